"""The batch of `probe scaling`: a unit is a tensor in one format, and this process writes what they give.

A tensor that fails is reported in one line, and the batch goes on.
"""

import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cached_property
from itertools import chain, count
from pathlib import Path

from probe.engines import Engine, Job, Unit, UnitFailedError
from probe.engines.identity import identity_of
from probe.engines.interface import INPUT_ERRORS, Emit, Progress, reason_of, silent
from probe.engines.local import LocalEngine
from probe.files.paths import check_outputs
from probe.recordings.tensor_sources import TensorSource
from probe.report.scaling import page
from probe.report.scaling.plots import pictures
from probe.report.script_layouts import alternatives_block, overflow_block, recommendation_block
from probe.scaling.advice import alternatives, recommend
from probe.scaling.levels import GRANULARITIES, check_levels, expand_formats, sweep_ends
from probe.scaling.rules import compare_rules
from probe.scaling.sweep import Prepared, scaling_sweep
from probe.words import look_up, require_positive

#: Called with every line as it is printed.
Show = Callable[[str], None]

DEFAULT_FOLDER = Path("draw") / "scaling_analysis"
RULE = "=" * 80
#: What a worker takes beside tensors, and what the analysis takes for each value of one: 13 bytes were measured.
WORKER_BYTES = 2**29
BYTES_PER_VALUE = 16


@dataclass(frozen=True)
class Request:
    """What is done to every tensor. Options with which no tensor could be analysed are a ValueError."""

    formats: Sequence[str] = ("fp8_e4m3",)
    granularity: str = "tensor"
    num_levels: int | None = None
    max_scale_exp: float | None = None
    min_scale_exp: float | None = None
    scale_bits: int = 8
    block_size: int | None = None
    plots: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "formats", tuple(expand_formats(list(self.formats))))
        look_up("granularity", self.granularity, {one: one for one in GRANULARITIES})
        check_levels(self.num_levels)
        sweep_ends(self.max_scale_exp, self.min_scale_exp, (0, 0), scale_bits=self.scale_bits)
        require_positive("block_size", self.block_size)


@dataclass(frozen=True)
class Outcome:
    """One tensor, analysed in every format or failed for a `reason`."""

    source: TensorSource
    found: tuple[page.AnalysedTensor, ...] = ()
    reason: str = ""
    unread: bool = False  # there was no tensor to analyse: the input is wrong, not its numbers


def run_batch(
    sources: Sequence[TensorSource],
    request: Request,
    output_dir: Path | None,
    *,
    engine: Engine | None = None,
    show: Show = print,
    progress: Progress = silent,
) -> int:
    """Analyse all sources in order and write one page over them; returns 0, or 1 if a tensor failed.

    If nothing could be analysed, the page of an earlier run stays; if nothing could be read, that is a ValueError.
    """
    if not sources:
        raise ValueError("no tensor was given. Give at least one file or folder.")
    show(f"Processing {len(sources)} tensor(s)...")
    show(RULE)
    root = output_dir or DEFAULT_FOLDER
    check_outputs(folders=[root])
    folders = output_folders(sources, root, use_root=output_dir is not None and len(sources) == 1)
    engine = engine or LocalEngine()
    stamps = tuple(_stamp(source.path) for source in sources)
    job = ScalingJob(tuple(sources), request, stamps, is_elsewhere=not engine.shares_disk)
    units = [
        Unit(f"{source.text} {format}", (index, format))
        for index, source in enumerate(sources)
        for format in request.formats
    ]
    parts = engine.run(job, units, progress=progress, keep_going=True)
    if not engine.shares_disk:
        parts = _of_same_tensors(parts, units, job, engine)
    outcomes = []
    for number, (source, folder) in enumerate(zip(sources, folders, strict=True), 1):
        header = f"[{number}/{len(sources)}] Processing: {source.text}"
        outcomes.append(_write_tensor(source, header, parts, folder, request.formats, show))
    next(parts, None)  # which reports the end
    engine.finish()
    found = [one for outcome in outcomes for one in outcome.found]
    failed = [page.FailedTensor(one.source.text, one.reason) for one in outcomes if one.reason]
    unread = [page.FailedTensor(one.source.text, one.reason) for one in outcomes if one.reason and one.unread]
    written = page.write_page(root, found, failed) if found else None
    for line in (
        *("", RULE, "FINAL SUMMARY", RULE, f"Total tensors: {len(sources)}"),
        f"Successful: {len(sources) - len(failed)}",
        f"Failed: {len(failed)}",
        *(f"  {one.source}: {one.reason}" for one in failed),
        "⚠️  Some tensors failed - see above" if failed else "🎉 All tests completed successfully!",
        f"Page of all tensors: {written}" if written else "Nothing was analysed, so no page is written.",
    ):
        show(line)
    if unread and not found:
        more = f" And {len(unread) - 1} more, see above." if len(unread) > 1 else ""
        raise ValueError(f"nothing was analysed. {unread[0].source}: {unread[0].reason}{more}")
    return 1 if failed else 0


# ---------------------------------------------------------------------------------------------------- one tensor


@dataclass(frozen=True)
class Analysed:
    """One tensor in one format, whose folder is not known yet; or the `reason` why there is nothing."""

    found: page.AnalysedTensor | None = None
    reason: str = ""
    unread: bool = False  # there was no tensor to analyse: the input is wrong, not its numbers
    traceback: str = ""  # of a bug of probe
    tensor: str = ""  # the digest of what was read


@dataclass(frozen=True, eq=False)
class ScalingJob(Job[dict[int, Prepared], Analysed]):
    """The analysis of tensors: a unit is the index of a tensor, and a format. `stamps` are the times of their files."""

    sources: tuple[TensorSource, ...]
    request: Request
    stamps: tuple[list[tuple[str, int, int]], ...]
    is_elsewhere: bool  # whether workers may find other files under the same names

    def open(self) -> dict[int, Prepared]:
        """The tensor that was read last, by its index."""
        return {}

    def run(self, state: dict[int, Prepared], work: tuple[int, str], given: None, emit: Emit) -> Analysed:
        """The results; an error is a reason."""
        index, format = work
        unread = index not in state
        try:
            if index not in state:
                state.clear()
                tensor = self.sources[index].load()
                unread = False
                state[index] = Prepared(tensor)
            found = self._analyse(state[index], self.sources[index], format)
            return Analysed(found, tensor=identity_of(state[index].x) if self.is_elsewhere else "")
        except INPUT_ERRORS as problem:
            return Analysed(reason=reason_of(problem), unread=unread)
        except Exception as problem:  # a bug of probe, not a mistake of the user; the batch goes on all the same
            text = "".join(traceback.format_exception(problem)).rstrip()
            return Analysed(reason=f"{type(problem).__name__}: {problem}", traceback=text)

    def _analyse(self, prepared: Prepared, source: TensorSource, format: str) -> page.AnalysedTensor:
        request = self.request
        result = scaling_sweep(
            prepared,
            format,
            granularity=request.granularity,
            num_levels=request.num_levels,
            max_scale_exp=request.max_scale_exp,
            min_scale_exp=request.min_scale_exp,
            scale_bits=request.scale_bits,
            block_size=request.block_size if request.granularity == "block" else None,
            name=source.name,
        )
        advice = recommend(result)
        rules = compare_rules(prepared, format, block_size=request.block_size, scale_bits=request.scale_bits)
        others = alternatives(result, advice.level, rules)
        plots = pictures(result, advice) if request.plots else ()
        return page.AnalysedTensor(source.text, "", result, advice, rules, others, plots)

    @property
    def is_journaled(self) -> bool:
        """Their files say all."""
        return True

    def is_final(self, result: Analysed) -> bool:
        """Not a failure: the file may be another one by then."""
        return result.found is not None

    @cached_property
    def memory(self) -> int:
        """What the largest tensor needs."""
        return WORKER_BYTES + BYTES_PER_VALUE * max((source.values for source in self.sources), default=0)

    @property
    def paths(self) -> dict[str, str]:
        """The files of the tensors, whose values are compared when they are read."""
        return {str(source.path): "" for source in self.sources if not source.defect}


def _of_same_tensors(
    parts: Iterator[Analysed | UnitFailedError], units: Sequence[Unit], job: ScalingJob, engine: Engine
) -> Iterator[Analysed | UnitFailedError]:
    """Results of other machines; one of a tensor that has other values there than here is a failure."""
    here: dict[int, str] = {}
    for unit, part in zip(units, parts, strict=True):  # the end of the units is that of the parts
        if isinstance(part, UnitFailedError) or part.found is None:
            yield part
            continue
        index = unit.work[0]
        try:
            here = here if index in here else {index: identity_of(Prepared(job.sources[index].load()).x)}
        except INPUT_ERRORS as problem:
            yield Analysed(reason=reason_of(problem))
            continue
        if part.tensor == here[index]:
            yield part
        else:
            engine.discard(job, unit)
            yield Analysed(
                reason="a node read other values from it than this machine has. Put the same file on all nodes."
            )


def _stamp(path: Path) -> list[tuple[str, int, int]]:
    """Names, sizes and times of a file, or of those in a folder."""
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.exists()]


@dataclass
class Transcript:
    """The lines printed about a tensor, also with their times, as its log has them; `show` prints each at once."""

    show: Show
    stamped: list[str] = field(default_factory=list)

    def add(self, *texts: str) -> None:
        """Add texts, line by line, at the time of now."""
        now = datetime.now().isoformat(sep=" ", timespec="milliseconds")
        for line in [line for text in texts for line in text.splitlines() or [""]]:
            self.stamped.append(f"{now} {line}".rstrip())
            self.show(line)


def _write_tensor(
    source: TensorSource,
    header: str,
    parts: Iterator[Analysed | UnitFailedError],
    folder: Path,
    formats: Sequence[str],
    show: Show,
) -> Outcome:
    """Write the files of one tensor as its formats arrive; after an error nothing more of it is written."""
    transcript = Transcript(show)
    transcript.add("", header, "-" * 60)
    opening = list(transcript.stamped)
    found: list[page.AnalysedTensor] = []
    logs: dict[str, list[str]] = {}
    reason, unread = "", False
    for format in formats:
        part = next(parts)
        if reason:
            continue
        before = len(transcript.stamped)
        if isinstance(part, UnitFailedError):
            reason = str(part).partition(": ")[2] or str(part)
        elif part.reason:
            reason, unread = part.reason, part.unread
            transcript.add(*([part.traceback] if part.traceback else []))
        else:
            try:
                assert part.found is not None
                found.append(replace(part.found, folder=str(folder)))
                _write_format(source, found[-1], format, folder, transcript)
                logs[format] = transcript.stamped[before:]
            except OSError as problem:
                reason = reason_of(problem)
    failed = f"❌ Failed to process: {source.text}: {reason}"
    transcript.add(failed if reason else f"✅ Successfully processed: {source.text}")
    for format, lines in logs.items():
        page.write_log(folder, source.name, format, [*opening, *lines, transcript.stamped[-1]])
    return Outcome(source, tuple(found), reason, unread)


def _write_format(
    source: TensorSource, found: page.AnalysedTensor, format: str, folder: Path, transcript: Transcript
) -> None:
    result, advice, rules, others = found.result, found.recommendation, found.rules, found.alternatives
    levels = [page.level_line(level, len(result.levels)) for level in result.levels]
    transcript.add(*page.tensor_lines(result, source=source.text), *levels)
    for block in (
        overflow_block(result, advice),
        recommendation_block(result, advice),
        alternatives_block(result, advice, others),
        page.rules_block(rules),
    ):
        transcript.add("", *block)
    written = page.write_results(folder, result, advice, rules, others, source=source.text, identity=source.identity)
    if found.plots:
        written += page.write_plots(folder, format, (found.plots[0], found.plots[1]))
    log = folder / page.LOG.format(name=source.name, format=format)
    transcript.add(*(f"Wrote {path}" for path in (*written, log)))


def output_folders(sources: Sequence[TensorSource], root: Path, *, use_root: bool) -> list[Path]:
    """A folder for every source: root/<name>, or with `use_root` the root itself if it is free.

    No two inputs share a folder, also not with an earlier run: the next free of <name>_2, <name>_3 is used.
    """
    folders: list[Path] = []
    for source in sources:
        names = (source.name if number == 1 else f"{source.name}_{number}" for number in count(1))
        candidates = chain([root] if use_root else [], (root / name for name in names))
        folders.append(next(one for one in candidates if one not in folders and _is_free(one, source)))
    return folders


def _is_free(folder: Path, source: TensorSource) -> bool:
    """Whether the folder has no results yet but those of this input."""
    if not folder.exists():
        return True
    results = folder.glob("mxfp_scaling_results_*.json")
    return folder.is_dir() and all(_identity_in(file) == source.identity for file in results)


def _identity_in(file: Path) -> str:
    try:
        return str(json.loads(file.read_text()).get("identity"))
    except (OSError, ValueError, AttributeError):
        return ""
