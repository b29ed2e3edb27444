"""The gate with `--probe-engine ray`: the same figures, alone and beside xdist; the controller alone writes."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from probe.engines.cluster import RayEngine
from probe.gate.bench import Bench
from probe.gate.configuration import Settings
from probe.gate.observation_job import ObservationJob
from probe.plugin.engine import open_engine
from probe.running import shared_models
from probe.running.calibration import Calibration
from probe.running.recipes import Recipe
from probe.running.shared_models import SharedModel

SETTINGS = """
[tool.probe]
model = "tiny-llama"
modes = ["coarse", "bf16"]
formats = ["int8"]
layers = ["first"]
without = ["batch_1", "ragged", "padded"]
samples = 2
seqlen = 16
calibration = { samples = 2, seqlen = 16 }
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.delenv("CI", raising=False)
    pytester.makefile(".toml", pyproject=SETTINGS)
    pytester.makeconftest(
        "import probe\n\n\ndef coarse(model, format, calibration):\n    for layer in model.model.layers:\n"
        "        layer.mlp.up_proj.weight.copy_(probe.fake_quantize(layer.mlp.up_proj.weight, format))\n"
        "    return model\n\n\nprobe.register_mode('coarse', coarse)\n"
    )
    pytester.makepyfile(test_gate="def test_matches_baseline(probe_case):\n    probe_case.check()\n")
    return pytester


def files(project: pytest.Pytester) -> dict[str, bytes]:
    root = project.path / "baselines"
    return {str(file.relative_to(root)): file.read_bytes() for file in sorted(root.rglob("*")) if file.is_file()}


def test_an_update_on_ray_is_that_of_this_process_and_a_failure_is_explained_as_ever(
    project: pytest.Pytester, on_ray: RayEngine
) -> None:
    """With a mode of the project's, which nodes import; the checks are beside xdist."""
    on_ray.stop()
    ray = ("--probe-engine", "ray", "--probe-ray-address", on_ray.address)
    project.runpytest_subprocess("--update-baselines", "-q").assert_outcomes(passed=12)
    here = files(project)
    for file in (project.path / "baselines").rglob("*.json"):
        file.unlink()
    project.runpytest_subprocess("--update-baselines", *ray).assert_outcomes(passed=12)
    assert files(project) == here
    (file,) = (project.path / "baselines").rglob("coarse.json")
    stored = json.loads(file.read_text())
    stored["cases"]["int8"]["layer_0"]["injected"]["mse"][0] *= 1.5
    file.write_text(json.dumps(stored) + "\n")
    beside = project.runpytest_subprocess("-n", "2", *ray)
    beside.assert_outcomes(passed=11, failed=1)
    beside.stdout.fnmatch_lines(
        [
            f"probe: cases run on the Ray cluster at {on_ray.address}; workers: 2, threads of each: 1",
            "*coarse-layer_0-cpu-int8 drifted from its baseline",
            "*injected.mse*better",
            "*12 of 12 stored cases compared*",
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
        (["--probe-engine", "ray", "--probe-ray-address", "127.0.0.1:1"], "nobody answers at 127.0.0.1:1"),
    ],
)
def test_mistakes_are_told_before_any_test(project: pytest.Pytester, options: list[str], said: str) -> None:
    found = project.runpytest_subprocess(*options)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines([f"*{said}*"])


def test_a_model_that_a_node_does_not_have_is_told_before_any_test(
    tmp_path: Path, on_ray: RayEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This machine is all nodes, so that the model is one that it does not have either."""
    monkeypatch.setattr(shared_models, "paths_on_nodes", lambda name: (name,) if name.startswith("/") else ())
    values = {"--probe-engine": "ray", "collectonly": False}
    config: Any = SimpleNamespace(getoption=lambda name, default=None: values.get(name, default))
    with pytest.raises(ValueError, match=rf"node .* has no {tmp_path}/model\. Put it on a disk"):
        open_engine(config, None, "tiny-llama", None, f"{tmp_path}/model")


def test_every_node_must_have_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert shared_models.paths_on_nodes(str(tmp_path)) == ()  # it is sent
    monkeypatch.setattr(shared_models, "SENT", 1)
    assert shared_models.paths_on_nodes(str(tmp_path)) == (str(tmp_path),)
    assert shared_models.paths_on_nodes("tiny-mamba") == shared_models.paths_on_nodes("package.module:make") == ()


def test_more_workers_of_xdist_than_the_cluster_has_are_refused(project: pytest.Pytester, on_ray: RayEngine) -> None:
    found = project.runpytest_subprocess("-n", "3", "--probe-engine", "ray", "--probe-ray-address", on_ray.address)
    assert found.ret == pytest.ExitCode.USAGE_ERROR
    found.stderr.fnmatch_lines(["*-n 3 is more than the 2 workers that the cluster has room for*"])
