"""The sensitivity of a model by its name: loading, text and calibration included."""

from dataclasses import replace
from pathlib import Path

from probe.data import text_of, token_batches
from probe.formats import FORMATS, PERCENTILE
from probe.models.layers import select
from probe.models.loading import load_model
from probe.models.mamba import is_mamba
from probe.models.positions import check_positions
from probe.running.calibration import calibrate_on
from probe.running.devices import check_device, is_present, is_recorded
from probe.running.recipes import Recipe, check_recipes
from probe.sensitivity.ranking import Progress, Sites, rank_layers
from probe.sensitivity.results import Sensitivity


def rank_model(
    model: str,
    *,
    mode: str | None = None,
    format: str = "int8",
    layers: tuple[str | int, ...] = ("all",),
    sites: Sites | None = None,
    data: tuple[str, int, int, int] = ("evaluation", 8, 128, 4),
    calibration_data: tuple[str, int, int] = ("calibration", 16, 256),
    percentile: float = PERCENTILE,
    device: str = "cpu",
    advice: bool = True,
    allow_download: bool = False,
    trust_remote_code: bool = False,
    progress: Progress = lambda done, total, what: None,
) -> Sensitivity:
    """`rank_layers` of a model by name. `mode` None is 2-1 for a Mamba and linear_wa for all others.

    data                source, samples, tokens of each, samples in a batch
    calibration_data    source, samples, tokens of each; used by formats with calibrated scales only
    """
    check_device(device, Path())
    if is_recorded(device) or not is_present(device):
        raise ValueError(f"device {device!r} is not present here. Leave --device out to run on the cpu.")
    if data[2] < 2:
        raise ValueError(f"seqlen is {data[2]}; expected at least 2, a token and the next one.")
    early = None if mode is None else Recipe(mode, format)
    loaded = load_model(model, allow_download=allow_download, trust_remote_code=trust_remote_code)
    recipe = early or Recipe("2-1" if is_mamba(loaded.model) else "linear_wa", format)
    check_recipes(loaded, [recipe])
    select(loaded.model, layers, model_name=model)  # before a minute of calibration
    source, samples, seqlen, batch_size = data
    check_positions(loaded.model, seqlen, key="seqlen")
    batches = token_batches(text_of(source), loaded.tokenizer, samples=samples, seqlen=seqlen, batch_size=batch_size)
    calibration = None
    if FORMATS[format].needs_calibration:
        progress(0, 0, f"calibration on {calibration_data[1]} x {calibration_data[2]} tokens of {calibration_data[0]}")
        calibration = calibrate_on(loaded, *calibration_data, percentile=percentile)
    found = rank_layers(
        loaded.model.to(device),
        recipe,
        batches,
        calibration,
        layers=layers,
        sites=sites,
        advice=advice,
        progress=progress,
    )
    return replace(found, notes=(*loaded.notes, *found.notes))
