"""The formats of the users' own scripts: names of files and keys, statistics beside the tensors, printed blocks.

    recipe             tensor              npy                              npz, one layer       pt
    fp32               layer_0.output      mode_fp32_layer_0.npy            mode_fp32_output     layer_0_output.pt
    mode_2_1-int8      layer_0.input       mode_2-1_layer_0_input.npy       mode_2-1_input       layer_0_input.pt
    mode_2_1-int8      embedding.output    mode_2-1_embedding.npy           mode_2-1_embedding   embedding_output.pt
    mode_2_1-fp8_e4m3  layer_0.scan.input  mode_2-1-fp8_e4m3_layer_0_...    mode_..._scan_input  layer_0_scan_input.pt

The scripts quantize to int8 and do not name it; other formats are named. Headings with emoji or in Chinese reproduce
what these scripts print, so that whatever parses their output keeps working.
"""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probe.files.checked_json import finite
from probe.formats import FORMATS
from probe.recordings.manifest import ENDS, PARTS, Manifest
from probe.running.modes import MODES
from probe.words import LOGITS

if TYPE_CHECKING:
    from probe.recordings.reading import Recording

UNNAMED_FORMAT = "int8"
NPZ = "first_layer_io_all_modes.npz"
METADATA = "metadata.pt"

_PLACE = rf"(?P<label>layer_\d+)(?:_(?P<part>{'|'.join(PARTS)}))?(?:_(?P<kind>input|output))?"
_END = rf"(?P<end>{'|'.join(ENDS)})(?:_output)?|(?P<logits>{LOGITS})"
NPY_FILE = re.compile(rf"mode_(?P<mode>.+?)_(?:{_PLACE}|{_END})\.npy")
_FIRST = rf"(?:(?P<first_part>{'|'.join(PARTS)})_)?(?P<first>input|output)"
NPZ_KEY = re.compile(rf"mode_(?P<mode>.+?)_(?:{_FIRST}|{_PLACE}|{_END})")
PT_FILE = re.compile(rf"(?:{_PLACE}|{_END})\.pt")

# -------------------------------------------------------------------------------------------------------- names


def script_name(mode: str, format: str | None) -> str:
    """`mode_2_1` and `int8` as the scripts call it: 2-1."""
    name = mode.removeprefix("mode_").replace("_", "-") if mode.startswith("mode_") else mode
    return name if format in (None, UNNAMED_FORMAT) else f"{name}-{format}"


def recipe_named(text: str) -> tuple[str, str | None]:
    """The mode, as in test ids, and the format of what a script calls `text`. An unknown mode keeps its name."""
    name, format = text, None
    for known in FORMATS:
        if text.endswith(f"-{known}"):
            name, format = text.removesuffix(f"-{known}"), known
    if name in MODES:
        row = MODES[name]
        return row.id, format or (UNNAMED_FORMAT if row.is_quantized else None)
    return (f"mode_{name.replace('-', '_')}" if name[0].isdigit() else name), format


def tensor_named(match: re.Match[str]) -> str:
    """The tensor that the name of a file or a key stands for."""
    found = match.groupdict()
    if found["logits"]:
        return LOGITS
    if found["end"]:
        return f"{found['end']}.output"
    if found.get("first"):
        return ".".join(filter(None, ("layer_0", found["first_part"], found["first"])))
    return ".".join(filter(None, (found["label"], found["part"], found["kind"] or "output")))


def npy_file(recipe: str, name: str, layers: Sequence[str]) -> str:
    """The file of a tensor; `recipe` is a `script_name`."""
    return f"mode_{recipe}_{_npy_stem(name, layers)}.npy"


def npz_key(recipe: str, name: str, layers: Sequence[str]) -> str:
    """The key of a tensor in the archive: without the layer, if there is only one."""
    return f"mode_{recipe}_{_npz_stem(name, layers)}"


def pt_file(name: str, layers: Sequence[str]) -> str:
    """The file of a tensor in the folder of its mode."""
    return f"{_stem(name, layers)}.pt"


def _npy_stem(name: str, layers: Sequence[str]) -> str:
    stem = _stem(name, layers)
    return stem if stem.endswith("_scan_output") else stem.removesuffix("_output")


def _npz_stem(name: str, layers: Sequence[str]) -> str:
    stem = _stem(name, layers)
    if len(layers) == 1:
        stem = stem.removeprefix(f"{layers[0]}_")
    return stem if name.startswith(tuple(layers)) else stem.removesuffix("_output")


def _stem(name: str, layers: Sequence[str]) -> str:
    """`layer_0.scan.input` with underscores; the dots in names of modules stay."""
    label, dot, kind = name.rpartition(".")
    layer, _, part = label.rpartition(".")
    if layer in layers and part in PARTS:
        label = f"{layer}_{part}"
    return f"{label}_{kind}" if dot else name


# --------------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Figures:
    """Of one tensor, in float64. A NaN in it makes mean, std, min and max NaN."""

    shape: tuple[int, ...]
    dtype: str  # as the model gave it
    first_10: tuple[float, ...]
    mean: float
    std: float
    min: float
    max: float
    has_nan: bool
    has_inf: bool

    def chosen(self, *names: str) -> dict[str, Any]:
        """These figures as JSON has them: what is not finite is null."""
        return {name: finite(value) for name, value in asdict(self).items() if name in names}


def figures_of(tensor: Tensor, dtype: str, *, unbiased: bool = False) -> Figures:
    """One pass for sums and extremes, one for the spread around the mean: std = sqrt(sum (x - mean)^2 / n).

    With `unbiased` the divisor is n - 1, as in torch's std; numpy's is n. One sample is in memory at a time.
    """
    count = tensor.numel()
    total = 0.0
    low, high = math.inf, -math.inf
    has_nan = has_inf = False
    for sample in tensor:
        values = sample.double()
        total += float(values.sum())
        has_nan |= bool(values.isnan().any())
        has_inf |= bool(values.isinf().any())
        low, high = min(low, float(values.min())), max(high, float(values.max()))
    mean = total / count
    spread = sum(float((sample.double() - mean).square().sum()) for sample in tensor)
    divisor = count - 1 if unbiased else count
    std = math.sqrt(spread / divisor) if divisor and not math.isnan(spread) else math.nan
    first = tuple(tensor.flatten()[:10].double().tolist())
    if has_nan:
        low = high = math.nan
    return Figures(tuple(tensor.shape), dtype, first, mean, std, low, high, has_nan, has_inf)


_STATISTICS = ("shape", "dtype", "first_10", "mean", "std", "min", "max")


@dataclass(frozen=True)
class ScriptFacts:
    """What the scripts write down and a manifest does not have."""

    prompt: str | list[str] | None = None
    config: dict[str, Any] | None = None
    pretrained_dir: str | None = None
    output_file: str = NPZ


def npy_statistics(manifest: Manifest, recipe: str, figures: Mapping[str, Figures]) -> dict[str, Any]:
    """`mode_2-1_stats.json`, from the figures by tensor."""
    recorded = manifest.recipes[recipe]
    return {
        "mode": script_name(recorded.mode, recorded.format),
        "format": recorded.format,
        "model": manifest.model,
        "samples": manifest.tokens.samples,
        "seq_len": manifest.tokens.seqlen,
        "layers": {_npy_stem(name, recorded.layers): one.chosen(*_STATISTICS) for name, one in figures.items()},
    }


def npz_statistics(
    manifest: Manifest, figures: Mapping[str, Mapping[str, Figures]], pretrained_dir: str | None
) -> dict[str, Any]:
    """`first_layer_io_all_modes_stats.json`, from the figures by recipe and tensor."""
    modes = {}
    for recipe, by_name in figures.items():
        recorded = manifest.recipes[recipe]
        modes[script_name(recorded.mode, recorded.format)] = {
            _npz_stem(name, recorded.layers): one.chosen(*_STATISTICS) for name, one in by_name.items()
        }
    return {
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
        "model": manifest.model,
        "pretrained_dir": pretrained_dir,
        "seq_len": manifest.tokens.seqlen,
        "modes": modes,
    }


def pt_metadata(
    layers: Sequence[str], figures: Mapping[str, Figures], ids: Tensor | None, facts: ScriptFacts
) -> dict[str, Any]:
    """`metadata.pt`, from the figures by tensor."""
    statistics = {
        _stem(name, layers).removesuffix("_output"): {
            "shape": list(one.shape),
            "dtype": f"torch.{one.dtype}",
            **{key: getattr(one, key) for key in ("mean", "std", "min", "max", "has_nan", "has_inf")},
        }
        for name, one in figures.items()
    }
    return {
        "prompt": facts.prompt,
        "input_ids": ids,
        "attention_mask": None if ids is None else torch.ones_like(ids),
        "config": facts.config or {},
        "statistics": statistics,
    }


# ------------------------------------------------------------------------------------------------ printed blocks

RULE = "=" * 98


def first_layer_text(recording: "Recording") -> str:
    """Input and output of the first layer under every mode: ten values, mean, std, range."""
    blocks = []
    for recipe in recording.recipes:
        recorded = recording.manifest.recipes[recipe]
        lines = [RULE, f"MODE {script_name(recorded.mode, recorded.format)}", RULE]
        label = recorded.layers[0]
        for title, name in (("📥 INPUT", f"{label}.input"), ("📤 OUTPUT", f"{label}.output")):
            if name in recorded.tensors:
                figures = _figures(recording, recipe, name)
                lines += [
                    "",
                    f"{title} (Shape: {list(figures.shape)}):",
                    f"  First 10 values: {[f'{value:.6f}' for value in figures.first_10]}",
                    f"  Mean: {figures.mean:.6f}",
                    f"  Std:  {figures.std:.6f}",
                    f"  Range: [{figures.min:.6f}, {figures.max:.6f}]",
                ]
        blocks.append("\n".join(lines) + "\n")
    return "\n".join(blocks)


def key_layers_text(recording: "Recording", recipe: str) -> str:
    """The ends of the model, its first, middle and last layer: shape, mean, std, range, NaN and Inf."""
    layers = recording.layers(recipe)
    chosen = dict.fromkeys((layers[0], layers[len(layers) // 2], layers[-1]))
    lines = ["关键层统计信息:"]
    for label in ("embedding", *chosen, "final_norm"):
        if f"{label}.output" in recording.names(recipe):
            figures = _figures(recording, recipe, f"{label}.output")
            lines += [
                f"  {label}:",
                f"    Shape: {list(figures.shape)}",
                f"    Mean: {figures.mean:.6f}, Std: {figures.std:.6f}",
                f"    Range: [{figures.min:.6f}, {figures.max:.6f}]",
                f"    Has NaN: {figures.has_nan}, Has Inf: {figures.has_inf}",
                "",
            ]
    return "\n".join(lines)


def _figures(recording: "Recording", recipe: str, name: str) -> Figures:
    unbiased = recording.manifest.layout == "pt"
    return figures_of(recording.tensor(recipe, name), recording.dtype(recipe, name), unbiased=unbiased)
