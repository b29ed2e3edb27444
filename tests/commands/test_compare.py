import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from probe import ModeComparison, compare, record
from probe.commands import main
from probe.commands.compare import LIMITS as OPTIONS
from probe.comparisons.modes import LIMITS, failures
from tests.comparisons.recorded import noisy, plain, recorded
from tests.running.declared import declared

SEED = """\
================================================================================
Layer 0 - Comparison Results
================================================================================

📊 FP32 Reference Statistics:
  Mean:       0.125000
  Std:        1.000000
  Range:     [-1.234567,  2.345678]

📊 Mode Output Statistics:
  Mean:       0.125000
  Std:        1.000000
  Range:     [-1.234567,  2.345678]

📏 Difference (Mode - FP32):
  Mean Diff:         0.000006
  Std Diff:          0.000007
  Mean Abs Diff:     0.012345
  Max Abs Diff:      0.123456

❌ Error Metrics:
  MSE:               1.234567e-04
  RMSE:              0.011111
  MAE:               0.012345

📈 Relative Metrics:
  Relative MSE:      1.234567e-03 ( 0.123%)
  Relative MAE:      5.678901e-03 ( 0.568%)
  Correlation:       0.999999
  Cosine:            0.999999

📊 Absolute Difference Percentiles:
  50th (Median):     0.008765
  90th:              0.023456
  95th:              0.034567
  99th:              0.056789

  Quality:           excellent (99.9 dB)
================================================================================"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recording where the command looks for one."""
    monkeypatch.chdir(tmp_path)
    reference = plain(layers=2)
    modes = {"fp32": reference, "0-int8": noisy(reference, 0.1, seed=2), "2-1-int8": noisy(reference, 0.004)}
    return recorded(tmp_path / "layer_outputs", modes).folder


def masked(text: str) -> list[str]:
    """Every digit alike: what is left is the form."""
    return [re.sub(r"\d", "9", re.sub(r"(?<=[\s\[])-(?=\d)", " ", line)).rstrip() for line in text.splitlines()]


def test_a_layer_is_printed_line_by_line_as_in_the_document_of_users(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "2-1", "--layers", "0"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "Mode 2-1 vs fp32 (layer_outputs)"
    block = out[out.index("=" * 80) :].rstrip()
    wanted = masked(SEED)
    for found, line in zip(masked(block), wanted, strict=True):
        if "Diff:" in line or "Quality" in line:
            assert found.split(":")[0] == line.split(":")[0]
        else:
            assert re.sub(r" +", " ", found) == re.sub(r" +", " ", line)
    assert err == ""


def test_columns_of_a_block_stand_where_they_do_in_the_document(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["compare", "2-1", "--layers", "0"])
    found = {line.split(":")[0]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    for line in SEED.splitlines():
        if line.startswith("  ") and "Range" not in line and line.split(":")[0] not in ("  Mean", "  Std"):
            name = line.split(":")[0]
            start = len(line) - len(line.split(":", 1)[1].lstrip())
            assert len(found[name]) - len(found[name].split(":", 1)[1].lstrip()) == start, name


def test_figures_on_the_screen_are_those_of_the_library(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = compare(folder, "2-1").layers["layer_1"].metrics
    main(["compare", "2-1", "--layers", "1"])
    out = capsys.readouterr().out
    for line in (
        f"  MSE:               {metrics.mse:.6e}\n",
        f"  MAE:               {metrics.mae:.6f}\n",
        f"  Relative MSE:      {metrics.relative_mse:.6e} ({100 * (metrics.relative_mse or 0):6.3f}%)\n",
        f"  99th:              {metrics.p99:.6f}\n",
        f"  Max Abs Diff:      {metrics.max_abs:.6f}\n",
    ):
        assert line in out


def test_several_modes_end_with_the_summary_and_a_file_for_each(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "all"]) == 0
    lines = capsys.readouterr().out.rstrip().splitlines()[-9:]
    zero, one = (compare(folder, mode) for mode in ("0", "2-1"))
    first, last = (one.layers[name].metrics for name in ("layer_0", "layer_1"))
    assert lines[:6] == [
        "=" * 80,
        "SUMMARY TABLE - All Modes vs fp32",
        "=" * 80,
        "",
        "Mode       Layer 0 MSE     Layer 0 MAE  Last Layer MSE  Last Layer MAE  Avg Corr",
        "-" * 100,
    ]
    assert lines[6].startswith("0          ")
    assert lines[7:] == [
        f"2-1        {first.mse:.6e}    {first.mae:.6f}     {last.mse:.6e}    {last.mae:.6f}        "
        f"{one.summary['avg_correlation']:.6f}",
        "=" * 80,
    ]
    for found in (zero, one):
        file = Path("comparisons") / f"mode_{found.compared_mode}_vs_fp32.json"
        facts = json.loads(file.read_text())
        assert facts.pop("failures") == []
        assert ModeComparison.from_dict(facts).layers == found.layers


@pytest.mark.parametrize("option", ["--save", "--save-comparison", "--save_comparison"])
def test_figures_of_one_mode_are_saved_where_it_is_said(folder: Path, option: str) -> None:
    assert main(["compare", "2-1", option, "results/one.json"]) == 0
    assert json.loads(Path("results/one.json").read_text())["compared_mode"] == "2-1"
    assert not Path("comparisons").exists()


@pytest.mark.parametrize("option", ["--dir", "--output-dir", "--output_dir"])
def test_the_folder_has_the_names_that_scripts_give_it(folder: Path, option: str, tmp_path: Path) -> None:
    folder.rename(tmp_path / "elsewhere")
    assert main(["compare", "2-1"]) == 2
    assert main(["compare", "2-1", option, "elsewhere"]) == 0


@pytest.mark.parametrize("modes", [["2-1"], ["all"]])
def test_json_on_a_pipe_is_all_that_is_printed(
    folder: Path, modes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    report = [] if modes == ["all"] else ["--report", "page"]
    assert main(["compare", *modes, "--json", "-", *report]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [one["compared_mode"] for one in (facts if modes == ["all"] else [facts])] == (
        ["0", "2-1"] if modes == ["all"] else modes
    )


def test_the_options_are_the_limits_of_the_library() -> None:
    assert list(OPTIONS) == list(LIMITS)


@pytest.mark.parametrize(
    ("limit", "code"),
    [
        (["--max-mse", "1e-3"], 0),
        (["--max-mse", "1e-5"], 1),
        (["--max_mse", "1e-5"], 1),
        (["--max-mae", "1e-5"], 1),
        (["--max-abs", "1e-5"], 1),
        (["--max-relative-mse", "1e-7"], 1),
        (["--max-relative-mae", "1e-7"], 1),
        (["--min-correlation", "0.99"], 0),
        (["--min-correlation", "0.99999999"], 1),
        (["--min-cosine", "0.99999999"], 1),
    ],
)
def test_beyond_a_limit_the_exit_is_one(
    folder: Path, limit: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "2-1", *limit]) == code
    err = capsys.readouterr().err
    assert err.startswith("❌ 2-1 vs fp32: layer_0: ") if code else err == ""


def test_an_identical_mode_is_told_loudly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = plain(layers=1)
    where = recorded(tmp_path / "r", {"fp32": reference, "2-1-int8": reference}).folder
    assert main(["compare", "2-1", "--dir", str(where)]) == 1
    wanted = "❌ 2-1 vs fp32: layer_0 is identical with fp32, to the bit: was 2-1 applied?\n"
    assert capsys.readouterr().err == wanted


def test_what_is_not_finite_fails_also_on_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reference = plain(layers=1)
    output = noisy(reference, 0.1)
    output["layer_0.output"][1, 0, 4] = math.nan
    where = recorded(tmp_path / "r", {"fp32": reference, "2-1-int8": output}).folder
    assert main(["compare", "2-1", "--dir", str(where), "--json", "-"]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["layers"]["layer_0"]["first_nonfinite"] == [1, 0, 4]
    assert len(facts["failures"]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["2-4"], "layer_outputs has no mode '2-4'. It has: fp32, 0, 2-1."),
        (
            ["2-1", "--reference", "fp16"],
            "layer_outputs has no fp16 to compare with. It has: fp32, 0, 2-1. Record it: ",
        ),
        (["fp32"], "fp32 is compared with itself."),
        (
            ["all", "--save", "x.json"],
            "--save is for the figures of one mode, and 2 are compared. Give --save-dir DIR.",
        ),
        (["2-1", "--dir", "nowhere"], "there is no folder nowhere."),
        (["2-1", "--layers", "7"], "'7' is no layer of 2-1 in layer_outputs."),
        (["2-1", "--save", "/proc/x.json"], "cannot write /proc/x.json: no such file or directory. Give a file in"),
        (["2-1", "--json", "layer_outputs"], "cannot write layer_outputs: it is a folder. Give the name of a file."),
        (["all", "--save-dir", "/proc/x"], "cannot write to /proc/x: no such file or directory. Give a folder that"),
        (
            ["2-1", "--report", "layer_outputs/manifest.json/page"],
            "cannot write to layer_outputs/manifest.json/page: layer_outputs/manifest.json is a file, not a folder.",
        ),
    ],
)
def test_bad_input_is_one_message_and_two(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"probe: error: {message}")
    assert err.count("\n") == 1
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["layer_outputs"]


def test_only_the_reference_is_nothing_to_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = recorded(tmp_path / "r", {"fp32": plain()}).folder
    assert main(["compare", "all", "--dir", str(where)]) == 2
    command = f"probe record --modes quant_only --out {where}"
    wanted = f"has only the reference, fp32. Record modes to compare with it: {command}\n"
    assert capsys.readouterr().err.endswith(wanted)


def test_a_limit_that_is_no_number_is_refused(folder: Path) -> None:
    for text in ("nan", "much"):
        with pytest.raises(SystemExit) as stop:
            main(["compare", "2-1", "--max-mse", text])
        assert stop.value.code == 2


def test_verifying_finds_a_changed_byte(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "mode_2_1-int8.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(bytes(data))
    assert main(["compare", "2-1", "--json", "-"]) == 0
    assert main(["compare", "2-1", "--verify"]) == 2
    assert "its sha256 is" in capsys.readouterr().err


def test_notes_of_a_folder_without_a_manifest_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = plain(layers=1)["layer_0.output"].numpy()
    np.save(tmp_path / "mode_fp32_layer_0.npy", values)
    np.save(tmp_path / "mode_2-1_layer_0.npy", values + np.float32(0.25))
    assert main(["compare", "2-1", "--dir", str(tmp_path)]) == 0
    assert "note: no manifest: the inputs cannot be verified\n" in capsys.readouterr().err


def test_a_terminal_without_emojis_gets_the_figures_all_the_same(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with open(tmp_path / "out.txt", "w", encoding="ascii") as stream:
        monkeypatch.setattr("sys.stdout", stream)
        assert main(["compare", "2-1", "--layers", "0"]) == 0
    assert "? Mode Output Statistics:" in (tmp_path / "out.txt").read_text()


def test_the_page_has_the_summary_the_failures_and_the_pictures(folder: Path) -> None:
    assert main(["compare", "all", "--report", "page", "--max-mse", "1e-3"]) == 1
    page = (Path("page") / "compare.html").read_text()
    assert "<h1>0, 2-1 against fp32</h1>" in page
    for text in ("Summary", "Failures", "Error by layer", "Differences of layer_0", "All layers of 2-1"):
        assert re.search(rf"<h2[^>]*>{text}</h2>", page), text
    assert "0: layer_0: mse" in page
    assert page.count("data:image/png;base64,") == 1 + 3 * 2
    assert f"{compare(folder, '2-1').summary['avg_mse']:.6g}" in page


@pytest.fixture(scope="module")
def equal_modes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Modes that are equal by definition, two that are not, and one that keeps the first layer float."""
    out = tmp_path_factory.mktemp("equal") / "r"
    small: dict[str, Any] = {"samples": 1, "seqlen": 16, "formats": ["mxint8"], "layers": ["all"]}
    with declared("2-1", "layers.0"):
        record(out, modes=["fp32", "2-1", "2-2", "2-3", "2-4", "mixed"], **small)
    return out


def table_modes(out: str) -> list[str]:
    """The first column of the summary table."""
    rows = [line for line in out.partition("SUMMARY TABLE")[2].splitlines() if line.startswith(("2-", "mixed"))]
    return [re.split(r"\s+\d\.\d{6}e", row)[0] for row in rows]


def test_equal_modes_are_identical_as_they_must_be(equal_modes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "2-2-mxint8", "--reference", "2-1-mxint8", "--dir", str(equal_modes)]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("2-2-mxint8 vs 2-1-mxint8: identical, as it must be (4 layers)\n")
    assert err == ""
    assert main(["compare", "2-4-mxint8", "--reference", "2-1-mxint8", "--dir", str(equal_modes)]) == 0


def test_equal_modes_that_differ_fail(equal_modes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(equal_modes, broken)
    data = (broken / "mode_2_4-mxint8.safetensors").read_bytes()
    (broken / "mode_2_2-mxint8.safetensors").write_bytes(data)
    command = ["compare", "--dir", str(broken), "--save-dir", str(tmp_path / "saved")]
    assert main([*command, "2-2", "--reference", "2-1-mxint8"]) == 1
    assert "layer_0 differs from 2-1-mxint8 (mse " in (err := capsys.readouterr().err)
    assert "though the two modes are equal by definition: one of them is wrong" in err
    assert main([*command, "2-1", "2-2", "2-3", "--report", str(tmp_path / "page")]) == 1
    out, err = capsys.readouterr()
    wanted = (
        "2-2-mxint8 must be identical to 2-1-mxint8, by definition, and differs in layer_0, layer_1, layer_2, layer_3"
    )
    assert f"❌ {wanted}: one of the two is wrong\n" in err
    assert table_modes(out) == ["2-1-mxint8 = 2-3-mxint8", "2-2-mxint8"]
    assert f"equal modes: {wanted}" in (tmp_path / "page" / "compare.html").read_text()


def test_equal_modes_are_one_row_of_the_table_and_of_the_page(
    equal_modes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save = tmp_path / "saved"
    arguments = ["all", "--dir", str(equal_modes), "--save-dir", str(save), "--report", str(tmp_path), "--verbose"]
    assert main(["compare", *arguments]) == 0
    out, err = capsys.readouterr()
    assert table_modes(out) == ["2-1-mxint8 = 2-2-mxint8 = 2-3-mxint8", "2-4-mxint8", "mixed-mxint8"]
    assert out.count("Layer 0 - Comparison Results") == 3
    assert err == ""
    assert len(list(save.iterdir())) == 5, "the figures of every mode are saved"
    page = (tmp_path / "compare.html").read_text()
    assert "<h1>2-1-mxint8 = 2-2-mxint8 = 2-3-mxint8, 2-4-mxint8, mixed-mxint8 against fp32</h1>" in page


def test_a_layer_that_is_declared_float_may_be_identical(equal_modes: Path, tmp_path: Path) -> None:
    found = compare(equal_modes, "mixed")
    assert found.may_be_identical == ("layer_0",)
    assert [name for name, layer in found.layers.items() if layer.metrics.identical] == ["layer_0"]
    assert failures(found) == []
    assert ModeComparison.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    undeclared = replace(found, may_be_identical=())
    assert failures(undeclared) == ["layer_0 is identical with fp32, to the bit: was mixed-mxint8 applied?"]


def test_modes_that_differ_only_in_the_order_of_sums_may_be_identical_and_others_may_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "r"
    record(out, modes=["0", "2-0", "2-1", "2-3", "2-4"], formats=["int8"], samples=1, seqlen=16, layers=["first"])
    pairs: list[tuple[str, str]] = [("0", "2-1"), ("2-1", "0"), ("2-0", "2-3"), ("2-4", "2-1")]
    for modes in pairs:
        first, second = (f"mode_{mode.replace('-', '_')}-int8.safetensors" for mode in modes)
        (out / first).write_bytes((out / second).read_bytes())
        code = main(["compare", modes[0], "--reference", modes[1], "--dir", str(out)])
        err = capsys.readouterr().err
        assert code == (1 if modes[0] == "2-4" else 0), modes
        assert ("was 2-4 applied?" in err) == (modes[0] == "2-4")


def test_modes_that_others_ran_need_not_be_identical(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Kernels of users may add in another order: only what probe runs itself is equal to the bit."""
    reference = plain(layers=1)
    given = {"fp32": reference, "2-1-int8": noisy(reference, 0.1), "2-2-int8": noisy(reference, 0.1, seed=5)}
    where = recorded(tmp_path / "r", given).folder
    assert main(["compare", "2-2", "--reference", "2-1", "--dir", str(where)]) == 0
    assert main(["compare", "2-1", "2-2", "--dir", str(where), "--save-dir", str(tmp_path / "saved")]) == 0
    assert capsys.readouterr().err == ""


# ------------------------------------------------------------------------------------------------- many layers


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 layers in seven modes of a stream that grows, with relative errors of 0.2 %, and of 5 % in mode 3."""
    reference, modes = plain(layers=30), {}
    grown = {name: x * 1.2**place for place, (name, x) in enumerate(reference.items())}
    for seed, mode in enumerate(("0", "2-0", "2-1", "2-2", "2-3", "2-4", "3")):
        errors = noisy(reference, 0.05 if mode == "3" else 0.002, seed=seed)
        modes[f"{mode}-int8"] = {name: x * errors[name] / reference[name] for name, x in grown.items()}
    return recorded(tmp_path_factory.mktemp("deep") / "layer_outputs", {"fp32": grown, **modes}).folder


@pytest.mark.parametrize("limit", [[], ["--max-relative-mse", "1e-12"]], ids=["passes", "fails everywhere"])
def test_all_modes_of_thirty_layers_fit_on_a_screen(
    deep: Path, limit: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["compare", "all", "--dir", str(deep), "--save-dir", str(tmp_path)]
    assert main([*command, *limit]) == (1 if limit else 0)
    out, err = capsys.readouterr()
    assert len((out + err).splitlines()) <= 60
    assert "SUMMARY TABLE - All Modes vs fp32\n" in out
    assert re.search(r"^3 +layer_\d+ +fair .* 30 fair$", out, re.M)
    if limit:
        assert "❌ 2-1 vs fp32: layer_0: relative_mse" in err
        assert "❌ 2-1 vs fp32: and 29 more (all: --verbose)\n" in err
    main([*command, *limit, "--verbose"])
    out, err = capsys.readouterr()
    assert out.count(" - Comparison Results") == 7 * 30
    assert err.count("❌") == (7 * 30 if limit else 0)


def test_layers_are_judged_and_coloured_by_relative_figures(
    deep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = compare(deep, "2-1")
    last = found.layers["layer_29"]
    assert (last.label, last.quality) == ("poor", "excellent")
    assert last.as_dict()["label"] == "poor"
    assert last.as_dict()["quality"] == "excellent"
    assert {layer.quality for layer in compare(deep, "3").layers.values()} == {"fair"}
    assert main(["compare", "2-1", "--dir", str(deep), "--report", str(tmp_path)]) == 0
    assert re.search(r"^2-1 +layer_\d+ +excellent .* 30 excellent$", capsys.readouterr().out, re.M)
    page = (tmp_path / "compare.html").read_text()
    assert page.count('<tr class="bad">') == 0
    assert page.count("excellent") >= 30
    assert "poor" not in page


def test_a_poor_layer_is_marked_on_the_page(tmp_path: Path) -> None:
    reference = plain(layers=3)
    small = {name: 1e-4 * x for name, x in reference.items()}  # an error that the mse of 1e-10 hides
    output = noisy(small, 1e-5)
    where = recorded(
        tmp_path / "r", {"fp32": small, "2-1-int8": {**output, "layer_1.output": 1.001 * small["layer_1.output"]}}
    )
    found = compare(where, "2-1").layers
    assert [layer.label for layer in found.values()] == ["fair", "excellent", "fair"]
    assert [layer.quality for layer in found.values()] == ["fair", "excellent", "fair"]
    output["layer_2.output"] = -small["layer_2.output"]
    where = recorded(tmp_path / "s", {"fp32": small, "2-1-int8": output})
    assert main(["compare", "2-1", "--dir", str(where.folder), "--report", str(tmp_path)]) == 0
    assert (tmp_path / "compare.html").read_text().count('<tr class="bad">') == 1


def test_a_mode_that_is_unknown_is_named_before_a_missing_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = recorded(tmp_path / "r", {"2-1-int8": plain()}).folder
    assert main(["compare", "5", "--dir", str(where)]) == 2
    assert capsys.readouterr().err.endswith("has no mode '5'. It has: 2-1.\n")


def test_an_empty_folder_is_told_what_to_record_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    advice = "Record the float model and the modes first: probe record --modes fp32 2-1 --out layer_outputs.\n"
    assert main(["compare", "2-1"]) == 2
    assert capsys.readouterr().err == f"probe: error: there is no folder layer_outputs. Expected a recording. {advice}"
    Path("layer_outputs").mkdir()
    assert main(["compare", "2-1"]) == 2
    assert capsys.readouterr().err == f"probe: error: layer_outputs is empty. Expected a recording. {advice}"
