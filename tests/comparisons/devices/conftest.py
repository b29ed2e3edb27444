"""What the tests of two devices share."""

from pathlib import Path

import pytest

from probe.recordings import Recording
from tests.comparisons.devices.recordings import network, recorded


@pytest.fixture
def a(tmp_path: Path) -> Recording:
    """The network on device A."""
    return recorded(tmp_path / "a", network())
