"""The README is true: its Python runs as printed, its shell commands exist, and CI runs its test command."""

import re
import subprocess
import warnings
from pathlib import Path

import pytest

from probe.cli import _parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.S)


def test_the_python_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    program = "\n".join(code for language, code in BLOCKS if language == "python")
    assert "fake_quantize" in program
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # analyze_underflow warns, as it says there
        exec(compile(program, "README.md", "exec"), {})
    assert "layer_3.output" in capsys.readouterr().out


def test_every_probe_command_of_the_readme_is_one_that_the_parser_takes() -> None:
    lines = [line for language, code in BLOCKS if language == "bash" for line in code.splitlines()]
    commands = [line.split()[1:] for line in lines if line.startswith("probe ")]
    assert len(commands) >= 5
    for command in commands:
        _parser().parse_args(command)


def test_ci_runs_the_test_command_of_the_readme() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    extract = next(line for line in script.splitlines() if line.startswith("eval"))
    shown = subprocess.run(
        ["bash", "-c", extract.replace("eval", "echo", 1)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tests = re.search(r"<!-- tests -->\n```bash\n(.*?)\n```", README, re.S)
    assert tests is not None
    assert shown.stdout.strip() == tests[1]
    assert "tox -e py" in tests[1]
