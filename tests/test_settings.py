"""Settings with a check for every key: what is unknown or wrong is refused with what was meant or expected."""

from dataclasses import dataclass
from typing import Any

import pytest

from probe.settings import (
    ConfigurationError,
    key,
    key_hint,
    keys_of,
    one_of,
    positive,
    share,
    some_of,
    whole,
    with_value,
    with_values,
    word,
    word_or_none,
    yes_or_no,
)


@dataclass(frozen=True)
class Text:
    """A section."""

    source: str = key("builtin", word)
    samples: int = key(8, whole(1))


@dataclass(frozen=True)
class Tool:
    """Settings with a section and a key beside it."""

    batch_size: int = key(4, whole(1))
    data: Text = Text()


def test_values_are_set_key_by_key_and_what_is_not_named_stays() -> None:
    given = {"batch-size": 2, "data": {"samples": 3}}
    assert with_values(Tool(), given, where="a.toml") == Tool(2, Text("builtin", 3))
    assert with_values(Tool(2), None, where="a.yaml") == Tool(2), "an empty file"
    assert with_value(Tool(), ("data", "source"), "other", where="--data.source") == Tool(4, Text("other"))
    assert dict(keys_of(Tool())) == {"batch_size": 4, "data.source": "builtin", "data.samples": 8}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bachsize": 2}, "a.toml: unknown key 'bachsize'. Did you mean 'batch_size'? Known: batch_size, data."),
        ({"data": {"sampels": 2}}, "a.toml: unknown key 'data.sampels'. Did you mean 'data.samples'? Known:"),
        ({"samples": 2}, "a.toml: unknown key 'samples'. Did you mean 'data.samples'?"),  # of another section
        ({"zzz": 2}, "a.toml: unknown key 'zzz'. Known: batch_size, data."),
        ({"data": 3}, "a.toml: data is 3; expected a table of source, samples."),
        (3, "a.toml is 3; expected a table of batch_size, data."),
        ({"data": {"samples": 0}}, "a.toml: data.samples is 0; expected a whole number, 1 or more."),
    ],
)
def test_what_is_unknown_or_wrong_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        with_values(Tool(), given, where="a.toml")
    assert message in str(caught.value)


def test_where_keys_are_too_many_to_list_the_message_says_where_they_are() -> None:
    assert key_hint("zzz", Tool(), see="All keys: probe keys") == " Sections: batch_size, data. All keys: probe keys"


@pytest.mark.parametrize(
    ("check", "good", "bad"),
    [
        (whole(0), [0, 7], [-1, True, 1.0, "1"]),
        (positive, [1, 0.5, "1e-3"], [0, -1, True, float("inf"), "many"]),
        (share, [1, 0.9995], [0, 1.5, True, "1"]),
        (yes_or_no, [True, False], [1, "yes"]),
        (word, ["a"], ["", " ", 3, None]),
        (word_or_none, ["a", None], ["", 3]),
        (one_of(None, -1), [None, -1], [0, True, "None"]),
        (some_of("a", "b"), ["a", ["a", "b"]], [[], ["c"], 3]),
    ],
)
def test_checks(check: Any, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        check(value)
    for value in bad:
        with pytest.raises(ValueError, match=r"."):
            check(value)
    assert some_of("a", "b")(["b", "a", "b"]) == ("b", "a")
