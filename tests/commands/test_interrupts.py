"""Ctrl-C, as a real SIGINT to a real process: one line, exit code 130, nothing half-written, no process left."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there Ctrl-C is no signal")

TENSORS = tuple(f"{letter}.pt" for letter in "abcdefgh")
#: Arguments, the beginning of the line at which the signal is sent, and what is said.
COMMANDS = {
    "analyze": (
        ["analyze", "--data.num_samples", "64", "--data.batch_size", "1"],
        "[2/64]",
        "all files that were written are whole. The same command starts again.",
    ),
    "sensitivity": (
        ["sensitivity", "--samples", "64", "--batch-size", "1"],
        "calibration on",
        "all files that were written are whole. The same command starts again.",
    ),
    "errors": (
        ["errors", "--samples", "64", "--batch-size", "1"],
        "[reference]",
        "all files that were written are whole. The same command starts again.",
    ),
    "scaling": (
        ["scaling", *TENSORS, "--elem-format", "all"],
        "[1/8]",
        "the files of tensors that are done stay, no page was written. The same command starts again.",
    ),
}


def interrupted(arguments: list[str], at: str, folder: Path, send: Callable[[int, int], None] = os.kill) -> str:
    """What is on stderr from the line `at` on, at which the signal is sent. The command ends with its processes.

    Its work after that line must take seconds. `probe scaling` tells its progress on stdout, all others on stderr.
    """
    command = [sys.executable, "-m", "probe.commands", *arguments]
    running = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    told = running.stdout if arguments[0] == "scaling" else running.stderr
    assert told is not None
    try:
        for line in told:
            if line.startswith(at):
                break
        else:
            pytest.fail(f"{command} ended without a line that begins with {at}")
        time.sleep(0.1)
        send(running.pid, signal.SIGINT)
        rest = running.communicate(timeout=60)[1]
        assert running.returncode == 130, rest
        assert "Traceback" not in rest
        deadline = time.monotonic() + 20
        while alive(running.pid):
            assert time.monotonic() < deadline, "processes are left behind"
            time.sleep(0.05)
        return rest
    finally:
        if alive(running.pid):
            os.killpg(running.pid, signal.SIGKILL)


def alive(group: int) -> list[str]:
    """The processes of a group that are no zombies."""
    listed = subprocess.run(["ps", "-eo", "pgid=,stat=,args="], capture_output=True, text=True, check=True)
    rows = [line.split(maxsplit=2) for line in listed.stdout.splitlines()]
    return [" ".join(row) for row in rows if row[0] == str(group) and not row[1].startswith("Z")]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(TENSORS):
        torch.save(torch.randn(700, 700, generator=torch.Generator().manual_seed(seed)), tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(("arguments", "at", "said"), COMMANDS.values(), ids=COMMANDS)
def test_an_interrupt_is_one_line_and_exit_code_130(folder: Path, arguments: list[str], at: str, said: str) -> None:
    rest = interrupted(arguments, at, folder)
    assert rest.splitlines()[-1] == f"probe: interrupted; {said}"
    assert arguments[0] != "scaling" or rest.count("\n") == 1


def test_an_interrupt_inside_of_a_callback_of_c_code_is_not_lost() -> None:
    """numba's compiler calls back while it compiles; Python ignores what such a function raises."""
    code = """
import argparse, ctypes, signal, sys, time
from probe import commands

def run(options):
    ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()
    time.sleep(60)
    return 0

commands.parse = lambda words: argparse.Namespace(run=run, made=None, interrupted="done.")
sys.exit(commands.main())
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=50)
    assert (found.returncode, found.stderr) == (130, "probe: interrupted; done.\n")


@pytest.mark.parametrize(
    "raised", ["raise KeyboardInterrupt", 'exec("raise KeyboardInterrupt")'], ids=["anywhere", "inside of exec"]
)
def test_whatever_comes_after_an_interrupt_the_exit_code_stays(raised: str, tmp_path: Path) -> None:
    """`python -m` ends by SIGINT where Ctrl-C came inside of `exec`, as dataclasses use it, though it was handled."""
    (tmp_path / "interrupted.py").write_text(
        f"""
import argparse, signal, sys
from probe import commands

def run(options):
    {raised}

commands.parse = lambda words: argparse.Namespace(run=run, made=None, interrupted="done.")
code = commands.main()
signal.raise_signal(signal.SIGINT)
sys.exit(code)
"""
    )
    command = [sys.executable, "-m", "interrupted"]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=50)
    assert (found.returncode, found.stderr) == (130, "probe: interrupted; done.\n")


def test_an_interrupted_recording_goes_on_with_the_same_command(folder: Path) -> None:
    arguments = ["record", "--samples", "64", "--seqlen", "1024", "--modes", "fp32", "2-1", "--out", "r"]
    arguments += ["--calib-data-num", "1", "--calib-seqlen", "16"]
    said = interrupted(arguments, "[2/2]", folder)
    assert said == "probe: interrupted; what is recorded is kept. The same command goes on from there.\n"
    assert not (folder / "r" / "manifest.json").exists()
    again = subprocess.run(
        [sys.executable, "-m", "probe.commands", *arguments], cwd=folder, capture_output=True, text=True, check=False
    )
    assert again.returncode == 0, again.stderr
    assert "fp32 recorded already" in again.stderr


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["parent only", "all processes of the terminal"])
@pytest.mark.parametrize("at", ["=====", "✅ Successfully processed: a.pt"], ids=["while workers start", "at work"])
def test_an_interrupt_ends_the_workers_too_and_leaves_no_half_file(
    folder: Path, send: Callable[[int, int], None], at: str
) -> None:
    formats = ["fp8_e4m3", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "int8"]
    arguments = ["scaling", *TENSORS, "--jobs", "2", "--elem-format", *formats, "--no-plots"]
    rest = interrupted(arguments, at, folder, send)
    assert rest.startswith("probe: interrupted; the files of tensors that are done stay")
    assert rest.count("\n") == 1
    written = [path for path in (folder / "draw").rglob("*") if path.is_file()]
    assert not [path for path in written if path.suffix == ".tmp"]
    assert "scaling.html" not in {path.name for path in written}
    assert bool(written) == at.startswith("✅")
