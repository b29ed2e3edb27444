"""The gate with `--probe-engine ray`: the same figures, alone and beside xdist; the controller alone writes."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind

from probe.engines import UnitFailedError, cluster, nodes
from probe.engines.cluster import RayEngine
from probe.engines.local import LocalEngine
from probe.engines.versions import installed
from probe.gate import observation_job
from probe.gate.bench import Bench
from probe.gate.configuration import Settings
from probe.gate.measured_layers import Observation
from probe.gate.observation_job import ObservationJob
from probe.plugin import PARTS, pytest_testnodedown
from probe.plugin.engine import open_engine, tell_worker
from probe.running.calibration import Calibration
from probe.running.recipes import Recipe
from probe.running.shared_models import SharedModel
from tests.engines.conftest import Shared
from tests.models.quantized_models import write_gguf
from tests.plugin.conftest import Run, project as project, without as without
from tests.plugin.test_lifecycle import snapshot

#: On the nodes the files have other names.
ELSEWHERE = """
from probe.engines.cluster import RayEngine

check_nodes = RayEngine.check_nodes
RayEngine.check_nodes = lambda engine, paths: check_nodes(engine, {f"{path}.gz": "" for path in paths})
"""


@pytest.fixture
def on_cluster(on_ray: RayEngine, project: Run) -> Run:
    """`project`, on the cluster of the tests; the workers of other tests make room."""

    def run(*arguments: str, **changed: Any) -> pytest.RunResult:
        on_ray.pool.stop()
        return project("--probe-engine", "ray", "--probe-ray-address", on_ray.address, *arguments, **changed)

    return run


def test_an_update_on_ray_is_that_of_this_process(project: Run, reused: RayEngine, pytester: pytest.Pytester) -> None:
    """With a mode of the project's, which nodes import."""
    assert project("--update-baselines").ret == 0
    here = snapshot(pytester.path / "baselines")
    for file in here:
        (pytester.path / "baselines" / file).unlink()
    updated = project("--update-baselines", "--probe-engine", "ray")
    updated.assert_outcomes(passed=8)
    assert snapshot(pytester.path / "baselines") == here


def test_a_failure_beside_xdist_is_explained_as_ever(project: Run, on_cluster: Run, on_ray: RayEngine) -> None:
    assert project("--update-baselines").ret == 0
    beside = on_cluster(workers=2, fault="scale")
    beside.assert_outcomes(passed=4, failed=2)  # and two more in the same recipes
    beside.stdout.fnmatch_lines_random(
        [
            f"probe: cases run on the Ray cluster at {on_ray.address}; workers: 2, threads of each: 1",
            "*coarse-layer_1-cpu-fp8_e4m3 drifted from its baseline",
            "*injected.mse*worse",
            "*8 of 8 stored cases compared*",
        ]
    )


def test_figures_are_the_same_to_the_bit(on_ray: RayEngine) -> None:
    settings = Settings(model="tiny-mamba", samples=2, seqlen=32)
    settings = dataclasses.replace(settings, modes=("2-1",), formats=("int8",))
    recipe = Recipe("2-1", "int8")
    here, there = Bench(settings), Bench(settings, engine=on_ray)
    there.expected = [(recipe, "cpu"), (Recipe("2-4", "int8"), "cpu")]
    found, expected = there.observe(recipe, "cpu"), here.observe(recipe, "cpu")
    assert found.keys() == expected.keys()
    for label, one in expected.items():
        assert found[label].figures == one.figures, label


def test_a_recipe_that_fails_fails_its_own_tests_only_and_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test that came to it first was another one's: recipes are observed ahead of their tests."""
    settings = dataclasses.replace(
        Settings(model="tiny-mamba", samples=1, seqlen=16), modes=("2-1", "2-4", "0"), formats=("int8",)
    )
    first, failing, last = (Recipe(mode, "int8") for mode in settings.modes)
    seen: list[Recipe] = []

    def observe(model: Any, recipe: Recipe, *arguments: Any, **options: Any) -> dict[str, Observation]:
        seen.append(recipe)
        if recipe == failing:
            raise ValueError("no such thing")
        return {"layer_0": Observation({}, {}, {})}

    monkeypatch.setattr(observation_job, "observe", observe)
    bench = Bench(settings, engine=LocalEngine())
    bench.expected = [(recipe, "cpu") for recipe in (first, failing, last)]
    assert bench.observe(first, "cpu")
    assert bench.observe(first, "cpu"), "again, without those that come"
    assert bench.observe(last, "cpu")
    for _ in range(2):
        with pytest.raises(ValueError, match="no such thing"):
            bench.observe(failing, "cpu")
    assert seen == [first, first, failing, last]


def test_without_a_cluster_all_tests_fail_at_once() -> None:
    class Gone(LocalEngine):
        runs = 0

        def run(self, *arguments: Any, **options: Any) -> Any:
            self.runs += 1
            raise UnitFailedError("no node is left")
            yield

    engine = Gone()
    settings = Settings(model="tiny-mamba", samples=1, seqlen=16)
    bench = Bench(dataclasses.replace(settings, modes=("2-1",), formats=("int8",)), engine=engine)
    for _ in range(3):
        with pytest.raises(UnitFailedError, match="no node is left"):
            bench.observe(Recipe("2-1", "int8"), "cpu")
    assert engine.runs == 1


def test_every_worker_of_xdist_has_a_part_of_the_cluster_also_one_that_replaces_another(on_ray: RayEngine) -> None:
    parts: dict[str, int] = {}

    def told(name: str) -> dict[str, Any]:
        config, given = SimpleNamespace(getoption=lambda option: None), dict[str, Any]()
        tell_worker(SimpleNamespace(gateway=SimpleNamespace(id=name), workerinput=given, config=config), on_ray, parts)
        return given

    assert [told(name)["probe_ray_part"] for name in ("gw0", "gw1", "gw2")] == [0, 1, 2]
    stash = pytest.Stash()
    stash[PARTS] = parts
    crashed = SimpleNamespace(gateway=SimpleNamespace(id="gw1"), config=SimpleNamespace(stash=stash))
    pytest_testnodedown(crashed, "crashed")
    assert told("gw3") == {"probe_ray_part": 1, "probe_ray_address": on_ray.address}


def test_workers_tell_jobs_apart_by_their_references() -> None:
    """Not by where those lie in memory: another job may lie there next."""
    model = SharedModel.here("model", "fingerprint")

    def key(reference: bytes, amax: dict[str, float]) -> str:
        return ObservationJob(
            model=model,
            references={None: reference},
            calibrations={None: Calibration(amax, "model", "data", 1.0, 1)},
            devices=("cpu",),
        ).key

    assert key(b"one", {"site": 1.0}) == key(b"one", {"site": 1.0})
    assert len({key(b"one", {"site": 1.0}), key(b"two", {"site": 1.0}), key(b"one", {"site": 2.0})}) == 3


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--probe-ray-cpus", "2"], "--probe-ray-cpus is for --probe-engine ray"),
        (["--probe-engine", "ray", "--probe-ray-cpus", "two"], "--probe-ray-cpus is 'two'. Expected a whole number"),
    ],
)
def test_mistakes_are_told_before_any_test(project: Run, options: list[str], said: str) -> None:
    found = project(*options)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines([f"*{said}*"])


def test_a_cluster_that_is_not_there_is_told_before_any_test(project: Run, shared: Shared) -> None:
    shared.leave()
    found = project("--probe-engine", "ray", "--probe-ray-address", "127.0.0.1:1")
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*nobody answers at 127.0.0.1:1*"])


def test_more_workers_of_xdist_than_the_cluster_has_are_refused(
    on_cluster: Run, project: Run, on_ray: RayEngine
) -> None:
    found = on_cluster(workers=3)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*-n 3 is more than the workers that the cluster has room for (2)*-ray-cpus 1 for*"])
    found = project("--probe-engine", "ray", "--probe-ray-address", on_ray.address, "--probe-ray-cpus", "1", workers=3)
    found.stderr.fnmatch_lines(["*has room for (2). Give -n 2 or less, or none."])


def test_other_versions_on_a_node_are_told_before_any_test(on_cluster: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "installed", lambda: {**installed(), "torch": "9.9"})
    found = on_cluster()
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*probe: node * runs other versions: torch *, here 9.9.*"])


@pytest.mark.parametrize(("workers", "code"), [(0, 2), (2, 1)], ids=["alone", "beside xdist"])
def test_what_a_node_does_not_have_is_told_before_any_test(
    workers: int, code: int, on_cluster: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint, while tests are collected; errors of that have code 1 under xdist."""
    monkeypatch.setattr(RayEngine, "check_nodes", RayEngine.check_nodes)  # so that it is put back
    write_gguf(pytester.path / "q8.gguf", Kind.Q8_0)
    asked = {"model": '"tiny-llama"', "modes": '["checkpoint:./q8.gguf"]', "workers": workers}
    found = on_cluster(**asked, hooks=ELSEWHERE)
    assert found.ret == code
    found.stdout.fnmatch_lines([f"*probe: node * has no {pytester.path}/q8.gguf.gz. Put it on a disk that all nodes *"])
    assert set(found.parseoutcomes()) == {"errors"}


def test_a_worker_of_xdist_opens_its_part_of_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def make(address: str, **options: Any) -> Any:
        asked.append((address, options))
        return SimpleNamespace(workers=1, prepare=lambda setup: None)

    monkeypatch.setattr(cluster, "RayEngine", make)
    config: Any = SimpleNamespace(getoption={"--probe-engine": "ray"}.get)
    open_engine(config, {"probe_ray_address": "head:1", "probe_ray_part": 1, "workercount": 3})
    assert asked == [("head:1", {"cpus": None, "part": (1, 3)})]


def test_after_the_anchors_are_discarded_recipes_are_observed_against_the_new_reference() -> None:
    settings = Settings(model="tiny-mamba", samples=1, seqlen=16, modes=("2-1",), formats=("int8",))
    bench = Bench(settings, engine=LocalEngine())
    bench.observe(Recipe("2-1", "int8"), "cpu")
    before = bench._job
    bench.discard_anchors()
    bench.observe(Recipe("2-1", "int8"), "cpu")
    assert bench._job is not before
