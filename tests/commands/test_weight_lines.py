"""Every command that quantizes says how much is on a grid: in its text, its JSON and its page."""

import json
from pathlib import Path

import pytest

from probe.commands import main

MIXTRAL = ["--model", "tests.models.random_models:make_mixtral"]
GPT2 = ["--model", "tests.models.random_models:make_gpt2"]
SMALL = ["--samples", "2", "--seqlen", "16", "--calib-data-num", "2", "--calib-seqlen", "16"]
LINE = (
    "weights on a grid: 99.5 % (35,840 of 36,032); float: 192 in model.layers.*.mlp.gate.weight "
    "(routers, not in include); "
    "embedding 8,192 float, head 8,192 float, norms 160 float"
)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 0
    return capsys.readouterr().out


def test_errors(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["errors", *MIXTRAL, *SMALL, "--modes", "linear_w", "linear_wa", "--formats", "int8"]
    assert run(capsys, *arguments).splitlines().count(LINE) == 1, "once for recipes that have the same"
    found = json.loads(run(capsys, *arguments, "--json"))
    assert [one["weights"]["on_grid"] for one in found] == [35_840] * 2
    assert found[0]["weights"]["float_weights"][0]["names"] == "model.layers.*.mlp.gate.weight"


def test_sensitivity_by_site_knows_experts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["sensitivity", *MIXTRAL, *SMALL, "--format", "fp4_e2m1", "--sites", "--report", str(tmp_path)]
    lines = run(capsys, *arguments).splitlines()
    assert lines[1] == LINE
    sites = {line.split()[1] for line in lines[4:9]}
    assert sites == {"mlp.experts", *(f"self_attn.{name}_proj" for name in "qkvo")}
    stored = json.loads((tmp_path / "sensitivity.json").read_text())
    assert stored["weights"]["on_grid"] == 35_840
    assert all(one["alone"]["kl"] > 0 for one in stored["effects"])
    assert "weights on a grid: 99.5 % (35,840 of 36,032)" in (tmp_path / "sensitivity.html").read_text()


def test_record_and_compare(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(Path(__file__).parents[2])
    monkeypatch.syspath_prepend(root)
    monkeypatch.chdir(tmp_path)
    recorded = run(capsys, "record", *MIXTRAL, *SMALL, "--modes", "fp32", "linear_w", "--out", "r")
    assert LINE in recorded.splitlines()
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())["recipes"]
    assert manifest["linear_w-int8"]["weights"]["on_grid"] == 35_840
    assert manifest["fp32"]["weights"] is None
    compared = run(capsys, "compare", "linear_w", "--dir", "r", "--save", "one.json", "--report", "page")
    assert LINE in compared.splitlines()
    assert json.loads((tmp_path / "one.json").read_text())["weights"]["on_grid"] == 35_840
    page = (tmp_path / "page" / "compare.html").read_text()
    assert "weights on a grid: 99.5 %" in page
    run(capsys, "record", *MIXTRAL, *SMALL, "--modes", "linear_wa", "--out", "r")
    run(capsys, "compare", "all", "--dir", "r", "--report", "all")
    assert (tmp_path / "all" / "compare.html").read_text().count("weights on a grid: ") == 1, "both modes share it"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"on_grid": -1}, "expected a whole number, 0 or more, found -1"),
        ({"float_inputs": ["a\x1b[2J"]}, "recipes.linear_w-int8.weights.float_inputs[0]"),
        ({"more": 1}, "the key recipes.linear_w-int8.weights.more is unknown"),
    ],
)
def test_counts_from_elsewhere_are_checked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, damage: dict[str, object], words: str
) -> None:
    folder = tmp_path / "r"
    run(capsys, "record", *GPT2, *SMALL, "--modes", "fp32", "linear_w", "--out", str(folder))
    file = folder / "manifest.json"
    whole = json.loads(file.read_text())
    recipe = whole["recipes"]["linear_w-int8"]
    counts = dict(recipe["weights"])
    recipe["weights"] = counts | damage
    file.write_text(json.dumps(whole))
    assert main(["compare", "linear_w", "--dir", str(folder)]) == 2
    assert words in capsys.readouterr().err
    del recipe["weights"]  # as older recordings
    file.write_text(json.dumps(whole))
    assert main(["compare", "linear_w", "--dir", str(folder)]) == 0


@pytest.mark.parametrize(
    "arguments",
    [
        ["errors", "--modes", "torchao_w"],
        ["errors", "--modes", "torchao_wa", "--json"],
        ["sensitivity", "--mode", "torchao_w"],
        ["record", "--modes", "fp32", "torchao_w", "--out", "r"],
    ],
    ids=" ".join,
)
def test_torchao_reaches_nothing_of_gpt2_and_every_command_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    pytest.importorskip("torchao")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    monkeypatch.chdir(tmp_path)
    assert main([*arguments, *GPT2, *SMALL]) == 2
    captured = capsys.readouterr()
    assert "0.000e+00" not in captured.out
    assert "loses nothing" not in captured.out
    (message,) = [line for line in captured.err.splitlines() if line.startswith("probe: error:")]
    assert "was not applied" in message


INCLUDED = "weights on a grid: 100.0 % (36,032 of 36,032); embedding 8,192 float, head 8,192 on a grid, norms 160 float"


def test_include_is_an_option_of_every_command_that_quantizes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    include = ["--include", "router", "head"]
    formats = ["--formats", "fp4_e2m1", *include]
    errors = ["errors", *MIXTRAL, *SMALL, "--modes", "linear_w", *formats]
    assert INCLUDED in run(capsys, *errors).splitlines()
    assert json.loads(run(capsys, *errors, "--json"))[0]["include"] == ["router", "head"]
    record = ["record", *MIXTRAL, *SMALL, "--modes", "fp32", "linear_w", *formats, "--out", "r"]
    assert INCLUDED in run(capsys, *record).splitlines()
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())["recipes"]
    assert {name: one["include"] for name, one in manifest.items()} == {
        "fp32": [],
        "linear_w-fp4_e2m1": ["router", "head"],
    }
    assert main(record) == 2, "the same recipe with another include does not replace it unasked"
    assert "overwrite" in capsys.readouterr().err
    ranked = ["sensitivity", *MIXTRAL, *SMALL, "--mode", "linear_w", "--format", "fp4_e2m1", *include]
    assert INCLUDED in run(capsys, *ranked, "--no-advice").splitlines()


@pytest.mark.parametrize(
    "command",
    [
        ["errors", "--modes", "linear_w", "--formats", "int8"],
        ["record", "--modes", "linear_w", "--out", "r"],
        ["sensitivity", "--mode", "linear_w"],
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("heat", "unknown part for include 'heat'. Did you mean 'head'? Known: router, embedding, head."),
        (
            "router",
            "include has 'router', and tiny-llama has no router. Of router, embedding, head it has: embedding, head",
        ),
    ],
)
def test_an_include_that_cannot_be_is_one_message(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    part: str,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--model", "tiny-llama", *SMALL, "--include", part]) == 2
    assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
