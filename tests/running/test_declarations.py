"""Declared modes as TOML: patterns, tables with checked keys, and a table that is added to a file."""

import tomllib
from pathlib import Path

import pytest

from probe.running.declarations import (
    DeclaredMode,
    declaration_text,
    name_matcher,
    read_declarations,
    short_patterns,
    with_declaration,
)
from probe.running.modes import MODES, declare_modes, find_mode, register_mode, unregister_mode
from probe.settings import ConfigurationError

MIXED = DeclaredMode("linear_wa", ("layers.3",))


@pytest.mark.parametrize(
    ("pattern", "matching", "other"),
    [
        ("layers.3", ["backbone.layers.3", "backbone.layers.3.mixer.in_proj"], ["layers.30", "layers.13", "xlayers.3"]),
        ("layers.3.*", ["backbone.layers.3.mixer", "layers.3.mlp.up"], ["backbone.layers.3", "layers.30.mlp"]),
        ("layers.*.mlp", ["model.layers.11.mlp", "layers.0.mlp.up"], ["layers.0.self_attn.mlp2", "layers.0.a.mlp"]),
        ("layers.[13]", ["layers.1", "layers.3.mlp"], ["layers.2", "layers.13"]),
        ("layers.[!13]", ["layers.2"], ["layers.1", "layers.3"]),
        ("*_proj", ["a.q_proj", "a.q_proj.weight"], ["a.q_proj2", "a.proj"]),
        ("layers.1?", ["layers.10", "layers.19.mlp"], ["layers.1", "layers.1.mlp"]),
        ("mlp+up", ["a.mlp+up"], ["a.mlpp+up", "a.mlppup"]),
    ],
)
def test_a_pattern_is_a_path_in_the_name(pattern: str, matching: list[str], other: list[str]) -> None:
    matches = name_matcher([pattern])
    assert [name for name in matching if not matches(name)] == []
    assert [name for name in other if matches(name)] == []


def written(folder: Path, text: str) -> Path:
    file = folder / "mixed.toml"
    file.write_text(text)
    return file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.probe.modes.mixed]\nbas = 'linear_w'\n", r"unknown key 'bas'. Did you mean 'base'? Known: base, keep"),
        ("[tool.probe.modes.mixed]\nbase = 'linear_w'\n", "has no keep_float. Expected the modules that stay float"),
        ("[tool.probe.modes.mixed]\nkeep_float = ['a']\n", "has no base. Expected the mode that it is otherwise"),
        ("[tool.probe.modes.mixed]\nbase = 'linear_w'\nkeep_float = []\n", "keep_float is []; expected a list of"),
        ("[tool.probe.modes.mixed]\nbase = 'linear_w'\nkeep_float = 'a'\n", "keep_float is 'a'; expected a list of"),
        ("[tool.probe.modes.mixed]\nbase = 'linear_w'\nkeep_float = ['']\n", "expected a list of module names"),
        ("[tool.probe.modes.mixed]\nbase = 3\nkeep_float = ['a']\n", "base is 3; expected a text"),
        ("[tool.probe.modes.'a b']\nbase = 'linear_w'\nkeep_float = ['a']\n", "cannot be part of a test id"),
        ("[tool.probe.modes]\nmatrx = ['0']\n", "expected a table with base and keep_float. Did you mean 'matrix'?"),
        ("[tool.probe]\nmodes = ['0']\n", "declares no mode. Expected a table [tool.probe.modes.NAME]"),
        ("[tool.probe.modes\n", "cannot be read as TOML"),
    ],
)
def test_a_wrong_table_is_one_message_with_the_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        read_declarations(written(tmp_path, text))
    assert message in str(caught.value)
    assert "mixed.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nowhere\.toml cannot be read as TOML \(No such file"):
        read_declarations(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"mixed": DeclaredMode("linear_wx", ("a",))}, "unknown mode 'linear_wx'. Did you mean 'linear_w"),
        ({"mixed": DeclaredMode("bf16", ("a",))}, "base is bf16, a float mode: there is nothing to keep float in it"),
        ({"linear_w": MIXED}, "there is a mode 'linear_w' already"),
        ({"2_1": MIXED}, "there is a mode '2_1' already"),
        ({"a": DeclaredMode("b", ("x",)), "b": DeclaredMode("a", ("x",))}, "base is 'a', which leads back to 'b'"),
    ],
)
def test_a_declaration_that_cannot_be_is_one_message(declared: dict[str, DeclaredMode], message: str) -> None:
    before = dict(MODES)
    with pytest.raises(ConfigurationError) as caught:
        declare_modes(declared, where="mixed.toml")
    assert message in str(caught.value)
    assert "of mixed.toml" in str(caught.value)
    assert before == MODES


def test_a_declared_mode_is_its_base_with_modules_kept_float() -> None:
    declare_modes({"both": DeclaredMode("mixed", ("layers.1",)), "mixed": MIXED}, where="mixed.toml")
    try:
        mode = find_mode("both")
        assert (mode.base, mode.kind, mode.inputs) == ("linear_wa", "linear", True)
        assert mode.keep_float == ("layers.3", "layers.1")
        declare_modes({"mixed": MIXED}, where="another.toml")  # the same again is no other mode
        with pytest.raises(ConfigurationError, match="there is a mode 'mixed' already"):
            declare_modes({"mixed": DeclaredMode("linear_wa", ("layers.2",))}, where="another.toml")
    finally:
        unregister_mode("mixed")
        unregister_mode("both")
    assert "both" not in MODES


@pytest.mark.parametrize("patterns", [[], "layers.3", [3], [""], ["a\n"]], ids=str)
def test_register_mode_checks_what_it_keeps_float(patterns: list[str]) -> None:
    with pytest.raises(ValueError, match=r"keep_float of mode 'abc' is .*; expected a list of module names"):
        register_mode("abc", lambda model, format, calibration: model, keep_float=patterns)


OTHERS = """# ours
[project]
name = "net"

[tool.probe]
samples = 4

[tool.probe.modes.first]
base = "2-1"
keep_float = [
    "layers.0",
]  # a comment

[[tool.mypy.overrides]]
module = "a"
"""


def test_a_table_is_added_and_read_again_and_the_rest_of_the_file_stays(tmp_path: Path) -> None:
    file = written(tmp_path, OTHERS)
    text = with_declaration(file, "mixed", MIXED)
    assert text.startswith(OTHERS)
    file.write_text(text)
    assert read_declarations(file) == {"first": DeclaredMode("2-1", ("layers.0",)), "mixed": MIXED}
    assert with_declaration(file, "mixed", MIXED) == text, "it is there already"


def test_another_mode_of_that_name_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"mixed\.toml has another mode 'first' already\. .*--mode-name"):
        with_declaration(written(tmp_path, OTHERS), "first", MIXED)


@pytest.mark.parametrize("declared", [MIXED, None], ids=["after the work", "before it"])
@pytest.mark.parametrize(
    "text",
    [
        "[tool.probe]\nmodes = ['linear_w']\n",
        "[tool]\nprobe = { modes = { first = { base = '0', keep_float = ['a'] } } }\n",
    ],
    ids=["a list of modes", "an inline table"],
)
def test_a_file_that_cannot_take_a_table_is_refused(tmp_path: Path, text: str, declared: DeclaredMode | None) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no table \[tool\.probe\.modes\.mixed\] can be added to .*mixed\.toml"
    ):
        with_declaration(written(tmp_path, text), "mixed", declared)


def test_a_broken_file_is_refused_before_the_work(tmp_path: Path) -> None:
    assert with_declaration(tmp_path / "new.toml", "mixed", MIXED) == declaration_text("mixed", MIXED)
    with pytest.raises(ConfigurationError, match=r"mixed\.toml cannot be read as TOML"):
        with_declaration(written(tmp_path, "a = ["), "mixed")


def test_a_long_list_has_a_line_for_each_pattern() -> None:
    many = DeclaredMode("2-1", tuple(f"backbone.layers.{index}" for index in range(12)))
    text = declaration_text("mixed", many)
    assert max(map(len, text.splitlines())) < 100
    assert tomllib.loads(text)["tool"]["probe"]["modes"]["mixed"] == {"base": "2-1", "keep_float": [*many.keep_float]}


def test_names_of_all_layers_become_one_pattern_only_if_it_is_exact() -> None:
    every = [f"net.layers.{layer}.{part}" for layer in range(3) for part in ("up", "down", "down.input")]
    down = [name for name in every if name.endswith("down")]
    assert short_patterns(down, every) == ("net.layers.*.down",)
    assert short_patterns(down[:2], every) == tuple(down[:2])
    assert short_patterns(["net.layers.1.up"], every) == ("net.layers.1.up",)
