"""The documents are true: their code runs as printed, their commands, options and links exist, their tables agree."""

import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import yaml

from probe import plugin
from probe.commands import parse
from probe.gate.cases import HEADINGS, Verdict
from probe.gate.configuration import CalibrationSettings, Settings
from probe.gate.golden_values import MOVED
from probe.gate.tolerances import FLOAT_FACTOR, MULTIPLE, RULES
from probe.numerics.sketches import SAMPLE, SKETCH

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CHINESE = (ROOT / "README.zh-CN.md").read_text()
GATE = (ROOT / "docs" / "gate.md").read_text()
WORKFLOW = (ROOT / "docs" / "ci" / "github-actions.yml").read_text()
PAGES = [
    *("README.md", "README.zh-CN.md", "CONTRIBUTING.md", "CHANGELOG.md", "baselines/README.md", "benchmarks/README.md"),
    *sorted(f"docs/{page.name}" for page in ROOT.glob("docs/*.md")),
]
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)
#: The files of a repository of one's own, by name: blocks whose first line says it.
FILES = {match[1]: code for _, code in BLOCKS if (match := re.match(r"# (\w+\.(?:py|toml))\n", code))}


def command_after(marker: str) -> str:
    found = re.search(rf"<!-- {marker} -->\n```bash\n(.*?)\n```", README, re.S)
    assert found is not None
    return found[1]


def section(page: str, heading: str) -> str:
    return page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def table(text: str, head: str) -> list[list[str]]:
    """The rows of the table whose head begins with `head`, as cells."""
    lines = text.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {head} |"))
    rows = [line for line in lines[start + 2 :] if line.startswith("|") or not line]
    body = rows[: rows.index("")] if "" in rows else rows
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in body]


# ----------------------------------------------------------------------------------------------------- the README


def test_the_library_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    program = "\n".join(code for language, code in BLOCKS if language == "python" and code not in FILES.values())
    assert "fake_quantize" in program
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        exec(compile(program, "README.md", "exec"), {})
    assert "layer_3.output" in capsys.readouterr().out


def test_every_probe_command_is_one_that_the_parser_takes() -> None:
    lines = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
    commands = [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("probe ")]
    assert len(commands) >= 12
    for command in commands:
        parse(command)


def test_ci_runs_the_test_command() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    extract = next(line for line in script.splitlines() if line.startswith("eval"))
    shown = subprocess.run(
        ["bash", "-c", extract.replace("eval", "echo", 1)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert shown.stdout.strip() == command_after("tests")
    assert command_after("tests").endswith("tox -e py")


def test_the_main_command_is_the_gate_and_the_readme_says_what_tox_runs() -> None:
    assert command_after("main job").endswith("tox -q -e gate")
    tox = (ROOT / "tox.ini").read_text().partition("[testenv:gate]")[2]
    command = re.search(r"^commands = (pytest .*?) \{posargs\}$", tox, re.M)
    assert command is not None
    assert f"\n{command[1]} " in README


def test_a_repository_of_ones_own_works_as_printed(tmp_path: Path) -> None:
    assert list(FILES) == ["pyproject.toml", "network.py", "conftest.py", "test_gate.py"]
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)

    def run(*arguments: str) -> tuple[int, str]:
        clean = {name: value for name, value in os.environ.items() if name != "CI" and "PYTEST" not in name}
        path = os.pathsep.join([str(ROOT), *filter(None, [clean.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *_plugin_of_the_checkout(), *arguments]
        environment = {**clean, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    code, text = run()
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert "24 cases: 24 missing" in text
    assert "24 cases missing" in README
    assert not (tmp_path / "baselines").exists()
    code, text = run("--update-baselines")
    assert code == 0, text
    assert "24 cases measured (all of the matrix)" in text
    code, text = run()
    assert code == 0, text
    assert "24 passed" in text


def _plugin_of_the_checkout() -> list[str]:
    """Named where it is not installed, as an entry point would."""
    from importlib.metadata import entry_points

    return [] if any(one.value == "probe.plugin" for one in entry_points(group="pytest11")) else ["-p", "probe.plugin"]


def test_every_verdict_has_its_line() -> None:
    verdicts = list(get_args(Verdict))
    assert [row[0] for row in table(README, "verdict")] == verdicts
    assert [row[0] for row in table(CHINESE, "结论")] == verdicts


def test_the_number_of_cases_is_that_of_the_stored_ones() -> None:
    from probe.gate.baselines.store import Store

    store = Store(ROOT / "baselines")
    count = sum(len(store.read(model, device)) for model in store.models() for device in store.devices(model))
    assert f" {count} here" in README


# --------------------------------------------------------------------------------------------------- both READMEs


def test_the_code_of_both_languages_is_the_same() -> None:
    assert re.findall(r"```.*?```", CHINESE, re.S) == re.findall(r"```.*?```", README, re.S)
    for kind in (r"^#+ ", r"^- ", r"^\| ", r"^!\[", r"^<!-- "):
        pattern = re.compile(kind, re.M)
        assert len(pattern.findall(CHINESE)) == len(pattern.findall(README)), f"another number of lines with {kind}"


def links(page: str) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.S)
    return (found for found in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:", found))


@pytest.mark.parametrize("page", PAGES)
def test_every_relative_link_and_picture_exists(page: str) -> None:
    for link in links(page):
        name, _, fragment = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), f"{page}: {link}"
        if fragment:
            assert fragment in _anchors(target), f"{page}: {link}"


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_every_file_and_module_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    for path in re.findall(r"\b(?:probe|tests|benchmarks|training|configs)/[\w/-]+\.\w+", text):
        assert (ROOT / path).exists(), f"{page}: {path}"
    dotted = re.findall(r"\b(probe(?:\.[a-z_]+){2})\.(\w+)", text)
    imported = re.findall(r"^from (probe[\w.]*) import (.+)$", text, re.M)
    for module, names in [*dotted, *imported]:
        for name in names.split(", "):
            exists = hasattr(import_module(module), name) or find_spec(f"{module}.{name}")
            assert exists, f"{page}: {module}.{name}"


def test_the_picture_is_small_and_as_wide_as_promised() -> None:
    data = (ROOT / "docs" / "report.png").read_bytes()
    assert len(data) < 250_000
    assert data.startswith(b"\x89PNG")
    assert int.from_bytes(data[16:20]) == 1280


# --------------------------------------------------------------------------------------------------- docs/gate.md


def test_the_table_of_options_is_that_of_the_plugin() -> None:
    added: list[str] = []
    group = SimpleNamespace(addoption=lambda name, **_: added.append(name))
    plugin.pytest_addoption(SimpleNamespace(getgroup=lambda *_: group))  # type: ignore[arg-type]
    shown = [row[0].strip("`").split()[0] for row in table(section(GATE, "Settings"), "option")]
    assert sorted(shown) == sorted(added)


def test_the_table_of_settings_is_that_of_the_configuration() -> None:
    rows = {row[0].strip("`"): row[1].strip("`") for row in table(section(GATE, "Settings"), "key")}
    nested = {f"calibration.{one.name}": one.default for one in fields(CalibrationSettings)}
    plain = {one.name: one.default for one in fields(Settings) if one.name not in ("calibration", "declared")}
    plain["modes.NAME"] = None  # the tables of `declared`
    assert set(rows) == {*plain, *nested}
    for name, default in {**plain, **nested}.items():
        if isinstance(default, str | bool | int | float):
            shown = f'"{default}"' if isinstance(default, str) else str(default).lower()
            assert rows[name] == shown, name


def test_the_table_of_tolerances_is_that_of_the_rules() -> None:
    head = "| figure | relative | of_error | of_rest | absolute | worse |\n|---|---|---|---|---|---|\n"
    side = {1: "larger", -1: "smaller", 0: ""}
    expected = head + "".join(
        f"| {name} | {_number(rule.relative)} | {_number(rule.of_error)} | {_number(rule.of_rest)} | "
        f"{_number(rule.absolute)} | {side[rule.worse]} |\n"
        for name, rule in RULES.items()
    )
    assert expected in GATE, f"docs/gate.md should have:\n{expected}"
    assert {rule.multiple for rule in RULES.values()} == {MULTIPLE}
    assert f"`multiple` is {MULTIPLE:g}." in GATE
    assert f"is {FLOAT_FACTOR:g} times as large" in GATE


def _number(part: float) -> str:
    return f"{part:g}" if part else ""


def test_the_table_of_figures_is_what_is_stored() -> None:
    shown = {row[0]: row[1].replace(" of the absolute difference", "").split(", ") for row in table(GATE, "group")}
    for group in ("injected", "propagated", "corners", "functions", "logits", "weights"):
        assert shown[group] == [name.partition(".")[2] for name in RULES if name.startswith(f"{group}.")]
    assert f"{SKETCH} buckets" in GATE
    assert f"at {SAMPLE} places" in GATE
    assert f"> {MOVED:g} rmse" in GATE


def test_the_wording_of_the_verdicts_is_that_of_the_failures() -> None:
    rows = {row[0]: row[1] for row in table(section(GATE, "Verdicts"), "verdict")}
    assert rows == HEADINGS


def test_the_python_of_the_page_is_valid() -> None:
    blocks = re.findall(r"```python\n(.*?)```", GATE, re.S)
    assert blocks
    for block in blocks:
        compile(block, "docs/gate.md", "exec")


# -------------------------------------------------------------------------------------------------------- the workflow


def test_the_workflow_runs_the_gate_of_the_readme_and_reports_whatever_happens() -> None:
    workflow = yaml.safe_load(WORKFLOW)
    assert "pull_request" in workflow[True], "`on` is a truth value in YAML 1.1"
    assert workflow["permissions"] == {"contents": "read", "pull-requests": "write"}
    (job,) = workflow["jobs"].values()
    assert job["env"]["PIP_EXTRA_INDEX_URL"].endswith("/whl/cpu")
    gate = next(index for index, step in enumerate(job["steps"]) if step.get("name") == "Gate")
    assert job["steps"][gate]["run"] == command_after("main job")
    assert "continue-on-error" not in WORKFLOW
    after = {step["name"]: step for step in job["steps"][gate + 1 :]}
    assert list(after) == ["Summary", "Report", "Comment"]
    assert all(step["if"].startswith("always()") for step in after.values())
    assert "GITHUB_STEP_SUMMARY" in after["Summary"]["run"]
    assert after["Report"]["with"]["path"].split() == ["report.html", "summary.json", "summary.md"]
    assert after["Comment"]["run"].startswith("gh pr comment ")
    uses = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/[a-z-]+@v\d+", one) for one in uses)
