"""A toy model that is analysed in a moment, for the tests of the report."""

from typing import Any

from probe.activations.run import Analysis, analyze
from probe.activations.settings import read_configuration

TOY = {
    "model.path": "tests.activations.toys:make",
    "data.num_samples": "3",
    "data.seq_len": "12",
    "outlier.threshold": "8",
    "visualization.dpi": "50",
}
#: Few pictures, for what does not depend on which they are.
FEW = {
    **{f"enabled.{name}": "false" for name in ("heatmap_3d", "distribution", "magnitude_input", "magnitude_weight")},
    "layer_selection.patterns": "layers.0",
}


def quiet(_: str) -> None:
    return


def found(**given: Any) -> Analysis:
    return analyze(read_configuration(None, [(k, str(v)) for k, v in {**TOY, **given}.items()]), progress=quiet)
