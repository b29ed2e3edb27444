"""One page over all tensors and formats of a run: a table to sort, and for each what was found, with its plots."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from probe.report.document import Document
from probe.report.scaling.blocks import overflow_block, recommendation_block, truth_rows
from probe.scaling.advice import Recommendation
from probe.scaling.results import ScalingResult
from probe.scaling.rules import RuleResult

PAGE = "scaling.html"


@dataclass(frozen=True)
class Found:
    """One tensor in one format, analysed; `plots` are empty where none were asked for."""

    source: str
    folder: str
    result: ScalingResult
    recommendation: Recommendation
    truths: tuple[RuleResult, ...]
    plots: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class Failed:
    """A tensor that could not be analysed, and why."""

    source: str
    reason: str


def write_page(folder: Path, found: Sequence[Found], failed: Sequence[Failed]) -> Path:
    """The page of a run."""
    tensors = len({one.source for one in found})
    lead = f"{tensors} tensors analysed, {len(failed)} failed. A click on the head of a column sorts by it."
    page = Document("MX scaling analysis", lead)
    page.heading("All tensors and formats")
    if found:
        rows = [_row(one) for one in found]
        if not any(row["rule"] for row in rows):
            rows = [{key: value for key, value in row.items() if key != "rule"} for row in rows]
        page.table(rows, "recommended level of every sweep; psnr: - where nothing is lost")
    else:
        page.text("Not one tensor could be analysed.")
    if failed:
        page.heading("Failed")
        page.table([{"input": one.source, "reason": one.reason} for one in failed])
    for one in found:
        _section(page, one)
    return page.write(folder / PAGE)


def _row(one: Found) -> dict[str, object]:
    level, result = one.recommendation.level, one.result
    safe = one.recommendation.range
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
        "safe range": "none" if safe is None else f"{safe[0]:.2f} to {safe[1]:.2f}",
        "best block rule": min(one.truths, key=lambda truth: truth.level.mse).rule if one.truths else None,
    }


def _section(page: Document, one: Found) -> None:
    result, advice = one.result, one.recommendation
    page.heading(f"{result.name}, {result.format}")
    page.text(f"{one.source}; files in {one.folder}")
    for png, what in zip(one.plots, ("six figures", "summary"), strict=False):
        page.picture(png, alt=f"{what} of {result.name} in {result.format} over the scale exponent")
    if one.truths:
        first = one.truths[0]
        page.table(truth_rows(one.truths), f"scale rules over {first.blocks} blocks of {first.block_size}")
    page.pre("\n".join(recommendation_block(result, advice)))
    page.pre("\n".join(overflow_block(result, advice)))
