"""The public names of probe, each with the module it comes from: the one list, which __init__.py reads."""

from probe.comparisons.devices.diff import DeviceComparison as DeviceComparison, diff as diff
from probe.comparisons.health import Health as Health, check as check
from probe.comparisons.modes import ModeComparison as ModeComparison, compare as compare
from probe.data.samples import token_batches as token_batches
from probe.data.texts import text_of as text_of
from probe.formats import FORMATS as FORMATS, Format as Format
from probe.metrics import (
    Comparison as Comparison,
    LogitComparison as LogitComparison,
    LogitMetrics as LogitMetrics,
    Metrics as Metrics,
)
from probe.models.layers import select as select
from probe.models.loading import Loaded as Loaded, load_model as load_model
from probe.numerics.codes import Quantized as Quantized
from probe.numerics.hadamard import hadamard_matrix as hadamard_matrix, hadamard_transform as hadamard_transform
from probe.numerics.integers import (
    IntegerParameters as IntegerParameters,
    dequantize_integer as dequantize_integer,
    dynamic_parameters as dynamic_parameters,
    fake_quantize_integer as fake_quantize_integer,
    integer_parameters as integer_parameters,
    quantize_integer as quantize_integer,
)
from probe.numerics.observers import (
    MinMaxObserver as MinMaxObserver,
    MSEObserver as MSEObserver,
    PercentileObserver as PercentileObserver,
    make_observer as make_observer,
)
from probe.numerics.quantize import (
    fake_quantize as fake_quantize,
    quantize as quantize,
    round_to as round_to,
)
from probe.numerics.underflow import (
    Underflow as Underflow,
    UnderflowWarning as UnderflowWarning,
    analyze_underflow as analyze_underflow,
)
from probe.recordings.manifest import RecordingError as RecordingError
from probe.recordings.reading import Recording as Recording, read_recording as read_recording
from probe.recordings.recorder import record as record
from probe.recordings.request import RecordRequest as RecordRequest
from probe.recordings.stream import write_recording as write_recording
from probe.recordings.taps import record_outputs as record_outputs
from probe.running.calibration import (
    Calibration as Calibration,
    calibrate as calibrate,
    calibrate_on as calibrate_on,
    load_calibration as load_calibration,
)
from probe.running.capture import (
    Capture as Capture,
    UncoveredError as UncoveredError,
    capture as capture,
)
from probe.running.declarations import DeclaredMode as DeclaredMode, read_declarations as read_declarations
from probe.running.measurement import (
    Measured as Measured,
    NotAppliedError as NotAppliedError,
    check_applied as check_applied,
    measure as measure,
)
from probe.running.measurement_job import measure_all as measure_all
from probe.running.modes import (
    MODES as MODES,
    Mode as Mode,
    declare_modes as declare_modes,
    register_mode as register_mode,
    unregister_mode as unregister_mode,
)
from probe.running.recipes import Recipe as Recipe, apply as apply
from probe.running.reference import Reference as Reference, run_reference as run_reference
from probe.running.weights import Weights as Weights, count_weights as count_weights
from probe.scaling.advice import recommend as recommend
from probe.scaling.results import ScalingResult as ScalingResult
from probe.scaling.sweep import scaling_sweep as scaling_sweep
from probe.sensitivity import Sensitivity as Sensitivity, rank_layers as rank_layers

__version__: str
__all__: list[str]
