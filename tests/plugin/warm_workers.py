"""Workers of xdist that start in milliseconds: forks of one process that has loaded torch, instead of new interpreters.

execnet asks for a process with a pipe on each side; here it gets a fork of the nursery, which was started once for all
tests and has run nothing but imports. Everything else is xdist's own: separate processes, its protocol, its schedulers.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

#: What a worker of the small project loads.
LOADED = (
    *("torch", "transformers", "numba", "matplotlib", "pytest", "pytest_html"),
    *("probe.plugin.controller", "probe.plugin.fixtures", "probe.gate.engine"),
)
LIMIT = 1 << 20  # bytes of a request: the folder and the environment


class Worker:
    """A process that is not a child of this one; the two methods of Popen that execnet calls."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = os.pidfd_open(pid)

    def wait(self) -> int:
        """Wait for its end; its exit status is the nursery's."""
        select.select([self._handle], [], [])
        return 0

    def kill(self) -> None:
        """Send SIGKILL; the process may have ended."""
        signal.pidfd_send_signal(self._handle, signal.SIGKILL)


class Nursery:
    """Starts workers."""

    def __init__(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            command = [sys.executable, __file__, str(its.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
        self._socket = ours

    def start(self) -> tuple[Worker, Any, Any]:
        """A new worker in the current folder and environment, and the ends of the pipes to its stdin and stdout."""
        (stdin, to_worker), (from_worker, stdout) = os.pipe(), os.pipe()
        request = json.dumps([os.getcwd(), dict(os.environ)]).encode()
        socket.send_fds(self._socket, [request], [stdin, stdout])
        os.close(stdin)
        os.close(stdout)
        worker = Worker(int(self._socket.recv(100)))
        return worker, os.fdopen(to_worker, "wb", 0), os.fdopen(from_worker, "rb", 0)

    def close(self) -> None:
        """End the nursery; its workers end with their pipes."""
        self._socket.close()
        self._process.wait()


@contextmanager
def warm_workers(nursery: Nursery) -> Iterator[None]:
    """Let execnet take its processes from the nursery."""
    from execnet.gateway_base import Popen2IO
    from execnet.gateway_io import Popen2IOMaster

    def start(self: Any, args: list[str], execmodel: Any) -> None:
        assert args[-1] == "import sys;exec(eval(sys.stdin.readline()))", args
        self.popen, to_worker, from_worker = nursery.start()
        Popen2IO.__init__(self, to_worker, from_worker, execmodel=execmodel)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Popen2IOMaster, "__init__", start)
        yield


@pytest.fixture(scope="session")
def nursery() -> Iterator[Callable[[], Nursery]]:
    """Where warm workers come from, started when the first is needed."""
    started: list[Nursery] = []

    def find() -> Nursery:
        if not started:
            started.append(Nursery())
        return started[0]

    yield find
    for one in started:
        one.close()


def serve(connection: socket.socket) -> None:
    """In the nursery: fork a worker for each request, until the other side closes the connection."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended workers leave no zombies
    while True:
        request, pipes, _, _ = socket.recv_fds(connection, LIMIT, 2)
        if not request:
            return
        child = os.fork()
        if not child:
            connection.close()
            become_worker(*json.loads(request), *pipes)
        for pipe in pipes:
            os.close(pipe)
        connection.send(str(child).encode())


def become_worker(folder: str, environment: dict[str, str], stdin: int, stdout: int) -> None:
    """What `python -u -c "import sys;exec(eval(sys.stdin.readline()))"` would be, with modules loaded."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.dup2(stdin, 0)
    os.dup2(stdout, 1)
    os.close(stdin)
    os.close(stdout)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:], sys.path[0] = ["-c"], ""
    status = 1
    try:
        exec(eval(sys.stdin.readline()), {"__name__": "__main__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


if __name__ == "__main__":
    from importlib import import_module

    for module in LOADED:
        import_module(module)
    with socket.socket(fileno=int(sys.argv[1])) as accepted:
        serve(accepted)
