"""JSON from elsewhere: every value is what it should be, or the message names its key."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any

import pytest

from probe.files.checked_json import Node, document, finite, repeated
from probe.files.defects import DefectError


def node(value: Any) -> Node:
    return Node("a.b", value)


def test_a_sound_document_is_walked() -> None:
    whole = document(
        b'{"version": 2, "names": ["x", null], "size": {"count": 3, "share": 0.5, "odd": true}}', version=2
    )
    facts = whole.members("version", "names", "size")
    assert [one.or_null(Node.text) for one in facts["names"].entries()] == ["x", None]
    size = facts["size"].members()
    assert (size["count"].count(), size["share"].number(), size["odd"].flag()) == (3, 0.5, True)
    assert size["count"].key == "size.count"
    assert facts["names"].entries()[1].key == "names[1]"
    assert facts["names"].entries()[0].one_of(["x", "y"]) == "x"
    assert facts["names"].entries()[0].text(re.compile("[xyz]")) == "x"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' is there twice"),
        (b'{"x": [{"a": 1, "a": 2}]}', "the key 'a' is there twice"),
        (b'{"a": NaN}', "holds NaN, which is never stored"),
        (b'{"a": -Infinity}', "holds -Infinity, which is never stored"),
        (b"{", r"is not JSON that can be read \(Expecting"),
        (b"\xff", r"is not JSON that can be read \('utf-8' codec"),
        (b"[" * 100_000, "is not JSON that can be read"),
        (b'{"version": 3}', "version: was written by a newer probe, 3; this one reads 2"),
        (b'{"version": 0}', "version: expected a whole number, 1 or more, found 0"),
        (b'{"version": true}', "version: expected a whole number, 1 or more, found true"),
    ],
)
def test_a_document_that_cannot_be_read_says_why(data: bytes, message: str) -> None:
    with pytest.raises(DefectError, match=message):
        document(data, version=2)


def test_a_newer_version_is_a_reason_to_upgrade() -> None:
    with pytest.raises(DefectError) as problem:
        document(b'{"version": 3}', version=2)
    assert problem.value.remedy == "Upgrade probe."
    assert document(b'{"version": 1}', version=2).members()["version"].count() == 1
    assert document(b"[1]", version=2).entries()[0].count() == 1


WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    ("members", (), {"value": []}, "an object with named keys, found []"),
    ("members", (), {"value": {}}, "an object with named keys, found {}"),
    ("members", (), {"value": {"": 1}}, "an object with named keys"),
    ("members", (), {"value": {"\x1b": 1}}, "an object with named keys"),
    ("entries", (), {"value": {}}, "a list that is not empty, found {}"),
    ("entries", (), {"value": []}, "a list that is not empty, found []"),
    ("text", (), {"value": 3}, "a text, found 3"),
    ("text", (), {"value": ""}, 'a text, found ""'),
    ("text", (), {"value": "a\n"}, 'a text, found "a\\n"'),
    ("text", (re.compile("x+"), "some x"), {"value": "xy"}, 'some x, found "xy"'),
    ("one_of", (["a", "b"],), {"value": "c"}, 'one of a, b, found "c"'),
    ("one_of", (["a", "b"],), {"value": ["a"]}, 'one of a, b, found ["a"]'),
    ("count", (), {"value": 1.0}, "a whole number, 1 or more, found 1.0"),
    ("count", (), {"value": -1}, "a whole number, 1 or more, found -1"),
    ("number", (), {"value": "1"}, 'a finite number, found "1"'),
    ("number", (), {"value": math.inf}, "a finite number, found Infinity"),
    ("number", (), {"value": True}, "a finite number, found true"),
    ("flag", (), {"value": 1}, "true or false, found 1"),
    ("count", (), {"value": "x" * 99}, f'a whole number, 1 or more, found "{"x" * 56}...'),
]


@pytest.mark.parametrize(("method", "arguments", "given", "message"), WRONG)
def test_a_wrong_value_names_its_key_and_what_was_expected(
    method: str, arguments: tuple[Any, ...], given: dict[str, Any], message: str
) -> None:
    with pytest.raises(DefectError, match=re.escape(f"a.b: expected {message}")):
        getattr(node(given["value"]), method)(*arguments)


def test_keys_are_exactly_those_expected() -> None:
    with pytest.raises(DefectError, match=r"the key a\.b\.y is missing"):
        node({"x": 1}).members("x", "y")
    with pytest.raises(DefectError, match=r"the key a\.b\.z is unknown"):
        node({"x": 1, "z": 1}).members("x")
    assert node({}).members(empty=True) == {}
    assert node([]).entries(empty=True) == []


def test_a_value_that_is_nested_too_deep_can_be_named() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(DefectError, match="found something nested too deep"):
        node(deep).text()


def test_numbers_that_json_does_not_have_become_null() -> None:
    value = {"a": [1.0, math.nan, (math.inf, 2)], "b": {"c": -math.inf}, "d": "text"}
    assert finite(value) == {"a": [1.0, None, [None, 2]], "b": {"c": None}, "d": "text"}
    assert json.loads(json.dumps(finite(value), allow_nan=False))


def test_repeated_names() -> None:
    assert repeated(["b", "a", "b", "c", "a", "b"]) == ["b", "a"]


@dataclass(frozen=True)
class Example:
    name: str
    remark: str | None
    count: int
    share: float
    odd: bool


def test_an_object_is_read_as_a_dataclass_by_the_types_of_its_fields() -> None:
    value = {"name": "x", "remark": None, "count": 3, "share": 0.5, "odd": True}
    assert node(value).as_dataclass(Example) == Example("x", None, 3, 0.5, True)
    assert node(value).as_dataclass(Example, name=lambda text: text.text() * 2).name == "xx"
    with pytest.raises(DefectError, match=r"a\.b\.count: expected a whole number, 1 or more, found 0"):
        node({**value, "count": 0}).as_dataclass(Example)
    with pytest.raises(DefectError, match=r"the key a\.b\.more is unknown"):
        node({**value, "more": 1}).as_dataclass(Example)
