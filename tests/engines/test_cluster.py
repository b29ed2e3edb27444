"""A Ray cluster that is not there, not fit, or dies: each is one message, or costs only time."""

import gc
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from probe.commands import main
from probe.engines import Kept, Unit, UnitFailedError, actor, connection, dispatch, nodes, versions
from probe.engines.actor import Actor
from probe.engines.cluster import LEAST_BYTES, RayEngine
from probe.engines.connection import Connection
from probe.engines.journal import MAX_AGE, Journal
from probe.files.paths import content_digest, user_cache
from tests.engines.conftest import LOOPBACK, Shared, add_node, wait_until
from tests.engines.jobs import Sums, import_tabnanny
from tests.engines.test_engines import units


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=re.escape("pip install 'quant-probe[cluster]'")):
        RayEngine()


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:1", r"nobody answers at 127.0.0.1:1: .*refused.* Look for the address with: ray status"),
        ("ray://127.0.0.1:1", "nobody answers at ray://127.0.0.1:1"),
        ("somewhere", r"the address of the cluster is 'somewhere'. Expected auto, HOST:PORT, or ray://HOST:PORT"),
        ("http://127.0.0.1:8265", "the address of the cluster is 'http://127.0.0.1:8265'. Expected auto"),
        ("127.0.0.1:99999", "the address of the cluster is '127.0.0.1:99999'. Expected auto"),
        ("auto", "there is no Ray cluster to be used at 'auto': Could not find any running Ray instance. Start one"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_message(
    address: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 0.5)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)

    def init(**options: Any) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match=said):
        RayEngine(address)


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_a_cluster_that_asks_for_a_token_is_told_as_such(
    address: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As Ray 2.60 does: C++ code prints the reason, and the exception has none."""

    def init(**options: Any) -> None:
        if address.startswith("ray://"):
            raise ConnectionError("ray client connection timeout")
        os.write(2, b"Failed to get cluster ID from GCS server: Unauthenticated: RPC error: InvalidAuthToken\n")
        raise RuntimeError("Failed to connect to Ray cluster")

    monkeypatch.setattr(ray, "init", init)
    with answering(GREETING) as port:
        with pytest.raises(ValueError, match=r"asks for its token.*To send it: export RAY_AUTH_MODE=token"):
            RayEngine(address.format(port))
        assert capfd.readouterr().err == ""


#: An empty frame of settings, as a server of gRPC sends at first.
GREETING = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextmanager
def answering(greeting: bytes) -> Iterator[int]:
    """The port of a server that greets whoever comes so, and says no more."""

    def answer() -> None:
        with suppress(OSError):
            while True:
                one = server.accept()[0]
                one.sendall(greeting)
                open_ones.append(one)

    open_ones: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
    for one in open_ones:
        one.close()


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("greeting", [b"HTTP/1.1 400 Bad request\r\n\r\n", b"", b"x"], ids=["web", "mute", "short"])
@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}"])
def test_what_is_not_ray_is_refused_soon(address: str, greeting: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray itself would try for minutes, without a word."""
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 0.5)
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("Ray was asked"))
    with (
        answering(greeting) as port,
        pytest.raises(ValueError, match=r"^what answers at .* is not a Ray cluster\. "),
    ):
        RayEngine(address.format(port))


@pytest.mark.usefixtures("unconnected")
def test_a_token_that_this_machine_lacks_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:

    def init(**options: Any) -> None:
        raise ray.exceptions.AuthenticationError(
            "Token authentication is enabled but no authentication token was found"
        )

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(ValueError, match=r"^RAY_AUTH_MODE asks for a token, and this machine has none.*unset RAY"):
        RayEngine("auto")


@pytest.mark.usefixtures("unconnected")
@pytest.mark.parametrize("named", [None, *connection.TOKEN_VARIABLES, "file"])
def test_a_cluster_of_this_machine_has_a_token_of_its_own_where_the_user_has_none(
    named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would write one for the user, and then refuse a cluster that asks for none."""
    monkeypatch.setattr(os, "environ", {"HOME": str(tmp_path), **({named: "x"} if named and named != "file" else {})})
    if named == "file":
        (tmp_path / ".ray").mkdir()
        (tmp_path / ".ray" / "auth_token").touch()
    given: list[str | None] = []

    def init(**options: Any) -> None:
        given.append(os.environ.get("RAY_AUTH_TOKEN"))
        raise KeyboardInterrupt

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(KeyboardInterrupt):
        RayEngine()
    assert (len(given[0] or "") == 64) == (named is None)


def test_a_connection_that_is_lost_is_one_message(on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*arguments: Any) -> None:
        raise ConnectionError("Failed to reconnect within the grace period.")

    monkeypatch.setattr(on_ray, "fill", fill)
    with pytest.raises(
        UnitFailedError, match=r"^the connection to the Ray cluster was lost: Failed .* period\. What is done is kept"
    ):
        list(on_ray.run(Sums("connection", journaled=True), units(("plain", 1))))
    on_ray.finish()


@pytest.mark.usefixtures("unconnected")
def test_an_address_where_nobody_ever_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT", 0.3)
    with socket.socket() as deaf:  # bound, but not listening
        deaf.bind(("127.0.0.1", 0))
        port = deaf.getsockname()[1]
        with pytest.raises(ValueError, match=f"nobody answers at 127.0.0.1:{port}"):
            RayEngine(f"127.0.0.1:{port}")


@pytest.fixture
def client_server(shared: Shared) -> Iterator[str]:
    """What takes clients at ray://HOST:PORT, as on the head of a cluster that `ray start` started."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
    address = ["--address", shared.cluster.address, "--host", LOOPBACK, "--port", str(port)]
    command = [sys.executable, "-m", "ray.util.client.server", "--mode", "specific-server", *address]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        yield f"ray://{LOOPBACK}:{port}"
        running.kill()


@pytest.mark.parametrize("is_client", [False, True], ids=["auto", "ray://"])
def test_a_cluster_that_is_there_is_used_and_left_as_it_was(
    is_client: bool, shared: Shared, client_server: str, caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At ray:// through Ray's client: this process is no driver on a node then."""
    monkeypatch.setenv("RAY_ADDRESS", shared.nodes(2).address)  # what auto takes
    shared.leave()
    wait_until(lambda: is_reachable(client_server))
    with RayEngine(client_server if is_client else "auto") as engine:
        assert engine.workers == 2
        job = Sums("there")
        (kept,) = engine.keep(job, [Unit("kept", ("plain", [4]))])
        works = [*units(("wait", 0.3), ("die once", str(tmp_path / "died"))), Unit("plus", ("plus", 3), kept)]
        assert list(engine.run(job, works)) == [0.3, str(tmp_path / "died"), 7]
        with pytest.raises(UnitFailedError, match=r"^unit 0: there is no tensor"):
            list(engine.run(job, units(("fail", "tensor"))))
    assert not ray.is_initialized()
    assert len(shared.nodes(2).worker_nodes) == 2


def test_an_interrupt_waits_until_ray_is_connected_and_ends_the_connection(
    shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of its start, Ray would crash at the end of the process."""
    address, init, connected = shared.cluster.address, ray.init, list[bool]()
    shared.leave()

    def interrupted(**options: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        init(**options)
        connected.append(ray.is_initialized())

    monkeypatch.setattr(ray, "init", interrupted)
    with pytest.raises(KeyboardInterrupt):
        RayEngine(address)
    assert connected == [True]
    assert not ray.is_initialized()


def is_reachable(address: str) -> bool:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    with socket.socket() as one:
        return one.connect_ex((host, int(port))) == 0


def test_another_version_on_a_node_is_refused_before_any_work(
    on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = {**versions.installed(), "torch": "9.9"}
    monkeypatch.setattr(nodes, "installed", lambda: here)
    with pytest.raises(ValueError, match=r"node .* runs other versions: torch 2\.\d+\.\d+, here 9.9. Numbers of two"):
        list(on_ray.run(Sums("other version", needed=((str(tmp_path), ""),)), units(("mark", str(tmp_path / "ran")))))
    assert not (tmp_path / "ran").exists()


def test_another_probe_on_a_node_is_named_by_its_folder(on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {**versions.installed(), "probe": "0.1.0 (0123456789ab)"}
    monkeypatch.setattr(nodes, "installed", lambda: here)
    monkeypatch.setattr(nodes, "FOLDER", "/elsewhere/probe")
    with pytest.raises(ValueError, match=rf"Its probe is {versions.FOLDER}, this one is /elsewhere/probe\."):
        on_ray.inspect(Sums("other folder", needed=((os.getcwd(), ""),)))


@pytest.mark.parametrize(("package", "is_refused"), [("torchao", True), ("a package that nobody has", False)])
def test_another_version_of_an_optional_package_is_refused_where_a_node_has_one(
    package: str, is_refused: bool, on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = {**versions.installed(), package: "9.9"}
    monkeypatch.setattr(nodes, "installed", lambda: here)
    monkeypatch.setattr(nodes, "OPTIONAL", (package,))
    with pytest.raises(ValueError, match=r"torchao [\d.]+, here 9.9") if is_refused else nullcontext():
        on_ray.inspect(Sums(package, needed=((str(tmp_path), ""),)))


def test_another_source_of_the_same_version_is_another_version() -> None:
    assert re.fullmatch(r"[\d.]+ \([0-9a-f]{12}\)", versions.installed()["probe"])


def test_a_file_that_a_node_does_not_have_is_named_before_any_work(on_ray: RayEngine, tmp_path: Path) -> None:
    missing, ran = tmp_path / "model", tmp_path / "ran"
    with pytest.raises(ValueError, match=rf"node .* has no {missing}. Put it on a disk that all nodes share"):
        list(on_ray.run(Sums("paths", needed=((str(missing), ""),)), units(("mark", str(ran)))))
    assert not ran.exists()


def test_a_file_of_which_a_node_has_another_copy_is_named_before_any_work(on_ray: RayEngine, tmp_path: Path) -> None:
    """The digest of another file stands for the copy of this machine."""
    copy, here, ran = tmp_path / "weights", tmp_path / "here", tmp_path / "ran"
    copy.write_text("as there")
    here.write_text("as here")
    same = ((str(copy), content_digest(copy)),)
    assert list(on_ray.run(Sums("same copy", needed=same), units(("plain", 1)))) == [1]
    other = ((str(copy), content_digest(here)),)
    with pytest.raises(ValueError, match=rf"node .* has another {copy} than this machine. Put the same on all nodes."):
        list(on_ray.run(Sums("other copy", needed=other), units(("mark", str(ran)))))
    assert not ran.exists()


def test_the_content_of_a_folder_is_that_of_its_files_with_their_names(tmp_path: Path) -> None:
    def folder(**files: str) -> str:
        shutil.rmtree(tmp_path / "folder", ignore_errors=True)
        (tmp_path / "folder" / "inner").mkdir(parents=True)
        for name, text in files.items():
            (tmp_path / "folder" / "inner" / name).write_text(text)
        return content_digest(tmp_path / "folder")

    made = [folder(a="1"), folder(a="2"), folder(b="1"), folder(a="1", b=""), folder(), folder(a="", b="1")]
    assert len(set(made)) == len(made)
    assert folder(a="1") == made[0]


def test_a_job_that_no_node_has_memory_for_is_refused(on_ray: RayEngine) -> None:
    with pytest.raises(ValueError, match=r"a worker needs 100 TB of memory, and the largest node offers .* GB"):
        list(on_ray.run(Sums("large", room=10**14), units(("plain", 1))))


def test_more_cpus_than_a_node_has_are_refused(on_ray: RayEngine) -> None:
    with pytest.raises(ValueError, match=r"no room for workers \(1\) of 64 CPUs; the CPUs of its nodes are: .* 1, "):
        RayEngine(cpus=64)
    with pytest.raises(ValueError, match=r"no room for workers \(3\)"):
        RayEngine(part=(2, 3))


def test_a_shared_folder_that_is_not_there_is_refused(on_ray: RayEngine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the shared folder .* does not exist"):
        RayEngine(shared=tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"the shared folder .*/file is not a folder"):
        RayEngine(shared=tmp_path / "file")


def test_nothing_is_left_in_a_shared_folder_when_there_is_no_cluster(tmp_path: Path, on_ray: RayEngine) -> None:
    with pytest.raises(ValueError, match="was asked for"):
        RayEngine("10.0.0.1:1", shared=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_shared_folder_that_a_node_does_not_see_is_refused(on_ray: RayEngine, tmp_path: Path) -> None:
    with RayEngine(shared=tmp_path) as engine:
        (folder,) = tmp_path.iterdir()
        folder.rmdir()  # as on a node
        with pytest.raises(ValueError, match=rf"node .* has no {folder}\. Put it on a disk that all nodes share"):
            list(engine.run(Sums("unseen"), units(("plain", 1))))


@pytest.fixture
def kept_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No worker finds the files of the shared folder, as where every node has a folder of that name for itself."""
    store = RayEngine.store
    monkeypatch.setattr(
        RayEngine, "store", lambda engine, job, kept, answer: store(engine, job, kept, (None, "/nowhere", answer[2]))
    )


def test_what_is_lost_again_and_again_fails_the_unit_that_needs_it(on_ray: RayEngine, kept_nowhere: None) -> None:
    job = Sums("lost")
    (kept,) = on_ray.keep(job, [Unit("kept", ("zeros", 10))])
    with pytest.raises(UnitFailedError, match=r"^length: kept, which it needs, was lost 3 times"):
        list(on_ray.run(job, [Unit("length", ("length", 0), kept)]))


def test_what_kills_its_worker_when_it_is_made_again_fails(
    on_ray: RayEngine, kept_nowhere: None, tmp_path: Path
) -> None:
    job = Sums("deadly")
    (kept,) = on_ray.keep(job, [Unit("kept", ("die again", str(tmp_path / "made")))])
    with pytest.raises(UnitFailedError, match=r"^kept: its worker died 3 times"):
        list(on_ray.run(job, [Unit("length", ("length", 0), kept)]))


def test_a_connection_to_another_cluster_is_not_used(on_ray: RayEngine) -> None:
    with pytest.raises(
        ValueError, match=rf"connected to the Ray cluster at {on_ray.address}, and the one at 10\.0\.0\.1:1"
    ):
        RayEngine("10.0.0.1:1")


def test_workers_that_were_started_early_are_used_unless_the_job_needs_more(on_ray: RayEngine) -> None:
    pool = on_ray.pool
    pool.stop()
    on_ray.prepare(import_tabnanny)
    assert len(pool.pending) == 2
    assert list(on_ray.run(Sums("small", room=2**29), units(("wait", 1), ("wait", 1)))) == [1, 1]
    early = list(pool.ready)
    assert [worker.needs.memory for worker in early] == [LEAST_BYTES] * 2
    assert list(on_ray.run(Sums("large", room=2**31), units(("plain", 1)))) == [1]
    assert pool.ready
    assert not set(pool.ready) & set(early)
    pool.stop()


def test_a_unit_runs_on_the_node_that_holds_what_it_needs(on_ray: RayEngine) -> None:
    job = Sums("near")
    kept = engine_kept_by_node(on_ray, job)
    works = [Unit(f"{n} of {one.number}", ("where", 0.3), one) for one in kept for n in range(3)]
    found = list(on_ray.run(job, works))
    assert found == [on_ray.stored(one).node for one in kept for _ in range(3)]
    assert len(set(found)) == 2


def engine_kept_by_node(engine: RayEngine, job: Sums) -> list[Kept]:
    """A kept result on each of two nodes."""
    while len(engine.pool.ready) < 2:
        list(engine.run(job, [Unit(f"{n}", ("wait", 0.2)) for n in range(2)]))
    kept = engine.keep(job, [Unit(f"kept {n}", ("wait", 0.3)) for n in range(2)])
    assert len({engine.stored(one).node for one in kept}) == 2
    return kept


def test_a_worker_has_the_threads_that_it_was_given_whether_torch_is_loaded_or_not() -> None:
    """As an actor, in a process of its own; Ray itself would give it those of its CPUs."""
    code = (
        "import sys\nif len(sys.argv) > 1:\n    import torch\nfrom probe.engines.actor import Actor\n"
        "Actor(1)\nimport torch\nprint(torch.get_num_threads())"
    )
    for more in ([], ["loaded"]):
        found = subprocess.run([sys.executable, "-c", code, *more], capture_output=True, text=True, check=True)
        assert found.stdout == "1\n"


def test_two_engines_divide_the_nodes_among_them(on_ray: RayEngine) -> None:
    with RayEngine(part=(0, 2)) as one, RayEngine(part=(1, 2)) as other:
        on_ray.pool.stop()
        first = next(iter(one.run(Sums("one"), units(("where", 0)))))
        second = next(iter(other.run(Sums("other"), units(("where", 0)))))
    assert first != second
    assert one.workers == other.workers == 1


def test_large_kept_results_go_to_the_shared_folder_and_are_deleted(on_ray: RayEngine, tmp_path: Path) -> None:
    on_ray.pool.stop()
    with RayEngine(shared=tmp_path) as engine:
        job = Sums("shared")
        small, large = engine.keep(job, [Unit("small", ("zeros", 10)), Unit("large", ("zeros", 40 * 2**20))])
        assert engine.stored(small).file is None
        file = engine.stored(large).file
        assert file is not None
        assert file.stat().st_size == 40 * 2**20
        assert list(engine.run(job, [Unit("length", ("length", 0), large)])) == [40 * 2**20]
    assert not list(tmp_path.glob("probe-*"))


def test_a_second_run_continues_after_a_failure_and_forgets_when_it_is_done(on_ray: RayEngine, tmp_path: Path) -> None:
    job, files = Sums("journal", journaled=True), [tmp_path / f"{n}" for n in range(6)]
    works = [("mark", str(file)) for file in files]
    with pytest.raises(UnitFailedError, match="unit 5: there is no end"):
        list(on_ray.run(job, units(*works[:5], ("fail", "end"))))
    assert list(on_ray.run(job, units(*works))) == [str(file) for file in files]
    assert [len(file.read_bytes()) for file in files] == [1] * 6
    on_ray.finish()
    assert not list((user_cache() / "runs").iterdir())
    list(on_ray.run(job, units(*works[:1])))
    assert len(files[0].read_bytes()) == 2


def test_what_was_computed_on_another_number_of_threads_is_not_continued(
    on_ray: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their sums are added in another order."""
    job, mark = Sums("threads", journaled=True), ("mark", str(tmp_path / "ran"))
    for threads, runs in ((1, 1), (1, 1), (2, 2), (1, 2)):
        monkeypatch.setattr(on_ray.pool, "threads", threads)
        with pytest.raises(UnitFailedError):
            list(on_ray.run(job, units(mark, ("fail", "end"))))
        assert len((tmp_path / "ran").read_bytes()) == runs
    on_ray.finish()


def test_what_the_same_command_beside_this_one_deletes_is_computed_again(on_ray: RayEngine, tmp_path: Path) -> None:
    """When it has ended well, it deletes the journal of both."""
    job, files = Sums("beside", journaled=True), [tmp_path / f"{n}" for n in range(20)]
    works = [("mark", str(file)) for file in files]
    with pytest.raises(UnitFailedError):
        list(on_ray.run(job, units(*works[:3], ("fail", "end"))))
    found = on_ray.run(job, units(*works))
    first = next(found)
    (journal,) = (user_cache() / "runs").iterdir()
    shutil.rmtree(journal)
    assert [first, *found] == [str(file) for file in files]
    assert [len(file.read_bytes()) for file in files] == [1, 2, 2] + [1] * 17
    on_ray.finish()


def test_a_full_object_store_is_one_message(on_ray: RayEngine) -> None:
    """As the disk is full too, Ray can put nothing there."""
    with pytest.raises(UnitFailedError, match="the object store of the cluster is full"):
        on_ray.keep(Sums("full"), [Unit(f"kept {n}", ("zeros", 50 * 2**20)) for n in range(6)])


def test_another_job_has_another_journal_and_old_ones_are_deleted(caches: Path) -> None:
    first, (unit,) = Journal("a"), units(("plain", 1))
    first.add(unit, b"answer")
    assert unit in Journal("a")
    assert Journal("a").read(unit) == b"answer"
    assert unit not in Journal("b")
    old = time.time() - MAX_AGE - 10
    os.utime(first.folder, (old, old))
    Journal("b")
    assert not first.folder.exists()


def test_a_journal_that_others_can_write_to_is_not_read(caches: Path) -> None:
    folder = Journal("a").folder
    folder.chmod(0o777)
    with pytest.raises(ValueError, match="belongs to somebody else, or others can write to it"):
        Journal("a")


def test_a_node_that_dies_in_the_middle_costs_only_time(shared: Shared, caches: Path) -> None:
    """Three nodes; the one that holds what was kept is killed while units run that need it."""
    made = shared.nodes(3)
    with RayEngine() as engine:
        job = Sums("dies")
        (kept,) = engine.keep(job, [Unit("kept", ("zeros", 2**20))])
        holder = ray.experimental.get_object_locations([engine.stored(kept).reference])
        (node_id,) = holder[engine.stored(kept).reference]["node_ids"]
        node = next(one for one in made.worker_nodes if one.node_id == node_id)
        works = [Unit(f"length {n}", ("length", n), kept) for n in range(12)]
        waits = [Unit(f"wait {n}", ("wait", 0.4)) for n in range(6)]
        killer = threading.Timer(1.0, made.remove_node, (node,), {"allow_graceful": False})
        killer.start()
        found = list(engine.run(job, [*waits, *works]))
        killer.join()
        assert found == [0.4] * 6 + [2**20] * 12
        wait_until(lambda: len(engine.nodes()) == 3)  # with the head


@pytest.mark.parametrize("torch_threads", [1], indirect=True)  # as many as a worker of one CPU has
def test_a_command_that_was_interrupted_goes_on_and_loses_a_node_without_a_trace(
    shared: Shared,
    caches: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    torch_threads: int,
) -> None:
    """Ctrl-C in the first recipe; then the same command, one of whose nodes dies; the output is as without Ray."""
    small = ["--samples", "32", "--seqlen", "64", "--batch-size", "4", "--calib-data-num", "2", "--calib-seqlen", "32"]
    asked = ["errors", "--modes", "2-1", "--formats", "int8", "fp8_e4m3", *small, "--shard-size", "8", "--json"]
    assert main(asked) == 0
    expected = capsys.readouterr().out
    made, runs, add = shared.nodes(2), caches / "probe" / "runs", Journal.add
    asked += ["--engine", "ray"]

    def finished() -> int:
        return len([path for path in runs.rglob("*") if path.is_file()])

    def interrupt(journal: Journal, unit: Unit, answer: bytes) -> None:
        add(journal, unit, answer)
        if finished() == 4:  # the calibration, and three of the four shards of a recipe
            signal.raise_signal(signal.SIGINT)

    def lose_a_node() -> None:
        wait_until(lambda: finished() > 4)
        made.remove_node(made.worker_nodes.copy().pop(), allow_graceful=False)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", interrupt)
        assert main(asked) == 130
    told = capsys.readouterr().err
    assert "probe: interrupted; finished units are kept. The same command goes on from there." in told
    assert finished() == 4
    killer = threading.Thread(target=lose_a_node)
    killer.start()
    assert main(asked) == 0
    killer.join()
    found = capsys.readouterr()
    assert "3 known from the run before" in found.err
    assert "tried again" in found.err
    assert not list(runs.iterdir())
    assert found.out == expected


def test_a_node_that_comes_later_with_other_versions_gets_no_unit_and_without_another_one_the_run_gives_up(
    shared: Shared, caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "ABANDONED", 2.0)
    made = shared.nodes(1)
    with RayEngine() as engine:
        engine.workers = 2  # as if a node had been lost
        works = [("where", 0), ("wait", 1.0), *[("where", 0)] * 30, ("wait", 30)]
        found = engine.run(Sums("later"), units(*works))
        first = next(found)
        monkeypatch.setattr(nodes, "installed", lambda: {**versions.installed(), "torch": "9.9"})
        (old,) = list(made.worker_nodes)
        add_node(made)
        assert {next(found) for _ in works[1:-1]} == {first, 1.0}
        threading.Timer(0.5, made.remove_node, (old,), {"allow_graceful": False}).start()
        with pytest.raises(UnitFailedError, match=r"unit 32.*all workers died|unit 32: its worker died"):
            next(found)


def test_a_command_that_is_terminated_ends_as_by_ctrl_c_and_leaves_no_process(tmp_path: Path) -> None:
    asked = [
        "errors",
        "--modes",
        "2-1",
        "--formats",
        "int8",
        "--samples",
        "64",
        "--batch-size",
        "1",
        "--shard-size",
        "1",
    ]
    command = [sys.executable, "-m", "probe.commands", *asked, "--engine", "ray"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        assert running.stderr is not None
        assert any(line.startswith("[reference]") for line in running.stderr)
        started = psutil.Process(running.pid).children(recursive=True)
        assert len(started) > 2
        running.send_signal(signal.SIGTERM)
        told = running.stderr.read()
    assert running.returncode == 130
    assert told.splitlines()[-1].startswith("probe: interrupted; "), told
    assert "SIGTERM" not in told
    assert "Traceback" not in told
    wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in started))


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, lambda *_: None], ids=["none", "ignored", "own"])
def test_a_signal_to_end_is_ctrl_c_while_connected_unless_it_is_handled(
    handler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "_connect", lambda *_: signal.signal(signal.SIGTERM, print))  # as Ray does
    fake: Any = SimpleNamespace(is_initialized=lambda: False, shutdown=lambda: None)
    before = signal.signal(signal.SIGTERM, handler)
    try:
        made = Connection(fake, None)
        usual = signal.default_int_handler if handler is signal.SIG_DFL else handler
        assert signal.getsignal(signal.SIGTERM) is usual
        made.close()
        assert signal.getsignal(signal.SIGTERM) is handler
    finally:
        signal.signal(signal.SIGTERM, before)


def test_units_work_in_the_folder_that_this_process_is_in_now(
    on_ray: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Sums("folder")
    for name in ("kept", "ran"):
        list(on_ray.run(job, units(("wait", 0.3), ("wait", 0.3))))  # workers are there
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        if name == "kept":
            on_ray.keep(job, [Unit("unit", ("mark zeros", "mark"))])
        else:
            list(on_ray.run(job, units(("mark", "mark"))))
        assert (tmp_path / name / "mark").exists()


def test_garbage_is_collected_once_a_job_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actor, "use_threads", lambda threads: None)
    monkeypatch.setattr(ray, "get", lambda reference: Sums())
    try:
        made = Actor(1)
        assert not gc.isenabled()
        made._open("key", [None])
        assert gc.isenabled()
    finally:
        gc.enable()
        gc.unfreeze()


def test_a_journal_that_is_opened_is_as_new(caches: Path) -> None:
    journal = Journal("a")
    old = time.time() - MAX_AGE - 10
    os.utime(journal.folder, (old, old))
    Journal("a")  # a run goes on from it
    Journal("b")  # that of another one
    assert journal.folder.exists()


def test_a_journal_that_was_deleted_is_not_made_again(caches: Path) -> None:
    journal, (unit,) = Journal("a"), units(("plain", 1))
    journal.delete()  # by the same command beside this one
    journal.add(unit, b"answer")
    Journal("a")  # not refused


def test_the_progress_of_a_run_whose_journal_is_deleted_ends_with_all_units(on_ray: RayEngine, tmp_path: Path) -> None:
    job, works = Sums("counted", journaled=True), [("plain", n) for n in range(20)]
    with pytest.raises(UnitFailedError):
        list(on_ray.run(job, units(*works[:3], ("fail", "end"))))
    told: list[int] = []
    found = on_ray.run(job, units(*works), progress=lambda done, *_: told.append(done))
    next(found)
    on_ray.finish()
    list(found)
    assert told[-1] == max(told) == 20
