import math
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from probe.gate.cases import Case, Figure, Outcome
from probe.report.gate.page import SHADES, figure_table, front, name_cell, title
from probe.report.gate.recipes import cell_text, heat_maps
from tests.report.gate.examples import ENVIRONMENT, NASTY, OLDER, beside, failing, gate, layer, nasty, recipe


class Reader(HTMLParser):
    """The tags with their attributes, and the text outside of style and script."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside not in ("style", "script"):
            self.texts.append(data)

    def all(self, tag: str, **wanted: str) -> list[dict[str, str | None]]:
        wanted = {key.rstrip("_").replace("_", "-"): value for key, value in wanted.items()}
        return [found for name, found in self.tags if name == tag and wanted.items() <= found.items()]

    @property
    def text(self) -> str:
        return "\n".join(self.texts)


def html_of(outcomes: list[Outcome]) -> str:
    return front(outcomes, environment=ENVIRONMENT, baseline_environment=OLDER)


def read(outcomes: list[Outcome]) -> Reader:
    return Reader(html_of(outcomes))


def test_the_front_shows_totals_stories_maps_and_recipes() -> None:
    page = read(gate())
    assert "182 passed" in page.text
    assert "8 drift" in page.text
    assert [found["id"] for found in page.all("details", class_="probe-story")] == [
        "mode_2_1-fp8_e4m3",
        "mode_4_0-int8",
    ]
    assert "torch 2.12.1 -> 2.13.0" in page.text
    assert len(page.all("table", class_="probe-heat")) == 5
    assert "float modes" in page.text
    assert "the story is" not in page.text
    for name in ("excellent", "good", "poor", "KL of logits", "3.81e-03"):
        assert name in page.text


def test_a_cell_leads_to_its_test_and_tells_its_figures() -> None:
    page = read(gate())
    node = "test_gate.py::test_matches_baseline[mode_2_1-layer_0-cpu-fp8_e4m3]"
    assert page.all("a", data_test=node, data_status="failed")
    titles = [found["title"] or "" for found in page.all("td") if "bad" in (found.get("class") or "")]
    assert len(titles) == 8
    assert "mode_2_1-layer_0-cpu-fp8_e4m3\ndrift\n" in titles[0]
    assert "injected.mse 1.39e-04 → 3.01e-04" in titles[0]


def test_nothing_comes_from_elsewhere() -> None:
    html = html_of(gate())
    assert not re.search(r"https?:|//cdn|@import|url\(", html)
    assert not Reader(html).all("link")


def test_hostile_names_stay_text() -> None:
    table = figure_table(nasty())
    for html in (front([nasty()], environment={NASTY: NASTY}, baseline_environment={NASTY: "x"}), table):
        page = Reader(html)
        assert not page.all("img")
        assert len(page.all("script")) <= 1  # its own
        assert not [found for _, found in page.tags if any(key.startswith("on") for key in found)]
        assert "<script>document.title" not in html
    assert "<script>document.title='owned'</script>" in Reader(table).text
    assert not Reader(name_cell(nasty().nodeid)).all("img")


def test_two_devices_of_one_recipe_share_an_anchor() -> None:
    found = [*recipe(faulty=0), *recipe(faulty=1, device="cuda"), *recipe(faulty=0, model="other")]
    page = read(found)
    assert len(page.all("details", class_="probe-story")) == 1
    assert len(page.all("pre")) == 3
    assert "mode_2_1-layer_1-cuda-fp8_e4m3 drifted from its baseline" in page.text
    assert "mode_2_1 cuda" in page.text
    assert "other, fp8_e4m3" in page.text


@pytest.mark.parametrize(
    "outcomes", [[], recipe(), [failing("obsolete")], [failing(None, status="skipped", nodeid="")]]
)
def test_little_is_shown_too(outcomes: list[Outcome]) -> None:
    page = read(outcomes)
    assert page.text
    assert bool(page.all("pre")) == any(outcome.status == "failed" for outcome in outcomes)


def test_the_environment_is_noted_only_where_something_failed() -> None:
    assert "is not that of the baselines" not in read(recipe()).text
    assert "is not that of the baselines" in read(recipe(faulty=0)).text


def test_a_heat_map_has_every_mode_and_layer_once() -> None:
    maps = heat_maps(gate(layers=12))
    assert [heat.title for heat in maps] == ["fp4_e2m1", "fp6_e3m2", "fp8_e4m3", "int8", "float modes"]
    assert maps[0].layers == (*(f"layer_{n}" for n in range(12)), "logits")
    assert [label for label, _ in maps[0].rows] == sorted(label for label, _ in maps[0].rows)
    assert all(cell for _, row in maps[0].rows for cell in row)


def test_what_the_matrix_lacks_is_grey_and_of_two_the_failing_one_is_shown() -> None:
    short, long = recipe("a", layers=2, whole=False), recipe("b", layers=3, whole=False)
    twice = replace(short[0], status="failed", verdict="drift")
    given = [*short, twice, *long, short[0]]
    cells = dict(heat_maps(given)[0].rows)["a"]
    assert cells[2] is None
    assert cells[0] is twice
    assert 'class="off" title="not in the matrix"' in html_of(given)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (layer(0, Case("m", "", "cpu")), "2e-4"),
        (failing("not finite", figures={"propagated.mse": Figure(math.nan)}), "nan"),
        (failing("missing"), "?"),
        (failing(None, status="skipped"), "skip"),
        (failing("not applied", figures={"propagated.mse": Figure(0.0)}), "0"),
        (failing("drift", figures={"injected.mse": Figure(3e-3)}), "3e-3"),
        (failing(None, case=Case("m", "decode", "cpu")), "?"),
        (
            failing(
                "changed values",
                case=Case("m", "ragged", "cpu"),
                figures={"relation.layer_0": Figure(0.0), "distance.layer_0": Figure(0.2)},
            ),
            "2e-1",
        ),
    ],
)
def test_a_cell_is_one_digit_or_a_reason(outcome: Outcome, text: str) -> None:
    assert cell_text(outcome) == text
    assert f">{text}</a>" in html_of([outcome]).replace("✗ ", "")


def luminance(colour: str) -> float:
    channels = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in channels]
    return sum(part * x for part, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_text_is_read_on_every_shade_and_more_error_is_darker() -> None:
    rules = re.findall(r"\.s(\d+)\{background:(#\w{6});color:(#\w{3})\}", html_of([]))
    assert [int(shade) for shade, _, _ in rules] == list(range(SHADES))
    lights = [luminance(background) for _, background, _ in rules]
    assert lights == sorted(lights, reverse=True)
    assert (rules[0][1], rules[-1][1]) == ("#ffffd9", "#081d58"), "the ends of ColorBrewer's YlGnBu"
    for (_, _, text), light in zip(rules, lights, strict=True):
        own = luminance("#" + "".join(2 * c for c in text[1:]))
        assert (max(own, light) + 0.05) / (min(own, light) + 0.05) >= 4.5


def test_the_table_has_what_moved_first() -> None:
    table = figure_table(recipe(faulty=0)[1])
    rows = re.findall(r"<tr( class=moved)?><td>([\w.]+)", table)
    assert rows[0] == (" class=moved", "propagated.mse")
    assert [moved for moved, _ in rows] == sorted((moved for moved, _ in rows), reverse=True)
    assert len(rows) == 10
    assert "<td>4.02e-04<td>7.79e-04<td>8.0e-06<td>worse" in table


def test_the_table_says_why_a_worse_figure_was_accepted_and_that_there_are_none() -> None:
    figures = {"injected.mse": Figure(2e-3, 1e-3, 1e-5, direction="worse", reason="new <scan>")}
    assert "worse (accepted: new &lt;scan&gt;)" in figure_table(failing("drift", figures=figures))
    assert "<td><td>0.50000<td><td>" in figure_table(failing("missing", figures={"x": Figure(0.5)}))
    assert "No figures: the case was not measured." in figure_table(failing("missing"))


def headers(html: str) -> list[tuple[str, int, str]]:
    """What stands above the columns: words, columns, tooltip."""
    found = re.findall(r'<th colspan=(\d+) class="shown[^"]*" title="([^"]*)">([^<\n]*)', html)
    return [(words, int(count), sentence) for count, sentence, words in found]


def test_every_column_says_what_its_figure_is() -> None:
    given = [*recipe(), *beside(Case("mode_2_1", "", "cpu", "fp8_e4m3"))]
    html = html_of(given)
    words = headers(html)
    assert [(what, count) for what, count, _ in words] == [
        ("propagated mse", 4), ("mse", 3), ("from prefill or baseline", 4), ("KL", 1)
    ]  # fmt: skip
    titles = {found["title"] for found in Reader(html).all("th") if found.get("title")}
    for label, sentence in {
        "layer_0": "mse against the float layer, inside the whole quantized model",
        "head": "mse against the float one, given the reference's input",
        "padded": "the largest difference of a layer from the prefill or from the baseline, "
        "in units of the layer's own error",
        "logits": "KL divergence of the logits from those of the float model",
    }.items():
        assert f"{label}: {sentence}" in titles
    assert "propagated mse of layers" in Reader(html).text


def test_the_header_names_the_figure_that_the_cells_have() -> None:
    only_injected = [failing("drift", figures={"injected.mse": Figure(3e-3)})]
    assert [words for words, _, _ in headers(html_of(only_injected))] == ["injected mse"]
    assert "injected mse of layers" in Reader(html_of(only_injected)).text
    of_scaling = [failing("drift", figures={"scaling.mse": Figure(3e-3)})]
    assert [words for words, _, _ in headers(html_of(of_scaling))] == ["mse of the scale"]
    unmeasured = [failing("missing", case=Case("m", name, "cpu")) for name in ("layer_0", "head", "decode", "logits")]
    assert [words for words, _, _ in headers(html_of(unmeasured))] == [
        "propagated mse", "mse", "from prefill or baseline", "KL"
    ]  # fmt: skip


def test_the_title_says_how_it_went() -> None:
    assert title(recipe(), problems=0) == "probe: 5 cases passed (tiny-mamba)"
    assert title([*recipe(faulty=1), *recipe(model="b")], problems=1) == "probe: 4 of 10 cases failed (tiny-mamba, b)"
    assert title(recipe(), problems=1) == "probe: 5 cases judged, 1 problem (tiny-mamba)"
    assert "\n" not in title([nasty()], problems=0)


def test_what_was_not_run_and_a_synthetic_input_are_named() -> None:
    told = "the input is synthetic; paths not run: decode"
    shown = front(
        [replace(one, not_run=told) for one in gate()], environment=ENVIRONMENT, baseline_environment=ENVIRONMENT
    )
    assert told in shown
    assert told not in front(gate(), environment=ENVIRONMENT, baseline_environment=ENVIRONMENT)
