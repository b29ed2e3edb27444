"""Calibration: the largest magnitude, or a quantile of it, at every site over a text, and the files that store it."""

import hashlib
import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probe.data.calls import Batch, input_fingerprint
from probe.data.samples import TextSamples
from probe.files.atomic import write
from probe.files.defects import DefectError, parsing, reading
from probe.formats import PERCENTILE
from probe.models.forward import run_model
from probe.models.linear import linear_key, linear_layers
from probe.models.linear_grids import expert_sites
from probe.models.loading import Loaded
from probe.models.mamba import Site
from probe.models.mamba_blocks import is_mamba, rotated_twin, with_sites
from probe.numerics.observers import MinMaxObserver, Observer, PercentileObserver
from probe.running.inputs import input_batches
from probe.words import INCLUDABLE, near_or_first

#: Sites whose scale is a quantile of |x| over all calibration data; all others take the largest |x|.
PERCENTILE_SITES = ("conv1d.output", "scan.state")
VERSION = 1

#: The calibrated amax of a site by its name; None: the scale is taken from the tensor.
Amax = Callable[[str], float | None]


@dataclass(frozen=True, eq=False)
class Calibration:
    """amax by site (`backbone.layers.0.mixer.conv1d.output`) and linear (`linear model.layers.0.mlp.up_proj.input`).

    Sites are those of the rotated twin, linear inputs those of the plain float model.
    """

    amax: dict[str, float]
    model: str  # fingerprint of the weights
    data: str  # fingerprint of the tokens
    percentile: float
    tokens: int

    def amax_of(self, name: str) -> float:
        """The amax of a site; a site that was never observed is an error, not a default."""
        if name not in self.amax:
            hint = near_or_first(name, list(self.amax))
            raise ValueError(f"the calibration has no scale for {name}. {hint} Calibrate this model again.")
        return self.amax[name]

    def save(self, path: Path | str) -> None:
        """Write `path`.safetensors (the figures) and `path`.json (where they come from, and the digest of the figures).

        A kill between the two is found by the digest when they are read.
        """
        from safetensors.torch import save

        figures = save({name: torch.tensor(value, dtype=torch.float64) for name, value in sorted(self.amax.items())})
        facts = {key: value for key, value in asdict(self).items() if key != "amax"}
        facts |= {"version": VERSION, "figures": hashlib.sha256(figures).hexdigest()}
        write(f"{path}.safetensors", figures)
        write(f"{path}.json", json.dumps(facts, indent=2, sort_keys=True) + "\n")


def amax_lookup(calibration: Calibration | None, prefix: str = "") -> Amax:
    """The amax of a site by its name behind `prefix`; without a calibration, None for every site."""
    return lambda site: None if calibration is None else calibration.amax_of(f"{prefix}{site}")


def load_calibration(path: Path | str, *, model: str, data: str | None = None) -> Calibration:
    """Read a calibration; one of another model, or of other data than `data`, is refused."""
    from safetensors.torch import load

    facts_file, figures_file = Path(f"{path}.json"), Path(f"{path}.safetensors")
    for file in (facts_file, figures_file):
        if not file.is_file():
            raise ValueError(f"there is no {file}. A calibration is two files, .json and .safetensors: make it again.")
    with reading(Path(path), ValueError, remedy="Make it again."), parsing("a calibration"):
        facts, stored = json.loads(facts_file.read_bytes()), figures_file.read_bytes()
        figures = {name: float(value) for name, value in load(stored).items()}
        percentile, tokens = float(facts["percentile"]), int(facts["tokens"])
        calibration = Calibration(figures, facts["model"], facts["data"], percentile, tokens)
        version = facts["version"]
        if facts.get("figures", digest := hashlib.sha256(stored).hexdigest()) != digest:  # older ones have no digest
            raise DefectError("its two files are not of one calibration")
    if version != VERSION:
        raise ValueError(f"{facts_file} has version {version}; this probe reads {VERSION}. Make it again.")
    if calibration.model != model:
        raise ValueError(
            f"{path} belongs to a model with fingerprint {calibration.model}, this one has {model}: the weights "
            "changed or it is another model. Make the calibration again."
        )
    if data is not None and calibration.data != data:
        raise ValueError(
            f"{path} was made from data with fingerprint {calibration.data}, expected {data}. Make it again."
        )
    return calibration


def check_percentile(percentile: float) -> None:
    """Refuse what is no share."""
    if isinstance(percentile, bool) or not 0 < percentile <= 1:
        raise ValueError(f"percentile is {percentile}; expected a share above 0 and at most 1, such as 0.9995 (alpha).")


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    model_fingerprint: str,
    data_fingerprint: str,
    percentile: float = PERCENTILE,
    progress: Callable[[int], Any] | None = None,
) -> Calibration:
    """Run the float model over `batches` and observe every linear input, and every site if it is a Mamba."""
    batches = list(batches)
    check_percentile(percentile)
    if not batches:
        raise ValueError("there is no calibration data: not one batch was given. Pass at least one.")
    observers: dict[str, Observer] = {}
    optional: set[str] = set()  # inputs that only an `include` puts on a grid: a head may be read without a call
    runs: list[tuple[nn.Module, dict[str, Any]]] = [(model, {})]
    with ExitStack() as hooks, torch.no_grad():
        if is_mamba(model):
            plain, rotated = with_sites(model, scan="fast"), rotated_twin(model, scan="fast")
            runs = [(plain, {}), (rotated, {"use_cache": True})]  # the state leaves a block only into a cache
            for name, module in rotated.named_modules():
                if isinstance(module, Site):
                    site = name.replace(".sites.", ".")
                    quantile = site.endswith(PERCENTILE_SITES)
                    observers[site] = PercentileObserver(percentile) if quantile else MinMaxObserver()
                    hooks.callback(module.register_forward_hook(partial(_observe, observers[site])).remove)
        hooks.enter_context(expert_sites(runs[0][0]))
        always = set(linear_layers(runs[0][0]))
        for name, layer in linear_layers(runs[0][0], INCLUDABLE).items():
            for site in layer.inputs:
                observer = observers[linear_key(name, site)] = MinMaxObserver()
                if name not in always:
                    optional.add(linear_key(name, site))
                place = layer.module.get_submodule(site) if layer.has_sites else layer.module
                hook = partial(_observe_input, observer)
                hooks.callback(place.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for done, batch in enumerate(batches):
            for running, options in runs:
                run_model(running, batch, options)
            if progress is not None:
                progress(done + 1)
    unused = {name for name, observer in observers.items() if not observer.count}
    silent = [name for name in observers if name in unused - optional]
    if silent:
        raise ValueError(f"{len(silent)} sites never fired during calibration, first {silent[0]}. Nothing was kept.")
    amax = {name: float(observer.amax) for name, observer in observers.items() if name not in unused}
    tokens = sum(batch.numel() for batch in batches)
    return Calibration(amax, model_fingerprint, data_fingerprint, percentile, tokens)


def _observe(observer: Observer, module: nn.Module, inputs: Any, output: Tensor) -> None:
    """A hook that observes the output."""
    observer.update(output)


def _observe_input(observer: Observer, module: nn.Module, args: Any, kwargs: Any) -> None:
    """A hook that observes the first input."""
    observer.update(next(iter((*args, *kwargs.values()))))


def calibrate_on(
    loaded: Loaded, source: str, samples: int, seqlen: int, batch_size: int = 8, *, percentile: float = PERCENTILE
) -> Calibration:
    """Calibrate a model on `samples` windows of `seqlen` tokens of a text, or on what else `source` names."""
    batches = input_batches(loaded, TextSamples(source, samples, seqlen, batch_size), key="calib_seqlen").batches
    return CalibrationRun(tuple(batches), percentile).of(loaded)


@dataclass(frozen=True, eq=False)
class CalibrationRun:
    """A calibration to be made, wherever the model is: its inputs are those of the process that asks for it."""

    batches: tuple[Batch, ...]
    percentile: float

    def of(self, loaded: Loaded) -> Calibration:
        """The calibration of a model."""
        return calibrate(
            loaded.model,
            self.batches,
            model_fingerprint=loaded.fingerprint,
            data_fingerprint=input_fingerprint(self.batches),
            percentile=self.percentile,
        )
