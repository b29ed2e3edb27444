"""A store to write to, and one with a single case."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from probe.gate.baselines.store import Store
from tests.gate.baselines.examples import MODEL, case, entry


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """No waiting for the disk; where fsync matters a test counts the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "baselines")


@pytest.fixture
def small(store: Store) -> Path:
    """The file of a store with one case."""
    store.write(MODEL, {case(): entry(0.5, 1.0, 2.0)}, environment={"torch": "2.13.0"})
    return store.file(MODEL, case())
