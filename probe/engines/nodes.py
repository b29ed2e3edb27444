"""Checks that every node of a cluster has the same versions as this process, and the files of a job."""

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any

from probe.engines.actor import Paths, describe_node
from probe.engines.interface import INPUT_ERRORS
from probe.engines.versions import FOLDER, OPTIONAL, installed
from probe.words import first_few

#: A node as Ray describes it.
Node = dict[str, Any]
#: What terminals take for a change of colour.
COLOUR = re.compile("\x1b\\[[0-9;]*m")
#: No files.
NONE: Mapping[str, str] = MappingProxyType({})

#: Seconds to wait for the answer of a node.
INSPECTION_TIMEOUT = 120.0
#: Seconds to wait for that of a worker which starts there.
WORKER_TIMEOUT = 10.0
#: Seconds that Ray may take to notice that a node is gone.
NOTICED_AFTER = 40


class Inspection:
    """Asks every node once for its versions, and once for each set of files."""

    def __init__(self, ray: ModuleType, alive: Callable[[], list[Node]]) -> None:
        self._ray, self._alive = ray, alive
        self._asked: dict[tuple[str, Paths], Any] = {}
        self._fit: dict[tuple[str, Paths], bool] = {}
        self._checked: set[Paths] = set()
        self._from_workers: set[Any] = set()

    def expect(self, descriptions: Mapping[str, Any]) -> None:
        """Take these references, of workers that start, for the answers of their nodes: that spares a process."""
        for node, reference in descriptions.items():
            if (node, ()) not in self._asked:
                self._asked[node, ()] = reference
                self._from_workers.add(reference)

    def begin(self, nodes: Sequence[Node], paths: Mapping[str, str] = NONE) -> None:
        """Ask without waiting for the answers."""
        for node in nodes:
            self._ask(node, _absolute(paths))

    def check(self, nodes: Sequence[Node], paths: Mapping[str, str]) -> None:
        """Refuse nodes that are not fit. Those that come after this are only left alone: see `is_fit`."""
        wanted = _absolute(paths)
        if wanted in self._checked:
            return
        for node in nodes:
            self._wait_for_worker((node["NodeID"], wanted))
        self.begin(nodes, paths)
        for node in nodes:
            self._fit[node["NodeID"], wanted] = self._is_there(node, wanted)
        self._checked.add(wanted)

    def is_fit(self, node: Node, paths: Mapping[str, str]) -> bool:
        """Whether a node may run units. One that came later is inspected now, and is not fit until it has answered."""
        wanted = _absolute(paths)
        key = (node["NodeID"], wanted)
        if key not in self._fit:
            errors, reference = self._ray.exceptions, self._ask(node, wanted)
            if not self._ray.wait([reference], timeout=0, fetch_local=False)[0]:
                return False
            try:
                _check_answer(host_of(node), self._ray.get(reference))
            except (ValueError, errors.RayTaskError):  # it is not fit, or cannot run probe
                self._fit[key] = False
            except errors.RayError:  # to be asked again
                del self._asked[key]
                return False
            else:
                self._fit[key] = True
        return self._fit[key]

    def _ask(self, node: Node, paths: Paths) -> Any:
        key = (node["NodeID"], paths)
        if key not in self._asked:
            self._asked[key] = on_node(self._ray.remote(describe_node), node["NodeID"], num_cpus=0).remote(paths)
        return self._asked[key]

    def _wait_for_worker(self, key: tuple[str, Paths]) -> None:
        """Let another process answer for a node where no worker has started in time: others may have its CPUs."""
        reference = self._asked.get(key)
        if reference not in self._from_workers:
            return
        self._from_workers.discard(reference)
        try:
            self._ray.get(reference, timeout=WORKER_TIMEOUT)
        except self._ray.exceptions.RayError:  # also that of the time-out
            del self._asked[key]

    def _is_there(self, node: Node, paths: Paths) -> bool:
        """Whether a node answers; one that does, but is not fit, is a ValueError."""
        errors = self._ray.exceptions
        try:
            answer = self._ray.get(self._ask(node, paths), timeout=INSPECTION_TIMEOUT)
        except errors.GetTimeoutError:
            raise ValueError(
                f"node {host_of(node)} did not answer within {INSPECTION_TIMEOUT:g} s. Look at it with: ray status"
            ) from None
        except (errors.RayError, *INPUT_ERRORS) as problem:
            if not isinstance(problem, errors.RayTaskError) and self._is_gone(node):
                return False
            raise ValueError(
                f"node {host_of(node)} cannot run probe: {error_in(problem)}. Install the same version as here."
            ) from None
        _check_answer(host_of(node), answer)
        return True

    def _is_gone(self, node: Node) -> bool:
        """Whether a node that does not answer is lost; Ray takes a moment to find out."""
        for _ in range(NOTICED_AFTER):
            if all(one["NodeID"] != node["NodeID"] for one in self._alive()):
                return True
            time.sleep(1.0)
        return False


def _check_answer(host: str, answer: dict[str, Any]) -> None:
    there, here = answer["installed"], installed()
    asked = [name for name in here if name in there or name not in OPTIONAL]  # a mode without its package says so
    other = [f"{name} {there.get(name)}, here {here[name]}" for name in asked if there.get(name) != here[name]]
    if other:
        where = ""
        if there.get("probe") != here["probe"] and answer["folder"] != FOLDER:
            where = f" Its probe is {answer['folder']}, this one is {FOLDER}."
        raise ValueError(
            f"node {host} runs other versions: {'; '.join(other)}.{where} Numbers of two versions must not be mixed: "
            "install the same on all nodes."
        )
    if answer["missing"]:
        raise ValueError(
            f"node {host} has no {first_few(answer['missing'])}. Put it on a disk that all nodes share, under the same "
            "name, or copy it to each of them."
        )
    if answer["other"]:
        raise ValueError(
            f"node {host} has another {first_few(answer['other'])} than this machine. Put the same on all nodes."
        )


def plain_text(problem: BaseException) -> str:
    """The message of an error of Ray's, which may have a traceback, without its colours."""
    return COLOUR.sub("", str(problem))


def error_in(problem: BaseException) -> str:
    """The message of an error of Ray's; where it quotes a traceback, the last line of that."""
    lines = [line for line in plain_text(problem).splitlines() if line.strip()]
    text = lines[-1] if any(line.startswith('  File "') for line in lines) else " ".join(lines)
    return " ".join(text.split())[:300].rstrip(".") or type(problem).__name__


def on_node(remote: Any, node: str, **options: Any) -> Any:
    """A remote function or class that runs on this node and on no other."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return remote.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False), **options)


def cpus_of(node: Node) -> int:
    """The CPUs that a node offers."""
    return int(node["Resources"].get("CPU", 0))


def memory_of(node: Node) -> int:
    """The bytes of memory that a node offers."""
    return int(node["Resources"].get("memory", 0))


def gpus_of(node: Node) -> int:
    """The accelerators that a node offers."""
    return int(node["Resources"].get("GPU", 0))


def is_head(node: Node) -> bool:
    """Whether it is the node that the cluster was started on."""
    return "node:__internal_head__" in node["Resources"]


def host_of(node: Node) -> str:
    """A node by its name, for people; several nodes may be on one host."""
    return f"{node['NodeManagerHostname']} ({node['NodeID'][:8]})"


def _absolute(paths: Mapping[str, str]) -> Paths:
    return tuple((os.path.abspath(os.path.expanduser(path)), digest) for path, digest in paths.items())
