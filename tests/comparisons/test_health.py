import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from probe import Health, check
from probe.comparisons import selection as sides
from tests.comparisons.recorded import SHAPE, noisy, plain, recorded


def health_of(tmp_path: Path, tensors: dict[str, Tensor], **options: float) -> Health:
    return check(recorded(tmp_path / "r", {"fp32": tensors}), **options)  # type: ignore[arg-type]


def marks(health: Health) -> str:
    return "".join(layer.mark for layer in health.layers)


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
        if before is None:
            assert (layer.max_change, layer.mean_change) == (None, None)
        else:
            change = (x.double() - before.double()).abs()
            assert layer.max_change == float(change.max())
            assert layer.mean_change == pytest.approx(float(change.mean()), rel=1e-12)
    changes = sorted(layer.mean_change for layer in found.layers[1:] if layer.mean_change is not None)
    assert found.median_change == changes[2]


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


@pytest.mark.parametrize(("mean", "mark"), [(9.99, "✓"), (10.01, "⚠"), (-10.01, "⚠")])
def test_a_large_mean_is_suspicious(tmp_path: Path, mean: float, mark: str) -> None:
    found = health_of(tmp_path, {"layer_0.output": torch.full(SHAPE, mean)})
    assert marks(found) == mark
    assert found.layers[0].problems == ((f"its mean is {mean:.6g}, beyond 10",) if mark == "⚠" else ())
    assert marks(check(tmp_path / "r", max_mean=100)) == "✓"


@pytest.mark.parametrize(("jump", "mark"), [(9.9, "✓"), (10.1, "⚠"), (-10.1, "⚠")])
def test_a_jump_of_one_value_is_suspicious(tmp_path: Path, jump: float, mark: str) -> None:
    x = torch.zeros(SHAPE)
    y = x.clone()
    y[0, 3, 2] = jump
    found = health_of(tmp_path, {"layer_0.output": x, "layer_1.output": y})
    assert marks(found) == "✓" + mark
    if mark == "⚠":
        assert found.layers[1].problems == ("differs from the layer before by up to 10.1, more than 10",)
        assert marks(check(tmp_path / "r", max_change=11)) == "✓✓"


def test_a_change_that_is_many_times_the_usual_one_is_suspicious(tmp_path: Path) -> None:
    steps = [0.1, 0.1, 0.1, 1.2, 0.1, 0.1]
    x = torch.zeros(SHAPE)
    tensors = {}
    for layer, step in enumerate([0.0, *steps]):
        x = x + step
        tensors[f"layer_{layer}.output"] = x
    found = health_of(tmp_path, tensors)
    assert marks(found) == "✓✓✓✓⚠✓✓"
    assert found.first is not None
    assert found.first.problems == ("differs from the layer before by 1.2 on average, usual is below 1",)
    assert marks(check(tmp_path / "r", factor=13)) == "✓" * 7
    assert marks(check(tmp_path / "r", factor=11.9)) == "✓✓✓✓⚠✓✓"


def test_two_changes_have_no_usual_one(tmp_path: Path) -> None:
    tensors = {f"layer_{n}.output": torch.full(SHAPE, x) for n, x in enumerate((0.0, 0.001, 5.0))}
    assert marks(health_of(tmp_path, tensors)) == "✓✓✓"


def test_layers_that_are_not_adjacent_are_not_compared(tmp_path: Path) -> None:
    tensors = {"layer_0.output": torch.zeros(SHAPE), "layer_7.output": torch.full(SHAPE, 9.0)}
    found = health_of(tmp_path, tensors, max_change=1.0)
    assert [layer.max_change for layer in found.layers] == [None, None]


def test_layers_of_other_shapes_are_not_compared(tmp_path: Path) -> None:
    tensors = {"layer_0.output": torch.zeros(SHAPE), "layer_1.output": torch.ones(2, 6, 9)}
    assert [layer.max_change for layer in health_of(tmp_path, tensors).layers] == [None, None]


def test_what_is_no_layer_has_no_layer_before_and_logits_may_have_any_mean(tmp_path: Path) -> None:
    tensors = {
        "embedding.output": torch.full(SHAPE, 5.0),
        "layer_0.output": torch.zeros(SHAPE),
        "layer_1.output": torch.zeros(SHAPE),
        "final_norm.output": torch.full(SHAPE, 20.0),
        "logits": torch.full(SHAPE, 50.0),
    }
    found = health_of(tmp_path, tensors, max_change=1.0)
    assert marks(found) == "✓✓✓⚠✓"
    assert [layer.max_change for layer in found.layers] == [None, None, 0.0, None, None]
    tensors["logits"][0, 0, 0] = math.nan
    assert marks(check(recorded(tmp_path / "again", {"fp32": tensors}))) == "✓✓✓⚠❌"


def test_health_survives_json(tmp_path: Path) -> None:
    tensors = plain(layers=4)
    tensors["layer_2.output"][0, 1, 2] = math.nan
    found = health_of(tmp_path, tensors)
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
