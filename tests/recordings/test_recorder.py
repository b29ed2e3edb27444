"""`record`: what is on disk is what the model gave; interrupted work is continued or refused, never taken as whole."""

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import probe
from probe.models.loading import Loaded
from probe.recordings import (
    Recording,
    RecordingError,
    publishing as publishing_module,
    read_recording,
    recorder as recorder_module,
)
from probe.recordings.request import ModelToRun, RecordRequest, recipes_for
from probe.running.capture import UncoveredError
from probe.running.measurement import NotAppliedError
from probe.running.recipes import Recipe, apply
from tests.recordings.examples import files
from tests.recordings.models import KILL, Deaf, Stack, Twice

QUANTIZED = " ".join(f"mode_{mode}-int8" for mode in ("0", "2_0", "2_1", "2_2", "2_3", "2_4", "3"))
ALL_TAPS = ["inputs", "mixer", "conv1d", "scan", "embedding", "final_norm", "logits"]
SMALL: dict[str, Any] = {"samples": 3, "seqlen": 16, "calib_data_num": 2, "calib_seqlen": 16}


@pytest.fixture(scope="module")
def ids() -> list[Tensor]:
    return [torch.arange(12).view(2, 6), torch.arange(6).view(1, 6)]


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps: list[tuple[str, str]] = []
        self.total = 0

    def line(self, text: str) -> None:
        self.lines.append(text)

    def begin(self, steps: int) -> None:
        self.total = steps

    def step(self, recipe: str, name: str) -> None:
        self.steps.append((recipe, name))


# ------------------------------------------------------------------------------------------------ what is recorded


@pytest.mark.parametrize("layout", ["safetensors", "npy", "npz", "pt"])
def test_every_tap_is_what_hooks_of_ones_own_see(tmp_path: Path, loaded: Loaded, layout: str) -> None:
    """The oracle registers its own hooks on its own copy; no code of the recorder takes part."""
    log = Log()
    recording = probe.record(
        tmp_path / "r",
        model=loaded,
        modes=["fp32", "2-1"],
        formats=["fp8_e4m3"],
        layers=["first", "last"],
        taps=ALL_TAPS,
        batch_size=2,
        layout=layout,
        progress=log,
        **SMALL,
    )
    batches = probe.token_batches(probe.text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=2)
    for recipe in (Recipe("fp32"), Recipe("2-1", "fp8_e4m3")):
        twin: Any = apply(loaded.model, recipe)
        seen: dict[str, list[Tensor]] = {}

        def keep(name: str, module: Any, seen: dict[str, list[Tensor]] = seen) -> None:
            module.register_forward_hook(lambda m, i, o: seen.setdefault(name, []).append(o.clone()))

        keep("embedding.output", twin.backbone.embeddings)
        keep("final_norm.output", twin.backbone.norm_f)
        for index in (0, 3):
            block = twin.backbone.layers[index]
            block.register_forward_hook(
                lambda m, i, o, n=f"layer_{index}.input", s=seen: s.setdefault(n, []).append(i[0].clone())
            )
            keep(f"layer_{index}.output", block)
            keep(f"layer_{index}.mixer.output", block.mixer)
            keep(f"layer_{index}.conv1d.output", block.mixer.sites["conv1d"]["output"])
            keep(f"layer_{index}.scan.input", block.mixer.sites["scan"]["u"])
            keep(f"layer_{index}.scan.output", block.mixer.sites["scan"]["y"])
        seen["logits"] = [twin(batch, use_cache=False).logits for batch in batches]
        assert set(recording.names(str(recipe))) == set(seen)
        for name, tensors in seen.items():
            assert torch.equal(recording.tensor(str(recipe), name), torch.cat(tensors)), (recipe, name)
    assert recording == read_recording(tmp_path / "r")
    names = recording.names("fp32")
    assert names[:3] == ("embedding.output", "layer_0.input", "layer_0.conv1d.output")
    assert names[-3:] == ("layer_3.output", "final_norm.output", "logits")
    assert log.total == len(log.steps) == 2 * 2 * len(names)
    assert "[2/2] mode_2_1-fp8_e4m3" in log.lines


def test_the_manifest_states_what_happened(tmp_path: Path, loaded: Loaded) -> None:
    recording = probe.record(tmp_path / "r", modes=["fp32", "2-1"], layers=["first"], percentile=0.99, **SMALL)
    document = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert (document["model"], document["fingerprint"]) == ("tiny-mamba", loaded.fingerprint)
    assert (document["device"], document["layout"], document["unfinished"]) == ("cpu", "safetensors", None)
    tokens = document["tokens"]
    assert (tokens["count"], tokens["samples"], tokens["seqlen"], tokens["source"]) == (48, 3, 16, "evaluation")
    assert document["versions"]["torch"] == torch.__version__
    quantized, plain = document["recipes"]["mode_2_1-int8"], document["recipes"]["fp32"]
    assert (quantized["applied"], quantized["compiled"], quantized["layers"]) == ("by probe", False, ["layer_0"])
    calibration = quantized["calibration"]
    assert {key: calibration[key] for key in ("data", "percentile", "samples", "seqlen")} == {
        "data": "calibration",
        "percentile": 0.99,
        "samples": 2,
        "seqlen": 16,
    }
    assert plain["calibration"] is None
    assert set(document["files"]) == {"fp32.safetensors", "mode_2_1-int8.safetensors", "tokens.safetensors"}
    given = probe.token_batches(probe.text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=3)
    found = recording.input_ids()
    assert found is not None
    assert torch.equal(found, given[0])


def test_calibration_is_what_was_asked_for(tmp_path: Path, loaded: Loaded) -> None:
    calibration = probe.calibrate_on(loaded, "calibration", 2, 16, percentile=0.9)
    twin: Any = apply(loaded.model, Recipe("2-1", "int8"), calibration)
    batches = probe.token_batches(probe.text_of("evaluation"), loaded.tokenizer, samples=3, seqlen=16, batch_size=1)
    expected = torch.cat([twin(batch, use_cache=False).logits for batch in batches])
    recording = probe.record(tmp_path / "r", modes=["2-1"], taps=["logits"], percentile=0.9, **SMALL)
    assert torch.equal(recording.tensor("mode_2_1-int8", "logits"), expected)


def test_bfloat16_lies_in_numpy_as_float32_and_is_said_to_be_bfloat16(tmp_path: Path, ids: list[Tensor]) -> None:
    model = Stack(2)
    expected = probe.record(tmp_path / "s", model=model, modes=["bf16"], batches=ids)
    assert expected.tensor("bf16", "layer_0.output").dtype == torch.bfloat16
    for layout, file in (("npy", "mode_bf16_stats.json"), ("npz", "first_layer_io_all_modes_stats.json")):
        found = probe.record(tmp_path / layout, model=model, modes=["bf16"], batches=ids, layout=layout)
        tensor = found.tensor("bf16", "layer_0.output")
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, expected.tensor("bf16", "layer_0.output").float())
        assert found.dtype("bf16", "layer_0.output") == "bfloat16"
        assert '"bfloat16"' in (tmp_path / layout / file).read_text()
    array = np.load(tmp_path / "npy" / "mode_bf16_layer_0.npy", allow_pickle=False)
    assert array.dtype == np.float32


@pytest.mark.parametrize(
    ("layout", "modes", "recipes"),
    [
        ("safetensors", None, "fp32 mode_0-int8 mode_2_1-int8 mode_2_2-int8 mode_2_4-int8"),
        ("safetensors", ["fp_only"], "fp32"),
        ("safetensors", ["quant_only"], QUANTIZED),
        ("npz", None, f"fp32 {QUANTIZED}"),
        ("pt", None, "fp32"),
    ],
)
def test_groups_and_defaults(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch, layout: Any, modes: Any, recipes: str
) -> None:
    found = recipes_for(RecordRequest(modes=modes, layout=layout), ModelToRun(loaded))
    assert " ".join(map(str, found)) == recipes


def test_all_has_its_reference_with_it(loaded: Loaded) -> None:
    found = recipes_for(RecordRequest(modes=["all"]), ModelToRun(loaded))
    assert str(found[0]) == "fp32"
    assert len(found) == 8
    llama = probe.load_model("tiny-llama")
    found = recipes_for(RecordRequest(), ModelToRun(llama))
    assert list(map(str, found)) == ["fp32", "linear_w-int8", "linear_wa-int8"]


def test_how_it_is_batched_does_not_show(tmp_path: Path, ids: list[Tensor]) -> None:
    whole = torch.cat(ids)
    for size in (1, 2, 3):
        probe.record(tmp_path / str(size), model=Stack(2), modes=["fp32"], batches=list(torch.split(whole, size)))
    contents = [files(tmp_path / str(size)) for size in (1, 2, 3)]
    assert contents[0].keys() == contents[1].keys() == contents[2].keys()
    assert contents[0]["manifest.json"].count(b"\n") == contents[1]["manifest.json"].count(b"\n")


def test_a_folder_of_weights_is_recorded_under_the_given_name(tmp_path: Path) -> None:
    weights = Path(probe.models.loading.FOLDER) / "tiny-mamba"  # type: ignore[attr-defined]
    recording = probe.record(
        tmp_path / "r", model="quamba-130m", pretrained_dir=str(weights), modes=["fp32"], layout="npz", **SMALL
    )
    assert recording.manifest.model == "quamba-130m"
    stats = json.loads((tmp_path / "r" / "first_layer_io_all_modes_stats.json").read_text())
    assert (stats["model"], stats["pretrained_dir"]) == ("quamba-130m", str(weights))


def test_several_modes_of_pt_have_a_folder_each(tmp_path: Path, ids: list[Tensor]) -> None:
    recording = probe.record(tmp_path / "r", model=Stack(2), modes=["fp32", "bf16"], layout="pt", batches=ids)
    assert (tmp_path / "r" / "mode_fp32" / "layer_1_output.pt").is_file()
    assert (tmp_path / "r" / "mode_bf16" / "metadata.pt").is_file()
    assert recording == read_recording(tmp_path / "r")
    probe.record(tmp_path / "r", model=Stack(2), modes=["fp16"], layout="pt", batches=ids)
    assert read_recording(tmp_path / "r").recipes == ("fp32", "fp16", "bf16")
    probe.record(tmp_path / "one", model=Stack(2), layout="pt", batches=ids)
    with pytest.raises(RecordingError, match=r"one holds fp32, and the layout pt has one mode in a folder\. Give anot"):
        probe.record(tmp_path / "one", model=Stack(2), modes=["bf16"], layout="pt", batches=ids)


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layout": "zip"}, "unknown layout 'zip'. Did you mean 'npz'|unknown layout 'zip'"),
        ({"taps": ["scans"]}, "unknown tap 'scans'. Did you mean 'scan'"),
        ({"layers": ["nowhere"]}, "layer 'nowhere' matches none of the"),
        ({"modes": ["2-9"]}, "unknown mode '2-9'"),
        ({"samples": 0}, "samples is 0; expected 1 or more"),
        ({"seqlen": 70000}, r"the text has 65536 tokens; 3 samples of 70000 need 210000"),
        ({"prompt": "abc", "seqlen": 9, "samples": None}, r"the text has 3 tokens; 1 samples of 9 need 9"),
        ({"prompt": "", "seqlen": None, "samples": None}, "the prompt is empty"),
        ({"prompt": "abc"}, r"prompt and samples were both given, and a prompt is one sample of its own\. Leave one"),
        ({"prompt": "abc", "samples": None, "data": "evaluation"}, r"prompt and data were both given"),
        ({"batches": [torch.zeros(1, 4, dtype=torch.int64)]}, r"batches and samples were both given"),
        ({"output_file": "x.npz"}, r"an output file is for the layout npz, and the layout is safetensors"),
        ({"compile": True, "model": probe.record_outputs(Stack(2)), "layers": ["all"]}, "layers were chosen when"),
        ({"data": "nowhere.txt"}, "text file 'nowhere.txt' does not exist"),
        ({"device": "cuda"}, "device 'cuda' is not present on this machine"),
        ({"device": "recorded:x"}, "is a recording already"),
        ({"output_file": "../x.npz", "layout": "npz"}, "Expected a plain name that ends in .npz"),
        ({"model": "tiny-llama", "modes": ["2-1"]}, "quantizes Mamba-1 blocks and tiny-llama has none"),
        ({"model": "tiny-llama", "modes": ["fp32"], "taps": ["scan"]}, "tiny-llama has no tap 'scan' at these layers. "
         "It has: inputs, embedding, final_norm, logits"),
    ],
)  # fmt: skip
def test_mistakes_are_told_and_leave_nothing(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probe.record(tmp_path / "r", **({"modes": ["fp32"], **SMALL} | wrong))
    assert list(tmp_path.iterdir()) == []


def test_modules_that_run_twice_or_never_are_told_and_leave_nothing(tmp_path: Path, ids: list[Tensor]) -> None:
    with pytest.raises(RecordingError, match=r"fp32: layer_0\.output has 4 samples of .*Expected 3 of one dtype"):
        probe.record(tmp_path / "r", model=Twice(2), modes=["fp32"], batches=ids)
    with pytest.raises(UncoveredError, match="1 of 2 selected layers never ran: layer_1"):
        probe.record(tmp_path / "r", model=Deaf(2), modes=["fp32"], layers=["all"], batches=ids)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_a_tokenizer_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"Stack brings no tokenizer\. Give the tokens themselves: batches="):
        probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"])


def test_a_mode_that_does_nothing_is_found_out(tmp_path: Path, loaded: Loaded) -> None:
    probe.register_mode("lazy", lambda model, format, calibration: model)
    try:
        with pytest.raises(NotAppliedError, match=r"lazy-mxint8 was not applied: layer_0, layer_3 are those of fp32"):
            probe.record(tmp_path / "r", model=loaded, modes=["fp32", "lazy"], formats=["mxint8"], **SMALL)
    finally:
        probe.unregister_mode("lazy")
    assert os.listdir(tmp_path) == ["r.partial"]
    left = sorted(os.listdir(tmp_path / "r.partial"))
    assert left == ["fp32.safetensors", "manifest.json", "tokens.safetensors"]


def test_a_built_in_mode_that_was_not_applied_is_found_out_without_a_reference(
    tmp_path: Path, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "apply", lambda model, recipe, calibration=None: apply(model, Recipe("fp32")))
    with pytest.raises(NotAppliedError, match=r"mode_2_1-int8 was not applied: .* is not on a grid of int8"):
        probe.record(tmp_path / "r", model=loaded, modes=["2-1"], **SMALL)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------- adding, overwriting


@pytest.mark.parametrize("layout", ["safetensors", "npy", "npz"])
def test_modes_are_added_to_a_recording_of_the_same(tmp_path: Path, ids: list[Tensor], layout: str) -> None:
    both = probe.record(tmp_path / "both", model=Stack(2), modes=["fp32", "bf16"], batches=ids, layout=layout)
    probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids, layout=layout)
    (tmp_path / "r" / "notes.txt").write_text("mine")
    added = probe.record(tmp_path / "r", model=Stack(2), modes=["bf16"], batches=ids, layout=layout)
    assert added == read_recording(tmp_path / "r")
    assert added.manifest.recipes == both.manifest.recipes
    same(added, both)
    assert (tmp_path / "r" / "notes.txt").read_text() == "mine"
    assert "notes.txt" not in added.manifest.files
    assert sorted(os.listdir(tmp_path)) == ["both", "r"]
    if layout == "npz":
        stats = json.loads((tmp_path / "r" / "first_layer_io_all_modes_stats.json").read_text())
        assert list(stats["modes"]) == ["fp32", "bf16"]


def same(one: Recording, other: Recording) -> None:
    assert one.recipes == other.recipes
    for recipe in one.recipes:
        assert one.names(recipe) == other.names(recipe)
        for name in one.names(recipe):
            assert torch.equal(one.tensor(recipe, name), other.tensor(recipe, name)), (recipe, name)


@pytest.mark.parametrize("layout", ["safetensors", "npy", "npz", "pt"])
def test_a_mode_that_is_there_is_replaced_only_if_asked(tmp_path: Path, ids: list[Tensor], layout: str) -> None:
    target = tmp_path / "r"
    probe.record(target, model=Stack(2), modes=["fp32", "bf16"], batches=ids, layout=layout)
    before = files(target)
    message = r"r has fp32 already\. Leave them out, give another folder, or overwrite them \(--overwrite\)\."
    with pytest.raises(RecordingError, match=message):
        probe.record(target, model=Stack(2), modes=["fp32"], batches=ids, layout=layout)
    assert files(target) == before
    probe.record(target, model=Stack(2), modes=["fp32"], batches=ids, layout=layout, overwrite=True)
    again = probe.record(tmp_path / "new", model=Stack(2), modes=["fp32", "bf16"], batches=ids, layout=layout)
    same(read_recording(target), again)
    shutil.rmtree(tmp_path / "new")
    stamped = {name for name in before if "all_modes" in name} | {"manifest.json"}
    after = files(target)
    assert after.keys() == before.keys()
    assert {name for name in before if before[name] != after[name]} <= stamped
    assert read_recording(target).recipes == ("fp32", "bf16")
    assert os.listdir(tmp_path) == ["r"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": Stack(3)}, r"weights \w{16} -> \w{16}"),
        ({"batches": [torch.zeros(3, 6, dtype=torch.int64)]}, r"tokens 3 x 6, \w{16} -> 3 x 6, \w{16}"),
        ({"layout": "npy"}, "layout safetensors -> npy"),
        ({"layers": ["all"], "model": Stack(2), "taps": ["logits"]}, r"bf16 would have other tensors than fp32 in the"),
    ],
    ids=["weights", "tokens", "layout", "taps"],
)
def test_modes_are_not_added_to_a_recording_of_something_else(
    tmp_path: Path, ids: list[Tensor], change: dict[str, Any], message: str
) -> None:
    probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids)
    before = files(tmp_path)
    with pytest.raises(RecordingError, match=message):
        probe.record(tmp_path / "r", **({"model": Stack(2), "modes": ["bf16"], "batches": ids} | change))
    assert files(tmp_path) == before
    assert os.listdir(tmp_path) == ["r"]


def test_what_is_no_recording_is_left_alone(tmp_path: Path, ids: list[Tensor]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    for overwrite in (False, True):
        with pytest.raises(RecordingError, match=r"is not empty and is no recording\. Give another folder\."):
            probe.record(tmp_path, model=Stack(2), modes=["fp32"], batches=ids, overwrite=overwrite, restart=True)
        with pytest.raises(RecordingError, match=r"thesis\.txt is a file\. Expected the name of a folder to make\."):
            probe.record(tmp_path / "thesis.txt", model=Stack(2), modes=["fp32"], batches=ids, overwrite=overwrite)
    assert files(tmp_path) == {"thesis.txt": b"years of work"}
    assert not tmp_path.with_name(f"{tmp_path.name}.partial").exists()


# --------------------------------------------------------------------------------------------------- interruptions


@pytest.fixture(scope="module")
def what_a_kill_leaves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SIGKILL in the middle of the second of three recipes; a real process, a real signal."""
    root = tmp_path_factory.mktemp("killed")
    (root / KILL).touch()
    command = [sys.executable, "-m", "probe.commands", "record", "--model", "tests.recordings.models:mortal"]
    command += ["--modes", "fp32", "fp16", "bf16", "--samples", "2", "--seqlen", "8", "--out", "r"]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert sorted(os.listdir(root)) == [str(KILL), "r.partial"]
    return root / "r.partial"


@pytest.fixture
def killed(tmp_path: Path, what_a_kill_leaves: Path) -> Path:
    shutil.copytree(what_a_kill_leaves, tmp_path / "r.partial")
    return tmp_path / "r"


MORTAL: dict[str, Any] = {
    "model": "tests.recordings.models:mortal",
    "modes": ["fp32", "fp16", "bf16"],
    "samples": 2,
    "seqlen": 8,
}


def test_a_killed_recording_is_told_refused_and_finished(killed: Path, tmp_path: Path) -> None:
    partial = tmp_path / "r.partial"
    assert not killed.exists()
    with pytest.raises(
        RecordingError, match=r"no folder .*/r\. .*r\.partial is an interrupted recording of it: run the"
    ):
        read_recording(killed)
    with pytest.raises(
        RecordingError, match=r"interrupted recording: 1 of 3 recipes are whole, fp16, bf16 missing\. Run"
    ):
        read_recording(partial)
    before = files(partial)
    assert "fp16.safetensors" in before, "the kill was in the middle of it"
    for change, words in (
        ({"layers": ["all"]}, r"layers first last -> all"),
        ({"seqlen": 16}, r"tokens 2 x 8, \w+ -> 2 x 16, \w+"),
        ({"modes": ["fp32", "fp16"]}, r"recipes fp32 fp16 bf16 -> fp32 fp16"),
        ({"layout": "npy"}, r"layout safetensors -> npy"),
        ({"taps": ["logits"]}, r"taps none -> logits"),
        ({"model": "tiny-mamba"}, r"model tests\.recordings\.models:mortal -> tiny-mamba"),
    ):
        with pytest.raises(
            RecordingError, match=rf"of something else: {words}.*\. Run the command that began it, or del"
        ):
            probe.record(killed, **(MORTAL | change))
    assert files(partial) == before
    log = Log()
    recording = probe.record(killed, **MORTAL, progress=log)
    assert f"continuing {partial}: fp32 recorded already" in log.lines
    assert {recipe for recipe, _ in log.steps} == {"fp16", "bf16"}, "what is whole is not run again"
    assert os.listdir(tmp_path) == ["r"]
    same(recording, probe.record(tmp_path / "at once", **MORTAL))


def test_a_killed_recording_can_be_started_again(killed: Path, tmp_path: Path) -> None:
    log = Log()
    probe.record(killed, **(MORTAL | {"modes": ["fp32"]}), restart=True, progress=log)
    assert log.lines[-1] == "[1/1] fp32"
    assert os.listdir(tmp_path) == ["r"]


def interrupted(tmp_path: Path, ids: list[Tensor], monkeypatch: pytest.MonkeyPatch, **more: Any) -> Path:
    """A recording that failed while it was put in its place: all recipes are whole."""

    def full(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publishing_module, "sync_tree", full)
        with pytest.raises(
            RecordingError, match=r"cannot write .*: No space left on device\. What was there before is"
        ):
            probe.record(tmp_path / "r", model=Stack(2), modes=["fp32", "bf16"], batches=ids, **more)
    return tmp_path / "r.partial"


@pytest.mark.parametrize("layout", ["safetensors", "npy", "npz", "pt"])
def test_a_disk_that_is_full_at_the_end_loses_nothing(
    tmp_path: Path, ids: list[Tensor], monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    interrupted(tmp_path, ids, monkeypatch, layout=layout)
    assert os.listdir(tmp_path) == ["r.partial"]
    log = Log()
    found = probe.record(
        tmp_path / "r", model=Stack(2), modes=["fp32", "bf16"], batches=ids, layout=layout, progress=log
    )
    assert log.steps == []
    assert found == read_recording(tmp_path / "r")
    assert os.listdir(tmp_path) == ["r"]


def test_an_interrupted_recording_that_was_changed_is_refused(
    tmp_path: Path, ids: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = interrupted(tmp_path, ids, monkeypatch)
    file = partial / "fp32.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\x01")
    again: dict[str, Any] = {"model": Stack(2), "modes": ["fp32", "bf16"], "batches": ids}
    with pytest.raises(RecordingError, match=r"cannot be used\. .*its sha256 is .*or delete it with --restart\."):
        probe.record(tmp_path / "r", **again)
    probe.record(tmp_path / "r", **again, restart=True)
    assert os.listdir(tmp_path) == ["r"]


def test_a_folder_of_ones_own_is_not_deleted_by_restart(tmp_path: Path, ids: list[Tensor]) -> None:
    (tmp_path / "r.partial").mkdir()
    (tmp_path / "r.partial" / "thesis.txt").write_text("years of work")
    for restart in (False, True):
        with pytest.raises(RecordingError, match=r"r\.partial is in the way and is no interrupted recording\. Move it"):
            probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids, restart=restart)
    assert files(tmp_path) == {"r.partial/thesis.txt": b"years of work"}


def test_two_processes_do_not_write_one_recording(tmp_path: Path, ids: list[Tensor]) -> None:
    class Intruder(Log):
        def step(self, recipe: str, name: str) -> None:
            if not self.steps:
                with pytest.raises(RecordingError, match=r"r\.partial is being written by another process\. Wait"):
                    probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids)
            super().step(recipe, name)

    log = Intruder()
    probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids, progress=log)
    assert log.steps
    read_recording(tmp_path / "r")


def test_a_disk_that_is_full_in_the_middle_keeps_the_recipes_that_are_whole(tmp_path: Path, ids: list[Tensor]) -> None:
    """fp32 takes twice the bytes of bf16: with a limit between them the first is whole, the second is not."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    again: dict[str, Any] = {"model": Stack(2, width=512), "modes": ["bf16", "fp32"], "batches": ids}
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, old[1]))
    try:
        with pytest.raises(RecordingError, match=r"cannot write .*fp32\.safetensors: File too large\. What was there"):
            probe.record(tmp_path / "r", **again)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    names = sorted(os.listdir(tmp_path / "r.partial"))
    assert names == ["bf16.safetensors", "manifest.json", "tokens.safetensors"]
    log = Log()
    probe.record(tmp_path / "r", **again, progress=log)
    assert {recipe for recipe, _ in log.steps} == {"fp32"}
    assert read_recording(tmp_path / "r").recipes == ("fp32", "bf16")


def test_a_folder_without_permission_is_told(ids: list[Tensor]) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        root = os.geteuid() == 0
        if root:
            os.seteuid(65534)  # root may write anywhere; nobody may not
        try:
            with pytest.raises(RecordingError, match=r"cannot write .*r\.partial: Permission denied\. What was there"):
                probe.record(Path(name) / "r", model=Stack(2), modes=["fp32"], batches=ids)
        finally:
            if root:
                os.seteuid(0)
        os.chmod(name, 0o755)
        assert os.listdir(name) == []


def test_a_kill_between_the_two_renames_is_mended(tmp_path: Path, ids: list[Tensor]) -> None:
    probe.record(tmp_path / "r", model=Stack(2), modes=["fp32"], batches=ids)
    (tmp_path / "r").rename(tmp_path / ".r.previous")
    with pytest.raises(
        RecordingError, match=r"\.r\.previous is what an interrupted overwriting left of it: rename it ba"
    ):
        read_recording(tmp_path / "r")
    probe.record(tmp_path / "r", model=Stack(2), modes=["bf16"], batches=ids)
    assert read_recording(tmp_path / "r").recipes == ("fp32", "bf16")
    assert os.listdir(tmp_path) == ["r"]
