"""What commands print and write: text for any terminal, rows as a table, JSON, and progress on stderr."""

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from probe.files.atomic import write
from probe.words import columns

if TYPE_CHECKING:
    from probe.engines import Engine

#: Seconds between two lines of `update` in a log.
LOG_INTERVAL = 5.0


def echo(text: str, *, error: bool = False, end: str = "\n") -> None:
    """Print to stdout or stderr; a character that the terminal cannot show becomes a question mark."""
    stream = sys.stderr if error else sys.stdout
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), file=stream, end=end)


def echo_beside_progress(text: str) -> None:
    """A line on stderr, above a bar if there is one."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)
    else:
        echo(text, error=True)


def write_document(where: str | Path, text: str) -> None:
    """Write text that ends in a newline to a file, whole or not at all; `-` is standard output."""
    if where == "-":
        echo(text, end="")
    else:
        write(where, text)


def write_json(where: str | Path, value: Any) -> None:
    """Write JSON to a file, whole or not at all; `-` is standard output."""
    write_document(where, json.dumps(value, indent=2, allow_nan=False) + "\n")


def print_rows(rows: Sequence[dict[str, object]], *, as_json: bool = False) -> None:
    """Print rows of the same keys as JSON, or as aligned columns: numbers to the right, words to the left."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    texts = [{key: _cell(value) for key, value in row.items()} for row in rows]
    words = {key for row in rows for key, value in row.items() if isinstance(value, str)}
    print("\n".join(columns(texts, left=words)))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if value == 0 or math.isinf(value):
            return f"{value:g}"
        if math.log2(abs(value)).is_integer() and abs(value) < 0.01:
            return f"2^{int(math.log2(abs(value)))}"
        return f"{value:.6g}"
    return str(value)


class Progress:
    """Progress on stderr: one bar with the time left on a terminal, which is left clean; plain lines in a log.

    line     a line that stays: printed, or written above the bar
    status   what is being done right now: shown in place of the last, on a terminal only
    update   the share of the work that is done
    begin    how many steps there are, and `step`, one of them: what a recorder calls
    lines    all lines that stay
    """

    def __init__(self) -> None:
        self.bar: Any = None  # tqdm has no types
        self.lines: list[str] = []
        self._started = self._printed = 0.0
        self._first = self._total = 0
        self._is_done = False
        if sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(bar_format="{desc}", leave=False, dynamic_ncols=True, file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        if self.bar is not None:
            self.bar.close()

    def line(self, text: str) -> None:
        """Print a line that stays."""
        self.lines.append(text)
        echo_beside_progress(text)

    def status(self, text: str) -> None:
        """Show what is being done; in a log, nothing."""
        if self.bar is not None:
            self.bar.set_description_str(text)

    def begin(self, steps: int) -> None:
        """Start the clock of a bar of so many steps; in a log, nothing."""
        if self.bar is not None:
            self.bar.bar_format = None
            self.bar.reset(steps)

    def step(self, recipe: str, name: str) -> None:
        """One step further, at a tensor `layer_0.output` of a recipe; in a log, nothing."""
        if self.bar is not None:
            self.bar.set_description(f"{recipe} {name.rpartition('.')[0] or name}", refresh=False)
            self.bar.update()

    def update(self, done: int, total: int, text: str) -> None:
        """Show `text` and how much is done of a total, 0 while that is not known; in a log, a line every 5 s."""
        if self.bar is not None:
            if total and total != self.bar.total:
                self.begin(total)
            self.bar.set_description(text, refresh=not total)
            self.bar.update(done - self.bar.n)
            return
        now = time.monotonic()
        if not total or total != self._total:
            self._started, self._first, self._total = now, done, total  # what an earlier run made took no time
        finished = done >= total
        told, self._is_done = self._is_done, finished and total > 0
        if (finished and not told) or now - self._printed >= LOG_INTERVAL:
            self._printed = now
            made = done - self._first
            left = (now - self._started) * (total - done) / made if made else 0.0
            share = f"[{done / total:4.0%}] " if total else ""
            self.line(f"{share}{text}" + (f", {_duration(left)} left" if made and not finished else ""))

    def units(self, engine: "Engine") -> "Callable[[int, int, str], object]":
        """What an engine tells of its units: shown where they run elsewhere, else the lines of the tool say it."""
        return (lambda done, total, text: None) if engine.is_here else self.update


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
