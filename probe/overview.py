"""What there is to choose from, and what every choice costs: modes, layers, and the table of errors."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from probe.calibration import Calibration, calibrate
from probe.data import fingerprint, text_of, token_batches
from probe.formats import FORMATS, GATE_FORMATS, PERCENTILE
from probe.hooks import blocks_of, select
from probe.models.limits import check_positions
from probe.models.load import Loaded, load_model
from probe.models.mamba import mamba_blocks, with_sites
from probe.modes import MODES, Recipe, expand_modes, find_mode
from probe.names import look_up
from probe.runner import Measured, measure, run_reference


def mode_rows() -> list[dict[str, object]]:
    """The table of modes."""
    return [
        {
            "mode": mode.name,
            "id": mode.id,
            "kind": mode.kind,
            "conv1d input": mode.conv_input if mode.kind == "ssm" else "-",
            "conv1d gives": {"float": "F", "codes": "q", "grid": "s*q"}[mode.conv_gives] if mode.kind == "ssm" else "-",
            "scan reads": _scan_reads(mode.conv_gives, mode.scan_reads) if mode.kind == "ssm" else "-",
            "scan": mode.scan if mode.kind in ("ssm", "float") else "-",
            "what it is": mode.what,
        }
        for mode in MODES.values()
    ]


def _scan_reads(gives: str, reads: str) -> str:
    if reads == "again":
        return "round(s*q/s)"
    if reads == "grid":
        return "round(F/s)"
    return {"float": "F", "codes": "q", "grid": "s*q"}[gives]


def layer_rows(loaded: Loaded, patterns: Sequence[str], *, sites: bool) -> list[dict[str, object]]:
    """Name, label, type and parameters of the modules that match, all of them without a pattern."""
    model = with_sites(loaded.model) if sites else loaded.model
    names = set(select(model, patterns, model_name=loaded.name).values()) if patterns else None
    labels = {name: f"layer_{index}" for index, name in enumerate(blocks_of(model))}
    return [
        {
            "name": name,
            "layer": labels.get(name, "-"),
            "type": type(module).__name__,
            "parameters": sum(p.numel() for p in module.parameters()),
            "weight": " x ".join(map(str, getattr(module.weight, "shape", ()))) or "-" if _has_weight(module) else "-",
        }
        for name, module in model.named_modules()
        if name and (names is None or name in names)
    ]


def _has_weight(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), torch.Tensor)


def recipes_of(modes: Sequence[str], formats: Sequence[str] | None) -> list[Recipe]:
    """The cross product: float modes once, every other mode with every format; every name is checked."""
    chosen = list(formats) if formats else list(GATE_FORMATS)
    for format in chosen:
        look_up("format", format, FORMATS)
    recipes = []
    for mode in expand_modes(list(modes)):
        if mode.is_quantized:
            own = ["int8"] if mode.name.startswith("torchao") and not formats else chosen
            recipes += [Recipe(mode.name, format) for format in own]
        else:
            recipes.append(Recipe(mode.name))
    return list(dict.fromkeys(recipes))


def check_recipes(loaded: Loaded, recipes: Sequence[Recipe]) -> None:
    """Find what cannot work before anything is run."""
    is_mamba = any(True for _ in mamba_blocks(loaded.model))
    for recipe in recipes:
        if find_mode(recipe.mode).kind == "ssm" and not is_mamba:
            raise ValueError(
                f"{recipe} quantizes Mamba-1 blocks and {loaded.name} has none. "
                "Modes for other models: fp16, bf16, linear_w, linear_wa."
            )
        if recipe.mode.startswith("torchao") and recipe.format != "int8":
            raise ValueError(
                f"{recipe}: torchao's modes take the format int8 only. Leave the format out, or give int8."
            )


def measure_all(
    model: str,
    *,
    modes: Sequence[str] | None = None,
    formats: Sequence[str] | None = None,
    layers: Sequence[str | int] = ("all",),
    data: tuple[str, int, int, int] = ("evaluation", 8, 256, 8),
    calibration_data: tuple[str, int, int] = ("calibration", 16, 256),
    percentile: float = PERCENTILE,
    injected: bool = False,
    allow_download: bool = False,
    trust_remote_code: bool = False,
    progress: Callable[[str], Any] = lambda text: None,
) -> list[Measured]:
    """Every recipe of modes x formats against fp32, on one model, with one reference and one calibration."""
    if data[2] < 2:
        raise ValueError(f"seqlen is {data[2]}; expected at least 2, a token and the next one.")
    recipes = recipes_of(modes, formats) if modes else []
    loaded = load_model(model, allow_download=allow_download, trust_remote_code=trust_remote_code)
    if not modes:  # what fits the model
        is_mamba = any(True for _ in mamba_blocks(loaded.model))
        recipes = recipes_of(["all"] if is_mamba else ["linear_w", "linear_wa"], formats)
    check_recipes(loaded, recipes)
    check_positions(loaded.model, data[2], key="seqlen")
    select(loaded.model, layers, model_name=model)
    for note in loaded.notes:
        progress(f"note: {note}")
    source, samples, seqlen, batch_size = data
    batches = token_batches(text_of(source), loaded.tokenizer, samples=samples, seqlen=seqlen, batch_size=batch_size)
    progress(f"[reference] {loaded.name}, {samples} x {seqlen} tokens of {source}")
    reference = run_reference(loaded.model, batches, layers)
    calibration = None
    if any(recipe.needs_calibration for recipe in recipes):
        progress(f"[calibration] {calibration_data[1]} x {calibration_data[2]} tokens of {calibration_data[0]}")
        calibration = calibrate_on(loaded, *calibration_data, percentile=percentile)
    measured = []
    for index, recipe in enumerate(recipes):
        progress(f"[{index + 1}/{len(recipes)}] {recipe}")
        measured.append(measure(loaded.model, recipe, reference, calibration, injected=injected))
    return measured


def calibrate_on(
    loaded: Loaded, source: str, samples: int, seqlen: int, *, percentile: float = PERCENTILE, batch_size: int = 8
) -> Calibration:
    """Calibrate a model on a text."""
    batches = token_batches(text_of(source), loaded.tokenizer, samples=samples, seqlen=seqlen, batch_size=batch_size)
    return calibrate(
        loaded.model,
        batches,
        model_fingerprint=loaded.fingerprint,
        data_fingerprint=fingerprint(batches),
        percentile=percentile,
    )


def measured_rows(measured: Sequence[Measured]) -> list[dict[str, object]]:
    """One row a recipe: mse of every layer, then the whole model."""
    rows = []
    for one in measured:
        row: dict[str, object] = {"recipe": str(one.recipe)}
        for label, metrics in one.layers.items():
            row[label] = f"{metrics.mse:.3e}" if metrics.mse is not None else "not finite"
        logits = one.logits
        row |= {
            "kl": _rounded(logits.kl),
            "top-1": _rounded(logits.top1_agreement),
            "bits": _rounded(logits.bits_per_token),
            "change": _rounded(logits.change_in_bits),
        }
        rows.append(row)
    return rows


def _rounded(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.4f}"
