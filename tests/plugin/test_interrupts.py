"""Ctrl-C in a run of the gate."""

import sys

import pytest

from tests.plugin.conftest import Run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there Ctrl-C is no signal")

#: Hooks of a conftest: Ctrl-C in the second test.
IN_A_CALLBACK = """
import ctypes
import signal
import time

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item):
    if "layer_1" in item.name:
        ctypes.CFUNCTYPE(None)(lambda: signal.raise_signal(signal.SIGINT))()
        time.sleep(20)
"""


def test_an_interrupt_inside_of_a_callback_of_c_code_ends_the_run(project: Run) -> None:
    """pytest would make a warning of it, and go on."""
    assert project("--update-baselines").ret == 0
    found = project("-k", "int8", hooks=IN_A_CALLBACK, subprocess=True)
    assert found.ret == pytest.ExitCode.INTERRUPTED
    found.stdout.fnmatch_lines(["*not compared: * the run ended early (interrupted)*"])
