"""What commands print and write: text that any terminal can show, rows as a table, JSON to a pipe or a file."""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from probe.files.atomic import write
from probe.words import columns


def echo(text: str, *, error: bool = False, end: str = "\n") -> None:
    """Print to stdout or stderr; a character that the terminal cannot show becomes a question mark."""
    stream = sys.stderr if error else sys.stdout
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), file=stream, end=end)


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
