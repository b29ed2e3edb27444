"""What `probe analyze` prints."""

from collections.abc import Sequence
from pathlib import Path

import yaml

from probe.activations.run import Analysis, Prepared
from probe.activations.statistics import Kind
from probe.messages import said_size
from probe.models.placing import size_of
from probe.report.activations.pictures import planned_files

#: Names that are listed before the rest is counted.
MOST_NAMES = 20


def dry_run_text(prepared: Prepared) -> str:
    """The resolved configuration, the layers, the data and the files to be written."""
    settings, plan, batches = prepared.settings, prepared.plan, prepared.batches
    tokens = sum(int(batch.mask.sum()) for batch in batches)
    padded = sum(int((~batch.mask).sum()) for batch in batches)
    device, size = prepared.room.device, size_of(prepared.model)
    fits = "fits" if prepared.room.takes(size) else "does not fit: offloaded by accelerate"
    parts = [
        yaml.safe_dump(settings.as_dict(), sort_keys=False).rstrip(),
        f"model: {prepared.loaded.name}, {said_size(size)} on {device} ({fits})",
        f"data: {prepared.about_data}: {settings.data.num_samples} samples, {tokens} tokens in {len(batches)} batches, "
        f"{padded} of padding",
    ]
    kinds: tuple[Kind, ...] = ("input", "output", "weight")
    for kind in kinds:
        names = plan.measured(kind)
        parts.append(_listed(f"statistics of the {kind} of {len(names)} modules", names))
    parts.append(_listed(f"outlier tokens of {len(plan.outliers)} layers", plan.outliers))
    parts.append(_listed(f"heat maps of {len(plan.heat[1])} layers, {plan.heat[0]}", plan.heat[1]))
    some = f" (of {plan.bands_of}, evenly spaced)" * (len(plan.bands[1]) < plan.bands_of)
    parts.append(_listed(f"bands of {len(plan.bands[1])} layers{some}, {plan.bands[0]}", plan.bands[1]))
    files = planned_files(settings, plan)
    parts.append(_listed(f"files in {settings.visualization.save_dir}", files, most=len(files)))
    parts.append("Nothing was run: --dry-run.")
    return "\n\n".join(parts)


def _listed(title: str, names: Sequence[str], *, most: int = MOST_NAMES) -> str:
    more = [f"... and {len(names) - most} more"] if len(names) > most else []
    return "\n  ".join([f"{title}:", *(names[:most] or ["none"]), *more])


def summary_text(analysis: Analysis, written: Sequence[Path]) -> str:
    """What stands out, in a few lines, and where the report is."""
    facts = analysis.facts
    lines = [f"{analysis.name}: {facts['samples']} samples, {facts['tokens']} tokens of {facts['data']}"]
    worst = sorted(analysis.statistics.values(), key=lambda s: -(s.max_to_p99 or 0.0))[:5]
    for s in worst:
        median = f"{s.max_to_median:.4g}" if s.max_to_median is not None else "-"
        p99 = f"{s.max_to_p99:.4g}" if s.max_to_p99 is not None else "-"
        lines.append(f"  {s.module} {s.kind}: max |x| {s.amax:.4g}, {median} x median, {p99} x the 99th percentile")
    if analysis.outliers:
        count = sum(one.count for one in analysis.outliers.values())
        having = sum(one.count > 0 for one in analysis.outliers.values())
        threshold = analysis.settings.visualization.outlier.threshold
        lines.append(
            f"  outlier tokens (above {threshold:g} x median): {count} in {having} of {len(analysis.outliers)} layers"
        )
    lines += [f"note: {note}" for note in analysis.notes]
    last = [str(path) for path in written if path.suffix == ".html"] or [str(path) for path in written[-1:]]
    lines.append(f"{len(written)} files, the last: {last[0]}" if last else "no file was written")
    return "\n".join(lines)
