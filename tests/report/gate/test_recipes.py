"""Modes that are equal by definition are one row, as long as they passed and gave the same."""

from dataclasses import replace

from probe.gate.cases import Outcome
from probe.report.gate.page import front
from probe.report.gate.recipes import heat_maps, run_groups, runs
from probe.report.gate.summary import markdown
from tests.report.gate.examples import ENVIRONMENT, recipe

EQUALS = {"mode_2_2": "mode_2_1", "mode_2_3": "mode_2_1", "mode_2_0": "mode_0"}


def outcomes(**changed: dict[str, object]) -> list[Outcome]:
    """Five modes, of which 2-1, 2-2 and 2-3 are equal by definition, and 0 and 2-0."""
    found = []
    for mode in ("mode_0", "mode_2_0", "mode_2_1", "mode_2_2", "mode_2_3", "mode_2_4"):
        options = {"scale": 3.0 if mode in ("mode_0", "mode_2_0") else 1.0, **changed.get(mode, {})}
        found += [replace(one, equals=EQUALS.get(mode, "")) for one in recipe(mode, "int8", **options)]  # type: ignore[arg-type]
    return found


def labels(given: list[Outcome]) -> list[str]:
    (heat,) = heat_maps(given)
    return [label for label, _ in heat.rows]


def test_equal_modes_are_one_row_with_all_names_and_modes_that_only_agree_are_not() -> None:
    given = outcomes()
    assert labels(given) == ["mode_0 = mode_2_0", "mode_2_1 = mode_2_2 = mode_2_3", "mode_2_4"]
    (heat,) = heat_maps(given)
    assert heat.cases == len(given), "every case counts"
    assert [group.recipes for group in run_groups(runs(given))][1] == "mode_2_1-int8 = mode_2_2-int8 = mode_2_3-int8"


def test_equal_modes_that_differ_or_fail_stay_apart() -> None:
    assert labels(outcomes(mode_2_2={"scale": 1.01})) == [
        *("mode_0 = mode_2_0", "mode_2_1 = mode_2_3", "mode_2_2", "mode_2_4")
    ]
    assert labels(outcomes(mode_2_1={"faulty": 1})) == [
        *("mode_0 = mode_2_0", "mode_2_1", "mode_2_2 = mode_2_3", "mode_2_4")
    ]


def test_devices_and_formats_are_not_mixed() -> None:
    given = [
        replace(one, equals=EQUALS.get(mode, ""))
        for mode, device in (("mode_2_1", "cpu"), ("mode_2_2", "cuda"))
        for one in recipe(mode, "int8", device=device)
    ]
    assert labels(given) == ["mode_2_1 cpu", "mode_2_2 cuda"]


def test_the_page_and_the_comment_have_one_row() -> None:
    page = front(outcomes(), environment=ENVIRONMENT, baseline_environment=None)
    assert "mode_2_1 = mode_2_2 = mode_2_3" in page
    assert "mode_0-int8 = mode_2_0-int8" in page
    text = markdown(outcomes(), environment=ENVIRONMENT, baseline_environment=None, exit_status=0)
    assert "mode&#95;2&#95;1 = mode&#95;2&#95;2" in text


def test_the_page_and_the_comment_say_how_much_is_on_a_grid_once_for_all_recipes_that_share_it() -> None:
    lines = {"int8": "weights on a grid: 100.0 % (9 of 9)", "fp8_e4m3": "weights on a grid: 44.4 % (4 of 9)"}
    given = [
        replace(one, weights=line)
        for format, line in lines.items()
        for mode in ("mode_0", "mode_2_4")
        for one in recipe(mode, format)
    ]
    page = front(given, environment=ENVIRONMENT, baseline_environment=None)
    text = markdown(given, environment=ENVIRONMENT, baseline_environment=None, exit_status=0)
    for line in lines.values():
        assert page.count(line) == 1
        assert text.count(line.replace("(", "&#40;").replace(")", "&#41;")) == 1
    assert "tiny-mamba: mode_0-int8, mode_2_4-int8: weights on a grid: 100.0 %" in page
