"""The commands modes, layers and errors, and what they are made of."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from probe.commands import main
from probe.data.samples import TextSamples
from probe.formats import GATE_FORMATS
from probe.running.measurement_job import measure_all
from probe.running.modes import MODES, register_mode, unregister_mode
from probe.running.recipes import recipes_of

SMALL = ["--samples", "2", "--seqlen", "32", "--calib-data-num", "2", "--calib-seqlen", "64"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_modes_prints_every_row_with_both_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "modes")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(MODES)
    assert "mode_2_1" in out


def test_layers_lists_names_types_and_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "layers", "--model", "tiny-mamba", "--json", "last")
    assert code == 0
    assert json.loads(out) == [
        {"name": "backbone.layers.3", "layer": "layer_3", "type": "MambaBlock", "parameters": 116608, "weight": "-"}
    ]
    _, out, _ = run(capsys, "layers", "--sites", r"layers\.0\.mixer\.sites\.scan")
    assert "backbone.layers.0.mixer.sites.scan.u" in out


def test_errors_is_a_row_per_recipe_with_every_layer_and_the_whole_model(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "errors", "--modes", "fp32", "2-1", "mode_3", "--formats", "int8", "fp4_e2m1", *SMALL)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["recipe", "layer_0", "layer_1", "layer_2", "layer_3", "kl", "top-1", "bits", "change"]
    assert [line.split()[0] for line in lines[1:6]] == [
        "fp32",
        "mode_2_1-int8",
        "mode_2_1-fp4_e2m1",
        "mode_3-int8",
        "mode_3-fp4_e2m1",
    ]
    assert lines[1].split()[1:] == [*["0.000e+00"] * 5, "1.0000", lines[1].split()[7], "0.0000"]
    assert all(re.fullmatch(r"\d\.\d{3}e[+-]\d\d", line.split()[5]) for line in lines[1:6])
    assert "[5/5] mode_3-fp4_e2m1" in err


def test_modes_that_are_equal_by_definition_are_one_row_with_all_names(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "errors", "--modes", "all", "--formats", "int8", "mxint8", *SMALL)
    assert code == 0
    names = [line.partition("  ")[0] for line in out.splitlines()[1:9]]
    for format in ("int8", "mxint8"):
        assert f"mode_0-{format} = mode_2_0-{format}" in names
        assert f"mode_2_1-{format} = mode_2_2-{format} = mode_2_3-{format}" in names
        assert {f"mode_2_4-{format}", f"mode_3-{format}"} <= set(names)
    assert "[14/14]" in err, "all of them are measured"
    _, out, _ = run(capsys, "errors", "--modes", "2-1", "2-2", "--formats", "mxint8", "--json", *SMALL)
    assert [one["equal_by_definition"] for one in json.loads(out)] == [None, "mode_2_1-mxint8"]


def test_equal_modes_that_differ_are_an_error(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODES, "2-4", replace(MODES["2-4"], equals="2-1"))
    code, out, err = run(capsys, "errors", "--modes", "2-1", "2-4", "2-2", "--formats", "mxint8", *SMALL)
    assert code == 1
    assert [line.partition("  ")[0] for line in out.splitlines()[1:3]] == [
        "mode_2_1-mxint8 = mode_2_2-mxint8",
        "mode_2_4-mxint8",
    ]
    wanted = "mode_2_4-mxint8 must be identical to mode_2_1-mxint8, by definition, and differs in layer_0, layer_1, "
    assert wanted in err.splitlines()[-1]


def test_errors_of_a_recipe_that_changes_nothing_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    register_mode("same", lambda model, format, calibration: model)
    try:
        code, out, err = run(capsys, "errors", "--modes", "2-1", "same", "--formats", "mxint8", *SMALL)
    finally:
        unregister_mode("same")
    assert (code, out) == (2, "")
    assert "same-mxint8 was not applied to layer_0, layer_1, layer_2, layer_3: given the" in err.splitlines()[-1]


MIXED = '[tool.probe.modes.mixed]\nbase = "2-1"\nkeep_float = ["layers.0"]\n'


@pytest.mark.parametrize("name", ["mixed.toml", "pyproject.toml"])
def test_modes_of_a_file_are_modes_as_any_other(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(MIXED)
    option = [] if name == "pyproject.toml" else ["--modes-from", name]
    try:
        code, out, _ = run(capsys, "errors", "--modes", "mixed", "--formats", "mxint8", "--injected", *option, *SMALL)
        assert code == 0
        cells = out.splitlines()[1].split()
        assert cells[:2] == ["mixed-mxint8", "0.000e+00"]
        assert float(cells[2]) > 0
        _, out, _ = run(capsys, "modes", *option)
        assert "2-1, but layers.0 stay float" in out
    finally:
        unregister_mode("mixed")


def test_errors_as_json_has_all_figures(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, "errors", "--modes", "fp32", "2-4", "--formats", "fp8_e4m3", "--layers", "first", "--json", *SMALL
    )
    lossless, row = json.loads(out, parse_constant=pytest.fail)  # no NaN, no Infinity
    assert lossless["layers"]["layer_0"]["identical"]
    assert row["recipe"] == "mode_2_4-fp8_e4m3"
    assert set(row["layers"]) == {"layer_0"}
    assert row["layers"]["layer_0"]["correlation"] > 0.9
    assert row["logits"]["kl"] > 0


def test_injected_errors_do_not_leak_from_layer_to_layer() -> None:
    data = TextSamples("evaluation", 2, 32)
    (propagated,) = measure_all("tiny-mamba", modes=["2-1"], formats=["fp4_e2m1"], data=data)
    (injected,) = measure_all("tiny-mamba", modes=["2-1"], formats=["fp4_e2m1"], data=data, injected=True)
    assert injected.layers["layer_0"].mse == pytest.approx(propagated.layers["layer_0"].mse, rel=0.05)  # fed bfloat16
    ours, whole = injected.layers["layer_3"].mse, propagated.layers["layer_3"].mse
    assert ours is not None
    assert whole is not None
    assert ours < whole


def test_the_cross_product_has_float_modes_once() -> None:
    recipes = [str(r) for r in recipes_of(["fp16", "0", "2-1"], None)]
    assert recipes[0] == "fp16"
    assert len(recipes) == 1 + 2 * len(GATE_FORMATS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["errors", "--modes", "2-9"], "unknown mode '2-9'. Did you mean"),
        (["errors", "--formats", "int9", "--modes", "0"], "unknown format 'int9'. Did you mean 'int8'?"),
        (["errors", "--model", "tiny-mmba"], "tiny-mamba"),
        (["errors", "--layers", "99", *SMALL], "layer '99' matches none"),
        (
            ["errors", "--model", "tiny-llama", "--modes", "0", "--formats", "mxint8", *SMALL],
            "quantizes Mamba blocks and tiny-llama has none",
        ),
        (["errors", "--modes", "torchao_w", "--formats", "int2"], "torchao's modes take the format int8 only"),
        (["errors", "--seqlen", "1"], "seqlen is 1; expected at least 2"),
        (
            ["errors", "--percentile", "99", "--modes", "0", "--formats", "int8", *SMALL],
            "percentile is 99.0; expected a share",
        ),
        (["errors", "--data", "/nowhere.txt"], "does not exist"),
        (["errors", "--seqlen", "100000"], "the text has 65536 tokens; 8 samples of 100000 need 800000"),
        (["layers", "nothing_like_it"], "matches none of the"),
        (["errors", "--modes-from", "/nowhere.toml"], "/nowhere.toml cannot be read as TOML"),
        (["layers", "--model", "/nowhere"], "/nowhere"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert message in err.splitlines()[-1]
    assert "Traceback" not in err
