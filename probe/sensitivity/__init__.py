"""Sensitivity: what each layer, or each site, costs the whole model when it is quantized.

    alone     only this one is quantized, everything else is float
    without   everything is quantized, only this one is float

`rank_layers` measures both for every unit against one run of the float model, and says which units to keep in
higher precision. A run starts at the layer that differs: what the layers before it return is known from a whole run.
"""

from probe.sensitivity.ranking import rank_layers
from probe.sensitivity.results import Advice, Effect, Figures, Sensitivity

__all__ = ["Advice", "Effect", "Figures", "Sensitivity", "rank_layers"]
