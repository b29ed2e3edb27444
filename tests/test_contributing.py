"""CONTRIBUTING.md is true: its files and names exist, and a new row in a copy of probe/ is enough where it says so."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "CONTRIBUTING.md").read_text()
ROWS = dict(re.findall(r"^\| (an? [^|]+?) \| (.+) \|$", PAGE, re.M))

#: One row of FORMATS, and a program that uses the new format everywhere.
FORMAT = 'Format("fp8_e3m4", 8, 3, 4, 31.0, "none", "e8m0", 32, "a format that only this test has"),'
USES_FORMAT = """
import torch, probe
from probe.commands import main
from probe.formats import FORMATS

fmt = FORMATS["fp8_e3m4"]
grid = torch.tensor([fmt.decode(code) for code in range(2**fmt.bits)])
blocks = torch.cat([grid.reshape(-1, 1), torch.full((len(grid), 31), fmt.max)], dim=1)
x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
for implementation in ("reference", "auto"):
    assert probe.fake_quantize(blocks, fmt.name, implementation=implementation).equal(blocks)
    y = probe.fake_quantize(x, fmt.name, implementation=implementation)
    assert y.equal(probe.fake_quantize(x, fmt.name, implementation="reference"))
    assert y.equal(probe.quantize(x, fmt.name, implementation=implementation).dequantize())
    assert 0 < (y - x).abs().max() < (probe.fake_quantize(x, "fp4_e2m1") - x).abs().max()
assert probe.recommend(probe.scaling_sweep(x, fmt.name)).scale > 0
assert main(["formats"]) == 0
assert main(["errors", "--modes", "2-1", "--formats", fmt.name, "--samples", "1", "--seqlen", "32"]) == 0

from probe.gate.bench import Bench
from probe.gate.configuration import settings_of
from probe.running.coverage import off_grid
from probe.running.recipes import recipes_of

assert off_grid(y, fmt.name) == 0 and off_grid(x, fmt.name) > 0.5
assert list(map(str, recipes_of(["0", "linear_w"], [fmt.name]))) == ["mode_0-fp8_e3m4", "linear_w-fp8_e3m4"]
matrix = Bench(settings_of({"formats": [fmt.name], "modes": ["0"]}, where="here"))
assert [str(case) for case in matrix.cases][0] == "mode_0-layer_0-cpu-fp8_e3m4"
"""

#: One row of MODES, and a program that uses the new mode everywhere.
MODE = 'Mode("2-5", "a mode that only this test has", conv_gives="grid", scan_reads="again", is_essential=True),'
USES_MODE = """
import probe
from probe.commands import main
from probe.gate.bench import Bench
from probe.gate.configuration import settings_of
from probe.models.mamba import MAMBA
from probe.running.coverage import expected_on_grid
from probe.running.modes import GROUPS, find_mode

assert find_mode("mode_2_5").is_quantized
assert "2-5" in GROUPS["all"] and "2-5" in GROUPS["essential"]
assert "scan.u" in expected_on_grid(probe.Recipe("2-5", "int8"), MAMBA)
matrix = Bench(settings_of({"formats": ["mxint8"]}, where="here"))
assert "mode_2_5-logits-cpu-mxint8" in [str(case) for case in matrix.cases]
assert main(["modes"]) == 0
assert main(["errors", "--modes", "2-5", "2-2", "--formats", "mxint8", "--samples", "1", "--seqlen", "32"]) == 0
"""

#: A field of Metrics and a row of RULES, and a project whose gate then checks the new figure.
FIGURE = "peak_error: float | None = value(lambda t: t.difference.largest / t.output.largest)"
RULE = '"injected.peak_error": Rule(relative=1e-3, worse=1),'
PROJECT = {
    "pyproject.toml": """[tool.probe]
model = "tiny-llama"
modes = ["linear_w"]
formats = ["int8"]
layers = ["first"]
without = ["embedding", "norm", "head", "decode", "batch_1", "ragged", "padded"]
samples = 1
seqlen = 32
calibration = { samples = 1, seqlen = 32 }
""",
    "test_gate.py": "def test_matches_baseline(probe_case):\n    probe_case.check()\n",
}


@pytest.mark.parametrize("kind", ["a format", "a mode", "a figure", "a verdict", "a command"])
def test_at_most_two_files_are_touched_for(kind: str) -> None:
    files = set(re.findall(r"`(probe/[\w/]+(?:\.py)?)`", ROWS[kind])) - {"probe/commands"}
    assert 1 <= len(files) <= 2


def test_the_page_names_what_exists() -> None:
    named = re.findall(r"`(\w+)`[^`|;]* in (?:both )?`([\w/]+\.py)`", PAGE)
    assert len(named) >= 12
    for name, file in named:
        assert re.search(rf"\b{name}\b", (ROOT / file).read_text()), f"{name} is not in {file}"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of probe/ that a test can change, with the machine code of its kernels, which takes long to make."""
    shutil.copytree(ROOT / "probe", tmp_path / "probe", ignore=shutil.ignore_patterns("*.pyc"))
    return tmp_path


def insert(file: Path, before: str, line: str) -> None:
    """Insert `line` above the one line that contains `before`, at its indentation."""
    lines = file.read_text().splitlines(keepends=True)
    (place,) = [index for index, old in enumerate(lines) if before in old]
    indent = lines[place][: len(lines[place]) - len(lines[place].lstrip())]
    file.write_text("".join([*lines[:place], f"{indent}{line}\n", *lines[place:]]))


def run(folder: Path, *command: str, code: int = 0) -> str:
    """What a Python command prints with the copy of probe/ in `folder`; its exit code must be `code`."""
    clean = {name: value for name, value in os.environ.items() if name != "CI" and "PYTEST" not in name}
    environment = {**clean, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_a_new_format_is_a_row_of_one_table(copy: Path) -> None:
    insert(copy / "probe" / "formats.py", 'Format("fp4_e2m1"', FORMAT)
    printed = run(copy, "-c", USES_FORMAT)
    assert "a format that only this test has" in printed
    assert "mode_2_1-fp8_e3m4" in printed


def test_a_new_mode_is_a_row_of_one_table(copy: Path) -> None:
    insert(copy / "probe" / "running" / "modes.py", 'Mode("3", ', MODE)
    printed = run(copy, "-c", USES_MODE)
    assert "a mode that only this test has" in printed
    (new, known) = (re.findall(rf"^mode_{mode}-mxint8 +(.*)$", printed, re.M)[0] for mode in ("2_5", "2_2"))
    assert new == known, "rounding to the same grid once more changes nothing"


def test_a_new_figure_is_a_field_and_a_rule(copy: Path) -> None:
    insert(copy / "probe" / "metrics" / "figures.py", "    p50: float", FIGURE)
    insert(copy / "probe" / "gate" / "tolerances.py", '"injected.distance": Rule', RULE)
    for name, text in PROJECT.items():
        (copy / name).write_text(text)
    pytest_here = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "probe.plugin")
    run(copy, *pytest_here, "--update-baselines")
    file = copy / "baselines" / "tiny-llama" / "cpu" / "linear_w.json"
    (figure,) = re.findall(r'"peak_error": \[([\d.]+),', file.read_text())
    file.write_text(file.read_text().replace(f'"peak_error": [{figure},', '"peak_error": [0.5,'))
    printed = run(copy, *pytest_here, code=pytest.ExitCode.TESTS_FAILED)
    assert "1 failed, 1 passed" in printed
    assert f"0.5 -> {figure}" in printed
