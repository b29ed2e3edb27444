"""Many tensors, each by itself: analysed, written, told. One that fails is told in a line, and the others go on."""

import traceback
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from probe.commands.scaling_places import Places
from probe.commands.scaling_workers import submitted
from probe.report.scaling import files
from probe.report.scaling.blocks import overflow_block, recommendation_block, truth_block
from probe.report.scaling.page import Failed, Found, write_page
from probe.report.scaling.plots import pictures
from probe.scaling.advice import recommend
from probe.scaling.inputs import Source
from probe.scaling.levels import GRANULARITIES, check_levels, ends_of, expand_formats
from probe.scaling.sweep import Prepared, scaling_sweep
from probe.scaling.truth import block_truth
from probe.words import look_up

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """What is done to every tensor."""

    formats: tuple[str, ...] = ("fp8_e4m3",)
    granularity: str = "tensor"
    num_levels: int = 21
    max_scale_exp: float | None = None
    min_scale_exp: float | None = None
    scale_bits: int = 8
    block_size: int | None = None
    plots: bool = True

    def __post_init__(self) -> None:
        """Refuse at once what no tensor could be analysed with."""
        object.__setattr__(self, "formats", tuple(expand_formats(list(self.formats))))
        look_up("granularity", self.granularity, {one: one for one in GRANULARITIES})
        check_levels(self.num_levels)
        ends_of(self.max_scale_exp, self.min_scale_exp, (0, 0), scale_bits=self.scale_bits)
        if self.block_size is not None and self.block_size < 1:
            raise ValueError(f"block_size {self.block_size} is not a whole number of at least 1. OCP MX uses 32.")


@dataclass(frozen=True)
class Done:
    """One tensor, done or failed. `lines` are what is told of it."""

    source: Source
    lines: tuple[str, ...]
    found: tuple[Found, ...] = ()
    reason: str = ""
    unread: bool = False
    """There was no tensor to analyse: the input is wrong, not its numbers."""


@dataclass
class Told:
    """Lines with the times at which they were told; `live` also shows each at once."""

    live: Tell | None = None
    lines: list[str] = field(default_factory=list)
    stamped: list[str] = field(default_factory=list)

    def __call__(self, *lines: str) -> None:
        """Tell, now."""
        now = datetime.now().isoformat(sep=" ", timespec="milliseconds")
        for text in lines:
            for line in text.splitlines() or [""]:
                self.lines.append(line)
                self.stamped.append(f"{now} {line}".rstrip())
                if self.live is not None:
                    self.live(line)


def analyse(source: Source, request: Request, folder: Path, head: Sequence[str] = (), live: Tell | None = None) -> Done:
    """One tensor in every format, its files written; whatever goes wrong is told in one line."""
    told = Told(live)
    told(*head)
    opening = list(told.stamped)
    found: list[Found] = []
    logs: dict[str, list[str]] = {}
    reason, unread = "", True
    try:
        tensor = source.load()
        unread = False
        given = Prepared(tensor)
        for format in request.formats:
            before = len(told.stamped)
            found.append(_one(source, given, format, request, folder, told))
            logs[format] = told.stamped[before:]
    except (ValueError, TypeError, OSError, MemoryError) as problem:
        reason = " ".join(str(problem).split()) or type(problem).__name__
    except Exception as problem:  # ours, not the user's; the others go on all the same
        told("".join(traceback.format_exception(problem)).rstrip())
        reason = f"{type(problem).__name__}: {problem}"
    told(f"❌ Failed to process: {source.text}: {reason}" if reason else f"✅ Successfully processed: {source.text}")
    for format, lines in logs.items():
        files.write_log(folder, source.name, format, [*opening, *lines, told.stamped[-1]])
    return Done(source, tuple(told.lines), tuple(found), reason, unread)


def _one(source: Source, given: Prepared, format: str, request: Request, folder: Path, told: Told) -> Found:
    is_block = request.granularity == "block"
    result = scaling_sweep(
        given,
        format,
        granularity=request.granularity,
        num_levels=request.num_levels,
        max_scale_exp=request.max_scale_exp,
        min_scale_exp=request.min_scale_exp,
        scale_bits=request.scale_bits,
        block_size=request.block_size if is_block else None,
        name=source.name,
    )
    advice = recommend(result)
    told(*files.tensor_lines(result, source=source.text))
    told(*(files.level_line(level, len(result.levels)) for level in result.levels))
    truths = block_truth(given, format, block_size=request.block_size, scale_bits=request.scale_bits)
    told("", *overflow_block(result, advice), "", *recommendation_block(result, advice), "", *truth_block(truths))
    written = files.write_results(folder, result, advice, truths, source=source.text, identity=source.identity)
    plots = pictures(result, advice) if request.plots else ()
    if plots:
        written += files.write_plots(folder, format, plots)
    told(*(f"Wrote {path}" for path in written))
    told(f"Wrote {folder / files.LOG.format(name=source.name, format=format)}")
    return Found(source.text, str(folder), result, advice, truths, plots)


def run_batch(
    sources: Sequence[Source], request: Request, output_dir: Path | None, *, jobs: int = 1, tell: Tell = print
) -> int:
    """All of them, told in order; 0, or 1 if any failed. One page over all is written at the end.

    Where nothing was analysed the page of an earlier run stays, and what could not be read is a ValueError.
    """
    if jobs < 1:
        raise ValueError(f"jobs is {jobs}. Give how many processes work at a time: 1 or more.")
    if not sources:
        raise ValueError("no tensor was given. Give at least one file or folder.")
    tell(f"Processing {len(sources)} tensor(s)...")
    tell("=" * 80)
    places = Places(output_dir, alone=len(sources) == 1)
    folders = [places.folder_for(source) for source in sources]
    found: list[Found] = []
    failed: list[Failed] = []
    unread: list[Failed] = []
    with closing(_all(sources, request, folders, jobs, tell)) as results:
        for done in results:
            found += done.found
            if done.reason:
                failed.append(Failed(done.source.text, done.reason))
                unread += failed[-1:] if done.unread else []
    page = write_page(places.root, found, failed) if found else None
    tell("")
    tell("=" * 80)
    tell("FINAL SUMMARY")
    tell("=" * 80)
    tell(f"Total tensors: {len(sources)}")
    tell(f"Successful: {len(sources) - len(failed)}")
    tell(f"Failed: {len(failed)}")
    for one in failed:
        tell(f"  {one.source}: {one.reason}")
    tell(f"Page over all: {page}" if page else "Nothing was analysed, so no page is written.")
    tell("⚠️  Some tensors failed - see above" if failed else "🎉 All tests completed successfully!")
    if unread and not found:
        more = f" And {len(unread) - 1} more, see above." if len(unread) > 1 else ""
        raise ValueError(f"nothing was analysed. {unread[0].source}: {unread[0].reason}{more}")
    return 1 if failed else 0


def _heads(sources: Sequence[Source]) -> list[list[str]]:
    return [["", f"[{i}/{len(sources)}] Processing: {source.text}", "-" * 60] for i, source in enumerate(sources, 1)]


def _all(
    sources: Sequence[Source], request: Request, folders: Sequence[Path], jobs: int, tell: Tell
) -> Generator[Done, None, None]:
    heads = _heads(sources)
    works = list(zip(sources, folders, heads, strict=True))
    if jobs == 1:
        for source, folder, head in works:
            yield analyse(source, request, folder, head, live=tell)
        return
    calls = [(source, request, folder, head) for source, folder, head in works]
    with submitted(analyse, calls, jobs=min(jobs, len(sources)), folders=folders) as futures:
        for call, future in zip(calls, futures, strict=True):
            done = _result(future, *call)
            for line in done.lines:
                tell(line)
            yield done


def _result(future: "Future[Done]", source: Source, request: Request, folder: Path, head: Sequence[str]) -> Done:
    """Of a worker. When one dies, all that was not done is done again, each in a process of its own."""
    try:
        return future.result()
    except BrokenProcessPool:
        pass
    try:
        with submitted(analyse, [(source, request, folder, head)], jobs=1, folders=[folder]) as futures:
            return futures[0].result()
    except BrokenProcessPool:
        reason = "its process was killed, perhaps for want of memory"
        return Done(source, (*head, f"❌ Failed to process: {source.text}: {reason}"), reason=reason)
