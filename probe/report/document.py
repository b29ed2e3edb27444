"""HTML from the templates beside this file, and `Document`, the self-contained page that most reports are.

The template engine escapes every value. Characters that cannot be shown become a replacement character.
"""

import base64
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from probe.files.atomic import write
from probe.words import single_line


class Cell(NamedTuple):
    """The text of a table's cell and, for a number, its sort key, which is empty if it is not finite."""

    text: str
    key: str | None


class Document:
    """A page that is built from top to bottom and then written."""

    def __init__(self, title: str, lead: str = "") -> None:
        self._title = title
        self._lead = lead
        self._parts: list[dict[str, Any]] = []

    def heading(self, text: str) -> None:
        """Begin a section. A page with three or more has a list of links at its top."""
        self._parts.append({"kind": "heading", "text": text})

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self._parts.append({"kind": "text", "text": text})

    def pre(self, text: str) -> None:
        """Add text as in a terminal, line by line."""
        self._parts.append({"kind": "pre", "text": text})

    def table(self, rows: Sequence[Mapping[str, object]], caption: str = "", *, bad: Sequence[bool] = ()) -> None:
        """Add a table with the columns of its first row; None is a dash. Rows whose `bad` is true are marked."""
        if not rows:
            raise ValueError("a table needs at least one row. Say in words that there is none.")
        cells = [[_cell(row.get(name)) for name in rows[0]] for row in rows]
        columns_of = list(zip(*cells, strict=True))
        numeric = [
            any(cell.key is not None for cell in c) or all(cell == _cell(None) for cell in c) for c in columns_of
        ]
        columns = [{"name": name, "numeric": number} for name, number in zip(rows[0], numeric, strict=True)]
        marked = list(zip(bad or [False] * len(rows), cells, strict=True))
        self._parts.append({"kind": "table", "caption": caption, "columns": columns, "rows": marked})

    def picture(self, png: bytes, *, alt: str, caption: str = "") -> None:
        """Embed a PNG."""
        source = base64.b64encode(png).decode()
        self._parts.append({"kind": "picture", "source": source, "alt": alt, "caption": caption})

    def html(self) -> str:
        """The whole page."""
        return render("document.html", title=self._title, lead=self._lead, parts=self._parts)

    def write(self, path: str | Path) -> Path:
        """Write the page, whole or not at all."""
        return write(path, self.html())


def render(template: str, **values: object) -> str:
    """A template of this package with its values, escaped. Its filter `line` makes a text one line of at most 500."""
    html: str = _templates().get_template(template).render(**values)
    return html


@cache
def _templates() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("probe.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_printable,
    )
    environment.filters["line"] = single_line
    return environment


def _printable(value: object) -> object:
    if type(value) is not str:  # a number, or text that the template engine has escaped already
        return value
    if value.replace("\n", "").isprintable():  # the same, faster for the long text of a picture
        return value
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in value)


def _cell(value: object) -> Cell:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return Cell("-" if value is None else str(value), None)
    if isinstance(value, int):
        return Cell(str(value), str(value))
    return Cell(f"{value:.6g}", repr(float(value)) if math.isfinite(value) else "")
