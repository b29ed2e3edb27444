"""What commands print and write: text that any terminal takes, JSON to a pipe or a file, and a line of progress."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def say(text: str, *, error: bool = False) -> None:
    """Print; what the terminal has no sign for is shown as a question mark."""
    stream = sys.stderr if error else sys.stdout
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), file=stream)


def json_to(where: str | Path, facts: Any) -> None:
    """As JSON to a file, whole or not at all; `-` is standard output."""
    text = json.dumps(facts, indent=2, allow_nan=False)
    if where == "-":
        say(text)
        return
    from probe.files.atomic import write

    write(where, text + "\n")


@contextmanager
def progress_line() -> Iterator[Callable[[str], None] | None]:
    """A line that is written over, if somebody is looking; None if not."""
    if not sys.stderr.isatty():
        yield None
        return

    def show(text: str) -> None:
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
