"""probe: numerical regression tests for quantized models.

Names are imported when first used, so that `probe --help` does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from probe.version import VERSION

if TYPE_CHECKING:
    from probe.calibration import Calibration, calibrate, load_calibration
    from probe.comparisons.devices import DeviceComparison, diff
    from probe.comparisons.health import Health, check
    from probe.comparisons.mode_result import ModeComparison
    from probe.comparisons.modes import compare
    from probe.data import text_of, token_batches
    from probe.formats import FORMATS, Format
    from probe.hooks import Capture, UncoveredError, capture, select
    from probe.metrics import Comparison, LogitComparison, LogitMetrics, Metrics
    from probe.models.load import Loaded, load_model
    from probe.modes import MODES, Mode, Recipe, apply, register_mode, unregister_mode
    from probe.overview import calibrate_on, measure_all
    from probe.quantizers.codes import Quantized
    from probe.quantizers.hadamard import hadamard_matrix, hadamard_transform
    from probe.quantizers.integers import (
        IntegerParameters,
        dequantize_integer,
        dynamic_parameters,
        fake_quantize_integer,
        integer_parameters,
        quantize_integer,
    )
    from probe.quantizers.observers import MinMaxObserver, MSEObserver, PercentileObserver, make_observer
    from probe.quantizers.quantize import fake_quantize, quantize, round_to
    from probe.quantizers.underflow import Underflow, UnderflowWarning, analyze_underflow
    from probe.recordings.checked import RecordingError
    from probe.recordings.reading import Recording, read_recording
    from probe.recordings.recorder import record
    from probe.recordings.returning import record_outputs
    from probe.recordings.writing import write_recording
    from probe.runner import Measured, NotAppliedError, Reference, check_applied, measure, run_reference
    from probe.scaling.advice import recommend
    from probe.scaling.results import ScalingResult
    from probe.scaling.sweep import scaling_sweep
    from probe.sensitivity import Sensitivity, rank_layers

__version__ = VERSION

_HOME = {
    "Calibration": "calibration",
    "Capture": "hooks",
    "Comparison": "metrics",
    "DeviceComparison": "comparisons.devices",
    "FORMATS": "formats",
    "Format": "formats",
    "Health": "comparisons.health",
    "IntegerParameters": "quantizers.integers",
    "Loaded": "models.load",
    "LogitComparison": "metrics",
    "LogitMetrics": "metrics",
    "MODES": "modes",
    "MSEObserver": "quantizers.observers",
    "Measured": "runner",
    "Metrics": "metrics",
    "MinMaxObserver": "quantizers.observers",
    "Mode": "modes",
    "ModeComparison": "comparisons.mode_result",
    "NotAppliedError": "runner",
    "PercentileObserver": "quantizers.observers",
    "Quantized": "quantizers.codes",
    "Recipe": "modes",
    "Recording": "recordings.reading",
    "RecordingError": "recordings.checked",
    "Reference": "runner",
    "Sensitivity": "sensitivity",
    "ScalingResult": "scaling.results",
    "UncoveredError": "hooks",
    "Underflow": "quantizers.underflow",
    "UnderflowWarning": "quantizers.underflow",
    "analyze_underflow": "quantizers.underflow",
    "apply": "modes",
    "calibrate": "calibration",
    "calibrate_on": "overview",
    "capture": "hooks",
    "check": "comparisons.health",
    "check_applied": "runner",
    "compare": "comparisons.modes",
    "dequantize_integer": "quantizers.integers",
    "dynamic_parameters": "quantizers.integers",
    "diff": "comparisons.devices",
    "fake_quantize": "quantizers.quantize",
    "fake_quantize_integer": "quantizers.integers",
    "hadamard_matrix": "quantizers.hadamard",
    "hadamard_transform": "quantizers.hadamard",
    "integer_parameters": "quantizers.integers",
    "load_calibration": "calibration",
    "load_model": "models.load",
    "make_observer": "quantizers.observers",
    "measure": "runner",
    "measure_all": "overview",
    "quantize": "quantizers.quantize",
    "quantize_integer": "quantizers.integers",
    "rank_layers": "sensitivity",
    "read_recording": "recordings.reading",
    "record": "recordings.recorder",
    "record_outputs": "recordings.returning",
    "recommend": "scaling.advice",
    "register_mode": "modes",
    "round_to": "quantizers.quantize",
    "run_reference": "runner",
    "scaling_sweep": "scaling.sweep",
    "select": "hooks",
    "text_of": "data",
    "token_batches": "data",
    "unregister_mode": "modes",
    "write_recording": "recordings.writing",
}
__all__ = [  # noqa: RUF022
    "__version__",
    "Calibration",
    "Capture",
    "Comparison",
    "DeviceComparison",
    "FORMATS",
    "Format",
    "Health",
    "IntegerParameters",
    "Loaded",
    "LogitComparison",
    "LogitMetrics",
    "MODES",
    "MSEObserver",
    "Measured",
    "Metrics",
    "MinMaxObserver",
    "Mode",
    "ModeComparison",
    "NotAppliedError",
    "PercentileObserver",
    "Quantized",
    "Recipe",
    "Recording",
    "RecordingError",
    "Reference",
    "Sensitivity",
    "ScalingResult",
    "UncoveredError",
    "Underflow",
    "UnderflowWarning",
    "analyze_underflow",
    "apply",
    "calibrate",
    "calibrate_on",
    "capture",
    "check",
    "check_applied",
    "compare",
    "dequantize_integer",
    "dynamic_parameters",
    "diff",
    "fake_quantize",
    "fake_quantize_integer",
    "hadamard_matrix",
    "hadamard_transform",
    "integer_parameters",
    "load_calibration",
    "load_model",
    "make_observer",
    "measure",
    "measure_all",
    "quantize",
    "quantize_integer",
    "rank_layers",
    "read_recording",
    "record",
    "record_outputs",
    "recommend",
    "register_mode",
    "round_to",
    "run_reference",
    "scaling_sweep",
    "select",
    "text_of",
    "token_batches",
    "unregister_mode",
    "write_recording",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'probe' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"probe.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
