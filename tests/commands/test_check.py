import json
import math
from pathlib import Path

import pytest
import torch

from probe.commands import main
from probe.report.figure import Sheet
from tests.comparisons.recorded import noisy, plain, recorded
from tests.report.test_figure import texts

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    reference = plain(layers=5)
    broken = noisy(reference, 0.01)
    broken["layer_3.output"][1, 2, 3] = math.nan
    return recorded(tmp_path / "r", {"fp32": reference, "2-1-int8": broken}).folder


def test_every_layer_has_its_mark_and_the_first_bad_one_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "r", "--mode", "2-1"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Mode 2-1 of r"
    assert [line[:9] for line in lines if line[:1] in "✓⚠❌" and "layer_" in line[:9]] == [
        *("✓ layer_0", "✓ layer_1", "✓ layer_2", "❌ layer_3", "✓ layer_4"),
    ]
    assert "    1 NaN and 0 Inf, the first at (1, 2, 3)" in lines
    assert lines[-2] == "❌ 1 layer looks wrong. The first is layer_3."


def test_a_sound_mode_passes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "r", "--mode", "fp32"]) == 0
    assert "✓ All 5 outputs look normal\n" in capsys.readouterr().out


def test_without_a_mode_all_are_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "r"]) == 1
    out = capsys.readouterr().out
    assert "Mode fp32 of r\n" in out
    assert "Mode 2-1 of r\n" in out


@pytest.mark.parametrize("mode", [[], ["--mode", "2-1"]])
def test_json_on_a_pipe_is_all_that_is_printed(
    folder: Path, mode: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "r", *mode, "--json", "-", *(["--report", "page"] if mode else [])]) == 1
    facts = json.loads(capsys.readouterr().out)
    last = facts if mode else facts[-1]
    assert last["first_suspicious"] == "layer_3"
    assert last["layers"]["layer_3"]["first_nonfinite"] == [1, 2, 3]


def test_factor_and_limits_reach_the_library(folder: Path) -> None:
    assert main(["check", "r", "--mode", "fp32", "--factor", "1.0001"]) == 1
    assert main(["check", "r", "--mode", "fp32", "--max-change", "0.01"]) == 1
    assert main(["check", "r", "--mode", "fp32", "--max-mean", "1e-9"]) == 1


@pytest.mark.parametrize("layer", ["3", "layer_3"])
def test_the_distribution_of_a_layer_is_a_picture(folder: Path, layer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "r", "--mode", "2-1", "--layer", layer]) == 1
    assert Path("layer_3_analysis.png").read_bytes().startswith(PNG)
    assert "picture: layer_3_analysis.png\n" in capsys.readouterr().out
    main(["check", "r", "--mode", "2-1", "--layer", layer, "--report", "page"])
    assert Path("page/layer_3_analysis.png").is_file()


@pytest.mark.parametrize(
    "values",
    [torch.full((2, 6, 8), math.nan), torch.zeros(2, 6, 8), torch.full((2, 6), 3.0)],
    ids=["nan", "zero", "flat"],
)
def test_a_layer_of_one_value_or_none_is_drawn_too(
    values: torch.Tensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recorded(tmp_path / "r", {"fp32": {"layer_0.output": values}})
    main(["check", "r", "--layer", "0", "--report", "page"])
    assert Path("page/layer_0_analysis.png").read_bytes().startswith(PNG)


def test_the_page_names_the_first_and_shows_it(folder: Path) -> None:
    assert main(["check", "r", "--report", "page"]) == 1
    page = Path("page/check.html").read_text()
    assert "1 of 5 look wrong. The first is layer_3: 1 NaN and 0 Inf, the first at (1, 2, 3)" in page
    assert page.count("data:image/png;base64,") == 3
    assert "5 outputs look normal." in page
    assert page.count('<tr class="bad">') == 1


def test_layers_that_are_not_adjacent_have_no_empty_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[str]] = []
    png = Sheet.png

    def keep(page: Sheet, **options: int | None) -> bytes:
        drawn.append([axes.get_title(loc="left") for axes in page.panels])
        return png(page, **options)

    monkeypatch.setattr(Sheet, "png", keep)
    two = {"layer_0.output": plain()["layer_0.output"], "layer_7.output": plain()["layer_1.output"]}
    folder = str(recorded(tmp_path / "r", {"fp32": two, "bf16": plain(layers=4)}).folder)
    assert main(["check", folder, "--report", str(tmp_path)]) == 0
    assert drawn[0] == ["size of the values"]
    assert drawn[1] == [
        "size of the values",
        "growth from the layer before",
        "change from the layer before, relative to it",
    ]
    page = (tmp_path / "check.html").read_text()
    assert page.count("No two adjacent layers of one shape were recorded, so growth and change are not known.") == 1
    assert page.count("The growth of the first layer") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["r", "--mode", "0"], "r has no mode '0'. It has: fp32, 2-1."),
        (["r", "--layer", "3"], "--layer shows a layer of one mode, and there are fp32, 2-1. Say which with --mode."),
        (["r", "--mode", "2-1", "--layer", "9"], "unknown layer 'layer_9'."),
        (["r", "--factor", "0"], "factor is 0.0. Expected a multiple of the median change above 1"),
        (["nowhere"], "there is no folder nowhere."),
    ],
)
def test_bad_input_is_one_message_and_two(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"probe: error: {message}")
    assert err.count("\n") == 1


def test_a_nan_is_named_before_an_earlier_step_on_the_screen_and_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = plain(layers=6)
    tensors["layer_1.output"] = 40 * tensors["layer_1.output"]
    tensors["layer_3.output"][1, 2, 3] = math.nan
    folder = str(recorded(tmp_path / "r", {"fp32": tensors}).folder)
    assert main(["check", folder, "--report", str(tmp_path)]) == 1
    words = "Look at layer_3 first (not finite); layer_1 before it is less severe (step)"
    assert f"❌ 3 layers look wrong. {words}.\n" in capsys.readouterr().out
    page = (tmp_path / "check.html").read_text()
    assert f"3 of 6 look wrong. {words}: 1 NaN and 0 Inf, the first at (1, 2, 3)" in page
    for text in ("layer_1: its values are 4", "is usual in this model", "layer_3: 1 NaN"):
        assert page.count(text) >= 1, text


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ([], "usual in this model, up to"),
        (["--max-change", "1"], "--max-change 1"),
        (["--factor", "2"], "--factor x median"),
        (["--max-mean", "1e-6"], "--max-mean 1e-06"),
    ],
)
def test_the_page_draws_the_limit_that_was_broken(
    options: list[str], limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[str] = []
    png = Sheet.png

    def keep(page: Sheet) -> bytes:
        drawn.extend(texts(page.figure))
        return png(page)

    monkeypatch.setattr(Sheet, "png", keep)
    tensors = plain(layers=6)
    tensors["layer_2.output"] = 40 * tensors["layer_2.output"]
    folder = str(recorded(tmp_path / "r", {"fp32": tensors}).folder)
    assert main(["check", folder, "--report", str(tmp_path), *options]) == 1
    assert any(text.startswith(limit) for text in drawn)
