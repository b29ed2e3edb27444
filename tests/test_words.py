"""Near names, natural order, shortening: what messages and pages say about names."""

import pytest

from probe.words import (
    describe_error,
    did_you_mean,
    first_few,
    format_bytes,
    look_up,
    natural_key,
    near,
    near_or_first,
    short_names,
    tail,
)

NAMES = ["evaluation", "calibration", "text"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("txt", ["text"]),
        ("CALIB", ["calibration"]),  # a beginning, in any case
        ("evalution", ["evaluation", "calibration"]),
        ("zzz", []),
        ("", []),
    ],
)
def test_only_names_that_are_really_near_are_suggested(written: str, expected: list[str]) -> None:
    assert near(written, NAMES) == expected


def test_a_beginning_comes_before_what_is_only_alike() -> None:
    assert near("layer_1", ["layer_2", "layer_12", "layer_1x"]) == ["layer_12", "layer_1x", "layer_2"]


def test_without_a_near_name_the_first_few_are_shown() -> None:
    names = [f"model.layers.{index}" for index in range(9)]
    assert near_or_first("model.layers.9", names) == "Nearest: model.layers.8, model.layers.7, model.layers.6."
    assert near_or_first("?", names).endswith("model.layers.4 and 4 more.")
    assert near_or_first("?", []) == "It has: none."


def test_a_question_only_where_there_is_something_to_ask() -> None:
    assert did_you_mean("txt", NAMES) == " Did you mean 'text'?"
    assert did_you_mean("zzz", NAMES) == ""


def test_a_table_is_looked_up_or_the_message_says_what_there_is() -> None:
    assert look_up("format", "a", {"a": 1}) == 1
    with pytest.raises(
        ValueError, match=r"^unknown format 'intt8'\. Did you mean 'int8'\? Known: int8, int4\. See x\.$"
    ):
        look_up("format", "intt8", {"int8": 1, "int4": 2}, see="See x.")


def test_an_error_on_one_line_of_bounded_length() -> None:
    assert describe_error(ValueError("two\n  lines.")) == "ValueError: two lines."
    assert describe_error(KeyError()) == "KeyError."
    assert len(describe_error(ValueError("x" * 1000))) < 320


def test_the_first_few_and_how_many_more() -> None:
    assert first_few(["a", "b"], most=2) == "a, b"
    assert first_few(["a", "b", "c"], "; ", most=2) == "a; b and 1 more"
    assert first_few([]) == ""


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 bytes"), (999, "999 bytes"), (1_234_000, "1.23 MB"), (10**16, "1e+04 TB")]
)
def test_sizes(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_numbers_sort_by_their_size() -> None:
    names = ["layer_10", "layer_2", "layer", "layer_2.b", "layer_2.a10", "layer_2.a9"]
    assert sorted(names, key=natural_key) == ["layer", "layer_2", "layer_2.a9", "layer_2.a10", "layer_2.b", "layer_10"]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["model.layers.0.mixer", "model.layers.1.mixer"], ["0", "1"]),
        (["layer_0", "layer_10"], ["0", "10"]),
        (["model.layers.0.up_proj", "model.layers.0.down_proj"], ["up_proj", "down_proj"]),
        (["one"], ["one"]),
        (["same", "same"], ["same", "same"]),
        (["a", "a.b"], ["a", "a.b"]),  # nothing would be left of the first
        ([], []),
    ],
)
def test_names_are_cut_to_what_tells_them_apart(names: list[str], short: list[str]) -> None:
    assert short_names(names) == short


def test_what_is_still_too_long_keeps_its_end() -> None:
    assert short_names(["x" * 50 + "1", "y" * 50 + "2"], most=5) == ["\u2026xxx1", "\u2026yyy2"]
    assert tail("abcdefgh", most=6, mark="...") == "...fgh"
    assert tail("abcdef", most=6) == "abcdef"


def test_the_plural_of_what_was_written_is_the_nearest() -> None:
    assert near("mode", ["model", "modes"]) == ["modes", "model"]
