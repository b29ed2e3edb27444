"""What was found: order, advice, JSON, text, page, and the command."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from probe.commands import main
from probe.report.sensitivity import describe, page, picture, table_rows
from probe.running.counted_parameters import FloatWeights
from probe.running.declarations import read_declarations
from probe.running.modes import register_mode, unregister_mode
from probe.running.weights import Count, Weights
from probe.sensitivity import Advice, Effect, Figures, Sensitivity
from probe.sensitivity.advice import advise


def figures(kl: float | None, mse: float | None = None) -> Figures:
    return Figures(
        kl=kl, mse=kl if mse is None else mse, top1_agreement=0.9, change_in_bits=0.1, finite=True, identical=False
    )


def found_with(
    alone: dict[str, float | None], without: dict[str, float | None], whole: float | None = 1.0, kind: str = "layers"
) -> Sensitivity:
    return Sensitivity(
        model="abc",
        recipe="mode_2_1-int8",
        kind=kind,
        tokens=64,
        samples=2,
        reference_bits_per_token=2.0,
        everything=figures(whole),
        effects=tuple(
            Effect(name=name, layer=name.split(" ")[0], alone=figures(kl), without=figures(without[name]))
            for name, kl in alone.items()
        ),
        advice=Advice(keep=(), loss_all=whole, loss_kept=whole, reached=False, text="none"),
        weights=Weights(
            300, 100, [FloatWeights("layers.*.conv.weight", "convolutions", 100)], {"biases": Count(2, 0)}, False, []
        ),
    )


LAYERS = {"layer_0": 0.1, "layer_1": 0.5, "layer_2": 0.2, "layer_3": 0.05}


def additive(names: Sequence[str]) -> float:
    return 1.0 - sum(LAYERS[name] / 0.85 for name in names)


def test_the_most_sensitive_come_first_and_what_is_not_finite_before_all() -> None:
    found = found_with({**LAYERS, "layer_4": None}, dict.fromkeys([*LAYERS, "layer_4"], 0.5))
    assert [effect.name for effect in found.by_loss()] == ["layer_4", "layer_1", "layer_2", "layer_0", "layer_3"]
    assert [effect.name for effect in found.by_mse()] == ["layer_4", "layer_1", "layer_2", "layer_0", "layer_3"]


def test_the_gain_is_the_share_of_the_kl_that_goes() -> None:
    found = found_with({"a": 0.1, "b": 0.2, "c": 0.3}, {"a": 0.25, "b": 1.5, "c": None})
    assert [found.gain(effect) for effect in found.effects] == [0.75, -0.5, None]
    assert [effect.name for effect in found.by_gain()] == ["a", "b", "c"]
    assert found_with({"a": 0.1}, {"a": 0.0}, 0.0).gain(found.effects[0]) is None


def test_the_advice_is_the_fewest_that_halve_the_kl_and_was_measured() -> None:
    asked: list[tuple[str, ...]] = []

    def measure(names: Sequence[str]) -> float:
        asked.append(tuple(names))
        return additive(names)

    found = found_with(dict(LAYERS), {name: additive([name]) for name in LAYERS})
    advice = advise(found, measure)
    assert advice.keep == ("layer_1",)
    assert advice.reached
    assert asked == []  # one alone was measured already
    assert advice.loss_kept == pytest.approx(1 - 0.5 / 0.85)
    assert advice.text == "Keep layer_1 in higher precision: the KL falls from 1 to 0.412 (41%), measured."


@pytest.mark.parametrize("needed", [1, 2, 5, 9, 17, 30])
@pytest.mark.parametrize("gain", [0.4, 0.01, -0.01])
def test_the_search_ends_between_one_that_is_enough_and_one_that_is_not(needed: int, gain: float) -> None:
    """Whatever the first guess, and in few runs."""
    names = [f"layer_{index}" for index in range(30)]
    asked: set[int] = set()

    def measure(kept: Sequence[str]) -> float:
        asked.add(len(kept))
        return 0.4 if len(kept) >= needed else 0.9

    first = 0.4 if needed == 1 else 1 - gain
    alone = {name: float(30 - index) for index, name in enumerate(names)}
    advice = advise(found_with(dict(alone), dict.fromkeys(names, first)), measure)
    assert advice.keep == tuple(names[:needed])
    assert advice.loss_kept == 0.4
    assert needed <= 2 or {needed, needed - 1} <= asked
    assert len(asked) <= 11


def test_the_shorter_of_both_orders_is_advised() -> None:
    """`big` costs much alone; nothing is gained by keeping one of the others, but the order by gain has them first."""
    alone = {"a": 0.1, "b": 0.1, "big": 0.9}
    without = {"a": 0.8, "b": 0.85, "big": 0.9}

    def measure(kept: Sequence[str]) -> float:
        return 0.2 if {"a", "big"} <= set(kept) else 0.7

    advice = advise(found_with(dict(alone), dict(without)), measure)
    assert set(advice.keep) == {"a", "big"}


def test_advice_that_does_not_reach_its_aim_says_so() -> None:
    found = found_with({"a": 0.1, "b": 0.1}, {"a": 0.9, "b": 0.9})
    advice = advise(found, lambda names: 0.8)
    assert not advice.reached
    assert advice.keep == ()
    assert advice.loss_kept == 0.8
    assert advice.text.startswith(
        "No choice among these 2 halves the KL: with all of them in higher precision it falls"
    )
    assert advise(found_with({"a": 0.1}, {"a": 0.1}, None), lambda names: 0.0).text == (
        "No advice: the KL of the quantized model is not finite."
    )
    assert advise(found_with({"a": 0.0}, {"a": 0.0}, 0.0), lambda names: 0.0).keep == ()


def test_a_sensitivity_goes_to_json_and_comes_back() -> None:
    found = found_with({**LAYERS, "odd": None}, dict.fromkeys([*LAYERS, "odd"], 0.5))
    text = json.dumps(found.as_dict(), allow_nan=False)
    assert Sensitivity.from_dict(json.loads(text)) == found
    assert json.loads(text)["effects"][1]["rank_kl"] == 2
    assert json.loads(text)["effects"][1]["gain"] == 0.5
    with pytest.raises(ValueError, match="this is not a sensitivity of version 3"):
        Sensitivity.from_dict({"version": 1})
    broken = json.loads(text)
    del broken["advice"]
    with pytest.raises(ValueError, match="the sensitivity cannot be read: 'advice'"):
        Sensitivity.from_dict(broken)


def test_the_table_shows_the_worst_first_and_as_many_as_asked() -> None:
    found = found_with({**LAYERS, "odd": None}, dict.fromkeys([*LAYERS, "odd"], 0.5))
    rows = table_rows(found, top=2)
    assert [row["layer"] for row in rows] == ["odd", "layer_1"]
    assert rows[0]["kl alone"] == "not finite"
    assert rows[1]["gain"] == "+50.0%"
    assert len(table_rows(found)) == 5
    assert describe(found, "m") == "m, mode_2_1-int8, 5 layers, 64 tokens; KL of the quantized model: 1"


@pytest.mark.parametrize("kind", ["layers", "sites", "layer sites"])
@pytest.mark.parametrize("count", [1, 300])
def test_pictures_of_few_and_many_are_drawn_and_stay_of_one_size(kind: str, count: int) -> None:
    names = [f"layer_{i // 6} <site>${i % 6}" if kind == "layer sites" else f"layer_{i}" for i in range(count)]
    found = found_with({name: 10.0**-i for i, name in enumerate(names)}, dict.fromkeys(names, None), kind=kind)
    drawn = picture(found)
    assert drawn.startswith(b"\x89PNG")
    assert int.from_bytes(drawn[16:20], "big") == 1200
    assert int.from_bytes(drawn[20:24], "big") <= 1400
    html = page(found, model="<b>m</b>").html()
    assert "<b>m</b>" not in html
    assert "<site>" not in html


SMALL = ["--samples", "2", "--seqlen", "16", "--calib-data-num", "2", "--calib-seqlen", "64"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["sensitivity", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_command_prints_a_table_and_writes_page_and_figures(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(capsys, *SMALL, "--report", str(tmp_path / "r"), "--json", str(tmp_path / "f.json"))
    assert code == 0
    lines = out.splitlines()
    assert lines[0].startswith("tiny-mamba, mode_2_1-int8, 4 layers, 32 tokens; KL of the quantized model:")
    assert lines[1].startswith("weights on a grid: 100.0 % (")
    assert [line.split()[0] for line in lines[4:8]] == ["1", "2", "3", "4"]
    assert any(line.startswith(("Keep layer_", "No choice")) for line in lines)
    assert "calibration on 2 x 64 tokens" in err
    assert "[100%]" in err
    html = (tmp_path / "r" / "sensitivity.html").read_text()
    assert "data:image/png;base64," in html
    both = [json.loads(file.read_text()) for file in (tmp_path / "r" / "sensitivity.json", tmp_path / "f.json")]
    assert both[0] == both[1]
    advice: dict[str, Any] = both[0]["advice"]
    assert advice["text"] in out


def test_the_advice_is_printed_and_saved_as_a_mode_and_another_one_is_not_overwritten(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "new" / "mixed.toml"
    code, out, err = run(capsys, *SMALL, "--save-mode", str(file))
    assert code == 0
    table = file.read_text()
    assert table.startswith('[tool.probe.modes.mixed]\nbase = "2-1"\nkeep_float = ["backbone.layers.')
    assert f"As a mode:\n\n{table}" in out
    assert err.endswith(f"mode mixed: {file}\n")
    assert run(capsys, *SMALL, "--save-mode", str(file))[0] == 0, "the same once more is no other mode"
    other = [*SMALL, "--mode", "2-4", "--save-mode", str(file)]
    code, _, err = run(capsys, *other)
    assert code == 2
    assert "has another mode 'mixed' already. Give this one another name (--mode-name NAME)" in err
    assert file.read_text() == table
    assert run(capsys, *other, "--mode-name", "other")[0] == 0
    assert list(read_declarations(file)) == ["mixed", "other"]
    assert file.read_text().startswith(table)


def test_without_advice_no_mode_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "mixed.toml"
    code, out, err = run(capsys, *SMALL, "--layers", "1", "--save-mode", str(file))
    assert "No choice among these 1 halves the KL" in out
    assert code == 1
    assert f"no mode was written to {file}: there is nothing to keep float" in err
    assert not file.exists()


def test_sensitivity_of_a_recipe_that_changes_nothing_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    register_mode("same", lambda model, format, calibration: model)
    try:
        code, out, err = run(capsys, *SMALL, "--mode", "same")
    finally:
        unregister_mode("same")
    assert (code, out) == (2, "")
    assert "same-int8 was not applied to layer_0, layer_1, layer_2, layer_3: given the" in err.splitlines()[-1]


def test_the_command_prints_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys, "--model", "tiny-llama", "--format", "fp4_e2m1", "--sites", "--no-advice", "--json", "-", *SMALL
    )
    assert code == 0
    found = Sensitivity.from_dict(json.loads(out))
    assert found.recipe == "linear_wa-fp4_e2m1"
    assert found.kind == "sites"
    assert [effect.name for effect in found.effects][:2] == ["self_attn.q_proj", "self_attn.k_proj"]
    assert found.advice.text == "Advice is off."


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "bf16"], "mode bf16 is a float mode: no layer of it is on a grid"),
        (["--mode", "bf16", "--format", "int8"], "mode bf16 is a float mode and takes no format, but int8 was given"),
        (["--mode", "2-9"], "unknown mode '2-9'"),
        (["--format", "int9"], "unknown format 'int9'"),
        (["--model", "tiny-llama", "--mode", "2-1"], "quantizes Mamba blocks and tiny-llama has none"),
        (["--layers", "9"], "layer '9' matches none"),
        (["--top", "0"], "--top is 0; expected 1 or more"),
        (["--seqlen", "1"], "seqlen is 1; expected at least 2"),
        (["--device", "cuda:0"], "device 'cuda:0' is not present here"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--no-advice", "--save-mode", "x.toml"], "--save-mode writes the advice, and --no-advice leaves it out"),
        (["--mode-name", "a b"], "mode name 'a b' cannot be part of a test id"),
        (["--mode-name", "2-1"], "there is a mode '2-1' already"),
        (["--modes-from", "/nowhere.toml"], "/nowhere.toml cannot be read as TOML"),
    ],
)
def test_mistakes_are_one_message_and_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *SMALL, *arguments)
    assert code == 2
    assert out == ""
    assert re.search(rf"^probe: error: .*{re.escape(message)}", err, re.MULTILINE)
