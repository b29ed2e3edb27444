"""Pages of their own: escaped, sortable, written whole or not at all."""

import base64
import os
from pathlib import Path

import pytest

from probe.report.document import Document
from probe.report.files import write
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
    assert 'alt="&quot;&lt;script&gt;' in html


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
