"""A page of its own: headings, text, sortable tables and pictures in one HTML file that needs nothing else."""

import base64
import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from probe.files.atomic import write

STYLE = """
body{background:#fff;color:#1c2733;color-scheme:light;font:14px/1.5 "Segoe UI",Helvetica,Arial,sans-serif;
  max-width:1320px;margin:24px auto;padding:0 20px}
h1{font-size:22px;margin:0 0 6px}
h2{font-size:17px;margin:30px 0 8px;padding-top:10px;border-top:1px solid #dde2e8}
p{margin:8px 0}
p.lead{color:#45525f;margin-bottom:16px}
nav{margin:10px 0;line-height:2}
nav a{margin-right:14px;color:#0b5cad;white-space:nowrap}
pre{background:#f6f8fa;border:1px solid #e1e6eb;border-radius:4px;padding:10px 12px;overflow-x:auto;
  font:12px/1.5 "DejaVu Sans Mono",Menlo,Consolas,monospace}
.wide{position:relative;display:inline-block;max-width:100%}
.box{max-height:640px;overflow:auto;border:1px solid #dde2e8;border-radius:4px}
.box::-webkit-scrollbar{width:11px;height:11px}
.box::-webkit-scrollbar-thumb{background:#9aa7b4;border-radius:6px;border:2px solid #eef1f5}
.box::-webkit-scrollbar-track{background:#eef1f5}
.wide.more::after{content:"";position:absolute;top:0;right:0;bottom:0;width:34px;pointer-events:none;z-index:3;
  background:linear-gradient(to right,rgba(28,39,51,0),rgba(28,39,51,.28))}
table{border-collapse:separate;border-spacing:0;font-size:13px}
th{position:sticky;top:0;background:#eef1f5;text-align:left;font-weight:600;cursor:pointer;user-select:none;z-index:1}
td:first-child,th:first-child{position:sticky;left:0;border-right:1px solid #dde2e8;white-space:normal;max-width:40vw;
  overflow-wrap:break-word}
td:first-child{background:#fff}
th:first-child{z-index:2}
th,td{padding:4px 12px;border-bottom:1px solid #e8ecf0;white-space:nowrap}
td.n{text-align:right;font-variant-numeric:tabular-nums}
tr.bad td{background:#fdecee}
th[aria-sort=ascending]::after{content:" \\25b4"}
th[aria-sort=descending]::after{content:" \\25be"}
th:focus-visible{outline:2px solid #0b5cad}
figure{margin:12px 0}
figure img{max-width:100%;height:auto;border:1px solid #e8ecf0}
figcaption,.caption{color:#5f6b7a;font-size:13px;margin:4px 0 2px}
.caption{margin-top:16px}
"""
#: A click (or Enter) on a head sorts by that column, numbers as numbers; what is no number comes last. A shadow on
#: the right edge of a table says that it goes on there.
SCRIPT = """
document.querySelectorAll('th').forEach(head => {
  const sort = () => {
    const table = head.closest('table'), body = table.tBodies[0], place = head.cellIndex
    const up = head.getAttribute('aria-sort') !== 'ascending'
    table.querySelectorAll('th').forEach(other => other.removeAttribute('aria-sort'))
    head.setAttribute('aria-sort', up ? 'ascending' : 'descending')
    const key = row => row.cells[place].dataset.n ?? ''
    const text = row => row.cells[place].textContent
    const order = (a, b) => {
      if (key(a) === '' || key(b) === '') return key(a) !== '' ? -1 : key(b) !== '' ? 1
        : (up ? 1 : -1) * text(a).localeCompare(text(b), undefined, {numeric: true})
      return (up ? 1 : -1) * (Number(key(a)) - Number(key(b)))
    }
    body.append(...[...body.rows].sort(order))
  }
  head.tabIndex = 0
  head.addEventListener('click', sort)
  head.addEventListener('keydown', event => { if (event.key === 'Enter') sort() })
})
document.querySelectorAll('.box').forEach(box => {
  const mark = () =>
    box.parentElement.classList.toggle('more', box.scrollLeft + box.clientWidth < box.scrollWidth - 1)
  box.addEventListener('scroll', mark)
  addEventListener('resize', mark)
  mark()
})
"""


class Document:
    """Built from top to bottom, then written. All text is escaped: names come from models and files."""

    def __init__(self, title: str, lead: str = "") -> None:
        self._title = title
        self._lead = lead
        self._headings: list[str] = []
        self._parts: list[str] = []

    def heading(self, text: str) -> None:
        """Begin a section; with three or more of them the page has a list of links at its top."""
        self._headings.append(text)
        self._parts.append(f'<h2 id="part-{len(self._headings)}">{_shown(text)}</h2>')

    def text(self, text: str) -> None:
        """A paragraph."""
        self._parts.append(f"<p>{_shown(text)}</p>")

    def pre(self, text: str) -> None:
        """Text as in a terminal, line by line."""
        self._parts.append(f"<pre>{_shown(text)}</pre>")

    def table(
        self, rows: Sequence[Mapping[str, object]], caption: str = "", *, bad: Sequence[bool] | None = None
    ) -> None:
        """Columns as in the first row; None is a dash. Rows for which `bad` is true are marked."""
        if not rows:
            raise ValueError("a table needs at least one row. Say in words that there is none.")
        columns = list(rows[0])
        marks = bad or [False] * len(rows)
        head = "".join(f"<th>{_shown(column)}</th>" for column in columns)
        body = "".join(
            f"<tr{' class=bad' if mark else ''}>{''.join(_cell(row.get(column)) for column in columns)}</tr>"
            for row, mark in zip(rows, marks, strict=True)
        )
        said = f'<p class="caption">{_shown(caption)}</p>' if caption else ""
        self._parts.append(
            f"{said}<div class=wide><div class=box><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            "</div></div>"
        )

    def picture(self, png: bytes, *, alt: str, caption: str = "") -> None:
        """A PNG, embedded."""
        source = base64.b64encode(png).decode()
        said = f"<figcaption>{_shown(caption)}</figcaption>" if caption else ""
        self._parts.append(
            f'<figure><img src="data:image/png;base64,{source}" alt="{escape(_printable(alt))}">{said}</figure>'
        )

    def html(self) -> str:
        """The whole page."""
        links = " ".join(f'<a href="#part-{i}">{_shown(text)}</a>' for i, text in enumerate(self._headings, 1))
        return (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            f"<title>{_shown(self._title)}</title><style>{STYLE}</style></head><body>\n<h1>{_shown(self._title)}</h1>"
            + (f'<p class="lead">{_shown(self._lead)}</p>' if self._lead else "")
            + (f"<nav>{links}</nav>" if len(self._headings) >= 3 else "")
            + "\n".join(self._parts)
            + f"\n<script>{SCRIPT}</script></body></html>\n"
        )

    def write(self, path: str | Path) -> Path:
        """Write the page, whole or not at all."""
        return write(path, self.html())


def _cell(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f"<td>{_shown('-' if value is None else str(value))}</td>"
    text = str(value) if isinstance(value, int) else f"{value:.6g}"
    key = text if isinstance(value, int) else repr(float(value)) if math.isfinite(value) else ""
    return f'<td class=n data-n="{key}">{text}</td>'


def _shown(text: str) -> str:
    return escape(_printable(text))


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text)
