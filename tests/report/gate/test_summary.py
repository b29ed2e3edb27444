import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from probe.gate.cases import Case, Figure, Outcome
from probe.report.gate.summary import MOST_CHARACTERS, code, harmless, markdown, summary
from tests.report.gate.examples import ENVIRONMENT, MODES, NASTY, OLDER, beside, failing, gate, nasty, recipe

RUN: dict[str, Any] = {"environment": ENVIRONMENT, "baseline_environment": OLDER, "exit_status": 1}

PULL_REQUEST = """\
### probe: failed

**1** passed, **4** drift in 1 recipes.

The environment is not that of the baselines: torch 2.12.1 -&#62; 2.13.0.

| recipe | first layer | verdict | worst figure | tolerance | likely cause |
|---|---|---|---|---|---|
| <code>mode&#95;2&#95;1-int8</code> | <code>layer&#95;1</code> | drift &#40;4 of 5 cases&#41; \
| injected.mse 2.36e-04 → 5.12e-04 worse | 4.7e-06 \
| site conv1d.output; error mean is biased: rounding looks like floor, not nearest |

Rerun the first with: <code>pytest test&#95;gate.py -k "mode&#95;2&#95;1 and cpu-int8"</code>

<details><summary>Error by mode and layer</summary>

layers: mse against the float layer, inside the whole quantized model; \
logits: KL divergence of the logits from those of the float model.

**int8**

| layer | 0 | 1 | 2 | 3 | logits |
|---|---|---|---|---|---|
| <code>mode&#95;2&#95;1</code> | 2e-4 | **✗ 9e-4** | **✗ 1e-3** | **✗ 1e-3** | **✗ 2e-3** |


</details>
"""


def test_the_pull_request_reads_well() -> None:
    assert markdown(recipe("mode_2_1", "int8", faulty=1), **RUN) == PULL_REQUEST


def test_every_column_of_the_tables_is_explained_once() -> None:
    found = [*recipe(), *beside(Case("mode_2_1", "", "cpu", "fp8_e4m3")), *recipe("mode_0", "int8")]
    text = markdown(found, environment=ENVIRONMENT, baseline_environment=None, exit_status=0)
    for line in (
        "layers: mse against the float layer, inside the whole quantized model; ",
        "embedding, norm, head: mse against the float one, given the reference's input; ",
        "decode, batch&#95;1, ragged, padded: the largest difference of a layer from the prefill or from the baseline",
        "logits: KL divergence of the logits from those of the float model.\n",
    ):
        assert text.count(line) == 1, line
    scaled = failing("drift", figures={"scaling.mse": Figure(3e-3)}, case=Case("scaling", "w", "cpu", "int8"))
    text = markdown([*recipe(), scaled], environment=ENVIRONMENT, baseline_environment=None, exit_status=1)
    assert "layers of fp8&#95;e4m3: mse against the float layer" in text
    assert "layers of int8: mse of the tensor at the recommended scale" in text


def test_a_passing_run_is_short() -> None:
    text = markdown(recipe(), environment=ENVIRONMENT, baseline_environment=OLDER, exit_status=0)
    assert text.startswith("### probe: passed\n\n**5** passed in 1 recipes.\n\n<details>")
    assert "no case was judged" in markdown([], environment={}, baseline_environment=None, exit_status=5)
    assert "### probe: failed" in markdown([], environment={}, baseline_environment=None, exit_status=5)


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(tag)


def test_hostile_names_stay_text_and_call_nobody() -> None:
    text = markdown([nasty()], environment={NASTY: NASTY}, baseline_environment={NASTY: "x"}, exit_status=1)
    assert set(Tags(text).found) <= {"code", "details", "summary"}
    assert "`" not in text
    row = next(line for line in text.splitlines() if line.startswith("| <code>mode"))
    assert row.count("|") == 7
    outside = text.replace("@\u200b", "")
    assert all("@user" not in part.split("</code>")[-1] for part in outside.split("<code>"))


def test_every_mark_is_written_out() -> None:
    assert harmless("a|b`c`<d>*e*_f_[g](h)") == (
        "a&#124;b&#96;c&#96;&#60;d&#62;&#42;e&#42;&#95;f&#95;&#91;g&#93;&#40;h&#41;"
    )
    assert harmless("@user #12 https://x.y &amp;") == "@\u200buser &num;\u200b12 https:\u200b//x.y &#38;amp;"
    assert harmless("two\nlines\x1b") == "two lines?"
    assert code("@user") == "<code>@user</code>"
    assert len(harmless("x" * 500)) == 120


@pytest.mark.parametrize("name", ["x", NASTY * 5, "|" * 400])
def test_it_always_fits_and_says_what_is_left_out(name: str) -> None:
    found: list[Outcome] = []
    for number in range(400):
        changes: dict[str, Any] = {
            "case": Case(f"mode_{number}", "layer_0", "cpu", "int8"),
            "message": name,
            "cause": name,
        }
        found.append(replace(nasty(), **changes) if number % 2 else failing("drift", **changes))
    environment = {f"{name}{n}": name for n in range(300)}
    text = markdown(found, environment=environment, baseline_environment={"torch": "1"}, exit_status=1)
    assert len(text) < MOST_CHARACTERS
    assert "more failing recipes are left out" in text
    assert "and 293 more" in text


def test_of_too_many_tables_the_first_are_shown() -> None:
    found = []
    for outcome in recipe(layers=48, faulty=3):
        for mode in MODES:
            for format in range(40):
                found.append(replace(outcome, case=replace(outcome.case, mode=mode, format=f"format_{format}")))
    text = markdown(found, **RUN)
    assert 40_000 < len(text) < MOST_CHARACTERS
    assert "more failing recipes are left out" in text
    assert "more tables are left out" in text
    assert "**format&#95;0**" in text
    assert text.endswith("</details>\n")


def test_the_summary_is_json_without_nan_and_without_values() -> None:
    figures = {"injected.mse": Figure(math.nan, math.inf, None, moved=True, direction="worse")}
    found = [*recipe(faulty=1), failing("not finite", figures=figures, details=("one", "two"))]
    given = summary(found, **RUN)
    read = json.loads(json.dumps(given, allow_nan=False))
    assert read == given
    assert read["version"] == 1
    assert read["exit_status"] == 1
    assert read["totals"] == {"passed": 1, "not finite": 1, "drift": 4}
    assert "points" not in json.dumps(read)
    last = read["cases"][-1]
    assert last["figures"]["injected.mse"] == {
        "new": None,
        "old": None,
        "tolerance": None,
        "moved": True,
        "direction": "worse",
        "reason": "",
    }
    assert (last["id"], last["layer"]) == ("mode_2_1-layer_0-cpu-fp8_e4m3", "layer_0")
    assert last["details"] == ["one", "two"]


def test_a_recipe_of_the_summary_names_the_layers() -> None:
    found = summary(recipe(layers=6, faulty=2), **RUN)["recipes"]
    assert found == [
        {
            "model": "tiny-mamba",
            "device": "cpu",
            "mode": "mode_2_1",
            "format": "fp8_e4m3",
            "recipe": "mode_2_1-fp8_e4m3",
            "totals": {"passed": 2, "drift": 5},
            "weights": "",
            "paths_not_run": "",
            "first_failing_layer": "layer_2",
            "verdict": "drift",
            "cause": recipe(faulty=0)[0].cause,
            "own": ["layer_2"],
            "inherited": ["layer_3", "layer_4", "layer_5"],
        }
    ]


def test_the_summary_does_not_depend_on_who_was_first() -> None:
    found = gate()
    groups = sorted(found, key=lambda outcome: -len(outcome.case.recipe))
    assert summary(found, **RUN) == summary(groups, **RUN)
    assert markdown(found, **RUN) == markdown(groups, **RUN)
