"""What the tests of the diagnosis share."""

import pytest
import torch
from torch import Tensor


@pytest.fixture(scope="module")
def activation() -> Tensor:
    """[sequence, token, channel], larger than AMAX here and there; the width is no multiple of a block."""
    x = torch.randn(2, 40, 72, generator=torch.Generator().manual_seed(3)) * 1.5
    x[0, 5] *= 1e-4
    x[1, 7, 3] = 0.0
    return x
