"""A model folder that a test may damage."""

from pathlib import Path

import pytest

from tests.models.folders import copy_of_llama


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of tiny-llama."""
    return copy_of_llama(tmp_path)
