"""The C scan that trained tiny-mamba, against the plain loop beside it."""

import shutil
from pathlib import Path

import pytest


@pytest.mark.skipif(shutil.which("gcc") is None, reason="scan.c is compiled with gcc, which is not installed")
@pytest.mark.parametrize("time", [1, 2, 33])
def test_outputs_and_gradients_equal_those_of_the_reference_loop(monkeypatch: pytest.MonkeyPatch, time: int) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "training")
    from scan import check_gradients

    assert check_gradients(channels=3, batch=2, time=time) < 1e-5
