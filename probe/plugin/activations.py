"""What a test that takes `probe_activations` is given."""

from probe.gate.held import Judged
from probe.plugin.golden_activations import judged
from probe.plugin.scaling import ProbeScaling


class ProbeActivations(ProbeScaling):
    """One tensor of one layer. `str()` of it is the pytest id."""

    fixture = "probe_activations"

    def judge(self) -> Judged:
        """What became of it; the model runs once for all tensors of a marker."""
        return judged(self.session, self.asked)
