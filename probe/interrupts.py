"""Ctrl-C where libraries do not expect it: it is neither lost, nor does it come in the middle of their start."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

#: Seconds until it is sent again: by then the call of C code is over.
LATER = 0.1


def keep_interrupts() -> None:
    """Send Ctrl-C again if it came where Python drops exceptions: in a __del__, in what C code calls back.

    Other dropped exceptions go where they went before.
    """
    usual = sys.unraisablehook

    def hook(problem: "sys.UnraisableHookArgs") -> None:
        if problem.exc_type is not KeyboardInterrupt:
            usual(problem)
            return
        again = threading.Timer(LATER, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.daemon = True
        again.start()

    if hasattr(signal, "pthread_kill"):
        sys.unraisablehook = hook


@contextmanager
def interrupt_later() -> Iterator[None]:
    """Ctrl-C waits until the block is over; a second one does not."""
    usual = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(usual):
        yield
        return
    came: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        if came:
            usual(number, frame)
        came.append(number)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
        if came:
            signal.raise_signal(signal.SIGINT)
