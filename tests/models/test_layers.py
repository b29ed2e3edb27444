"""Names chosen by number, label, position or expression, as `select` and the comparisons of recordings do."""

import pytest

from probe.models.layers import match_layers

LAYERS = {"layer_0": "h.0", "layer_2": "h.2", "layer_10": "h.10"}
NAMES = ["h", "h.0", "h.0.mlp", "h.2", "h.10", "norm"]


@pytest.mark.parametrize(
    ("wanted", "whole", "found"),
    [
        ("all", False, ["h.0", "h.2", "h.10"]),
        ("first", False, ["h.0"]),
        ("last", True, ["h.10"]),
        (2, False, ["h.2"]),
        ("layer_10", True, ["h.10"]),
        ("1", False, []),  # a layer that is not there, never an expression
        ("layer_1", True, []),
        (r"h\.0", False, ["h.0", "h.0.mlp"]),  # anywhere in the name
        (r"h\.0", True, ["h.0"]),  # all of the name
        ("h.0.mlp", True, ["h.0.mlp"]),
        (r".*\.mlp|norm", True, ["h.0.mlp", "norm"]),
        ("zzz", False, []),
    ],
)
def test_names_are_matched(wanted: str | int, whole: bool, found: list[str]) -> None:
    assert match_layers(wanted, NAMES, LAYERS, whole=whole) == found


def test_without_layers_all_is_an_expression() -> None:
    assert match_layers("all", ["all", "wall"], {}) == ["all", "wall"]


def test_what_is_no_expression_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^layer 'a\(' is not a regular expression .* Escape special characters"):
        match_layers("a(", NAMES, LAYERS)
