"""The regression matrix: every mode, layer, device and format of [tool.probe] against baselines/."""

import pytest

from probe.plugin.fixtures import ProbeCase


def test_matches_baseline(probe_case: ProbeCase) -> None:
    probe_case.check()


@pytest.mark.probe(model="tiny-llama", modes=["linear_w", "linear_wa"])
def test_llama_matches_baseline(probe_case: ProbeCase) -> None:
    probe_case.check()
