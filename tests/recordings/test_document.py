"""docs/recording.md is true: its code runs, its commands parse, its table of options is that of the command."""

import re
import shlex
from pathlib import Path

import pytest

from probe.commands import _parser, parse
from probe.recordings.request import DEFAULTS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recording.md").read_text()
GATE = (ROOT / "docs" / "gate.md").read_text()


def options() -> set[str]:
    (commands,) = (action.choices for action in _parser()._actions if isinstance(action.choices, dict))
    actions = [action for action in commands["record"]._actions if action.option_strings]  # MODEL may be positional
    return {action.option_strings[0] for action in actions} - {"-h", "--allow-download", "--trust-remote-code"}


def test_the_table_has_every_option_and_no_other() -> None:
    head = PAGE.partition("\n## ")[0]
    rows = [line.split("|")[1] for line in head.splitlines() if line.startswith("| `--")]
    assert {name for row in rows for name in re.findall(r"`(--[a-z-]+)`", row)} == options()


@pytest.mark.parametrize("page", [PAGE, GATE], ids=["recording", "gate"])
def test_every_command_parses(page: str) -> None:
    blocks = re.findall(r"```bash\n(.*?)```", page, re.S)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("probe record")]
    assert lines
    for line in lines:
        parse(shlex.split(line, comments=True)[1:])


def test_the_table_of_layouts_says_what_is_recorded() -> None:
    for layout, defaults in DEFAULTS.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{layout}` |"))
        told = row.split("|")[3].strip()
        if told.startswith("the same"):
            assert defaults == DEFAULTS["safetensors"]
            continue
        mode = {"fp_only": "fp32"}.get(defaults.modes[0], defaults.modes[0])
        assert told.startswith(f"{mode}, {'first' if defaults.layers[0] == 'first' else 'all layers'}")
        assert f"{defaults.samples} sample" in told


def test_the_code_runs_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
        exec(compile(block, "recording.md", "exec"), {})
    shown = capsys.readouterr().out
    assert shown.startswith("('fp32', 'mode_2_1-int8') ('layer_0.output', 'layer_3.output', 'logits')")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["compiled", "outputs"]
