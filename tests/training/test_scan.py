"""The C scan that trained tiny-mamba, against the plain loop beside it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TIMES = (1, 2, 33)
#: In a process of its own: scan.c is linked with -ffast-math, and loading it flushes subnormals to zero from then on.
CHECK = f"""
import json
from scan import check_gradients
print(json.dumps({{time: check_gradients(channels=3, batch=2, time=time) for time in {TIMES}}}))
"""


@pytest.fixture(scope="module")
def errors() -> dict[str, float]:
    """The largest error of outputs and gradients, by the length of the sequence."""
    folder = Path(__file__).parents[2] / "training"
    done = subprocess.run([sys.executable, "-c", CHECK], cwd=folder, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(shutil.which("gcc") is None, reason="scan.c is compiled with gcc, which is not installed")
@pytest.mark.parametrize("time", TIMES)
def test_outputs_and_gradients_equal_those_of_the_reference_loop(errors: dict[str, float], time: int) -> None:
    assert errors[str(time)] < 1e-5
