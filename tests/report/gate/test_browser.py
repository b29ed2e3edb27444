"""The report as its readers have it: made by pytest-html and opened in Chromium."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.browser import find_browser, open_report
from tests.report.gate.examples import nasty
from tests.report.gate.project import make_report

pytest.importorskip("pytest_html")

FAULTS = "{'mode_1_0-int8': 1, 'mode_2_0-fp8_e4m3': 0}"
OUTCOMES = (
    f"examples.gate(modes=('mode_1_0', 'mode_2_0'), faults={FAULTS})"
    " + [examples.failing(None, status='skipped', message='no cuda', case=examples.Case('mode_1_0', 'layer_0', 'cuda',"
    " 'int8'), nodeid='test_gate.py::test_matches_baseline[mode_1_0-layer_0-cuda-int8]'), examples.nasty()]"
)
FAILING = "mode_2_0-layer_0-cpu-fp8_e4m3"
PASSING = "mode_1_0-layer_2-cpu-fp6_e3m2"
PICTURES = 4 + 5 + 1 + 8  # the failing cases, the nasty one, and the passing recipes


@pytest.fixture(scope="module", params=["serial", "xdist"])
def report(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Serial, with @group in some of the cells; and with workers, with @group in some of the rows."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "serial":
        return make_report(folder, OUTCOMES, grouped="cells")
    return make_report(folder, OUTCOMES, "-n", "2", "--dist", "loadgroup", grouped="rows")


@pytest.fixture(scope="module")
def browser(report: Path) -> Iterator[Any]:
    with open_report(report) as page:
        yield page


@pytest.fixture
def page(browser: Any, report: Path) -> Any:
    """The report just opened; what it logs is what is wrong with it."""
    browser.get("about:blank")
    browser.get_log("browser")
    browser.get(report.as_uri())
    return browser


def row_of(page: Any, case: str) -> dict[str, Any]:
    """Whether the row of a case is there and expanded, what of it can be seen, and where it is."""
    script = """
    const row = [...document.querySelectorAll('#results-table > tbody')]
      .find(row => row.querySelector('.col-testId')?.textContent.includes(`[${arguments[0]}]`))
    if (!row) return {there: false}
    const seen = selector => [...row.querySelectorAll(selector)].some(element => element.checkVisibility())
    const box = row.getBoundingClientRect()
    return {
      there: true, name: row.querySelector('.col-testId').textContent, expanded: seen('.extras-row'),
      table: seen('.probe-figures table'), picture: seen('.media img'),
      on_screen: box.top >= -1 && box.top < innerHeight, marked: row.classList.contains('probe-here'),
    }
    """
    return dict(page.execute_script(script, case))


def click_cell(page: Any, case: str) -> None:
    from selenium.webdriver.common.by import By

    page.find_element(By.CSS_SELECTOR, f'[data-test*="[{case}]"]').click()


def test_every_picture_loads_and_nothing_is_logged(page: Any) -> None:
    widths = page.execute_script("""
    const pictures = [...document.querySelectorAll('#results-table img')].filter(each => each.getAttribute('src'))
    return Promise.all(pictures.map(each => each.decode().then(() => [each.naturalWidth, each.naturalHeight])))
    """)
    assert len(widths) == PICTURES
    assert {tuple(size) for size in widths} == {(1200, 360)}
    assert page.get_log("browser") == []


def test_a_failing_case_is_open_with_its_table_and_picture(page: Any) -> None:
    found = row_of(page, FAILING)
    assert (found["there"], found["expanded"], found["table"], found["picture"]) == (True, True, True, True)


def test_only_one_of_row_and_cell_names_the_group(page: Any) -> None:
    """Or the other tests would not show that they are matched all the same."""
    cell = page.execute_script(f"""return document.querySelector('[data-test*="[{FAILING}]"]').dataset.test""")
    assert ("@" in row_of(page, FAILING)["name"]) != ("@" in cell)


def test_the_headings_are_those_of_the_front(page: Any) -> None:
    """pytest-html has two of its own, which stand above nothing; its table of the environment is kept, below ours."""
    found = page.execute_script("""
    const headings = [...document.querySelectorAll('h2')].map(each => each.innerText)
    const table = document.getElementById('environment')
    return [headings, document.getElementById('environment-header') === null, table.closest('details')?.id,
            table.checkVisibility(), table.rows.length > 2]
    """)
    assert found == [[], True, "probe-environment", False, True]


def test_a_picture_is_shown_whole(page: Any) -> None:
    shape = page.execute_script("""
    const picture = [...document.querySelectorAll('#results-table img')].find(each => each.checkVisibility())
    return [picture.clientWidth / picture.clientHeight, getComputedStyle(picture).objectFit]
    """)
    assert shape[0] == pytest.approx(1200 / 360, rel=0.01)
    assert shape[1] == "contain"


@pytest.mark.parametrize("case", [FAILING, PASSING, "mode_1_0-logits-cpu-int8", "mode_1_0-layer_0-cuda-int8"])
def test_a_cell_leads_to_its_row(page: Any, case: str) -> None:
    click_cell(page, case)
    found = row_of(page, case)
    assert found["expanded"]
    assert found["on_screen"]
    assert found["marked"]
    click_cell(page, case)  # again: it stays open
    assert row_of(page, case)["expanded"]


def test_a_cell_finds_its_row_behind_a_filter(page: Any) -> None:
    for result in ("failed", "passed", "skipped"):
        page.execute_script(f"document.querySelector('input[data-test-result={result}]').click()")
    assert not row_of(page, FAILING)["there"]
    click_cell(page, FAILING)
    found = row_of(page, FAILING)
    assert found["expanded"]
    assert found["on_screen"]
    assert not row_of(page, PASSING)["there"]  # what was filtered and is not needed stays so
    click_cell(page, PASSING)
    assert row_of(page, PASSING)["expanded"]


def test_a_cell_finds_its_row_after_sorting_and_hiding(page: Any) -> None:
    page.execute_script("document.querySelector('th[data-column-type=testId]').click()")
    page.execute_script("document.getElementById('hide_all_details').click()")
    assert not row_of(page, FAILING)["expanded"]
    click_cell(page, FAILING)
    found = row_of(page, FAILING)
    assert found["expanded"]
    assert found["on_screen"]


@pytest.mark.parametrize("recipe", ["mode_2_0-fp8_e4m3", "mode_1_0-int8"])
def test_the_anchor_leads_to_the_story(browser: Any, report: Path, recipe: str) -> None:
    browser.get("about:blank")
    browser.get(f"{report.as_uri()}#{recipe}")
    script = """
    const story = document.getElementById(arguments[0]), box = story.getBoundingClientRect()
    return [story.open, box.top >= -5 && box.top < innerHeight / 2, story.querySelector('pre').innerText]
    """
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 10).until(lambda browser: all(browser.execute_script(script, recipe)))  # built by scripts
    assert "--update-baselines" in browser.execute_script(script, recipe)[-1]


def test_a_link_within_the_report_opens_a_closed_story(page: Any) -> None:
    is_open = "return document.getElementById('mode_2_0-fp8_e4m3').open"
    page.execute_script("document.getElementById('mode_2_0-fp8_e4m3').open = false")
    page.execute_script("""document.querySelector('.probe-recipes a[href="#mode_2_0-fp8_e4m3"]').click()""")
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(page, 5).until(lambda page: page.execute_script(is_open))


def test_hostile_names_are_inert(page: Any) -> None:
    page.execute_script("document.getElementById('show_all_details').click()")
    page.execute_script("document.querySelectorAll('details').forEach(each => { each.open = true })")
    page.execute_script(
        "[...document.querySelectorAll('[data-test]')].find(e => e.dataset.test.includes('nasty')).click()"
    )
    found = page.execute_script("return [document.title, document.querySelectorAll('[onerror]').length]")
    assert found == ["report.html", 0]
    assert page.execute_script("return document.body.innerText").count("<img src=x") > 5
    assert nasty().message.split()[0] in page.execute_script("return document.body.innerText")
    assert page.get_log("browser") == []


def test_nothing_sticks_out_of_the_window(page: Any) -> None:
    wide = page.execute_script("return document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wide <= 0


def test_without_a_browser_it_skips_but_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium chromium-driver"):
        find_browser()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="no browser to open the report in"):
        find_browser()


def test_500_cases_with_60_failing_stay_below_10_megabytes(tmp_path: Path) -> None:
    modes = [f"mode_{number}" for number in range(25)]
    faults = {
        f"mode_{number}-{format}": 0 for number in (3, 9, 17) for format in ("int8", "fp8_e4m3", "fp6_e3m2", "fp4_e2m1")
    }
    made = make_report(tmp_path, f"examples.gate(modes={modes!r}, faults={faults!r})")
    text = made.read_text(encoding="utf-8")
    assert text.count("data:image/png;base64,") == 60 + 90
    assert len(text.encode()) < 10e6
