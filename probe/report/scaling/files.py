"""The files of one tensor and format: results as text, CSV and JSON, the plots, and the log."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from probe.files.atomic import write
from probe.report.scaling.blocks import decibels, factor, grid_name
from probe.scaling.advice import Recommendation
from probe.scaling.results import Level, ScalingResult
from probe.scaling.rules import RuleResult

#: File -> what it is; the first part of each name is the users' own.
RESULTS = "mxfp_scaling_results_{format}"
TEST_PLOT = "mxfp_scaling_test_{format}.png"
SUMMARY_PLOT = "mxfp_scaling_summary_{format}.png"
LOG = "mxfp_scaling_test_{name}_{format}.log"


def write_results(
    folder: Path,
    result: ScalingResult,
    found: Recommendation,
    truths: Sequence[RuleResult],
    *,
    source: str,
    identity: str,
) -> list[Path]:
    """The .txt, .csv and .json of every level and every figure."""
    stem = RESULTS.format(format=result.format)
    beside = {
        "source": source,
        "identity": identity,
        "recommendation": found.as_dict(),
        "blocks": [truth.as_dict() for truth in truths],
    }
    return [
        write(folder / f"{stem}.txt", results_text(result, found, source=source)),
        write(folder / f"{stem}.csv", results_csv(result, found)),
        write(folder / f"{stem}.json", result.to_json(**beside)),
    ]


def write_plots(folder: Path, format: str, plots: tuple[bytes, bytes]) -> list[Path]:
    """The six panels and the summary."""
    names = (TEST_PLOT.format(format=format), SUMMARY_PLOT.format(format=format))
    return [write(folder / name, png) for name, png in zip(names, plots, strict=True)]


def write_log(folder: Path, name: str, format: str, lines: Sequence[str]) -> Path:
    """Everything that was on screen; the lines have their times already."""
    return write(folder / LOG.format(name=name, format=format), "".join(f"{line}\n" for line in lines))


def tensor_lines(result: ScalingResult, *, source: str) -> list[str]:
    """What was analysed, and how."""
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
        f"Scale exponents: {result.max_scale_exp:.2f} (max alignment) to {result.min_scale_exp:.2f} (min alignment), "
        f"{len(result.levels)} levels",
    ]


def level_line(level: Level, count: int) -> str:
    """One level in one line, for the screen and the log."""
    rule = f" [{level.rule}]" if level.rule else ""
    return (
        f"  Level {level.level + 1}/{count}: Scale Exp {level.scale_exponent:.2f}{rule}, "
        f"Factor {factor(level.scale)}, MSE {level.mse:.6e}, Cosine {level.cosine:.6f}, "
        f"PSNR {decibels(level.psnr)} dB, Overflow {level.percent(level.overflow):.2f}%, "
        f"Underflow {level.percent(level.underflow):.2f}%"
    )


def results_text(result: ScalingResult, found: Recommendation, *, source: str) -> str:
    """Every level with every figure, one paragraph each."""
    lines = ["MXFP scaling results", "=" * 80, *tensor_lines(result, source=source), ""]
    for level in result.levels:
        mark = "   <- recommended" if level.level == found.level.level else ""
        rule = f", rule {level.rule}" if level.rule else ""
        lines += [
            f"Level {level.level}: scale exponent {level.scale_exponent:.6f}, factor {factor(level.scale)}{rule}{mark}",
            f"  MSE {level.mse:.6e}  RMSE {level.rmse:.6e}  MAE {level.mae:.6e}  "
            f"Max abs error {level.max_abs_error:.6e}",
            f"  Cosine {level.cosine:.8f}  PSNR {decibels(level.psnr)} dB  Relative error {level.relative_error:.4f}%  "
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
    text = io.StringIO()
    writer: csv.DictWriter[str] | None = None
    for level in result.levels:
        row = level.as_dict()
        row |= {"psnr": level.psnr, "score": found.scores[level.level], "recommended": level is found.level}
        row["codes"] = "" if level.codes is None else " ".join(map(str, level.codes))
        if writer is None:
            writer = csv.DictWriter(text, list(row), lineterminator="\n")
            writer.writeheader()
        writer.writerow(row)
    return text.getvalue()
