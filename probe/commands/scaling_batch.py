"""The batch of `probe scaling`: each tensor is analysed and written by itself, here or in worker processes.

A tensor that fails is reported in one line, and the batch goes on.
"""

import json
import os
import signal
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, count
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any, TypeVar

from probe.files.atomic import remove_unfinished
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

T = TypeVar("T")
#: Called with every line as it is printed.
Show = Callable[[str], None]

DEFAULT_FOLDER = Path("draw") / "scaling_analysis"
RULE = "=" * 80


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
    """One tensor, analysed in every format or failed for a `reason`; `lines` are what was printed about it."""

    source: TensorSource
    lines: tuple[str, ...]
    found: tuple[page.AnalysedTensor, ...] = ()
    reason: str = ""
    unread: bool = False  # there was no tensor to analyse: the input is wrong, not its numbers


def run_batch(
    sources: Sequence[TensorSource], request: Request, output_dir: Path | None, *, jobs: int = 1, show: Show = print
) -> int:
    """Analyse all sources in order and write one page over them; returns 0, or 1 if a tensor failed.

    If nothing could be analysed, the page of an earlier run stays; if nothing could be read, that is a ValueError.
    """
    require_positive("jobs", jobs)
    if not sources:
        raise ValueError("no tensor was given. Give at least one file or folder.")
    show(f"Processing {len(sources)} tensor(s)...")
    show(RULE)
    root = output_dir or DEFAULT_FOLDER
    check_outputs(folders=[root])
    folders = output_folders(sources, root, use_root=output_dir is not None and len(sources) == 1)
    with closing(_outcomes(sources, request, folders, jobs, show)) as running:
        outcomes = list(running)
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


@dataclass
class Transcript:
    """The lines printed about a tensor, also with their times, as its log has them; `show` prints each at once."""

    show: Show | None = None
    lines: list[str] = field(default_factory=list)
    stamped: list[str] = field(default_factory=list)

    def add(self, *texts: str) -> None:
        """Add texts, line by line, at the time of now."""
        now = datetime.now().isoformat(sep=" ", timespec="milliseconds")
        for line in [line for text in texts for line in text.splitlines() or [""]]:
            self.lines.append(line)
            self.stamped.append(f"{now} {line}".rstrip())
            if self.show is not None:
                self.show(line)


def analyse(
    source: TensorSource, request: Request, folder: Path, header: Sequence[str] = (), show: Show | None = None
) -> Outcome:
    """Analyse one tensor in every format and write its files; an error is one line of the outcome."""
    transcript = Transcript(show)
    transcript.add(*header)
    opening = list(transcript.stamped)
    found: list[page.AnalysedTensor] = []
    logs: dict[str, list[str]] = {}
    reason, unread = "", True
    try:
        tensor = source.load()
        unread = False
        prepared = Prepared(tensor)
        for format in request.formats:
            before = len(transcript.stamped)
            found.append(_analyse_format(source, prepared, format, request, folder, transcript))
            logs[format] = transcript.stamped[before:]
    except (ValueError, TypeError, OSError, MemoryError) as problem:
        reason = " ".join(str(problem).split()) or type(problem).__name__
    except Exception as problem:  # a bug of probe, not a mistake of the user; the batch goes on all the same
        transcript.add("".join(traceback.format_exception(problem)).rstrip())
        reason = f"{type(problem).__name__}: {problem}"
    transcript.add(_failure(source, reason) if reason else f"✅ Successfully processed: {source.text}")
    for format, lines in logs.items():
        page.write_log(folder, source.name, format, [*opening, *lines, transcript.stamped[-1]])
    return Outcome(source, tuple(transcript.lines), tuple(found), reason, unread)


def _failure(source: TensorSource, reason: str) -> str:
    return f"❌ Failed to process: {source.text}: {reason}"


def _analyse_format(
    source: TensorSource, prepared: Prepared, format: str, request: Request, folder: Path, transcript: Transcript
) -> page.AnalysedTensor:
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
    plots = pictures(result, advice) if request.plots else ()
    if plots:
        written += page.write_plots(folder, format, plots)
    log = folder / page.LOG.format(name=source.name, format=format)
    transcript.add(*(f"Wrote {path}" for path in (*written, log)))
    return page.AnalysedTensor(source.text, str(folder), result, advice, rules, others, plots)


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


# --------------------------------------------------------------------------------------------- worker processes


def _outcomes(
    sources: Sequence[TensorSource], request: Request, folders: Sequence[Path], jobs: int, show: Show
) -> Generator[Outcome, None, None]:
    """The outcome of every source in order, its lines shown."""
    calls = [
        (source, request, folder, ["", f"[{number}/{len(sources)}] Processing: {source.text}", "-" * 60])
        for number, (source, folder) in enumerate(zip(sources, folders, strict=True), 1)
    ]
    if jobs == 1:
        for call in calls:
            yield analyse(*call, show=show)
        return
    with worker_processes(analyse, calls, jobs=min(jobs, len(sources)), folders=folders) as futures:
        for call, future in zip(calls, futures, strict=True):
            outcome = _outcome_of(future, *call)
            for line in outcome.lines:
                show(line)
            yield outcome


def _outcome_of(
    future: "Future[Outcome]", source: TensorSource, request: Request, folder: Path, header: Sequence[str]
) -> Outcome:
    """The result of a worker. When one dies, each source that is left gets its own process."""
    try:
        return future.result()
    except BrokenProcessPool:
        pass
    try:
        with worker_processes(analyse, [(source, request, folder, header)], jobs=1, folders=[folder]) as futures:
            return futures[0].result()
    except BrokenProcessPool:
        reason = "its process was killed, perhaps for want of memory"
        return Outcome(source, (*header, _failure(source, reason)), reason=reason)


@contextmanager
def worker_processes(
    work: Callable[..., T], calls: Sequence[tuple[Any, ...]], *, jobs: int, folders: Sequence[Path]
) -> Iterator[list["Future[T]"]]:
    """The futures of `work(*call)` in `jobs` processes; an exception in the block, such as Ctrl-C, kills them at once.

    Ctrl-C goes to all processes of a terminal. The workers ignore it, so that only this process decides. What killed
    workers had begun to write to `folders` is deleted.
    """
    others = active_children()
    threads = max(1, (os.cpu_count() or 1) // jobs)
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_limit_threads, initargs=(threads,))
    workers = []
    try:
        with _no_interrupt():  # workers inherit the mask from their first moment on
            futures = [pool.submit(work, *call) for call in calls]
            workers = [one for one in active_children() if one not in others]
        yield futures
    except BaseException:
        with _no_interrupt():  # a second Ctrl-C must not leave some of them behind
            for worker in workers:
                worker.kill()
            pool.shutdown(cancel_futures=True)
            for folder in set(folders):
                for worker in workers:
                    remove_unfinished(folder, worker.pid or 0)
        raise
    pool.shutdown()


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """SIGINT waits until the end of the block; on systems without signal masks, it does not."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _limit_threads(threads: int) -> None:
    import torch

    torch.set_num_threads(min(threads, torch.get_num_threads()))
