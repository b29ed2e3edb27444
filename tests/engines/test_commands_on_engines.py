"""Every command gives the same numbers in this process, in worker processes and on a Ray cluster."""

import json
import pickle
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import save_file

from probe.activations.run import analyze
from probe.activations.settings import read_configuration
from probe.commands import main, scaling_batch
from probe.engines import Job, Unit
from probe.engines.cluster import RayEngine
from probe.engines.identity import identity_of
from probe.engines.journal import Journal
from probe.engines.local import LocalEngine
from probe.files.paths import content_digest, user_cache
from probe.models.factories import loaded_code
from probe.models.loading import EMBEDDED, load_model, weight_fingerprint
from probe.models.offload import device_named
from probe.recordings.tensor_sources import TensorSource, tensor_sources
from probe.running import shared_models
from probe.running.declarations import DeclaredMode
from probe.running.measurement_job import measure_all
from probe.running.modes import MODES, declare_modes, find_mode, register_mode
from probe.running.shared_models import SharedModel, accelerators
from tests.models.quantized_models import write_gguf

SMALL = ["--samples", "4", "--seqlen", "32", "--batch-size", "2", "--calib-data-num", "2", "--calib-seqlen", "32"]
Run = Callable[..., str]


@pytest.fixture
def elsewhere(reused: RayEngine) -> dict[str, list[str]]:
    """The options of each engine."""
    return {"processes": ["--jobs", "2"], "ray": ["--engine", "ray"]}


@pytest.fixture
def ray_only(reused: RayEngine, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """As `elsewhere` without the processes, whose start would take longest; what pickle takes runs in them too."""
    send = RayEngine.job_reference

    def job_reference(engine: RayEngine, job: Job[Any, Any]) -> Any:
        assert identity_of(pickle.loads(pickle.dumps(job))) == identity_of(job)
        return send(engine, job)

    monkeypatch.setattr(RayEngine, "job_reference", job_reference)
    return {"ray": ["--engine", "ray"]}


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # as many as every worker has: sums on more threads are added in another order

    def command(*arguments: str, code: int = 0) -> str:
        found = main(arguments)
        captured = capsys.readouterr()
        assert found == code, captured.err
        return captured.out if code == 0 else captured.err

    yield command
    torch.set_num_threads(before)


def test_errors(run: Run, elsewhere: dict[str, list[str]]) -> None:
    asked = ["errors", "--modes", "fp16", "2-1", "--formats", "int8", *SMALL, "--shard-size", "2", "--json"]
    here = run(*asked)
    for engine, options in elsewhere.items():
        assert run(*asked, *options) == here, engine


def test_the_references_have_a_progress_of_their_own(reused: RayEngine) -> None:
    told: list[str] = []
    few = ("calibration", 1, 16, 1)
    asked: dict[str, Any] = {"modes": ["fp16"], "data": ("evaluation", 4, 16, 2), "calibration_data": few}
    measure_all(
        "tiny-mamba",
        **asked,
        shard_size=2,
        engine=reused,
        units=lambda done, total, text: told.append(f"{total} {text}"),
    )
    assert told[0].startswith("2 reference, ")
    assert told[-1].startswith("2 0 in flight")


def test_a_dry_run_starts_no_cluster(run: Run) -> None:
    assert "Nothing was run" in run("analyze", "--dry-run", "--engine", "ray", "--ray-address", "127.0.0.1:1")
    assert "--ray-cpus is for --engine ray" in run("analyze", "--dry-run", "--ray-cpus", "2", code=2)


def test_every_worker_analyzes_on_the_device_of_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on what `auto` would be on its node."""
    jobs: list[Any] = []
    run = LocalEngine.run

    def listen(engine: LocalEngine, job: Any, *arguments: Any, **options: Any) -> Any:
        jobs.append(job)
        return run(engine, job, *arguments, **options)

    monkeypatch.setattr(LocalEngine, "run", listen)
    settings = read_configuration(None, [("data.num_samples", "1"), ("data.seq_len", "16")])
    analyze(settings, progress=lambda text: None)
    assert settings.memory.device == "auto"
    assert jobs[0].settings.memory.device == str(device_named("auto"))


def test_a_gpu_with_a_number_is_refused_where_workers_have_one_of_their_own() -> None:
    assert [accelerators("cpu"), accelerators("cpu", "cuda")] == [0, 1]
    with pytest.raises(ValueError, match=r"the device is 'cuda:1', and the engine ray gives every worker a GPU of its"):
        accelerators("cpu", "cuda:1")


def test_shards_differ_by_the_order_of_sums_only(run: Run) -> None:
    asked = ["errors", "--modes", "2-1", "--formats", "int8", *SMALL, "--json"]
    whole, halves = (json.loads(run(*asked, *more)) for more in ([], ["--shard-size", "2"]))
    for name, layer in whole[0]["layers"].items():
        for figure, value in layer.items():
            other = halves[0]["layers"][name][figure]
            assert other == (pytest.approx(value, rel=1e-12) if isinstance(value, float) else value), (name, figure)


def test_a_shard_that_is_not_of_whole_batches_is_refused(run: Run) -> None:
    said = run("errors", "--modes", "2-1", "--formats", "int8", *SMALL, "--shard-size", "3", code=2)
    assert "a shard of 3 samples is not made of whole batches, which have 2. Give a multiple of it" in said


def test_sensitivity(run: Run, ray_only: dict[str, list[str]]) -> None:
    asked = ["sensitivity", "--mode", "2-1", "--format", "int8", *SMALL, "--json", "-"]
    here = run(*asked)
    for engine, options in ray_only.items():
        assert run(*asked, *options) == here, engine


def test_sensitivity_that_was_interrupted_goes_on_with_fewer_workers(
    run: Run, reused: RayEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The number of workers divides the work; on the one that is left the parts of two must be known."""
    asked = ["sensitivity", "--mode", "2-1", "--format", "int8", *SMALL, "--seqlen", "128", "--json", "-"]
    asked += ["--engine", "ray"]
    whole, add, parts = run(*asked), Journal.add, list[str]()

    def interrupt(journal: Journal, unit: Unit, answer: bytes) -> None:
        add(journal, unit, answer)
        parts.extend([unit.name] if unit.name.startswith("batch") else [])
        if len(parts) == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "add", interrupt)
        run(*asked, code=130)
    monkeypatch.setattr(reused.pool, "part", (0, 2))
    about = reused.about
    assert main(asked) == 0
    assert reused.workers == 1
    found = capsys.readouterr()
    assert f"{len(parts)} known from the run before" in found.err
    assert f"[engine] {about}" in found.err
    assert found.out == whole


def test_record(run: Run, elsewhere: dict[str, list[str]]) -> None:
    asked = ["record", "--modes", "fp32", "2-1", "--layers", "all", "--taps", "inputs", "logits", *SMALL]
    run(*asked, "--out", "here")
    files = sorted(path.name for path in Path("here").glob("*.safetensors"))
    assert len(files) == 3
    for engine, options in elsewhere.items():
        run(*asked, "--out", engine, *options)
        for name in files:
            assert Path(engine, name).read_bytes() == Path("here", name).read_bytes(), engine


def test_analyze(run: Run, ray_only: dict[str, list[str]]) -> None:
    few = ["--data.num_samples", "4", "--data.seq_len", "32", "--data.batch_size", "2", "--output.formats", "[json]"]
    run("analyze", *few, "--visualization.save_dir", "here")
    names = sorted(path.name for path in Path("here").glob("*.json") if not path.name.startswith("."))
    assert names
    for engine, options in ray_only.items():
        run("analyze", *few, "--visualization.save_dir", engine, *options)
        for name in names:
            here, there = (Path(folder, name).read_text() for folder in ("here", engine))
            assert there.replace(f'"{engine}"', '"here"') == here, engine


def test_scaling(run: Run, ray_only: dict[str, list[str]]) -> None:
    for seed in range(2):
        torch.save(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)), f"{seed}.pt")
    asked = ["scaling", "0.pt", "1.pt", "--elem-format", "int8", "fp8_e4m3", "--num-levels", "5", "--no-plots"]
    said = run(*asked, "--output-dir", "here")
    for engine, options in ray_only.items():
        assert run(*asked, "--output-dir", engine, *options).replace(engine, "here") == said
        for file in Path("here").rglob("mxfp_scaling_results_*"):
            assert (Path(engine) / file.relative_to("here")).read_bytes() == file.read_bytes(), engine


def test_a_tensor_of_which_a_node_has_another_copy_fails(
    run: Run, reused: RayEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caches: Path
) -> None:
    for name in ("same", "other"):
        torch.save(torch.ones(4, 32), f"{name}.pt")
    load = TensorSource.load
    monkeypatch.setattr(TensorSource, "load", lambda source: load(source) * (2 if source.name == "other" else 1))
    monkeypatch.setattr(reused, "finish", lambda: None)  # as if it was interrupted before the end
    asked = ["--elem-format", "int8", "--num-levels", "5", "--no-plots", "--output-dir", "out", "--engine", "ray"]
    assert main(["scaling", "same.pt", "other.pt", *asked]) == 1
    assert "other.pt: a node read other values from it than this machine has." in capsys.readouterr().out
    assert len(list(Path("out").rglob("mxfp_scaling_results_*.json"))) == 1
    (journal,) = (caches / "probe" / "runs").iterdir()
    assert len(list(journal.iterdir())) == 1, "the other one is to be read again"


def test_a_tensor_asks_for_memory_by_its_size(tmp_path: Path) -> None:
    """Not by that of its file, nor by those of files that are not read."""
    save_file({"small": torch.ones(2**10), "large": torch.ones(2**20)}, tmp_path / "x.safetensors")
    torch.save({"a": torch.ones(2**22)}, tmp_path / "not_one.pt")
    torch.save(torch.ones(2**15, 2), tmp_path / "one.pt")

    def memory(*given: str) -> int:
        sources = tuple(tensor_sources([str(tmp_path / one) for one in given]))
        found: int = scaling_batch.ScalingJob(sources, scaling_batch.Request(), (), is_elsewhere=True).memory
        return found - 2**29

    assert memory("x.safetensors:small") == 16 * 2**10
    assert memory("x.safetensors", "one.pt", "not_one.pt", "nowhere.pt") == 16 * 2**20
    assert memory("one.pt") == 16 * 2**16


def test_an_option_of_the_other_engine_is_refused(run: Run) -> None:
    said = run("errors", "--ray-cpus", "2", code=2)
    assert "--ray-cpus is for --engine ray. Add that, or leave it out." in said
    assert "--jobs is for the engine local" in run("errors", "--engine", "ray", "--jobs", "2", code=2)


def test_a_failing_model_is_one_message_with_the_unit(
    run: Run, reused: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node finds other weights under the same name."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "net.py").write_text(
        "import os, torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.embedding = nn.Embedding(256, 8)\n"
        "        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))\n"
        "        self.head = nn.Linear(8, 256)\n\n"
        "    def forward(self, tokens):\n        x = self.embedding(tokens)\n        for layer in self.layers:\n"
        "            x = layer(x)\n        return self.head(x)\n\n\ndef make():\n    torch.manual_seed(os.getpid())\n"
        "    return Net()\n"
    )
    said = run(
        "errors", "--model", "net:make", "--modes", "linear_w", "--formats", "int8", *SMALL, "--engine", "ray", code=2
    )
    assert "reference 0: net:make on " in said
    assert "is another model than here (here -> there: weights " in said
    assert "Traceback" not in said
    reused.pool.stop()  # whose workers know this module


def test_the_code_of_users_must_be_the_same_on_all_nodes(
    on_ray: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the module of a factory, and of what it imports; installed modules have a version."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "nethelp.py").write_text("WIDTH = 8\n")
    (tmp_path / "netcode.py").write_text("from nethelp import WIDTH\n\n\ndef make():\n    return WIDTH\n")
    loaded = load_model("tiny-llama")
    assert SharedModel.of("tiny-llama", loaded, on_ray).contents == {}
    assert SharedModel.of("netcode:make", loaded, LocalEngine(2)).contents == {}
    found = SharedModel.of("netcode:make", loaded, on_ray).paths
    assert found == loaded_code()
    assert found[str(tmp_path / "netcode.py")] == content_digest(tmp_path / "netcode.py")
    assert str(tmp_path / "nethelp.py") in found
    assert not any("site-packages" in path or "/probe/models/" in path for path in found)


def test_a_folder_that_only_this_machine_has_is_sent_to_the_nodes(
    run: Run, on_ray: RayEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = EMBEDDED["tiny-llama"].folder
    assert source is not None
    shutil.copytree(source, tmp_path / "model")
    name = str(tmp_path / "model")
    shared = SharedModel.of(name, load_model(name), on_ray)
    assert shared.paths == {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_models, "MAX_SENT_BYTES", 1)
        assert SharedModel.of(name, load_model(name), on_ray).paths == {name: ""}  # too large to be sent
    shutil.rmtree(name)  # as on a node
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(shared_models, "_loaded", None)
    loaded = shared.load()
    assert loaded.fingerprint == shared.fingerprint
    assert not list((tmp_path / "temporary").iterdir())
    assert weight_fingerprint(loaded.model) == shared.fingerprint  # which needs no file any more


FEW = ["--data.num_samples", "2", "--data.seq_len", "16", "--output.formats", "[json]"]


@pytest.mark.parametrize(
    "asked",
    [
        ["analyze", *FEW, "--visualization.save_dir", "out"],
        ["scaling", "x.pt", "--elem-format", "int8", "--num-levels", "5", "--no-plots", "--output-dir", "out"],
        ["sensitivity", "--mode", "2-1", "--format", "int8", *SMALL, "--no-advice"],
    ],
    ids=lambda asked: asked[0],
)
def test_a_command_that_ended_well_leaves_nothing_to_go_on_from(asked: list[str], run: Run, reused: RayEngine) -> None:
    torch.save(torch.ones(4, 32), "x.pt")
    run(*asked, "--engine", "ray")
    assert reused.resumes
    assert not list((user_cache() / "runs").iterdir())


def test_workers_are_told_of_modes_and_of_what_they_are_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("probe.running.modes.MODES", dict(MODES))
    elsewhere: Any = SimpleNamespace(shares_disk=False)
    loaded = load_model("tiny-llama")
    declare_modes({"careful": DeclaredMode("linear_w", ("lm_head",))}, where="here")
    found = SharedModel.of("tiny-llama", loaded, elsewhere, modes=["careful"])
    assert found.modes == (("careful", DeclaredMode("linear_w", ("lm_head",))),)
    register_mode("mine", lambda model, *_: model)
    found = SharedModel.of("tiny-llama", loaded, elsewhere, modes=["mine"])
    assert found.modes == (find_mode("mine"),)
    assert found.contents == loaded_code() != {}
    write_gguf(tmp_path / "q8.gguf", Kind.Q8_0)
    name = find_mode(f"checkpoint:{tmp_path / 'q8.gguf'}").name
    found = SharedModel.of("tiny-llama", loaded, elsewhere, modes=[name])
    assert found.contents == {str(tmp_path / "q8.gguf"): content_digest(tmp_path / "q8.gguf")}
