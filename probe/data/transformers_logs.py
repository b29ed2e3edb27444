"""Running transformers without its progress bars, warnings and log lines."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bars, warnings or log lines below ERROR from transformers and what it imports, inside the block."""
    level = logging.root.manager.disable
    logging.disable(max(level, logging.WARNING))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with _no_progress_bars():
                yield
    finally:
        logging.disable(level)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging as bars

    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()  # type: ignore[no-untyped-call]
