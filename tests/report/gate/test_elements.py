"""The worst elements of a case: which they are, what they were, and what is said where none is wrong."""

import math
from dataclasses import replace

from probe.gate.cases import Case, Points
from probe.report.gate.elements import MOST_ROWS, worst_elements
from probe.report.gate.page import figure_table
from tests.report.gate.examples import failing, layer, logits, recipe

CASE = Case("mode_2_1", "", "cpu", "int8")


def given(output: list[float], golden: list[float] | None = None) -> Points:
    """Elements of sequences of 3 tokens with 4 channels, at places 5, 15, 25, ...; the reference is 1 everywhere."""
    places = [5 + 10 * number for number in range(len(output))]
    return Points([1.0] * len(output), output, golden or (), places, (3, 4))


def test_the_elements_furthest_from_their_golden_values_come_first() -> None:
    nothing = math.nan
    points = given([9.0, 1.5, 1.25, 1.0], [nothing, 1.0, 1.5, 1.0])
    table = worst_elements(failing("drift", points=points))
    assert table is not None
    assert table.title == "The largest differences of 3 sampled golden values:"
    assert table.columns == ("[sequence, token, channel]", "float", "baseline", "now", "now - baseline")
    assert table.rows[0] == ("[1, 0, 3]", "1", "1.0000", "1.5000", "+5.00e-01")
    assert table.rows[1] == ("[2, 0, 1]", "1.0000", "1.5000", "1.2500", "-2.50e-01")
    assert len(table.rows) == 3


def test_without_golden_values_the_float_model_is_what_they_are_compared_with() -> None:
    points = given([1.0, 1.5, 0.25, math.nan])
    table = worst_elements(failing("not float", points=points, case=replace(CASE, layer="head")))
    assert table is not None
    assert table.title == "The largest differences from the float model of 4 sampled values:"
    assert [row[0] for row in table.rows] == ["[2, 2, 3]", "[2, 0, 1]", "[1, 0, 3]", "[0, 1, 1]"]
    assert table.rows[0] == ("[2, 2, 3]", "1", "nan", "+nan")
    assert table.rows[1][1:] == ("1.0000", "0.25000", "-7.50e-01")


def test_a_large_case_has_few_rows() -> None:
    table = worst_elements(layer(0, CASE, own=2.0))
    assert table is not None
    assert len(table.rows) == MOST_ROWS


def test_the_last_axis_of_logits_is_the_token_that_is_predicted() -> None:
    table = worst_elements(replace(logits(CASE), points=given([1.0, 1.5])))
    assert table is not None
    assert table.columns[0] == "[sequence, token, token id]"


def test_what_agrees_is_said() -> None:
    table = worst_elements(failing("drift", points=given([2.0, 3.0], [2.0, 3.0])))
    assert table is not None
    assert table.title == "Given the reference's input, all 2 sampled golden values are as stored."
    table = worst_elements(failing("not applied", points=given([1.0, 1.0])))
    assert table is not None
    assert table.title == "All 2 sampled values equal those of the float model."
    assert worst_elements(failing("missing")) is None


def test_a_failing_case_has_the_table_and_a_passing_one_does_not() -> None:
    failed, passed = recipe(faulty=1)[1], recipe()[1]
    assert "largest differences of 40 sampled golden values" in figure_table(failed)
    assert "golden values" not in figure_table(passed)
