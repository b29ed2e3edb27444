"""The plugin in pytest runs that do not use it: light, registered once, out of the way."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from probe.plugin import pytest_html_results_table_row
from tests.plugin.conftest import UNUSED
from tests.plugin.project import CONFTEST, LAYERS_ONLY, files

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "numpy", "transformers", "matplotlib", "safetensors"}
PLAIN = "def test_plain():\n    pass\n"
ASKS = 'pytest_plugins = ["probe.plugin"]\n'
#: Tells at the end what was loaded.
TELL = """
import json
import sys
from pathlib import Path


def pytest_unconfigure(config):
    if not hasattr(config, "workerinput"):
        named = [(name, getattr(one, "__name__", "")) for name, one in config.pluginmanager.list_name_plugin()]
        told = {"modules": sorted(sys.modules), "plugins": [name for name, module in named if module == "probe.plugin"]}
        Path("told.json").write_text(json.dumps(told))
"""


#: Makes Python forget that the package is installed: it is only importable, as from a checkout.
NOT_INSTALLED = """
import importlib.metadata

known = importlib.metadata.distributions


def distributions(**given):
    return (one for one in known(**given) if one.metadata["Name"] != "quant-probe")


importlib.metadata.distributions = distributions
"""


@pytest.fixture
def checkout(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a checkout that is not installed."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "sitecustomize.py").write_text(NOT_INSTALLED)
    (folder / "probe").symlink_to(ROOT / "probe")
    return {"PYTHONPATH": str(folder)}


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *UNUSED, *arguments]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "CI"))}
    return subprocess.run(command, cwd=folder, env={**kept, **environment}, capture_output=True, text=True, check=False)


def told(folder: Path) -> tuple[set[str], list[str]]:
    found = json.loads((folder / "told.json").read_text())
    return set(found["modules"]), found["plugins"]


@pytest.mark.parametrize("arguments", [(), ("--html=report.html",), ("-n", "1")], ids=["plain", "html", "xdist"])
def test_a_run_that_does_not_use_probe_loads_next_to_nothing_of_it(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "test_plain.py").write_text(PLAIN)
    (tmp_path / "conftest.py").write_text(TELL)
    done = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "= probe =" not in done.stdout
    modules, plugins = told(tmp_path)
    assert plugins == ["probe.plugin"], "it is loaded by its entry point"
    assert not modules & HEAVY
    ours = {name for name in modules if name.split(".")[0] == "probe"}
    assert len(ours) <= 19, sorted(ours)
    assert {file.name for file in tmp_path.iterdir()} <= {
        *("test_plain.py", "conftest.py", "told.json", "__pycache__", "report.html", "assets")
    }


@pytest.mark.parametrize(
    ("installed", "conftest", "arguments"),
    [
        (True, ASKS, ()),
        (True, ASKS, ("-p", "probe.plugin")),
        (False, ASKS, ()),
        (False, ASKS, ("-p", "probe.plugin")),
        (False, "", ("-p", "probe.plugin")),
    ],
    ids=["entry point and conftest", "all three", "conftest", "conftest and option", "option"],
)
def test_the_plugin_is_registered_once_however_it_is_asked_for(
    tmp_path: Path, checkout: dict[str, str], installed: bool, conftest: str, arguments: tuple[str, ...]
) -> None:
    (tmp_path / "test_plain.py").write_text(PLAIN)
    (tmp_path / "conftest.py").write_text(conftest + TELL)
    done = run(tmp_path, *arguments, "--probe-modes=2-1", **({} if installed else checkout))
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("quant-probe" in done.stdout) == installed
    assert told(tmp_path)[1] == ["probe.plugin"]


def test_a_checkout_works_without_installation(tmp_path: Path, checkout: dict[str, str]) -> None:
    """And without xdist and pytest-html: only what the conftest names is loaded."""
    for name, text in files(formats='["int8"]', without=LAYERS_ONLY).items():
        (tmp_path / name).write_text(text)
    (tmp_path / "conftest.py").write_text(ASKS + CONFTEST)
    checkout["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    done = run(tmp_path, "--update-baselines", "--probe-output=out", **checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "plugins:" not in done.stdout
    assert list((tmp_path / "baselines").rglob("coarse.json"))
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["totals"] == {"updated": 4}


def test_the_plugin_can_be_switched_off(tmp_path: Path) -> None:
    (tmp_path / "test_plain.py").write_text(PLAIN)
    (tmp_path / "conftest.py").write_text(ASKS + TELL)
    (tmp_path / "pyproject.toml").write_text("[tool.probe]\nmodes = 3\n")
    done = run(tmp_path, "-p", "no:probe.plugin")
    assert done.returncode == 0, done.stdout + done.stderr
    modules, plugins = told(tmp_path)
    assert plugins == []
    assert not any(name.split(".")[0] == "probe" for name in modules)
    done = run(tmp_path, "-p", "no:probe.plugin", "--probe-modes=2-1")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "unrecognized arguments: --probe-modes=2-1" in done.stderr
    (tmp_path / "test_gate.py").write_text("def test_gate(probe_case):\n    probe_case.check()\n")
    done = run(tmp_path, "-p", "no:probe.plugin")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "fixture 'probe_case' not found" in done.stdout


def test_rows_of_other_tests_in_the_html_report_stay_as_they_are() -> None:
    """Another plugin may have put its column before the name; only an id that is not safe in HTML is touched."""
    cells = ["<td>2 s</td>", '<td class="col-result">Passed</td>', '<td class="col-testId">t.py::test[a]</td>']
    kept = list(cells)
    pytest_html_results_table_row(SimpleNamespace(nodeid="t.py::test[a]"), cells)
    assert cells == kept
    cells[2] = '<td class="col-testId">t.py::test[<img>]</td>'
    pytest_html_results_table_row(SimpleNamespace(nodeid="t.py::test[<img>]"), cells)
    assert cells == [*kept[:2], '<td class="col-testId">t.py::test[&lt;img&gt;]</td>']
