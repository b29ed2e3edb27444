"""Without the packages of the extra `test`, test files that need them are skipped by name; in CI they are errors."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import conftest

ROOT = Path(__file__).parents[1]
#: Python finds none of the extras.
WITHOUT = """
import importlib.machinery as machinery
true = machinery.PathFinder.find_spec
def find_spec(finder, name, path=None, target=None):
    return None if name.partition(".")[0] in {names} else true(name, path, target)
machinery.PathFinder.find_spec = classmethod(find_spec)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT.format(names=set(conftest.EXTRAS)))
    source = (ROOT / "conftest.py").read_text()
    (tmp_path / "conftest.py").write_text(source.replace(', "pytester", "tests.faults.kills"', ""))
    (tmp_path / "test_plain.py").write_text("def test_mode_2_1(): pass")
    (tmp_path / "oracle.py").write_text("import gfloat.formats")
    (tmp_path / "test_oracle.py").write_text("import oracle\n\ndef test_mode_2_1(): pass")
    (tmp_path / "test_given.py").write_text("from hypothesis import given\n\ndef test_mode_2_1(): pass")
    return tmp_path


def run(project: Path, **environment: str) -> tuple[int, str]:
    kept = {name: value for name, value in os.environ.items() if name != "CI"}
    given = {"PYTHONPATH": f"{project}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment}
    command = [sys.executable, "-m", "pytest", "-ra", "-k", "mode_2_1", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=project, env=kept | given, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_a_file_that_needs_an_extra_is_skipped_and_named(project: Path) -> None:
    code, shown = run(project)
    assert code == 0, shown
    assert "1 passed, 2 skipped" in shown
    assert "not installed: hypothesis, ml_dtypes, gfloat, " in shown
    assert "test files that import them are skipped: pip install -e '.[test]'" in shown
    assert "test_given.py:1: needs hypothesis, which is not installed" in shown
    assert "test_oracle.py:1: needs gfloat, which is not installed" in shown


def test_in_ci_it_is_an_error(project: Path) -> None:
    code, shown = run(project, CI="true")
    assert code == pytest.ExitCode.INTERRUPTED, shown
    assert "2 errors" in shown


def test_another_missing_module_is_an_error_anywhere(project: Path) -> None:
    (project / "oracle.py").write_text("import no_such_module")
    code, shown = run(project)
    assert code == pytest.ExitCode.INTERRUPTED, shown
    assert "No module named 'no_such_module'" in shown


def test_the_list_is_that_of_the_extra() -> None:
    """Packages by the names of their modules; pyarrow comes with datasets, and optimum is that of optimum-quanto."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["test"]
    names = {re.split(r"[\[>=]", one)[0].replace("-", "_") for one in declared}
    assert (names - {"optimum_quanto"}) | {"pyarrow", "optimum"} == set(conftest.EXTRAS)
