"""`probe init`: the settings and the test file with which pytest guards the numbers of a model."""

import argparse
import configparser
import importlib.metadata
import json
import os
import re
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probe.commands.options import Subparsers, model_arguments
from probe.files.atomic import write_all
from probe.files.paths import check_outputs
from probe.formats import FORMATS, GATE_FORMATS
from probe.words import first_few

if TYPE_CHECKING:
    from probe.gate.matrix import Matrix

PYPROJECT, CONFTEST, TEST = "pyproject.toml", "conftest.py", "test_gate.py"
#: What makes the plugin known where it is not installed.
PLUGIN = 'pytest_plugins = ["probe.plugin"]'
CONFTEST_TEXT = (
    f'"""Makes probe\'s fixtures known to pytest, and the modules of this folder to the tests."""\n\n{PLUGIN}\n'
)
TEST_TEXT = '''"""Every mode, layer and format of [tool.probe] in pyproject.toml against baselines/."""


def test_matches_baseline(probe_case):
    probe_case.check()
'''
#: Files beside pyproject.toml in which pytest looks for settings, and their sections.
INI_FILES = {"pytest.ini": "pytest", ".pytest.ini": "pytest", "tox.ini": "pytest", "setup.cfg": "tool:pytest"}


def add(commands: Subparsers) -> None:
    """Add the parser of the command."""
    command = commands.add_parser("init", help="write the settings and the test with which pytest guards a model")
    command.add_argument("--model", required=True, help="folder, hub id, package.module:factory or embedded name")
    own = "what the model is called with, if that is no text: written as `inputs`"
    command.add_argument("--inputs", metavar="MODULE:FUNCTION", help=own)
    command.add_argument("--into", default=".", metavar="DIR", help="the project's folder (default: the current one)")
    command.add_argument(
        "--allow-download", action="store_true", help="allow downloads from the hub, here and in tests"
    )
    code = "run code that comes with the model, here and in tests"
    command.add_argument("--trust-remote-code", action="store_true", help=code)
    command.set_defaults(run=_init)


@dataclass(frozen=True)
class Project:
    """A folder as it is: the text of its pyproject.toml, what that says, and where pytest looks for tests."""

    folder: Path
    text: str
    tables: Mapping[str, Any]

    @property
    def has_pytest_settings(self) -> bool:
        """Whether pytest takes the folder for the root of the project, whatever folders lie around it."""
        return "pytest" in _table(self.tables, "tool") or any(
            self._ini_settings(name) is not None for name in INI_FILES
        )

    @property
    def test_file(self) -> Path:
        """The test in the first folder that pytest searches."""
        ini = [found for name in INI_FILES if (found := self._ini_settings(name)) is not None]
        own = _table(_table(self.tables, "tool"), "pytest")
        own = _table(own, "ini_options") or own
        paths = (ini[0] if ini else own).get("testpaths", "")
        listed = paths.split() if isinstance(paths, str) else paths if isinstance(paths, list) else []
        first = str(listed[0]) if listed else ""
        return Path("" if any(sign in first for sign in "*?[") else first) / TEST

    def _ini_settings(self, name: str) -> Mapping[str, str] | None:
        parser = configparser.ConfigParser(interpolation=None)
        try:
            parser.read(self.folder / name, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError):  # pytest itself will say so
            return None
        if name.endswith("pytest.ini") and (self.folder / name).is_file() and not parser.has_section("pytest"):
            return {}
        return parser[INI_FILES[name]] if parser.has_section(INI_FILES[name]) else None


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A table of a TOML document; empty if it is none."""
    found = tables.get(name)
    return found if isinstance(found, Mapping) else {}


def _init(options: argparse.Namespace) -> int:
    check_outputs(folders=[options.into])
    project = _read_project(Path(options.into))
    name = _name_in_project(options.model, project.folder)
    conftest = _conftest(
        project, is_factory=_is_factory(options.model) or bool(options.inputs)
    )  # all that can be refused without the model
    matrix = _matrix(options)
    text = _with_settings(project, _settings_text(matrix, name))
    files = {project.folder / PYPROJECT: text, project.folder / project.test_file: TEST_TEXT}
    files |= {project.folder / CONFTEST: CONFTEST_TEXT} if conftest else {}
    write_all(files)
    _report(options, project, matrix, name, list(files))
    return 0


def _read_project(folder: Path) -> Project:
    """The project; refused if it cannot be read, or if it has a gate already."""
    file, text, tables = folder / PYPROJECT, "", dict[str, Any]()
    try:
        if file.exists():
            text = file.read_bytes().decode("utf-8")
            tables = tomllib.loads(text)
    except (ValueError, RecursionError, OSError) as problem:
        why = problem.strerror if isinstance(problem, OSError) else problem
        raise ValueError(
            f"{file} cannot be read as TOML ({why}). Correct it and run again; nothing was written."
        ) from None
    if "probe" in _table(tables, "tool"):
        raise ValueError(
            f"{file} has a [tool.probe] already; nothing was written. Change it by hand, or guard a second model by a "
            'test of its own: @pytest.mark.probe(model="MODEL", modes=["linear_w"]) above a test that takes probe_case.'
        )
    project = Project(folder, text, tables)
    test = folder / project.test_file
    if test.exists():
        raise ValueError(
            f"{test} exists already; nothing was written. Move it away, or add to it by hand: "
            "def test_matches_baseline(probe_case): probe_case.check()"
        )
    return project


def _is_factory(model: str) -> bool:
    from probe.models.loading import EMBEDDED
    from probe.settings import FUNCTION

    return model not in EMBEDDED and FUNCTION.fullmatch(model) is not None


def _name_in_project(model: str, project: Path) -> str:
    """The model as pytest, started in the project's folder, finds it: a folder by its path from there, or absolute."""
    from probe.models.loading import EMBEDDED

    folder = Path(os.path.expanduser(model))
    if model in EMBEDDED or _is_factory(model) or not folder.is_dir():
        return model
    inside = Path(os.path.relpath(folder.resolve(), project.resolve())).as_posix()
    return str(folder.resolve()) if inside.startswith("..") else f"./{inside}"


def _conftest(project: Project, *, is_factory: bool) -> bool:
    """Whether a conftest.py is needed; one that is there and does not do is refused."""
    file = project.folder / CONFTEST
    installed = any(one.value == "probe.plugin" for one in importlib.metadata.entry_points(group="pytest11"))
    if not file.exists():
        return not installed or (is_factory and project.test_file.parent != Path())
    if not installed and "probe.plugin" not in file.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(
            f"{file} exists already, and probe is not installed as a plugin of pytest; nothing was written. "
            f"Add this line to it and run again: {PLUGIN}"
        )
    return False


def _matrix(options: argparse.Namespace) -> "Matrix":
    """The cases of the model with the settings that fit it, after the checks that the gate itself makes."""
    from probe.gate.configuration import settings_of
    from probe.gate.matrix import MAMBA_MODES, OTHER_MODES, Matrix
    from probe.models.layers import blocks_of
    from probe.models.linear import linear_layers
    from probe.models.mamba_blocks import is_all_mamba
    from probe.models.positions import position_limit

    given: dict[str, Any] = {
        "model": options.model,
        **({"inputs": options.inputs} if options.inputs else {}),
        **{name: True for name, on in model_arguments(options).items() if on},
    }
    model = Matrix(settings_of(given, where="probe init")).loaded.model
    given["modes"] = list(MAMBA_MODES if is_all_mamba(model) else OTHER_MODES)
    given["formats"] = list({FORMATS[name].scale: name for name in reversed(GATE_FORMATS)}.values())[::-1]
    given["layers"] = ["all"] if blocks_of(model) else [f"^{re.escape(name)}$" for name in linear_layers(model)]
    limit = position_limit(model)
    default = settings_of({}, where="")
    if limit is not None and limit < max(default.seqlen, default.calibration.seqlen):
        given |= {"seqlen": limit, "calibration": {"seqlen": limit}}
    if not given["layers"]:
        raise ValueError(
            f"{options.model} has neither a list of layers nor a linear layer, so there is nothing to guard. Register "
            "a mode of your own for it, and name its layers in [tool.probe]: see docs/gate.md."
        )
    matrix = Matrix(settings_of(given, where="probe init"), root=Path(options.into))
    matrix.check()
    return matrix


def _settings_text(matrix: "Matrix", name: str) -> str:
    """[tool.probe] as TOML."""
    ours = matrix.settings
    found = first_few(matrix.labels, most=6)
    rows: list[tuple[str, Any, str]] = [
        ("model", name, ""),
        *([("inputs", ours.inputs, "what the model is called with")] if ours.inputs else []),
        ("modes", ours.modes, "`probe modes` lists them"),
        ("formats", ours.formats, "one of each kind of scale; `probe formats` lists them all"),
        ("layers", ours.layers, f"{len(matrix.labels)}: {found}"),
    ]
    if ours.seqlen != type(ours)().seqlen:
        rows += [("seqlen", ours.seqlen, "the positions of the model"), ("calibration.seqlen", ours.seqlen, "")]
    rows += [(key, True, "") for key in ("allow_download", "trust_remote_code") if getattr(ours, key)]
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value, _ in rows]
    width = max((len(line) for line, row in zip(lines, rows, strict=True) if row[2]), default=0)
    noted = [f"{line:{width}}  # {row[2]}" if row[2] else line for line, row in zip(lines, rows, strict=True)]
    return "\n".join(["[tool.probe]", *noted, ""])


def _with_settings(project: Project, settings: str) -> str:
    """The text of pyproject.toml with the settings at its end; nothing of it is changed."""
    if not project.has_pytest_settings:
        settings = f"[tool.pytest.ini_options]  # makes this folder the root of pytest\n\n{settings}"
    whole = f"{project.text.rstrip()}\n\n{settings}" if project.text.strip() else settings
    if "\r\n" in project.text:
        whole = whole.replace("\r\n", "\n").replace("\n", "\r\n")
    try:
        tomllib.loads(whole)
    except tomllib.TOMLDecodeError:  # [tool] is an inline table
        file = project.folder / PYPROJECT
        raise ValueError(
            f"no [tool.probe] can be added to {file}, whose `tool` is in another form; nothing was written. "
            f"Add it by hand:\n{settings}"
        ) from None
    return whole


def _report(options: argparse.Namespace, project: Project, matrix: "Matrix", name: str, files: Sequence[Path]) -> None:
    for file in files:
        print(f"wrote {file}")
    ours = matrix.settings
    print(
        f"{name}: {len(matrix.labels)} layers ({first_few(matrix.labels, most=6)}), modes {', '.join(ours.modes)}, "
        f"formats {', '.join(ours.formats)}: {len(matrix.cases)} cases of {len(matrix.recipes)} recipes"
    )
    for note in (*matrix.loaded.notes, *([matrix.paths_not_run] if matrix.paths_not_run else [])):
        print(f"note: {note}")
    start = "" if project.folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(project.folder))} && "
    given = f" --inputs {ours.inputs}" if ours.inputs else ""
    errors = f"probe errors --model {shlex.quote(name)}{given} --formats {' '.join(ours.formats)}"
    print(
        f"\nNext:\n"
        f"  {start}pytest                       # fails: every case is missing its baseline\n"
        f"  {start}pytest --update-baselines    # stores them in baselines/; commit it\n"
        f"  {start}pytest                       # passes until a number changes\n"
        f'  {start}pytest --update-baselines --allow-worse "REASON"    # accepts figures that got worse\n'
        f"  {start}{errors}    # the errors as a table"
    )
