"""The golden reference: a change of the float run is a verdict of its own, and is never blamed on a mode."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from probe.diagnosis.causes import WIDTH
from probe.formats import FORMATS
from probe.gate import bench as bench_module, matrix as matrix_module
from probe.gate.bench import Bench
from probe.gate.cases import Outcome
from probe.gate.engine import Gate
from probe.gate.sources import differing
from probe.models import loading
from probe.numerics.quantize import fake_quantize
from probe.running import reference as reference_module
from probe.running.golden_reference import MOST, MOVED, _row as row_of, moved_tensors, row_distance, with_spread
from probe.running.noise import BASE, Anchors, Variation
from probe.running.recipes import Recipe, apply
from tests.faults.bench import SmallGate, settings_of

LLAMA, MAMBA = ("tiny-llama", "linear_wa-int8"), ("tiny-mamba", "mode_2_1-int8")


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> SmallGate:
    settings = {model: settings_of(model, [one]) for model, one in (LLAMA, MAMBA)}
    made = SmallGate(tmp_path_factory.mktemp("moved"), settings)
    for model, recipe in (LLAMA, MAMBA):
        made.make_baselines(model, [recipe])
    return made


@contextmanager
def reference_with(change: Callable[[Any], None]) -> Iterator[None]:
    """While the block runs, the float copy that the reference is made of is changed."""

    def apply_badly(model: nn.Module, recipe: Recipe, *rest: Any) -> nn.Module:
        twin = apply(model, recipe, *rest)
        change(twin)
        return twin

    with mock.patch.object(reference_module, "apply", apply_badly):
        yield


def stack_of(twin: Any) -> Any:
    return (twin.backbone if hasattr(twin, "backbone") else twin.model).layers


def quantized(twin: Any) -> None:
    for parameter in stack_of(twin)[1].parameters():
        if parameter.dim() == 2:
            parameter.data.copy_(fake_quantize(parameter.data, "int8"))


def twice(twin: Any) -> None:
    embedding = twin.get_input_embeddings()
    plain = embedding.forward
    embedding.forward = lambda tokens: plain(tokens[[0, *range(len(tokens) - 1)]])


def lower_precision(twin: Any) -> None:
    layer = stack_of(twin)[2]
    layer.register_forward_hook(lambda module, args, output: output.half().float())


@contextmanager
def stale_capture() -> Iterator[None]:
    """The reference's outputs of layer_2 are those of the batch before."""
    run = reference_module.run_reference

    def run_badly(*args: Any, **options: Any) -> Any:
        found = run(*args, **options)
        stale = [torch.roll(tensor, 1, 0) for tensor in found.tensors["layer_2.output"]]
        return replace(found, tensors={**found.tensors, "layer_2.output": stale})

    with mock.patch.object(bench_module, "run_reference", run_badly):
        yield


@contextmanager
def configured(tmp_path: Path, model: str, **changed: object) -> Iterator[None]:
    """While the block runs, config.json of an embedded model is another one, with the same weights."""
    row = loading.EMBEDDED[model]
    assert row.folder is not None
    folder = tmp_path / model
    shutil.copytree(row.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    assert set(changed) <= set(config)
    (folder / "config.json").write_text(json.dumps({**config, **changed}))
    with mock.patch.dict(loading.EMBEDDED, {model: replace(row, folder=folder)}):
        matrix_module._load.cache_clear()
        yield
    matrix_module._load.cache_clear()


def check_moved(outcomes: dict[str, Outcome], start: str, *causes: str) -> None:
    assert {one.verdict for one in outcomes.values()} == {"reference moved"}
    for one in outcomes.values():
        assert f"the float reference is not that of the baselines, from {start} on" in one.message
        assert one.cause.startswith(f"reference, from {start} on; ")
        assert all(cause in one.cause for cause in causes), one.cause
        assert len(one.cause) <= WIDTH


@pytest.mark.parametrize("run", [LLAMA, MAMBA], ids=lambda run: run[0])
@pytest.mark.parametrize(
    ("change", "start", "cause"),
    [
        (quantized, "layer_1", "lies on the grid of int8: the reference is quantized"),
        (twice, "embedding", "other tokens: sample 1 is sample 0"),
        (lower_precision, "layer_2", "weights, configuration and its input are the stored ones: look at its code"),
    ],
    ids=["reference quantized", "a sample evaluated twice", "a layer in half precision"],
)
def test_a_fault_in_the_reference_is_named_with_its_layer(
    gate: SmallGate, run: tuple[str, str], change: Callable[[Any], None], start: str, cause: str
) -> None:
    with reference_with(change):
        check_moved(gate.judge(*run, shared=False), start, cause)


def test_a_stale_capture_is_named_with_its_layer(gate: SmallGate) -> None:
    with stale_capture():
        check_moved(gate.judge(*LLAMA, shared=False), "layer_2", "run again it gives its stored output")


@pytest.mark.parametrize(
    ("run", "changed"),
    [(LLAMA, {"rms_norm_eps": 1e-3}), (MAMBA, {"layer_norm_epsilon": 1e-3})],
    ids=["tiny-llama", "tiny-mamba"],
)
def test_a_changed_configuration_is_named_by_its_key(
    gate: SmallGate, tmp_path: Path, run: tuple[str, str], changed: dict[str, float]
) -> None:
    with configured(tmp_path, run[0], **changed):
        outcomes = gate.judge(*run, shared=False)
    (key,) = changed
    check_moved(outcomes, "layer_0", f"configuration changed: {key}", "-> 0.001")


def test_other_tokens_are_another_input(gate: SmallGate) -> None:
    with pytest.raises(ValueError, match=r"were made with another input: input\.tokens"):
        Gate(gate.root).judge_recipe(
            replace(gate.settings["tiny-llama"], samples=5), gate.case(Gate(gate.root), *LLAMA)
        )


@pytest.mark.parametrize("run", [LLAMA, MAMBA], ids=lambda run: run[0])
def test_another_order_of_sums_moves_nothing(gate: SmallGate, run: tuple[str, str]) -> None:
    for batch_size in (1, 4):
        outcomes = gate.judge(*run, shared=False, batch_size=batch_size)
        assert not [one for one in outcomes.values() if one.verdict == "reference moved"]
    bench = Bench(gate.settings[run[0]], root=gate.root)
    bench.use_stored_anchors(all_devices=False)
    for variation in (Variation("oneDNN off", onednn=False), Variation("jitter", jitter=7)):
        assert not bench.compare_reference(variation)


def test_an_update_of_a_moved_reference_keeps_no_entry_and_no_anchor(gate: SmallGate, tmp_path: Path) -> None:
    model, recipe = LLAMA
    with ExitStack() as patches:
        patches.enter_context(configured(tmp_path, model, rms_norm_eps=0.3))
        patches.enter_context(mock.patch("probe.gate.engine.variations", return_value=()))
        update = Gate(gate.root, update=True, reason="the reference moved")
        judged = update.judge_recipe(gate.settings[model], gate.case(update, model, recipe))
    bench = update.bench(gate.settings[model])
    assert not judged.refusals
    assert bench.moved.startswith("from layer_0 on: its output differs by ")
    old = {label: bench.entry(one.case) for label, one in judged.outcomes.items()}
    assert all(judged.entries[label] != old[label] for label in ("layer_0", "layer_3", "norm", "head", "logits"))
    stored = Bench(gate.settings[model], root=gate.root)
    stored.use_stored_anchors(all_devices=False)
    assert bench.anchors is not None
    assert stored.anchors is not None
    assert row_distance(bench.anchors.rows["layer_0.output"], stored.anchors.rows["layer_0.output"]) > 0.01
    assert not torch.equal(bench.anchors.places["layer_1"], stored.anchors.places["layer_1"])
    assert bench.anchors.config["rms_norm_eps"] == "0.3"


def test_a_golden_reference_that_lacks_a_stored_layer_passes_nothing(gate: SmallGate) -> None:
    bench = Bench(gate.settings["tiny-llama"], root=gate.root)
    bench.use_stored_anchors(all_devices=False)
    assert bench.anchors is not None
    assert not bench.compare_reference()
    rows = {name: row for name, row in bench.anchors.rows.items() if not name.startswith("layer_2.")}
    bench.anchors = replace(bench.anchors, rows=rows)
    assert bench.compare_reference() == "from layer_2 on: the baselines have no golden reference of it"


# ---------------------------------------------------------------------------------------------------------- the sources


def test_sources_that_agree_say_nothing_and_each_that_differs_is_named(
    gate: SmallGate, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(gate.settings["tiny-llama"], root=gate.root)
    case, recipe = gate.case(Gate(gate.root), *LLAMA), Recipe("linear_wa", "int8")
    bench.use_stored_anchors(all_devices=False)
    assert differing(bench, recipe, case) == []
    assert differing(bench, recipe, replace(case, mode="linear_w")) == []  # nothing is stored of it

    monkeypatch.setitem(FORMATS, "int8", replace(FORMATS["int8"], max=126.0))
    assert differing(bench, recipe, case) == ["format int8 changed: max 127.0 -> 126.0"]
    monkeypatch.undo()

    half = replace(bench.settings, calibration=replace(bench.settings.calibration, samples=4))
    other = Bench(half, root=gate.root)
    other.anchors = bench.anchors
    text, scales = differing(other, recipe, case)
    assert text.startswith("calibration text changed: ")
    assert scales.startswith("calibration changed: ")
    assert "at linear model.layers." in scales


# ------------------------------------------------------------------------------------------------------------- the rows


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_row_does_not_depend_on_the_batches_and_its_distance_is_relative_to_the_rms() -> None:
    x = 5 * noise(6, 1000)
    whole, parts = row_of([x]), row_of([x[:1], x[1:]])
    torch.testing.assert_close(whole, parts, rtol=1e-6, atol=1e-6)
    assert row_distance(whole, whole) == 0
    changed = x + 0.5 * noise(6, 1000, seed=1)
    assert row_distance(row_of([changed]), whole) == pytest.approx(0.1, rel=0.4)


def test_infinities_stay_where_they_are_and_a_new_nan_moves_the_row() -> None:
    x = noise(4, 100)
    x[2, 5] = -torch.inf
    golden = row_of([x])
    assert row_distance(row_of([x.clone()]), golden) == 0
    assert golden[0] < 2, "the rms is of finite elements"
    worse = x.clone()
    worse[0, 0] = torch.nan
    assert row_distance(row_of([worse]), golden) > 1


def test_a_spread_widens_the_tolerance_but_not_without_bound() -> None:
    x = noise(2, 5000)
    golden = {"layer_0.output": row_of([x])}
    near = {"layer_0.output": row_of([x * (1 + 2 * MOVED)])}
    far = {"layer_0.output": row_of([x * (1 + 2 * MOST * MOVED)])}
    (moved,) = moved_tensors(near, golden)
    assert str(moved).startswith("from layer_0 on: its output differs by ")
    assert moved_tensors(near, with_spread(golden, [near])) == []
    assert moved_tensors(far, with_spread(golden, [far])) != []


def test_anchors_keep_the_rows_and_the_configuration_byte_for_byte() -> None:
    rows = {"layer_0.output": row_of([noise(2, 50)]), "logits": row_of([noise(3, 7)])}
    anchors = Anchors(rows=rows, config={"eps": "1e-05"}, amax={"site": 2.0})
    again = Anchors.from_bytes(anchors.to_bytes())
    assert again.to_bytes() == anchors.to_bytes()
    assert again.config == anchors.config
    assert all(torch.equal(again.rows[name], row) for name, row in rows.items())
    assert Anchors.from_bytes(Anchors(amax={"site": 2.0}).to_bytes()).rows == {}


def test_the_reference_under_the_base_variation_is_the_golden_one(gate: SmallGate) -> None:
    bench = Bench(gate.settings["tiny-llama"], root=gate.root)
    bench.use_stored_anchors(all_devices=False)
    assert not bench.compare_reference(BASE)
