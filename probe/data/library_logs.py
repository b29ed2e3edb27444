"""Running transformers and datasets without their progress bars, warnings and log lines."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from probe.numerics.native import without_collection


@contextmanager
def quietly() -> Iterator[None]:
    """No progress bars, warnings or log lines below ERROR from transformers and what it imports, inside the block."""
    level = logging.root.manager.disable
    with ExitStack() as undo:
        undo.callback(logging.disable, level)
        logging.disable(max(level, logging.WARNING))
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        with without_collection():
            from transformers.utils import logging as bars
        if bars.is_progress_bar_enabled():
            undo.callback(bars.enable_progress_bar)
            bars.disable_progress_bar()  # type: ignore[no-untyped-call]
        yield


@contextmanager
def quiet_datasets(datasets: Any, *, offline: bool = False) -> Iterator[None]:
    """No progress bars or log lines from datasets; with `offline`, it reads its cache and uses no network."""
    from datasets.utils import logging as log_lines

    with ExitStack() as undo:
        undo.callback(setattr, datasets.config, "HF_HUB_OFFLINE", datasets.config.HF_HUB_OFFLINE)
        undo.callback(log_lines.set_verbosity, log_lines.get_verbosity())
        if not datasets.utils.are_progress_bars_disabled():
            undo.callback(datasets.utils.enable_progress_bars)
        datasets.config.HF_HUB_OFFLINE = offline or datasets.config.HF_HUB_OFFLINE
        log_lines.set_verbosity_error()
        datasets.utils.disable_progress_bars()
        yield
