import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from probe import Health, check, record
from probe.comparisons import selection as sides
from probe.comparisons.health import KINDS
from tests.comparisons.recorded import SHAPE, noisy, plain, recorded


def health_of(tmp_path: Path, tensors: dict[str, Tensor], **options: float) -> Health:
    return check(recorded(tmp_path / "r", {"fp32": tensors}), **options)  # type: ignore[arg-type]


def marks(health: Health) -> str:
    return "".join(layer.mark for layer in health.layers)


def reasons(health: Health) -> dict[str, tuple[str, ...]]:
    return {layer.name: layer.problems for layer in health.suspicious}


def test_a_sound_recording_has_a_mark_for_every_layer_and_nothing_suspicious(tmp_path: Path) -> None:
    tensors = plain(layers=6)
    found = health_of(tmp_path, tensors)
    assert marks(found) == "✓" * 6
    assert (found.first, found.suspicious) == (None, ())
    for layer, (name, x), before in zip(found.layers, tensors.items(), [None, *tensors.values()], strict=False):
        assert layer.name == name.removesuffix(".output")
        assert layer.mean == pytest.approx(float(x.double().mean()), rel=1e-9)
        assert layer.std == pytest.approx(float(x.double().std(correction=0)), rel=1e-9)
        assert (layer.min, layer.max) == (float(x.min()), float(x.max()))
        sizes = x.double().abs().mean(-1)
        assert layer.size == pytest.approx(float(sizes.quantile(0.5)), rel=1e-12)
        if before is None:
            assert (layer.max_change, layer.mean_change, layer.growth, layer.relative_change) == (None,) * 4
            continue
        change, given = (x.double() - before.double()).abs(), before.double().abs().mean(-1)
        assert layer.max_change == float(change.max())
        assert layer.mean_change == pytest.approx(float(change.mean()), rel=1e-12)
        growths = (sizes / given).quantile(0.5, dim=1).tolist()
        assert layer.growth == pytest.approx(max(growths, key=lambda g: abs(math.log(g))), rel=1e-12)
        assert layer.relative_change == pytest.approx(float((change.mean(-1) / given).quantile(0.5, dim=1).max()))


# --------------------------------------------------------------------------------------------- healthy trained models


@pytest.mark.parametrize("model", ["tiny-mamba", "tiny-llama"])
def test_the_embedded_models_are_healthy_in_every_mode(model: str, tmp_path: Path) -> None:
    taps = ["embedding", "final_norm", "logits"]
    modes = ["fp32", "bf16", "fp16", *(["0", "2-1", "2-4", "3"] if model == "tiny-mamba" else ["linear_wa"])]
    options: dict[str, Any] = {"samples": 2, "seqlen": 64, "layers": ["all"], "taps": taps, "formats": ["int8"]}
    recording = record(tmp_path / "r", model=model, modes=modes, **options)
    for recipe in recording.recipes:
        found = check(recording, recipe)
        assert reasons(found) == {}, recipe
        assert len(found.layers) == 7


@pytest.fixture(scope="module")
def stream() -> dict[str, Tensor]:
    """What a transformer of the shape of SmolLM2-135M records whose stream grows as that of a trained model.

    The stream grows by 100 over its depth; some channels have outliers in all tokens; the first token has two massive
    activations from layer 2 on, which the last layer removes.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 512}
    heads: dict[str, Any] = {"num_attention_heads": 9, "num_key_value_heads": 3}
    model: Any = LlamaForCausalLM(LlamaConfig(**shape, **heads))  # type: ignore[no-untyped-call]
    kept: dict[str, Tensor] = {}

    def keep(name: str, index: int) -> Callable[..., Tensor]:
        def hook(_: object, __: object, output: Tensor) -> Tensor:
            if index in (2, 29):
                output = output.clone()
                output[:, 0, [91, 430]] += torch.tensor([2400.0, -900.0]) * (1 if index == 2 else -1)
            kept[name] = output
            return output

        return hook

    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            layer.mlp.down_proj.weight *= 2 * 100 ** (index / 30)
            layer.mlp.down_proj.weight[[17, 230, 511]] *= 60
            layer.register_forward_hook(keep(f"layer_{index}.output", index))
        model.model.embed_tokens.register_forward_hook(keep("embedding.output", -1))
        model(torch.randint(0, 512, (2, 24)))
    return kept


def test_a_stream_that_grows_as_in_a_trained_model_is_healthy(tmp_path: Path, stream: dict[str, Tensor]) -> None:
    ids = torch.zeros(2, 24, dtype=torch.int64)
    found = check(recorded(tmp_path / "r", {"fp32": stream}, batches=[ids]))
    assert reasons(found) == {}
    sizes = [layer.size or 0.0 for layer in found.layers]
    assert sizes[-1] > 50 * sizes[1], "it grows over its depth"
    assert max(layer.max_change or 0.0 for layer in found.layers) > 2000
    assert sum((layer.max_change or 0.0) > 10 for layer in found.layers) > 25, "where the limits of the scripts fail"
    scripts = check(tmp_path / "r", max_change=10)
    assert len(scripts.suspicious) > 25


FAULTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "nan": (lambda x: x.index_fill(2, torch.tensor([3]), math.nan), "not finite"),
    "zeros": (torch.zeros_like, "zeros"),
    "constant": (torch.ones_like, "constant"),
    "one value": (
        lambda x: x.index_put((torch.tensor(1), torch.tensor(5), torch.tensor(7)), torch.tensor(3e20)),
        "explosion",
    ),
    "scale": (lambda x: 5000 * x, "explosion"),
    "vanished": (lambda x: x / 5000, "explosion"),
    "dead": (lambda x: x.index_fill(2, torch.tensor([3, 9]), 0.0), "dead channels"),
    "stuck": (lambda x: x.index_fill(2, torch.tensor([3, 9]), 0.25), "dead channels"),
    "one token": (lambda x: x[:1, :1].expand_as(x), "dead channels"),
    "larger": (lambda x: 30 * x, "step"),
    "smaller": (lambda x: x / 30, "step"),
    "one sample": (lambda x: torch.cat([x[:1], 30 * x[1:]]), "step"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_layer_of_such_a_stream_is_found_and_named(
    fault: str, tmp_path: Path, stream: dict[str, Tensor]
) -> None:
    change, kind = FAULTS[fault]
    tensors = {**stream, "layer_12.output": change(stream["layer_12.output"])}
    found = check(recorded(tmp_path / "r", {"fp32": tensors}, batches=[torch.zeros(2, 24, dtype=torch.int64)]))
    assert found.first is not None
    assert (found.first.name, found.first.kind) == ("layer_12", kind)
    assert {layer.name for layer in found.suspicious} <= {"layer_12", "layer_13"}


def test_values_of_the_right_size_that_have_nothing_to_do_with_the_layers_beside_them_are_an_odd_step(
    tmp_path: Path,
) -> None:
    tensors = plain(layers=8)
    tensors["layer_4.output"] = tensors["layer_4.output"].flip(2)
    found = health_of(tmp_path, tensors)
    assert found.first is not None
    assert found.first.name == "layer_4"
    assert found.first.problems[0].startswith("differs from layer_3 by 1.")
    assert found.first.problems[0].endswith("which is odd in this model")


@pytest.mark.parametrize("place", range(4))
def test_one_bad_layer_of_four_is_found(place: int, tmp_path: Path) -> None:
    tensors = plain(layers=4)
    tensors[f"layer_{place}.output"] = 40 * tensors[f"layer_{place}.output"]
    assert next(iter(reasons(health_of(tmp_path, tensors)))) == f"layer_{max(place, 1)}"


def test_a_layer_that_did_nothing_is_suspicious(tmp_path: Path) -> None:
    tensors = plain(layers=5)
    tensors["layer_3.output"] = tensors["layer_2.output"].clone()
    assert reasons(health_of(tmp_path, tensors)) == {
        "layer_3": ("is the same as layer_2, to the bit: the layer did nothing",)
    }


def test_an_explosion_in_the_first_layer_shows_against_the_embedding(tmp_path: Path) -> None:
    tensors = plain(layers=5)
    exploded = {name: 5000 * x for name, x in tensors.items()}
    given = {"embedding.output": tensors["layer_0.output"] / 2}
    found = health_of(tmp_path, given | exploded)
    assert list(reasons(found)) == ["layer_0"]
    assert found.layers[1].problems[0].startswith("its values are 1e+04 times as large as those of embedding")
    assert marks(check(recorded(tmp_path / "sound", {"fp32": given | tensors}))) == "✓" * 6
    alone = {"layer_0.output": 1e9 * tensors["layer_0.output"]}
    assert "on average, more than 1e+06" in check(recorded(tmp_path / "alone", {"fp32": alone})).layers[0].problems[0]


def test_channels_that_are_constant_everywhere_or_rectified_are_no_dead_ones(tmp_path: Path) -> None:
    padded = {name: x.index_fill(2, torch.tensor([7]), 0.0) for name, x in plain(layers=5).items()}
    assert reasons(health_of(tmp_path, padded)) == {}
    first = {**padded, "layer_1.output": plain(layers=2)["layer_1.output"]}
    assert reasons(check(recorded(tmp_path / "first", {"fp32": first}))).keys() >= {"layer_0", "layer_2"}
    rectified = {
        name: x.relu().index_fill(2, torch.tensor([place]), 0.0) for place, (name, x) in enumerate(plain().items())
    }
    assert reasons(check(recorded(tmp_path / "rectified", {"fp32": rectified}))) == {}


def test_a_nan_is_named_before_any_step(tmp_path: Path) -> None:
    tensors = plain(layers=8)
    tensors["layer_1.output"] = 40 * tensors["layer_1.output"]
    tensors["layer_4.output"][0, 0, 0] = math.nan
    tensors["layer_5.output"] = torch.zeros(SHAPE)
    found = health_of(tmp_path, tensors)
    assert found.suspicious[0].name == "layer_1"
    assert found.first is not None
    assert (found.first.name, found.first.kind) == ("layer_4", "not finite")
    assert [KINDS.index(str(layer.kind)) for layer in found.suspicious if layer.name in ("layer_4", "layer_5")] == [
        0,
        1,
    ]


# ------------------------------------------------------------------------------------------------------- NaN and Inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_are_found_and_placed(tmp_path: Path, bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sides, "BAND", 10)
    tensors = plain(layers=5)
    for layer in (3, 4):
        tensors[f"layer_{layer}.output"][1, 2, 3] = bad
        tensors[f"layer_{layer}.output"][1, 5, 0] = bad
    found = health_of(tmp_path, tensors)
    assert marks(found) == "✓✓✓❌❌"
    assert found.first is not None
    assert (found.first.name, found.first.first_nonfinite) == ("layer_3", (1, 2, 3))
    counts = (2, 0) if math.isnan(bad) else (0, 2)
    assert (found.first.nan, found.first.inf) == counts
    assert found.first.problems == (f"{counts[0]} NaN and {counts[1]} Inf, the first at (1, 2, 3)",)
    good = tensors["layer_3.output"].double()[tensors["layer_3.output"].isfinite()]
    assert found.first.mean == pytest.approx(float(good.mean()), rel=1e-9)


def test_a_layer_after_nan_keeps_its_own_figures(tmp_path: Path) -> None:
    tensors = plain(layers=2)
    tensors["layer_0.output"][0] = math.nan
    found = health_of(tmp_path, tensors)
    assert found.layers[1].mean == pytest.approx(float(tensors["layer_1.output"].double().mean()), rel=1e-9)
    assert marks(found) == "❌✓"


def test_a_layer_without_a_finite_value_has_no_figures(tmp_path: Path) -> None:
    tensors = {**plain(layers=5), "layer_2.output": torch.full(SHAPE, math.nan)}
    found = health_of(tmp_path, tensors)
    assert marks(found) == "✓✓❌✓✓"
    assert (found.layers[2].mean, found.layers[2].size, found.layers[2].growth) == (None, None, None)


# ------------------------------------------------------------------------------------------- limits that users give


@pytest.mark.parametrize(("mean", "mark"), [(9.99, "✓"), (10.01, "⚠"), (-10.01, "⚠")])
def test_a_large_mean_is_suspicious_where_a_limit_is_given(tmp_path: Path, mean: float, mark: str) -> None:
    values = torch.linspace(-1, 1, math.prod(SHAPE), dtype=torch.float64).reshape(SHAPE) + mean
    found = health_of(tmp_path, {"layer_0.output": values}, max_mean=10)
    assert marks(found) == mark
    assert found.layers[0].problems == ((f"its mean is {mean:.6g}, beyond 10",) if mark == "⚠" else ())
    assert marks(check(tmp_path / "r")) == "✓"


@pytest.mark.parametrize(("jump", "mark"), [(9.9, "✓"), (10.1, "⚠"), (-10.1, "⚠")])
def test_a_jump_of_one_value_is_suspicious_where_a_limit_is_given(tmp_path: Path, jump: float, mark: str) -> None:
    x = plain(layers=1)["layer_0.output"].double()
    y = x.clone()
    y[0, 3, 2] += jump
    found = health_of(tmp_path, {"layer_0.output": x, "layer_1.output": y}, max_change=10)
    assert marks(found) == "✓" + mark
    if mark == "⚠":
        assert found.layers[1].problems == ("differs from the layer before by up to 10.1, more than 10",)
    assert marks(check(tmp_path / "r")) == "✓✓"


def test_a_change_beyond_a_given_multiple_of_the_median_is_suspicious(tmp_path: Path) -> None:
    steps = [0.1, 0.1, 0.1, 1.2, 0.1, 0.1]
    x = 5 * plain(layers=1)["layer_0.output"]
    tensors = {}
    for layer, step in enumerate([0.0, *steps]):
        x = x + step
        tensors[f"layer_{layer}.output"] = x
    found = health_of(tmp_path, tensors, factor=10)
    assert marks(found) == "✓✓✓✓⚠✓✓"
    assert found.first is not None
    assert found.first.problems == ("differs from the layer before by 1.2 on average, usual is below 1",)
    assert marks(check(tmp_path / "r", factor=13)) == "✓" * 7
    assert marks(check(tmp_path / "r", factor=11.9)) == "✓✓✓✓⚠✓✓"


def test_two_changes_have_no_usual_one(tmp_path: Path) -> None:
    x = plain(layers=1)["layer_0.output"]
    tensors = {f"layer_{n}.output": x + step for n, step in enumerate((0.0, 0.001, 90.0))}
    found = health_of(tmp_path, tensors, factor=2)
    assert marks(found) == "✓✓✓"
    assert found.limits == {}


def test_layers_that_are_not_adjacent_are_not_compared(tmp_path: Path) -> None:
    tensors = {"layer_0.output": plain()["layer_0.output"], "layer_7.output": 9 + plain()["layer_1.output"]}
    found = health_of(tmp_path, tensors, max_change=1.0)
    assert [layer.max_change for layer in found.layers] == [None, None]


def test_layers_of_other_shapes_are_not_compared(tmp_path: Path) -> None:
    tensors = {"layer_0.output": torch.randn(SHAPE), "layer_1.output": torch.randn(2, 6, 9)}
    assert [layer.max_change for layer in health_of(tmp_path, tensors).layers] == [None, None]


def test_what_is_no_layer_takes_no_step_and_logits_may_have_any_mean(tmp_path: Path) -> None:
    x = plain(layers=2)
    tensors = {
        "embedding.output": x["layer_0.output"] + 5.0,
        **x,
        "final_norm.output": x["layer_0.output"] + 20.0,
        "logits": x["layer_0.output"] + 50.0,
    }
    found = health_of(tmp_path, tensors, max_change=4.0, max_mean=10.0)
    assert marks(found) == "✓✓✓⚠✓"
    assert [layer.max_change is None for layer in found.layers] == [True, True, False, True, True]
    tensors["logits"][0, 0, 0] = math.nan
    tensors["final_norm.output"] = torch.zeros(SHAPE)
    assert marks(check(recorded(tmp_path / "again", {"fp32": tensors}))) == "✓✓✓⚠❌"


def test_health_survives_json(tmp_path: Path) -> None:
    tensors = plain(layers=4)
    tensors["layer_2.output"][0, 1, 2] = math.nan
    found = health_of(tmp_path, tensors, max_mean=3.0)
    facts = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert facts["first_suspicious"] == "layer_2"
    assert facts["layers"]["layer_2"]["mark"] == "❌"
    assert Health.from_dict(facts) == found


def test_one_recipe_of_many_has_to_be_named(tmp_path: Path) -> None:
    reference = plain()
    recording = recorded(tmp_path / "r", {"fp32": reference, "2-1-int8": noisy(reference, 0.1)})
    assert check(recording, "2-1").mode == "2-1"
    with pytest.raises(ValueError, match=r"r has 2 recipes: fp32, 2-1\. Say which one to check\.$"):
        check(recording)
    with pytest.raises(ValueError, match=r"r has no mode '0'\. It has: fp32, 2-1\."):
        check(recording, "0")


@pytest.mark.parametrize("name", ["factor", "max_mean", "max_change"])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_limits_that_mean_nothing_are_refused(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{name} is "):
        health_of(tmp_path, plain(), **{name: value})
