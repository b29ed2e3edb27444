"""Declared modes: a mode of the table in which some modules stay float, as tables of a TOML file. Loads nothing heavy.

    [tool.probe.modes.mixed]
    base = "linear_wa"
    keep_float = ["layers.3", "layers.*.mlp.down_proj"]

A pattern is a path of module names: it matches every module whose dotted name has that path in it, and everything
inside. `*` and `?` stand for characters of one name, `[13]` for one of these.
"""

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.files.defects import DefectError, read_document
from probe.settings import ConfigurationError, key, with_values, word
from probe.words import near

#: The key of [tool.probe.modes] that is no mode: the modes of the matrix.
MATRIX = "matrix"
_WILD = {"*": "[^.]*", "?": "[^.]"}


def checked_patterns(value: Any) -> tuple[str, ...]:
    """A list of patterns, each once."""
    good = isinstance(value, list | tuple) and all(isinstance(one, str) and one.strip(". ") == one for one in value)
    if not good or not value or not all(one and one.isprintable() for one in value):
        raise ValueError('a list of module names or patterns that is not empty, such as ["layers.3"]')
    return tuple(dict.fromkeys(value))


@dataclass(frozen=True)
class DeclaredMode:
    """A mode that is `base`, but for the modules that match `keep_float`."""

    base: str = key("", word)
    keep_float: tuple[str, ...] = key((), checked_patterns)


def name_matcher(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a dotted name matches one of the patterns: has it as a path in it."""
    expressions = [_expression(pattern) for pattern in patterns]
    return lambda name: any(expression.search(name) for expression in expressions)


def _expression(pattern: str) -> re.Pattern[str]:
    text = ""
    for part in re.split(r"(\[!?[^\[\]]+\])", pattern):
        if part.startswith("[") and part.endswith("]"):
            inside = re.escape(part[1:-1].removeprefix("!")).replace(r"\-", "-")
            text += f"[{'^' if part[1] == '!' else ''}{inside}]"
        else:
            text += "".join(_WILD.get(character) or re.escape(character) for character in part)
    return re.compile(rf"(?:^|\.){text}(?:\.|$)")


def short_patterns(names: Sequence[str], every: Sequence[str]) -> tuple[str, ...]:
    """Patterns that match these names, and of `every` name nothing else that is not inside of them.

    Names that differ in one number, such as a site of all layers, become one pattern if that is exact.
    """
    numbered: dict[str, list[str]] = {}
    for name in names:
        numbered.setdefault(re.sub(r"\.\d+\.", ".*.", f".{name}.", count=1).strip("."), []).append(name)
    found: list[str] = []
    for pattern, group in numbered.items():
        wanted = name_matcher(group)
        is_exact = [one for one in every if name_matcher([pattern])(one)] == [one for one in every if wanted(one)]
        found += [pattern] if len(group) > 1 and is_exact else group
    return tuple(found)


def check_mode_name(name: str) -> None:
    """Refuse a name that cannot be part of a test id."""
    if not name or not all(part.isalnum() for part in name.replace("-", "_").split("_")):
        raise ValueError(f"mode name {name!r} cannot be part of a test id. Use letters, digits, '_' and '-'.")


def declarations_of(tables: Any, *, where: str) -> dict[str, DeclaredMode]:
    """The modes that the tables of [tool.probe.modes] declare; `where` is the file."""
    if not isinstance(tables, Mapping):
        raise ConfigurationError(f"[tool.probe.modes] of {where} is {tables!r}; expected tables by the name of a mode.")
    found = {}
    for name, table in tables.items():
        here = f"[tool.probe.modes.{name}] of {where}"
        if not isinstance(table, Mapping):
            meant = "".join(f" Did you mean {one!r}?" for one in near(name, [MATRIX], count=1))
            raise ConfigurationError(f"{here} is {table!r}; expected a table with base and keep_float.{meant}")
        try:
            check_mode_name(name)
        except ValueError as problem:
            raise ConfigurationError(f"{here}: {problem}") from None
        declared = with_values(DeclaredMode(), table, where=here)
        if not declared.base:
            raise ConfigurationError(f'{here} has no base. Expected the mode that it is otherwise: base = "linear_wa"')
        if not declared.keep_float:
            raise ConfigurationError(
                f'{here} has no keep_float. Expected the modules that stay float: keep_float = ["layers.3"]'
            )
        found[name] = declared
    return found


def read_declarations(file: Path) -> dict[str, DeclaredMode]:
    """The modes that a TOML file declares; one that declares none is refused."""
    try:
        document = tomllib.loads(read_document(file).decode("utf-8"))
    except (ValueError, RecursionError, OSError, DefectError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ConfigurationError(f"{file} cannot be read as TOML ({why}). Expected [tool.probe.modes.NAME].") from None
    tables = mode_tables(document)
    declared = declarations_of(tables, where=str(file)) if tables else {}
    if not declared:
        raise ConfigurationError(f"{file} declares no mode. Expected a table [tool.probe.modes.NAME].")
    return declared


def declares_modes(file: Path) -> bool:
    """Whether a file has a table of a mode, without reading more than the text."""
    try:
        return "[tool.probe.modes." in file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False


def mode_tables(document: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of [tool.probe.modes] in a TOML document, but for the matrix; none where `modes` is a list."""
    tool = document.get("tool")
    settings = tool.get("probe") if isinstance(tool, Mapping) else None
    modes = settings.get("modes") if isinstance(settings, Mapping) else None
    return {name: table for name, table in modes.items() if name != MATRIX} if isinstance(modes, Mapping) else {}


def declaration_text(name: str, declared: DeclaredMode) -> str:
    """The table of a mode as TOML, ready to paste."""
    patterns = [json.dumps(pattern, ensure_ascii=False) for pattern in declared.keep_float]
    one_line = f"keep_float = [{', '.join(patterns)}]"
    many = "\n".join(["keep_float = [", *(f"    {pattern}," for pattern in patterns), "]"])
    base = f"base = {json.dumps(declared.base, ensure_ascii=False)}"
    return f"[tool.probe.modes.{name}]\n{base}\n{one_line if len(one_line) <= 100 else many}\n"


def with_declaration(file: Path, name: str, declared: DeclaredMode | None = None) -> str:
    """The text of a TOML file, which may not exist, with a mode added at its end; nothing of the file is changed.

    Without `declared`, only whether a mode of that name could be added. Another mode of that name is refused.
    """
    try:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        there = mode_tables(tomllib.loads(text)).get(name)
    except (ValueError, RecursionError) as problem:
        raise ConfigurationError(f"{file} cannot be read as TOML ({problem}). Correct it, or give another.") from None
    if there is not None:
        if declared in (None, declarations_of({name: there}, where=str(file))[name]):
            return text
        raise ConfigurationError(
            f"{file} has another mode {name!r} already. Give this one another name (--mode-name NAME), or remove "
            "the other."
        )
    table = declaration_text(name, declared or DeclaredMode())
    changed = f"{text.rstrip()}\n\n{table}" if text.strip() else table
    try:
        tomllib.loads(changed)
    except tomllib.TOMLDecodeError:  # an inline table, or a list of modes
        raise ConfigurationError(
            f"no table [tool.probe.modes.{name}] can be added to {file}, which has `modes` in another form. "
            "Give a file of its own, such as mixed.toml."
        ) from None
    return changed
