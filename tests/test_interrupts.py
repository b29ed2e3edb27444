"""Ctrl-C that waits."""

import signal
import sys
import threading

import pytest

from probe.interrupts import interrupt_later

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there Ctrl-C is no signal")


def test_the_first_waits_until_the_block_is_over_and_the_second_does_not() -> None:
    usual, reached = signal.getsignal(signal.SIGINT), list[int]()

    def interrupt(times: int) -> None:
        with interrupt_later():
            for time in range(times):
                signal.raise_signal(signal.SIGINT)
                reached.append(time)

    with pytest.raises(KeyboardInterrupt):
        interrupt(1)
    assert reached == [0]
    with pytest.raises(KeyboardInterrupt):
        interrupt(2)
    assert reached == [0, 0]
    assert signal.getsignal(signal.SIGINT) is usual


def test_an_interrupt_that_is_ignored_stays_so_and_other_threads_have_none() -> None:
    usual = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt_later():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, usual)
    failed = list[Exception]()

    def enter() -> None:
        try:
            with interrupt_later():
                pass
        except ValueError as problem:  # that of signal.signal
            failed.append(problem)

    other = threading.Thread(target=enter)
    other.start()
    other.join()
    assert not failed
