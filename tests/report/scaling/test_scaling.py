"""What people read: the two blocks in the seed's layout, the table of blocks, the pictures, the page."""

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from probe import recommend, scaling_sweep
from probe.report.figure import BAD
from probe.report.scaling.page import (
    AnalysedTensor,
    FailedTensor,
    rules_block,
    tensor_lines,
    write_page,
    write_results,
)
from probe.report.scaling.plots import OVERFLOW, UNDERFLOW, pictures
from probe.report.script_layouts import MOST_ISSUES, at, factor, overflow_block, recommendation_block
from probe.scaling.advice import alternatives
from probe.scaling.rules import compare_rules
from tests.scaling.tensors import grid_of_the_format, log_uniform, normal

D, S, H = "=" * 80, "-" * 80, "-" * 40
NUMBER = r"-?\d+\.\d+"
SCIENTIFIC = r"-?\d\.\d{6}e[+-]\d\d"
#: The users' example, line by line, with its numbers as patterns.
SEED_RECOMMENDATION = [
    *(D, "SCALING FACTOR ANALYSIS & RECOMMENDATIONS", D),
    r"Format: fp8_e4m3 \(e4m3\)",
    rf"Tested 7 scaling levels from {NUMBER} to {NUMBER}",
    *(S, "INDIVIDUAL METRIC OPTIMA:", H),
    rf"🏆 Best MSE: Scale Exp = {NUMBER}, Factor = {NUMBER}",
    rf"    MSE: {SCIENTIFIC}, Cosine: 0\.\d{{6}}, PSNR: {NUMBER} dB",
    rf"🎯 Best Cosine Similarity: Scale Exp = {NUMBER}, Factor = {NUMBER}",
    rf"    MSE: {SCIENTIFIC}, Cosine: 0\.\d{{6}}, PSNR: {NUMBER} dB",
    rf"📊 Best PSNR: Scale Exp = {NUMBER}, Factor = {NUMBER}",
    rf"    MSE: {SCIENTIFIC}, Cosine: 0\.\d{{6}}, PSNR: {NUMBER} dB",
    *(S, "COMPOSITE RECOMMENDATION:", H),
    rf"⭐ RECOMMENDED Scaling Factor: {NUMBER}",
    rf"   Scale Exponent: {NUMBER}",
    r"   Composite Score: [01]\.\d{4}",
    "   Balanced Performance:",
    rf"     - MSE: {SCIENTIFIC}",
    r"     - Cosine Similarity: 0\.\d{6}",
    rf"     - PSNR: {NUMBER} dB",
    rf"     - MAE: {SCIENTIFIC}",
    rf"     - Relative Error: {NUMBER}%",
    *(S, "PERFORMANCE ANALYSIS:", H),
    rf"MSE Range: {SCIENTIFIC} to {SCIENTIFIC} \(Δ: {SCIENTIFIC}\)",
    r"Cosine Range: 0\.\d{6} to 0\.\d{6} \(Δ: 0\.\d{6}\)",
    rf"PSNR Range: {NUMBER} to {NUMBER} dB \(Δ: {NUMBER} dB\)",
    rf"MSE Stability \(std\): {SCIENTIFIC}",
    r"Cosine Stability \(std\): 0\.\d{6}",
    rf"PSNR Stability \(std\): {NUMBER} dB",
    *(S, "RECOMMENDATIONS:", H),
    r"⚠️  MSE varies significantly with scaling - choose the recommended factor carefully",
    r"✅ Cosine similarity is very stable - scaling factor has minimal impact on direction preservation",
    r"✅ Small PSNR range - scaling factor has limited impact on quality",
    *(S, "FINAL RECOMMENDATION:", H),
    rf"🎯 Use scaling factor: {NUMBER}",
    "   This provides the best balance of accuracy and stability for fp8_e4m3 quantization",
    rf"   Scale exponent: {NUMBER}",
    "   📍 This is .*",
    D,
]
LEVEL = rf"  Scale Exp: {NUMBER} \(Factor: .*\)"
RANGE = r"    Tensor Range: \[-?\d\.\d\de[+-]\d\d, \d\.\d\de[+-]\d\d\] -> \[.*\]"
SEED_OVERFLOW = [
    *(D, "OVERFLOW/UNDERFLOW ANALYSIS SUMMARY", D),
    "Format: fp8_e4m3",
    "Analyzed 2 scaling levels",
    "Significant overflow/underflow detected in 2 levels",
    *(S, "🔴 OVERFLOW ISSUES:", H, LEVEL),
    r"    Overflow: \d+ \(\d+\.\d\d%\)",
    r"    Max Normal: 4.48e\+02",
    *(RANGE, "    Severity: HIGH", ""),
    *("🟡 UNDERFLOW ISSUES:", H, LEVEL),
    r"    Underflow: \d+ \(\d+\.\d\d%\)",
    r"    Flush to Zero: \d+ \(\d+\.\d\d%\)",
    r"    Subnormal: \d+ \(\d+\.\d\d%\)",
    *("    Min Normal: 1.56e-02", "    Min Subnormal: 1.95e-03", RANGE, "    Severity: HIGH", ""),
    *("OVERFLOW EXTREMES:", H, rf"Worst Overflow: Scale Exp {NUMBER}", r"  \d+\.\d\d% overflow", ""),
    *("UNDERFLOW EXTREMES:", H, rf"Worst Underflow: Scale Exp {NUMBER}"),
    r"  \d+\.\d\d% underflow, \d+\.\d\d% flushed to zero",
    rf"Best Underflow: Scale Exp {NUMBER}",
    r"  \d+\.\d\d% underflow, \d+\.\d\d% flushed to zero",
    *(S, "OVERFLOW/UNDERFLOW RECOMMENDATIONS:", H),
    "⚠️  AVOID scaling factors with HIGH overflow severity",  # the recommended level has high underflow itself
    "   These factors cause significant precision loss",
    *("🔴 OVERFLOW WARNING:", "   Avoid scaling factors that cause overflow"),
    "   These values will be saturated to max representable value",
    *("🟡 UNDERFLOW CONSIDERATIONS:", "   Moderate underflow may be acceptable depending on use case"),
    "   Balance between underflow and overflow risks",
    "⚠️  All scaling levels have some overflow/underflow - choose least problematic",
    rf"💡 Least problematic scaling: {NUMBER}",
    r"   Overflow: \d+\.\d\d%, Underflow: \d+\.\d\d%",
    "   Why: every level has more than 0.1 % overflow or underflow: .*",
    D,
]


def matches(lines: list[str], patterns: list[str]) -> None:
    for line, pattern in zip(lines, patterns, strict=False):
        fixed = set(pattern) <= {"=", "-"} or not re.search(r"[\\\[.*]", pattern)
        assert line == pattern if fixed else re.fullmatch(pattern, line), (line, pattern)
    assert len(lines) == len(patterns)


def test_the_recommendation_block_has_the_form_of_the_seed() -> None:
    x = normal(200, 3) * 50
    result = scaling_sweep(x, "fp8_e4m3", max_scale_exp=1, min_scale_exp=-1.5, num_levels=7)
    matches(recommendation_block(result, recommend(result)), SEED_RECOMMENDATION)


def test_the_overflow_block_has_the_form_of_the_seed() -> None:
    result = scaling_sweep(-log_uniform(-30, 10), "fp8_e4m3", num_levels=2)
    lines = overflow_block(result, recommend(result))
    matches([line.replace("[-1.02e+03, -9.31e-10]", "[-1.02e+03, 9.31e+10]") for line in lines], SEED_OVERFLOW)


@pytest.mark.parametrize("format", ["fp4_e2m1", "fp8_e4m3"])
def test_the_overflow_block_of_a_long_sweep_has_the_least_and_the_worst(format: str) -> None:
    result = scaling_sweep(log_uniform(-30, 10), format, num_levels=41)
    lines = overflow_block(result, recommend(result))
    assert len(lines) < 110
    text = "\n".join(lines)
    for loss, heading in (("overflow", "🔴 OVERFLOW ISSUES:"), ("underflow", "🟡 UNDERFLOW ISSUES:")):
        losing = [one for one in result.levels if getattr(one, f"{loss}_severity") != "none"]
        assert len(losing) > MOST_ISSUES
        ranked = sorted(losing, key=lambda one: getattr(one, loss))
        part = text.partition(heading)[2].partition("more levels")[0]
        listed = re.findall(r"Scale Exp: (\S+)", part)
        assert len(listed) == MOST_ISSUES
        assert {at(ranked[0]), at(ranked[-1])} <= set(listed)
        assert f"  and {len(losing) - MOST_ISSUES} more levels, " in text
    assert "% overflow: every level is in the results (.txt, .csv, .json)" in text


def outliers_in_a_cloud() -> torch.Tensor:
    """Two values far above all others: where nothing significant overflows or underflows, both saturate."""
    x = normal(64, 64).clamp(0.05, 4)
    x[0, :2] = 3000.0
    return x


@pytest.mark.parametrize("format", ["fp8_e4m3", "fp4_e2m1", "int8"])
@pytest.mark.parametrize("granularity", ["tensor", "block"])
@pytest.mark.parametrize(
    "x", [outliers_in_a_cloud(), log_uniform(-30, 10), normal(64, 64)], ids=["2", "wide", "normal"]
)
def test_console_text_json_and_page_have_one_recommendation(
    tmp_path: Path, x: torch.Tensor, format: str, granularity: str
) -> None:
    result = scaling_sweep(x, format, granularity=granularity)
    found, rules = recommend(result), compare_rules(x, format)
    others = alternatives(result, found.level, rules)
    told = found.level
    screen = "\n".join([*overflow_block(result, found), *recommendation_block(result, found)])
    exponents = re.findall(
        r"(?:Least problematic scaling:|scaling range: .* best|Scale [Ee]xponent:) (-?\d+\.\d+)",
        screen,
    )
    assert exponents == [f"{told.scale_exponent:.2f}"] * 3
    files = write_results(tmp_path, result, found, rules, others, source="x.pt", identity="x")
    text, rows, document = (file.read_text() for file in files)
    assert f"Recommended: scale exponent {at(told)} (" in text
    assert text.count("<- recommended") == 1
    assert f"Level {told.level}: scale exponent {told.scale_exponent:.6f}" in text.split("   <- recommended")[0][-120:]
    assert [row["level"] for row in csv.DictReader(rows.splitlines()) if row["recommended"] == "True"] == [
        str(told.level)
    ]
    stored = json.loads(document)["recommendation"]
    assert (stored["level"], stored["scale_exponent"]) == (told.level, told.scale_exponent)
    assert [one["what"] for one in stored["alternatives"]] == [one.what for one in others]
    page = write_page(tmp_path, [AnalysedTensor("x.pt", "out", result, found, rules, others)], []).read_text()
    assert page.count(f"Recommended: scale exponent {at(told)} (") == 1
    assert all(one.what in page and one.what in text for one in others)
    low, high = found.range
    assert low <= told.scale_exponent <= high
    near = [level for level in result.levels if level.rule == told.rule and low <= level.scale_exponent <= high]
    near = [level for level in near if level.is_power or format == "int8"]
    assert max(level.mse for level in near) <= 1.26 * told.mse
    assert told.significant or not any(level.significant for level in near)


def test_a_range_of_the_user_is_not_called_an_alignment() -> None:
    result = scaling_sweep(normal(16, 16), "fp8_e5m2", max_scale_exp=15, min_scale_exp=-15, num_levels=31)
    lines = tensor_lines(result, source="x.pt")
    assert lines[-1] == "Scale exponents: 15.00 to -15.00, 31 levels; max alignment -14, min alignment 5"


def test_a_sweep_without_a_power_of_two_says_so() -> None:
    result = scaling_sweep(normal(16, 16), "fp8_e4m3", max_scale_exp=0.2, min_scale_exp=0.8)
    text = "\n".join(recommendation_block(result, recommend(result)))
    assert "⚠️  Not a power of two, which the scale of this format is: sweep a range with a whole exponent" in text


def test_blocks_tell_the_figures_of_their_levels() -> None:
    result = scaling_sweep(log_uniform(-30, 10), "fp4_e2m1", num_levels=4)
    found = recommend(result)
    text = "\n".join(overflow_block(result, found))
    for level in result.levels:
        for count, name in (
            (level.overflow, "Overflow"),
            (level.underflow, "Underflow"),
            (level.flushed, "Flush to Zero"),
        ):
            severity = level.overflow_severity if name == "Overflow" else level.underflow_severity
            assert (f"    {name}: {count} ({100 * count / 4096:.2f}%)" in text) == (severity != "none"), name
    told = "\n".join(recommendation_block(result, found))
    assert f"   Scale Exponent: {found.scale_exponent:.2f}" in told
    assert f"   Composite Score: {found.score:.4f}" in told
    assert f"⚠️  It has {found.level.percent(found.level.overflow):.2f}% overflow" in told


def test_a_clean_sweep_says_so() -> None:
    result = scaling_sweep(torch.tensor([1.0, 2.0]), "fp8_e4m3", max_scale_exp=-7, min_scale_exp=-3)
    lines = overflow_block(result, recommend(result))
    assert "No significant overflow/underflow detected in any level" in lines
    assert "✅ Recommended scaling range: -7.00 to -3.00, best -7.00" in lines
    assert "   21 of 21 levels have no significant overflow or underflow" in lines


def test_a_lossless_sweep_is_told_without_nan() -> None:
    result = scaling_sweep(grid_of_the_format("fp4_e2m1"), "fp4_e2m1", max_scale_exp=1, min_scale_exp=-1, num_levels=3)
    text = "\n".join(recommendation_block(result, recommend(result)))
    assert "nan" not in text.lower()
    assert "     - PSNR: inf dB" in text
    assert "PSNR Stability" not in text


def test_the_table_of_blocks_has_a_row_for_every_rule() -> None:
    lines = rules_block(compare_rules(normal(8, 64), "fp4_e2m1"))
    names = [line.split()[0] for line in lines if line.strip().startswith(("floor", "ceil", "even", "rceil", "mse "))]
    assert names == ["floor", "ceil", "even", "rceil", "mse"]
    assert "16 blocks of 32, a power-of-two scale each; 0 are all zeros" in lines
    assert any("spoiled" in line and "codes used" in line for line in lines)


@pytest.mark.parametrize(("scale", "text"), [(1.0, "1.000000"), (2.0**-12, "2.441406e-04"), (32.0, "32.000000")])
def test_factors_keep_their_digits(scale: float, text: str) -> None:
    assert factor(scale) == text


def colours_of(png: bytes) -> dict[str, int]:
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    return {f"#{r:02x}{g:02x}{b:02x}": count for count, (r, g, b) in picture.getcolors(2**24) or []}  # type: ignore[misc]


def test_pictures_show_the_regions_and_fit_a_laptop() -> None:
    result = scaling_sweep(log_uniform(-30, 10), "fp8_e4m3", name="$x$ <b>")
    six, summary = pictures(result, recommend(result))
    for png, height in ((six, 800), (summary, 430)):
        assert Image.open(io.BytesIO(png)).size == (1320, height)
        colours = colours_of(png)
        assert colours.get(OVERFLOW, 0) > 10000
        assert colours.get(UNDERFLOW, 0) > 10000
    assert BAD in colours_of(six)
    clean = scaling_sweep(torch.tensor([1.0, 3.0]), "fp8_e5m2", max_scale_exp=-14)
    colours = colours_of(pictures(clean, recommend(clean))[1])
    assert colours.get(OVERFLOW, 0) < 1000  # in the legend only
    assert colours.get(UNDERFLOW, 0) < 1000


@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_pictures_have_a_box_of_statistics(monkeypatch: pytest.MonkeyPatch, granularity: str) -> None:
    drawn: list[Any] = []
    legend = Figure.legend

    def kept(figure: Figure, **options: Any) -> Any:
        drawn.append(made := legend(figure, **options))
        return made

    monkeypatch.setattr(Figure, "legend", kept)
    result = scaling_sweep(normal(16, 32), "fp4_e2m1", granularity=granularity, name="a tensor")
    found = recommend(result)
    pictures(result, found)
    for box in (drawn[0], drawn[2]):
        text = "\n".join([box.get_title().get_text(), *(one.get_text() for one in box.get_texts())])
        assert box.get_frame_on()
        assert text.startswith("a tensor: fp4_e2m1, ")
        assert f"16 x 32, float32; 512 values, {result.zeros} zeros" in text
        assert f"range [{result.minimum:.4g}, {result.maximum:.4g}], mean |x| {result.mean_abs:.4g}" in text
        assert f"max alignment {result.max_aligned}, min alignment {result.min_aligned}" in text
        assert f"recommended {at(found.level)}: MSE {found.level.mse:.4g}" in text
        assert f"best MSE {found.best['mse'].mse:.4g} at {at(found.best['mse'])}" in text
        window = box.get_window_extent()
        assert window.x0 >= 0
        assert window.x1 <= 1320
    for marks in (drawn[1], drawn[3]):
        assert {"max alignment", "min alignment"} <= {one.get_text() for one in marks.get_texts()}
        assert marks.get_window_extent().x1 <= 1320


@pytest.mark.parametrize(
    "x",
    [torch.full((8,), 2.0), torch.tensor([1e-38, 1.0]), torch.tensor([3e38, 1e-45]), torch.tensor([1.1])],
    ids=["all lossless", "tiny", "extreme", "one value"],
)
@pytest.mark.parametrize("granularity", ["tensor", "block"])
def test_odd_sweeps_can_be_drawn(x: torch.Tensor, granularity: str) -> None:
    for levels in (1, 5):
        result = scaling_sweep(x, "fp4_e2m1", granularity=granularity, num_levels=levels)
        assert all(len(png) > 5000 for png in pictures(result, recommend(result)))


def test_the_page_has_every_tensor_in_a_sortable_table_and_escapes_names(tmp_path: Path) -> None:
    found = []
    for name, format in (("<img src=x>", "int8"), ("b", "fp4_e2m1")):
        x = normal(8, 32)
        result = scaling_sweep(x, format, name=name)
        found.append(
            AnalysedTensor(
                f"{name}.pt", "out", result, recommend(result), compare_rules(x, format), (), (b"\x89PNG", b"\x89PNG2")
            )
        )
    page = write_page(tmp_path, found, [FailedTensor("c.pt", "it is <empty>")]).read_text()
    assert "<img src=x>" not in page
    assert "&lt;img src=x&gt;" in page
    assert "it is &lt;empty&gt;" in page
    assert page.count("data:image/png;base64,") == 2
    assert f'data-n="{recommend(found[0].result).level.mse!r}"' in page
    assert "SCALING FACTOR ANALYSIS &amp; RECOMMENDATIONS" in page


def test_a_page_without_results_says_so(tmp_path: Path) -> None:
    assert "No tensor could be analysed." in write_page(tmp_path, [], [FailedTensor("c.pt", "gone")]).read_text()


def test_psnr_of_a_lossless_level_is_inf_on_screen_only() -> None:
    result = scaling_sweep(torch.full((8,), 2.0), "int8", num_levels=1)
    assert result.levels[0].psnr == math.inf
    assert result.levels[0].as_dict()["psnr"] is None
