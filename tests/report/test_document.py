"""Pages of their own: escaped, sortable, written whole or not at all."""

import base64
import os
from pathlib import Path

import pytest

from probe.files.atomic import write
from probe.report.document import Document
from tests.report.browser import open_report

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg=="
)
NASTY = "<script>alert(1)</script>\x1b"


def test_write_replaces_whole_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = write(tmp_path / "made" / "summary.md", "old \N{BALLOT X} \udc80\n")
    assert target.read_bytes() == "old \N{BALLOT X} \\udc80\n".encode()

    def full(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write(target, "new")
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["summary.md"]
    assert target.read_text(encoding="utf-8").startswith("old")


def page(*, sections: int = 3) -> Document:
    made = Document(f"Title {NASTY}", NASTY)
    for index in range(sections):
        made.heading(f"{NASTY} {index}")
    made.text(NASTY)
    made.pre(NASTY)
    rows = [{NASTY: NASTY, "figure": value} for value in (2.5, 10, None, float("nan"), -3e-7)]
    made.table(rows, caption=NASTY, bad=[True, False, False, False, False])
    made.picture(PNG, alt=f'"{NASTY}', caption=NASTY)
    return made


def test_nothing_that_is_given_becomes_markup() -> None:
    html = page().html()
    assert html.count("<script>") == html.count("</script>") == 1, "its own"
    assert "\x1b" not in html
    assert 'alt="&#34;&lt;script&gt;' in html


def test_links_at_the_top_appear_with_the_third_section() -> None:
    assert "<nav>" not in page(sections=2).html()
    assert '<nav><a href="#part-1">' in page(sections=3).html()


def test_a_table_without_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="a table needs at least one row"):
        Document("x").table([])


def test_a_page_sorts_by_number_and_shows_its_picture(tmp_path: Path) -> None:
    column = "return [...document.querySelectorAll('tbody tr')].map(row => row.cells[1].textContent)"
    click = "document.querySelectorAll('th')[1].click()"
    with open_report(page().write(tmp_path / "page.html")) as browser:
        browser.execute_script(click)
        assert browser.execute_script(column)[:3] == ["-3e-07", "2.5", "10"], "numbers as numbers"
        assert set(browser.execute_script(column)[3:]) == {"-", "nan"}, "what is none comes last"
        browser.execute_script(click)
        assert browser.execute_script(column)[:3] == ["10", "2.5", "-3e-07"]
        assert browser.execute_script("return document.querySelector('img').naturalWidth") == 1
        assert not [one for one in browser.get_log("browser") if one["level"] == "SEVERE"]


def test_a_wide_table_shows_that_it_goes_on_and_keeps_its_first_column(tmp_path: Path) -> None:
    made = Document("wide")
    columns = {f"a long name of a column {i}": 1.5 for i in range(20)}
    made.table(
        [{"module": f"layers.{i}." + "x" * 400 * (i == 0), **columns} for i in range(60)], bad=[False, True] * 30
    )
    made.table([{"module": "layers.0", "figure": 1}])
    with open_report(made.write(tmp_path / "page.html")) as browser:
        assert browser.execute_script(
            "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        ), "the page itself is not wider than the window"
        marked = "return [...document.querySelectorAll('.wide')].map(one => one.classList.contains('more'))"
        assert browser.execute_script(marked) == [True, False]
        place = """
            const box = document.querySelector('.box'), cell = box.querySelector('tbody td')
            return [cell.getBoundingClientRect().left - box.getBoundingClientRect().left,
                    cell.getBoundingClientRect().width / box.clientWidth,
                    box.querySelector('th').getBoundingClientRect().top - box.getBoundingClientRect().top]
        """
        left, share, top = browser.execute_script(place)
        assert share < 0.6, "a long name leaves room for the rest"
        browser.execute_script("document.querySelector('.box').scrollTo(1e6, 300)")
        browser.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        assert browser.execute_script(place)[::2] == [left, top]
        assert browser.execute_script(marked) == [False, False], "the end is reached"
        colours = "return [...document.querySelectorAll('tbody tr')].slice(0, 2).map(one => "
        colours += "new Set([...one.cells].map(cell => getComputedStyle(cell).backgroundColor)).size)"
        assert browser.execute_script(colours)[1] == 1, "a marked row is marked as a whole"
