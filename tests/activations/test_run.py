"""Promises of a whole run: what it finds is what a plain computation finds, padding and all."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from probe.activations.export import tables
from probe.activations.job import forward
from probe.activations.plan import Plan
from probe.activations.run import Analysis, analyze, names_of, prepare, run
from probe.activations.settings import EnabledSettings, read_configuration
from probe.data.samples import TokenBatch as Batch, batches_of
from tests.activations.toys import CHANNEL, OUTLIER, make

TOY = {"model.path": "tests.activations.toys:make", "data.num_samples": "3", "data.seq_len": "12"}
SHORT = "the end\n", "eel", "a longer text than the others"


def quiet(_: str) -> None:
    return


def settings_of(**given: Any) -> Any:
    return read_configuration(None, [(k, str(v)) for k, v in {**TOY, **given}.items()])


def found(**given: Any) -> Analysis:
    return analyze(settings_of(**given), progress=quiet)


def texts(tmp_path: Path, lines: tuple[str, ...] = SHORT) -> dict[str, str]:
    (tmp_path / "short.json").write_text(json.dumps(list(lines)))
    return {"data.source": f"custom:{tmp_path}/short.json", "data.num_samples": str(len(lines))}


def captured(settings: Any) -> tuple[dict[str, list[torch.Tensor]], list[list[int]]]:
    """Inputs and outputs of every module, sample by sample, without padding: the plain way."""
    prepared = prepare(settings, progress=quiet)
    kept: dict[str, list[torch.Tensor]] = {}
    samples = [row[mask].tolist() for b in prepared.batches for row, mask in zip(b.tokens, b.mask, strict=True)]
    model = make()

    def keep(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            kept.setdefault(f"{name} input", []).append(args[0][0])
            kept.setdefault(f"{name} output", []).append((output[0] if isinstance(output, tuple) else output)[0])

        return hook

    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(keep(name))
    with torch.no_grad():
        for sample in samples:
            model(torch.tensor([sample]))
    return kept, samples


@pytest.mark.parametrize("batch_size", [1, 2, 3])
def test_statistics_are_those_of_the_tokens_that_are_there(tmp_path: Path, batch_size: int) -> None:
    given = texts(tmp_path) | {"data.batch_size": str(batch_size), "outlier.threshold": "8"}
    analysis = found(**given)
    plain, samples = captured(settings_of(**given))
    assert sorted(map(len, samples)) == [3, 8, 12]
    for (name, kind), s in analysis.statistics.items():
        if kind == "weight":
            weight = make().get_submodule(name).weight
            assert isinstance(weight, torch.Tensor)
            x = weight.detach().numpy()
        else:
            x = torch.cat(plain[f"{name} {kind}"]).numpy()
        assert (s.count, s.rows, s.channel_amax.size) == (x.size, len(x), x.shape[1]), (name, kind)
        assert s.amax == pytest.approx(float(np.abs(x).max()), rel=1e-5)
        assert s.moments.mean == pytest.approx(float(x.mean(dtype=np.float64)), rel=1e-4, abs=1e-6)
        assert s.channel_amax == pytest.approx(np.abs(x).max(0), rel=1e-4, abs=1e-5)
    assert len(analysis.statistics) == 3 * (2 * 3 + 1), "two linear layers, three kinds, and the layer's output"


@pytest.mark.parametrize("batch_size", [1, 3])
def test_outliers_are_the_tokens_that_were_really_there(tmp_path: Path, batch_size: int) -> None:
    given = texts(tmp_path) | {"data.batch_size": str(batch_size), "outlier.threshold": "8"}
    analysis = found(**given)
    plain, samples = captured(settings_of(**given))
    assert list(analysis.outliers) == ["layers.0", "layers.1", "layers.2"]
    for name, layer in analysis.outliers.items():
        expected = []
        for index, x in enumerate(plain[f"{name} output"]):
            amax = x.abs().amax(1)
            for place in (amax > 8 * np.median(amax.numpy())).nonzero()[:, 0].tolist():
                expected.append((index, place, samples[index][place]))
        assert sorted((one.sample, one.position, one.token) for one in layer.worst) == expected
        assert expected
        assert layer.tokens == sum(map(len, samples))
    assert {token for layer in analysis.outliers.values() for token in layer.token_ids} == {OUTLIER}
    assert analysis.token_texts == {OUTLIER: "e"}
    made = tables(analysis)
    assert made["outlier_token"][0]["text"] == "e"
    assert made["top_channels"][0]["channel"] == CHANNEL
    assert {row["position"] for row in made["outlier_position"]} == {place for _, place, _ in expected}
    for row in made["outlier_worst"]:
        ids = samples[row["sample"]]
        assert row["around"] == bytes(ids[max(0, row["position"] - 12) : row["position"] + 13]).decode()


def test_text_is_left_out_where_it_was_not_asked_for(tmp_path: Path) -> None:
    made = tables(found(**texts(tmp_path), **{"outlier.threshold": "8", "outlier.decode_tokens": "false"}))
    assert {row["around"] for row in made["outlier_worst"]} == {row["text"] for row in made["outlier_token"]} == {None}


def test_bands_and_heat_leave_out_padding_too(tmp_path: Path) -> None:
    analysis = found(**texts(tmp_path), **{"heatmap_3d.sample_idx": "1", "data.batch_size": "3"})
    plain, samples = captured(settings_of(**texts(tmp_path)))
    for name, band in analysis.bands.items():
        x = torch.cat(plain[f"{name} output"])
        assert band.counts.sum() == x.numel()
        assert band.maximum == pytest.approx(x.amax(0).numpy(), rel=1e-4, abs=1e-5)
    for name, heat in analysis.heat.items():
        assert heat.values == pytest.approx(plain[f"{name} output"][1].abs().numpy(), rel=1e-4, abs=1e-5)
        assert heat.tokens == len(samples[1])


def test_a_model_that_takes_no_mask_is_given_no_padding(tmp_path: Path) -> None:
    given = texts(tmp_path) | {"data.batch_size": "3"}
    a, b = found(**given), found(**given, **{"model.path": "tests.activations.toys:make_maskless"})
    assert a.statistics.keys() == b.statistics.keys()
    for key, s in a.statistics.items():
        assert (s.rows, s.count) == (b.statistics[key].rows, b.statistics[key].count)
        assert s.channel_amax == pytest.approx(b.statistics[key].channel_amax, rel=1e-4, abs=1e-5)


def test_padding_is_masked_where_the_model_takes_a_mask() -> None:
    seen: dict[str, Any] = {}

    class Model(nn.Module):
        def forward(self, ids: torch.Tensor, attention_mask: Any = None, use_cache: Any = None) -> None:
            seen.update(mask=attention_mask, use_cache=use_cache)

    mask = torch.tensor([[True, True], [True, False]])
    forward(Model(), Batch(torch.ones(2, 2, dtype=torch.int64), mask, 0), torch.device("cpu"))
    assert seen["mask"].tolist() == [[1, 1], [1, 0]]
    assert seen["use_cache"] is False


def test_the_tokens_of_real_models_do_not_depend_on_padding(tmp_path: Path) -> None:
    given = texts(tmp_path, ("Once upon a time", "Yes", "Twelve monkeys")) | {"data.seq_len": "16"}
    for model in ("tiny-llama", "tiny-mamba"):
        alone = found(**given, **{"model.path": model, "data.batch_size": "1"})
        padded = found(**given, **{"model.path": model, "data.batch_size": "3"})
        for key, s in alone.statistics.items():
            other = padded.statistics[key]
            assert (s.count, s.rows) == (other.count, other.rows)
            assert s.channel_amax == pytest.approx(other.channel_amax, rel=1e-3, abs=1e-4), key


def test_a_tensor_without_tokens_under_padding_is_left_out_and_said(tmp_path: Path) -> None:
    """The convolution of the toy gives 14 columns for 12 tokens, which is known; of other modules it is not."""
    given = texts(tmp_path) | {"outlier.pattern": "conv", "magnitude.patterns": "proj|conv", "data.batch_size": "3"}
    analysis = found(**given)
    assert analysis.statistics["conv", "output"].rows == 23
    assert analysis.outliers["conv"].tokens == 23

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(40, 4)])
            self.embed = nn.Embedding(256, 40)

        def forward(self, ids: torch.Tensor, attention_mask: Any = None) -> Any:
            return self.experts[0](self.embed(ids).reshape(-1, 40)[::3])

    settings = settings_of(
        **given, **{f"enabled.{name}": "false" for name in ("heatmap_3d", "distribution", "percentile_range")}
    )
    prepared = prepare(settings, progress=quiet)
    for batch_size, missing in ((3, True), (1, False)):
        model = Odd()
        plan = Plan(
            {"output": ("experts.0",)},
            ("input", ()),
            ("experts.0",),
            ("output", ()),
            ("output", ()),
            0,
            ("experts.0", "embed"),
        )
        samples = [row[mask].tolist() for b in prepared.batches for row, mask in zip(b.tokens, b.mask, strict=True)]
        odd = replace(prepared, model=model, plan=plan, batches=batches_of(samples, batch_size=batch_size, pad=True))
        if missing:
            with pytest.raises(
                ValueError,
                match=r"nothing could be analyzed\. the output of experts\.0 is \[12, 4\]: no axis is the 12 tokens",
            ):
                run(odd, progress=quiet)
        else:
            analysis = run(odd, progress=quiet)
            assert analysis.statistics["experts.0", "output"].rows == 1 + 3 + 4
            assert any("no axis is the tokens" in note for note in analysis.notes)


def test_modules_that_never_ran_are_said() -> None:
    analysis = found(**{"magnitude.patterns": "unused|up_proj"})
    (note,) = (note for note in analysis.notes if "never ran" in note)
    assert "3 of 12 chosen modules never ran, and are left out: layers.0.unused, layers.1.unused" in note
    assert ("layers.0.unused", "weight") in analysis.statistics, "its weight is there"
    everything = {f"enabled.{name}": "false" for name in ("outlier_layer_wise", "outlier_position", "outlier_token")}
    everything |= {
        f"enabled.{name}": "false" for name in ("heatmap_3d", "distribution", "percentile_range", "magnitude_weight")
    }
    with pytest.raises(ValueError, match=r"nothing could be analyzed\. 3 of 3 chosen modules never ran"):
        found(**everything, **{"magnitude.patterns": "unused"})


def test_a_mamba_layer_that_is_not_called_points_to_the_sites() -> None:
    analysis = found(**{"model.path": "tiny-mamba", "magnitude.patterns": "dt_proj|in_proj", "data.seq_len": "8"})
    assert any("dt_proj" in note and "Set model.sites true" in note for note in analysis.notes)


def test_a_weight_that_does_not_fit_its_input_is_said_with_what_was_predicted() -> None:
    analysis = found(**{"magnitude.patterns": "[conv, up_proj]", "outlier.threshold": "8"})
    (note,) = [note for note in analysis.notes if "predicted error" in note]
    assert note == (
        "the predicted error of 1 modules is that of their input alone, without the weight: the input has other "
        "channels than a row of the weight, as in convolutions: conv (40 and 120)."
    )
    rows = {row["module"]: row for row in tables(analysis)["predicted_error"]}
    assert rows["conv"]["predicted"] == "input"
    assert rows["layers.0.up_proj"]["predicted"] == "linear"
    assert not [note for note in found().notes if "predicted error" in note]


def test_nan_is_said() -> None:
    analysis = found(**{"model.path": "tests.activations.toys:make_nan"})
    assert any("NaN or Inf, which are left out of all statistics, in " in note for note in analysis.notes)


def test_the_bytes_that_stand_in_for_a_tokenizer_are_said() -> None:
    assert any("brings no tokenizer: text is read as bytes" in note for note in found().notes)
    with pytest.raises(ValueError, match=r"has no tokenizer and a vocabulary of 100; text as bytes needs at least 256"):
        found(**{"model.path": "tests.activations.toys:make_small_vocabulary"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"magnitude.patterns": "dwon_proj"},
            r"visualization\.magnitude\.patterns: layer 'dwon_proj' matches none of .* Nearest: layers\.\d\.down_proj",
        ),
        ({"magnitude.patterns": "[up_proj, nope]"}, r"layer 'nope' matches none"),
        ({"outlier.pattern": "blocks"}, r"visualization\.outlier\.pattern: layer 'blocks' matches none"),
        (
            {"layer_selection.patterns": "nothing"},
            r"visualization\.layer_selection\.patterns: layer 'nothing' matches none",
        ),
        ({"heatmap_3d.sample_idx": "3"}, r"sample_idx is 3; data\.num_samples is 3, so expected 0 to 2"),
        ({"memory.device": "cuda:77"}, r"memory\.device 'cuda:77' cannot be used here: .* Expected cpu, auto"),
        ({"memory.device": "gpu"}, r"memory\.device 'gpu' cannot be used here"),
        (
            {"magnitude.patterns": r"layers\.\d$"},
            r"magnitude_weight: none of the 3 layers of .* has a weight\. Name linear",
        ),
    ],
)
def test_mistakes_are_one_message(given: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        found(**given)


def test_nothing_enabled_is_refused() -> None:
    with pytest.raises(ValueError, match=r"there is nothing to analyze: everything of visualization\.enabled is off"):
        found(**{f"enabled.{name}": "false" for name in vars(EnabledSettings())})


def test_the_selection_narrows_every_plot() -> None:
    analysis = found(**{"layer_selection.patterns": r"[layers\.1]"})
    assert {name.split(".")[1] for name, _ in analysis.statistics} == {"1"}
    assert list(analysis.bands) == list(analysis.heat) == list(analysis.outliers) == ["layers.1"]


def test_where_the_selection_leaves_nothing_defaults_give_way_and_patterns_of_the_user_stay() -> None:
    chosen = {"layer_selection.patterns": r"down_proj$", "outlier.pattern": r"layers\.\d$"}
    analysis = found(**chosen)
    down = [f"layers.{index}.down_proj" for index in range(3)]
    assert list(analysis.bands) == list(analysis.heat) == down, "by default they are of the layers of the stack"
    assert list(analysis.outliers) == ["layers.0", "layers.1", "layers.2"]
    assert {name for name, kind in analysis.statistics if kind == "weight"} == set(down)
    note = (
        "visualization.layer_selection.patterns leaves none of the 3 layers of visualization.outlier.pattern "
        "(layers.0, ...): all of them are analyzed."
    )
    assert analysis.notes.count(note) == 1
    without = found(**{"layer_selection.patterns": r"layers\.\d$"})
    assert not [name for name, kind in without.statistics if kind == "weight"]
    assert any("has a weight: magnitude_weight is not drawn" in note for note in without.notes)


BERT = ("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense")
T5 = ("SelfAttention.q", "SelfAttention.k", "SelfAttention.v", "SelfAttention.o")
WIDE = ("DenseReluDense.wi_0", "DenseReluDense.wi_1", "DenseReluDense.wo")
DEFAULTS = {
    "make_bert": (
        [f"encoder.layer.{i}.{part}" for i in (0, 1) for part in (*BERT, "intermediate.dense", "output.dense")],
        ["encoder.layer.0", "encoder.layer.1"],
    ),
    "make_t5": (
        [f"encoder.block.{i}.layer.0.{part}" for i in (0, 1) for part in T5]
        + [f"encoder.block.{i}.layer.1.{part}" for i in (0, 1) for part in WIDE]
        + [f"decoder.block.{i}.layer.0.{part}" for i in (0, 1) for part in T5]
        + [
            f"decoder.block.{i}.layer.1.{part}"
            for i in (0, 1)
            for part in (one.replace("Self", "EncDec") for one in T5)
        ]
        + [f"decoder.block.{i}.layer.2.{part}" for i in (0, 1) for part in WIDE],
        [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in (0, 1)],
    ),
    "make_stages": ([f"stages.{i}.0" for i in range(3)], ["stages.0", "stages.1", "stages.2"]),
}


@pytest.mark.parametrize("maker", DEFAULTS)
def test_the_defaults_find_the_layers_of_models_with_other_names(maker: str) -> None:
    linear, layers = DEFAULTS[maker]
    analysis = found(**{"model.path": f"tests.activations.toys:{maker}", "data.seq_len": "16"})
    assert set(linear) <= {name for name, kind in analysis.statistics if kind == "input"}
    assert {name for name, kind in analysis.statistics if kind == "weight"} - {"pooler.dense"} == set(linear)
    assert set(analysis.outliers) == set(analysis.bands) == set(layers)


def test_names_of_layers_are_printed_before_a_pattern_can_fail() -> None:
    said: list[str] = []
    given = {**TOY, "outlier.pattern": "nothing_like_it"}
    with pytest.raises(ValueError, match="matches none"):
        prepare(read_configuration(None, list(given.items())), progress=said.append)
    names = [f"  layers.{i}.{part}" for i in range(3) for part in ("up_proj", "down_proj", "unused")]
    assert said == ["Total layers found: 11", "Showing first 11 layers:", "  embed", *names, "  conv"]
    many = names_of(torch.nn.ModuleList(torch.nn.Linear(1, 1) for _ in range(30)))
    assert (many[0], many[1], len(many), many[-1]) == (
        "Total layers found: 30",
        "Showing first 20 layers:",
        23,
        "  ...",
    )


# Offload


def figures(analysis: Analysis) -> list[dict[str, Any]]:
    return [s.figures() for s in analysis.statistics.values()]


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-mamba"])
@pytest.mark.parametrize("limit", ["1MB", "100kB"])
def test_offloaded_to_disk_the_statistics_are_the_same(model: str, limit: str) -> None:
    given = {"model.path": model, "data.seq_len": "24", "outlier.threshold": "2"}
    whole = found(**given)
    parts = found(**given, **{"memory.max_memory": limit, "memory.offload_device": "disk"})
    assert figures(parts) == figures(whole)
    assert parts.outliers == whole.outliers
    assert any("kept on disk and brought in to run" in note for note in parts.notes)
    assert not any("kept on" in note for note in whole.notes)


class Reads(nn.Module):
    """A model of which a layer reads the weight of another without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.a, self.layers = nn.Embedding(256, 8), nn.Linear(8, 8), nn.ModuleList([nn.Linear(8, 8)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        last = self.layers[0]
        assert isinstance(last, nn.Linear)
        return cast(torch.Tensor, last(self.a(x) + nn.functional.linear(x, last.weight)))


class Fails(Reads):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no kernel\nfor this")


LAYERS = {"magnitude.patterns": r"layers\.", "distribution.patterns": r"layers\."}


def test_weights_that_were_not_brought_in_are_never_taken_for_numbers() -> None:
    """F.linear of a tensor on the CPU and a weight on `meta` gives whatever lies in memory."""
    given = {"model.path": "tests.activations.test_run:Reads", **LAYERS}
    assert found(**given).statistics
    with pytest.raises(ValueError, match=r"a weight \[8, 8\] that was not brought in\. Its weights are offloaded"):
        found(**given, **{"memory.max_memory": "1B", "memory.offload_device": "disk"})


def test_a_model_that_fails_is_told_in_one_message() -> None:
    expected = r"the model failed on \[3, 12\] tokens: RuntimeError: no kernel for this\. What its forward needs"
    with pytest.raises(ValueError, match=expected):
        found(**{"model.path": "tests.activations.test_run:Fails", **LAYERS})
