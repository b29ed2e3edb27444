"""The text that `probe analyze` prints: the plan of a dry run, and the summary of a run."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import yaml

from probe.activations.run import Analysis, Prepared
from probe.activations.settings import Settings
from probe.activations.statistics import Kind, LayerStatistics
from probe.models.offload import size_of
from probe.report.activations.files import planned_files
from probe.words import format_bytes

#: Names in a list at most; the rest is counted.
MOST_NAMES = 20


def dry_run_text(prepared: Prepared) -> str:
    """The layers, the data and the files to be written, and where the configuration differs from the defaults."""
    settings, plan, batches = prepared.settings, prepared.plan, prepared.batches
    tokens, samples = sum(int(batch.mask.sum()) for batch in batches), sum(len(batch.tokens) for batch in batches)
    padded = sum(int((~batch.mask).sum()) for batch in batches)
    device, size = prepared.room.device, size_of(prepared.model)
    fits = "fits" if prepared.room.takes(size) else "does not fit: offloaded by accelerate"
    parts = [
        f"model: {prepared.loaded.name}, {format_bytes(size)} on {device} ({fits})",
        f"data: {prepared.about_data}: {_counted(samples, 'sample')}, {_counted(tokens, 'token')} "
        f"in {_counted(len(batches), 'batch', 'batches')}, {padded} of padding",
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
    if changed := _changed(settings.as_dict(), Settings().as_dict()):
        lines = yaml.safe_dump(changed, sort_keys=False).splitlines()
        title = "configuration, where it differs from the defaults (--keys shows all)"
        parts.append(_listed(title, lines, most=len(lines)))
    else:
        parts.append("configuration: the defaults (--keys shows them)")
    return "\n\n".join([*parts, "Nothing was run: --dry-run."])


def _changed(settings: dict[str, Any], default: dict[str, Any]) -> dict[str, Any]:
    """The settings that differ from the default, nested as they were."""
    return {
        key: _changed(value, default[key]) if isinstance(value, dict) else value
        for key, value in settings.items()
        if value != default[key]
    }


def _counted(count: int, one: str, many: str | None = None) -> str:
    return f"{count} {one if count == 1 else many or one + 's'}"


def _listed(title: str, names: Sequence[str], *, most: int = MOST_NAMES) -> str:
    more = [f"... and {len(names) - most} more"] if len(names) > most else []
    return "\n  ".join([f"{title}:", *(names[:most] or ["none"]), *more])


def summary_text(analysis: Analysis, written: Sequence[Path], *, printed: Collection[str] = ()) -> str:
    """The tensors that stand out, the notes that are not in `printed`, and the path of the report."""
    facts = analysis.facts
    samples, tokens = _counted(facts["samples"], "sample"), _counted(facts["tokens"], "token")
    lines = [f"{facts['model']}: {samples}, {tokens} of {facts['data']}"]
    lines += [f"  {s.module} {s.kind}: {_sizes(s)}" for s in analysis.hardest()[:5]]
    if analysis.outliers:
        counts = [tokens.count for tokens in analysis.outliers.values()]
        title = f"outlier tokens (above {analysis.settings.visualization.outlier.threshold:g} x median)"
        lines.append(f"  {title}: {sum(counts)} in {sum(n > 0 for n in counts)} of {len(counts)} layers")
    lines += [line for note in analysis.notes if (line := f"note: {note}") not in printed]
    last = [str(path) for path in written if path.suffix == ".html"] or [str(path) for path in written[-1:]]
    lines.append(f"wrote {_counted(len(written), 'file')}; open {last[0]}" if last else "no file was written")
    return "\n".join(lines)


def _sizes(s: LayerStatistics) -> str:
    """The largest magnitude, and its ratio to the median and the 99th percentile where these are not 0."""
    ratios = ((s.max_to_median, "median"), (s.max_to_p99, "99th percentile"))
    parts = [f"the {name} is 0" if ratio is None else f"{ratio:.4g} x the {name}" for ratio, name in ratios]
    return ", ".join([f"max |x| {s.amax:.4g}", *parts])
