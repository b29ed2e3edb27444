"""The files of a scaling run: results of every tensor as text, CSV and JSON, plots, logs, and one page over all."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probe.files.atomic import write
from probe.report.document import Document
from probe.report.numbers import csv_text
from probe.report.script_layouts import (
    DOUBLE,
    SINGLE,
    alternatives_block,
    at,
    factor,
    grid_name,
    overflow_block,
    recommendation_block,
)
from probe.scaling.advice import Alternative, Recommendation
from probe.scaling.results import Level, ScalingResult
from probe.scaling.rules import RuleResult
from probe.words import columns

PAGE = "scaling.html"
#: The names of the files begin as those of the users' own script.
STEM = "mxfp_scaling"
LOG = "mxfp_scaling_test_{name}_{format}.log"


@dataclass(frozen=True)
class AnalysedTensor:
    """One tensor analysed in one format; `plots` are empty if none were requested."""

    source: str
    folder: str
    result: ScalingResult
    recommendation: Recommendation
    rules: tuple[RuleResult, ...]
    alternatives: tuple[Alternative, ...] = ()
    plots: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class FailedTensor:
    """A tensor that could not be analysed, and the reason."""

    source: str
    reason: str


def write_page(folder: Path, found: Sequence[AnalysedTensor], failed: Sequence[FailedTensor]) -> Path:
    """Write the page over all tensors and formats of a run."""
    count = len({one.source for one in found})
    tensors = "1 tensor" if count == 1 else f"{count} tensors"
    lead = f"{tensors} analysed, {len(failed)} failed. A click on the header of a column sorts by it."
    page = Document("MX scaling analysis", lead)
    page.heading("All tensors and formats")
    if found:
        rows = [_row(one) for one in found]
        if not any(row["rule"] for row in rows):
            rows = [{key: value for key, value in row.items() if key != "rule"} for row in rows]
        page.table(rows, "The recommended level of every sweep; psnr: - if nothing is lost.")
    else:
        page.text("No tensor could be analysed.")
    if failed:
        page.heading("Failed")
        page.table([{"input": one.source, "reason": one.reason} for one in failed])
    for one in found:
        _section(page, one)
    return page.write(folder / PAGE)


def _row(one: AnalysedTensor) -> dict[str, object]:
    level, result = one.recommendation.level, one.result
    low, high = one.recommendation.range
    blocks = min(one.rules, key=lambda rule: rule.level.mse) if one.rules and level.rule is None else None
    return {
        "tensor": result.name,
        "format": result.format,
        "shape": " x ".join(map(str, result.shape)),
        "scale exponent": level.scale_exponent,
        "rule": level.rule or "",
        "score": round(one.recommendation.score, 4),
        "mse": level.mse,
        "cosine": level.cosine,
        "psnr dB": None if level.lossless else level.psnr,
        "rel. error %": level.relative_error,
        "overflow %": level.percent(level.overflow),
        "underflow %": level.percent(level.underflow),
        "range": f"{low:.2f} to {high:.2f}",
        "mse of blocks": None if blocks is None else blocks.level.mse,
        "by rule": None if blocks is None else blocks.rule,
    }


def _section(page: Document, one: AnalysedTensor) -> None:
    result, advice = one.result, one.recommendation
    page.heading(f"{result.name}, {result.format}")
    page.text(f"{one.source}; files in {one.folder}")
    page.text(recommended_line(result, advice))
    if one.alternatives:
        page.table([_alternative_row(other) for other in one.alternatives], "What other scales would cost.")
    for png in one.plots[:1]:  # the summary, a file of its own, has three of the six panels
        page.picture(png, alt=f"six figures of {result.name} in {result.format} over the scale exponent")
    if one.rules:
        first = one.rules[0]
        rows = [_rule_row(rule) for rule in one.rules]
        page.table(rows, f"scale rules over {first.blocks} blocks of {first.block_size}")
    page.pre("\n".join(recommendation_block(result, advice)))
    page.pre("\n".join(overflow_block(result, advice)))


def write_results(
    folder: Path,
    result: ScalingResult,
    advice: Recommendation,
    rules: Sequence[RuleResult],
    others: Sequence[Alternative],
    *,
    source: str,
    identity: str,
) -> list[Path]:
    """Write every figure of every level as .txt, .csv and .json."""
    stem = f"{STEM}_results_{result.format}"
    costs = [other.as_dict() for other in others]
    facts = {"recommendation": advice.as_dict() | {"alternatives": costs}, "blocks": [one.as_dict() for one in rules]}
    return [
        write(folder / f"{stem}.txt", results_text(result, advice, others, source=source)),
        write(folder / f"{stem}.csv", results_csv(result, advice)),
        write(folder / f"{stem}.json", result.to_json(source=source, identity=identity, **facts)),
    ]


def write_plots(folder: Path, format: str, plots: tuple[bytes, bytes]) -> list[Path]:
    """Write the pictures of the six panels and of the summary."""
    return [write(folder / f"{STEM}_{n}_{format}.png", png) for n, png in zip(("test", "summary"), plots, strict=True)]


def write_log(folder: Path, name: str, format: str, lines: Sequence[str]) -> Path:
    """Write the screen output of a tensor; the lines begin with their times."""
    return write(folder / LOG.format(name=name, format=format), "".join(f"{line}\n" for line in lines))


def tensor_lines(result: ScalingResult, *, source: str) -> list[str]:
    """What was analysed, and with which settings."""
    shape = " x ".join(map(str, result.shape)) or "scalar"
    blocks = "" if result.block_size is None else f", blocks of {result.block_size} along axis {result.axis}"
    return [
        f"Input: {source}",
        f"Tensor: {result.name}, shape {shape}, {result.dtype}, {result.elements} values, {result.zeros} zeros",
        f"Value range: [{result.minimum:.6e}, {result.maximum:.6e}], smallest magnitude {result.smallest:.6e}, "
        f"mean magnitude {result.mean_abs:.6e}",
        f"Format: {result.format} ({grid_name(result.element)}), max {result.element.max:g}, "
        f"smallest {result.element.min_subnormal:g}",
        f"Granularity: {result.granularity}{blocks}; scale bits {result.scale_bits}",
        f"Scale exponents: {result.max_scale_exp:.2f} to {result.min_scale_exp:.2f}, "
        f"{len(result.levels)} levels; max alignment {result.max_aligned}, min alignment {result.min_aligned}",
    ]


def recommended_line(result: ScalingResult, found: Recommendation) -> str:
    """The recommendation in a sentence or two."""
    level, (low, high) = found.level, found.range
    factors = "added to the exponent of every block" if level.rule else f"factor {factor(level.scale)}"
    alike = f"; range {low:.2f} to {high:.2f}, within 1 dB" if low < high else ""
    edge = f" {found.edge}." if found.edge else ""
    return (
        f"Recommended: scale exponent {at(level)} ({factors}), MSE {level.mse:.6e}, PSNR {level.psnr:.2f} dB{alike}. "
        f"{found.position}.{edge}"
    )


def _alternative_row(other: Alternative) -> dict[str, object]:
    psnr = None if math.isinf(other.psnr) else other.psnr
    times = {"mse": other.mse, "times the recommended": other.times, "psnr dB": psnr}
    return {"scale": other.what, "scale exponent": other.scale_exponent, **times}


def level_line(level: Level, count: int) -> str:
    """One level in one line, for the screen and the log."""
    return (
        f"  Level {level.level + 1}/{count}: Scale Exp {at(level)}, Factor {factor(level.scale)}, MSE {level.mse:.6e}, "
        f"Cosine {level.cosine:.6f}, PSNR {level.psnr:.2f} dB, Overflow {level.percent(level.overflow):.2f}%, "
        f"Underflow {level.percent(level.underflow):.2f}%"
    )


def results_text(
    result: ScalingResult, found: Recommendation, others: Sequence[Alternative] = (), *, source: str
) -> str:
    """The recommendation, and every level with every figure, one paragraph each."""
    lines = ["MXFP scaling results", DOUBLE, *tensor_lines(result, source=source), recommended_line(result, found), ""]
    lines += [*alternatives_block(result, found, others), ""]
    for level in result.levels:
        mark = "   <- recommended" if level.level == found.level.level else ""
        rule = f", rule {level.rule}" if level.rule else ""
        lines += [
            f"Level {level.level}: scale exponent {level.scale_exponent:.6f}, factor {factor(level.scale)}{rule}{mark}",
            f"  MSE {level.mse:.6e}  RMSE {level.rmse:.6e}  MAE {level.mae:.6e}  "
            f"Max abs error {level.max_abs_error:.6e}",
            f"  Cosine {level.cosine:.8f}  PSNR {level.psnr:.2f} dB  Relative error {level.relative_error:.4f}%  "
            f"Composite score {found.scores[level.level]:.4f}",
            f"  Overflow {_counted(level, level.overflow)} {level.overflow_severity}  "
            f"Underflow {_counted(level, level.underflow)} {level.underflow_severity}  "
            f"Flushed {_counted(level, level.flushed)}  Subnormal {_counted(level, level.subnormal)}",
            f"  Range [{result.minimum:.6e}, {result.maximum:.6e}] -> [{level.min_output:.6e}, {level.max_output:.6e}]",
        ]
        if level.codes is not None:
            lines.append(f"  Codes used {level.codes_used} of {len(level.codes)}: {' '.join(map(str, level.codes))}")
    return "\n".join(lines) + "\n"


def _counted(level: Level, count: int) -> str:
    return f"{count} ({level.percent(count):.4f}%)"


def results_csv(result: ScalingResult, found: Recommendation) -> str:
    """A row for every level; the psnr of a lossless level is inf, codes are separated by spaces."""
    rows = []
    for level in result.levels:
        row = level.as_dict()
        row |= {"psnr": level.psnr, "score": found.scores[level.level], "recommended": level is found.level}
        row["codes"] = "" if level.codes is None else " ".join(map(str, level.codes))
        rows.append(row)
    return csv_text(rows)


def rules_block(rules: Sequence[RuleResult]) -> list[str]:
    """BLOCK-LEVEL ANALYSIS: the scale rules of real MX blocks side by side."""
    rows = [_rule_row(rule) for rule in rules]
    texts = [{name: f"{x:g}" if isinstance(x, float) else str(x) for name, x in row.items()} for row in rows]
    first = rules[0]
    return [
        *(DOUBLE, "BLOCK-LEVEL ANALYSIS", DOUBLE),
        f"{first.blocks} blocks of {first.block_size}, a power-of-two scale each; {first.zero_blocks} are all zeros",
        SINGLE,
        *columns(texts),
        SINGLE,
        "blocks with: share of the blocks with at least one such value. worst: largest share of one block.",
        "spoiled: blocks whose other values lose more than 4 times as much (squared) to the scale of one outlier.",
        DOUBLE,
    ]


def _rule_row(rule: RuleResult) -> dict[str, object]:
    """The figures of a rule, with shares in percent."""
    level = rule.level

    def share(blocks: int) -> float:
        return round(100 * blocks / rule.blocks, 2)

    codes = {} if level.codes is None else {"codes used": f"{level.codes_used}/{len(level.codes)}"}
    return {
        "rule": rule.rule,
        "mse": float(f"{level.mse:.4g}"),
        "psnr dB": round(level.psnr, 2) if math.isfinite(level.psnr) else "inf",
        **{f"{loss} %": round(level.percent(getattr(level, loss)), 2) for loss in ("overflow", "underflow", "flushed")},
        "blocks with overflow %": share(rule.overflowing_blocks),
        "underflow in %": share(rule.underflowing_blocks),
        "flush in %": share(rule.flushing_blocks),
        "worst flush %": round(100 * rule.worst_flush, 1),
        "scale exp mean": round(rule.mean_exponent, 2),
        "std": round(rule.std_exponent, 2),
        "min": rule.min_exponent,
        "max": rule.max_exponent,
        "spoiled": rule.spoiled_blocks,
        **codes,
    }
