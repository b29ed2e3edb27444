"""Running transformers and datasets without their progress bars, warnings and log lines."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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


@contextmanager
def quiet_datasets(datasets: Any, *, offline: bool = False) -> Iterator[None]:
    """No progress bars or log lines from datasets; with `offline`, it reads its cache and uses no network."""
    from datasets.utils import logging as log_lines

    hidden, level, was = (
        datasets.utils.are_progress_bars_disabled(),
        log_lines.get_verbosity(),
        datasets.config.HF_HUB_OFFLINE,
    )
    datasets.utils.disable_progress_bars()
    log_lines.set_verbosity_error()
    datasets.config.HF_HUB_OFFLINE = offline or was
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE = was
        log_lines.set_verbosity(level)
        if not hidden:
            datasets.utils.enable_progress_bars()
