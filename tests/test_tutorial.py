"""The tutorial is true: its blocks run as printed, one after the other, and print what it says."""

import doctest
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from probe.commands import main

TUTORIAL = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", TUTORIAL, re.S)
PNG = b"\x89PNG"


def steps() -> list[tuple[str, str, str | None]]:
    """Kind and code of every block that runs, and what it should print, if the document says so."""
    found: list[tuple[str, str, str | None]] = []
    for place, (kind, code) in enumerate(BLOCKS):
        if kind != "text":
            after = BLOCKS[place + 1] if place + 1 < len(BLOCKS) else ("", "")
            found.append((kind, code, after[1] if after[0] == "text" else None))
    return found


def run_command(line: str) -> None:
    command, _, comment = line.partition("#")
    name, *arguments = shlex.split(command)
    wanted = re.search(r"exit code (\d)", comment)
    assert name == "probe"
    assert main(arguments) == (int(wanted[1]) if wanted else 0), line


def agrees(wanted: str, printed: str) -> bool:
    """Line by line; `...` stands for anything. A first or last line of dots is any number of lines."""
    return doctest.OutputChecker().check_output(wanted, printed, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)


def test_every_block_runs_and_prints_what_the_tutorial_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    names: dict[str, Any] = {}
    try:
        for kind, code, wanted in steps():
            if kind == "python":
                exec(compile(code, "tutorial.md", "exec"), names)
            else:
                run_command(code.strip())
            printed = capsys.readouterr().out
            assert wanted is None or agrees(wanted, printed), f"{code}\nprinted\n{printed}\nthe tutorial says\n{wanted}"
    finally:
        torch.set_num_threads(threads)
    for picture in ("report/error_by_layer.png", "report/values.png", "layer_2_analysis.png"):
        assert (tmp_path / picture).read_bytes().startswith(PNG)
    assert "device fault from layer_2 on" in (tmp_path / "report" / "diff.html").read_text()


def test_there_is_something_to_run_and_to_compare() -> None:
    kinds = [kind for kind, _, _ in steps()]
    assert kinds.count("bash") >= 6
    assert kinds.count("python") >= 3
    assert sum(wanted is not None for _, _, wanted in steps()) >= 7


def test_a_wrong_line_would_be_noticed() -> None:
    assert agrees("a ... c\n", "a b c\n")
    assert not agrees("a ... c\n", "a b d\n")
    assert not agrees("layer_2\n", "layer_3\n")
