"""The formats of the users' own scripts: names of files and keys, statistics, printed blocks.

    recipe             tensor              npy                              npz, one layer       pt
    fp32               layer_0.output      mode_fp32_layer_0.npy            mode_fp32_output     layer_0_output.pt
    mode_2_1-int8      layer_0.input       mode_2-1_layer_0_input.npy       mode_2-1_input       layer_0_input.pt
    mode_2_1-int8      embedding.output    mode_2-1_embedding.npy           mode_2-1_embedding   embedding_output.pt
    mode_2_1-fp8_e4m3  layer_0.scan.input  mode_2-1-fp8_e4m3_layer_0_...    mode_..._scan_input  layer_0_scan_input.pt

The scripts quantize to int8 and leave it out of names; other formats are named. Headings with emoji or in Chinese
reproduce what these scripts print, so that whatever parses their output keeps working.
"""

import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from probe.files.atomic import write
from probe.files.checked_json import finite
from probe.files.tensors import write_pt
from probe.formats import FORMATS
from probe.recordings.manifest import ENDS, PARTS, RecordedRecipe
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
    """The name that the scripts have for a mode and format: 2-1 for `mode_2_1` and `int8`."""
    name = mode.removeprefix("mode_").replace("_", "-") if mode.startswith("mode_") else mode
    return name if format in (None, UNNAMED_FORMAT) else f"{name}-{format}"


def recipe_named(text: str) -> tuple[str, str | None]:
    """The mode, as in test ids, and the format that a script calls `text`. An unknown mode keeps its name."""
    name, format = text, None
    for known in FORMATS:
        if text.endswith(f"-{known}"):
            name, format = text.removesuffix(f"-{known}"), known
    if name in MODES:
        row = MODES[name]
        return row.id, format or (UNNAMED_FORMAT if row.takes_format else None)
    return (f"mode_{name.replace('-', '_')}" if name[0].isdigit() else name), format


def tensor_named(match: re.Match[str]) -> str:
    """The name of the tensor that a file name or key stands for."""
    found = match.groupdict()
    if found["logits"]:
        return LOGITS
    if found["end"]:
        return f"{found['end']}.output"
    if found.get("first"):
        return ".".join(filter(None, ("layer_0", found["first_part"], found["first"])))
    return ".".join(filter(None, (found["label"], found["part"], found["kind"] or "output")))


def npy_file(recorded: RecordedRecipe, name: str) -> str:
    """The file of a tensor."""
    return f"mode_{script_name(recorded.mode, recorded.format)}_{npy_stem(name, recorded.layers)}.npy"


def npz_key(recorded: RecordedRecipe, name: str) -> str:
    """The key of a tensor in the archive, without the layer if there is only one."""
    return f"mode_{script_name(recorded.mode, recorded.format)}_{npz_stem(name, recorded.layers)}"


def pt_file(recorded: RecordedRecipe, name: str, *, alone: bool) -> str:
    """The file of a tensor; each mode has a folder of its own unless it is `alone`."""
    folder = "" if alone else f"mode_{script_name(recorded.mode, recorded.format)}/"
    return f"{folder}{pt_stem(name, recorded.layers)}.pt"


def npy_stem(name: str, layers: Sequence[str]) -> str:
    """`layer_0`, `layer_0_input`: `_output` is left out."""
    stem = pt_stem(name, layers)
    return stem if stem.endswith("_scan_output") else stem.removesuffix("_output")


def npz_stem(name: str, layers: Sequence[str]) -> str:
    """`input` and `output` of a single layer, `layer_3_output` of several."""
    stem = pt_stem(name, layers)
    if len(layers) == 1:
        stem = stem.removeprefix(f"{layers[0]}_")
    return stem if name.startswith(tuple(layers)) else stem.removesuffix("_output")


def pt_stem(name: str, layers: Sequence[str]) -> str:
    """`layer_0.scan.input` with underscores; dots in the names of modules are kept."""
    label, dot, kind = name.rpartition(".")
    layer, _, part = label.rpartition(".")
    if layer in layers and part in PARTS:
        label = f"{layer}_{part}"
    return f"{label}_{kind}" if dot else name


# --------------------------------------------------------------------------------------------------- statistics


@dataclass(frozen=True)
class Figures:
    """The statistics of one tensor, in float64. A NaN in it makes mean, std, min and max NaN."""

    shape: tuple[int, ...]
    dtype: str  # of the model's tensor
    first_10: tuple[float, ...]
    mean: float
    std: float
    min: float
    max: float
    has_nan: bool
    has_inf: bool

    def as_json(self) -> dict[str, Any]:
        """The statistics as JSON files have them: null for what is not finite, no flags."""
        return {name: finite(value) for name, value in asdict(self).items() if not name.startswith("has_")}


def figures_of(tensor: Tensor, dtype: str, *, unbiased: bool = False) -> Figures:
    """One pass for sums and extremes, one for the spread around the mean: std = sqrt(sum (x - mean)^2 / n).

    With `unbiased` the divisor is n - 1, as in torch's std; numpy's is n. One sample is in memory at a time.
    """
    count, total, low, high = tensor.numel(), 0.0, math.inf, -math.inf
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


def recorded_figures(recording: "Recording", recipe: str, name: str) -> Figures:
    """The figures of a recorded tensor, with the std of numpy, or of torch for the layout pt."""
    unbiased = recording.manifest.layout == "pt"
    return figures_of(recording.tensor(recipe, name), recording.dtype(recipe, name), unbiased=unbiased)


@dataclass(frozen=True)
class ScriptFacts:
    """Facts that the scripts write to their files and a manifest does not have."""

    prompt: str | list[str]
    config: dict[str, Any]
    pretrained_dir: str | None
    output_file: str


AllFigures = dict[str, dict[str, Figures]]  # by recipe and name


def npy_statistics(built: "Recording", facts: ScriptFacts, figures: AllFigures) -> Iterator[str]:
    """Write mode_2-1_stats.json for each mode."""
    for recipe, by_name in figures.items():
        recorded, tokens = built.manifest.recipes[recipe], built.manifest.tokens
        mode = script_name(recorded.mode, recorded.format)
        statistics = {
            "mode": mode,
            "format": recorded.format,
            "model": built.manifest.model,
            "samples": tokens.samples,
            "seq_len": tokens.seqlen,
            "layers": {npy_stem(name, recorded.layers): one.as_json() for name, one in by_name.items()},
        }
        yield _write_json(built.folder, f"mode_{mode}_stats.json", statistics)


def npz_statistics(built: "Recording", facts: ScriptFacts, figures: AllFigures) -> Iterator[str]:
    """Write one file of statistics for all modes of the archive."""
    modes = {}
    for recipe in built.recipes:
        recorded, names = built.manifest.recipes[recipe], built.names(recipe)
        by_name = figures.get(recipe) or {name: recorded_figures(built, recipe, name) for name in names}
        tensors = {npz_stem(name, recorded.layers): one.as_json() for name, one in by_name.items()}
        modes[script_name(recorded.mode, recorded.format)] = tensors
    statistics = {
        "timestamp": time.strftime("%Y-%m-%d %H:%M:%S"),
        "model": built.manifest.model,
        "pretrained_dir": facts.pretrained_dir,
        "seq_len": built.manifest.tokens.seqlen,
        "modes": modes,
    }
    yield _write_json(built.folder, f"{facts.output_file.removesuffix('.npz')}_stats.json", statistics)


def _write_json(folder: Path, name: str, statistics: dict[str, Any]) -> str:
    write(folder / name, json.dumps(statistics, indent=4, ensure_ascii=False, allow_nan=False) + "\n")
    return name


def pt_metadata(built: "Recording", facts: ScriptFacts, figures: AllFigures) -> Iterator[str]:
    """Write the metadata.pt of each mode."""
    ids = built.input_ids()
    for recipe, by_name in figures.items():
        recorded = built.manifest.recipes[recipe]
        statistics = {
            pt_stem(name, recorded.layers).removesuffix("_output"): {
                "shape": list(one.shape),
                "dtype": f"torch.{one.dtype}",
                **{key: getattr(one, key) for key in ("mean", "std", "min", "max", "has_nan", "has_inf")},
            }
            for name, one in by_name.items()
        }
        metadata = {
            "prompt": facts.prompt,
            "input_ids": ids,
            "attention_mask": None if ids is None else torch.ones_like(ids),
            "config": facts.config,
            "statistics": statistics,
        }
        file = str(Path(next(iter(recorded.tensors.values())).file).with_name(METADATA))
        write_pt(built.folder / file, metadata)
        yield file


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
                figures = recorded_figures(recording, recipe, name)
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
            figures = recorded_figures(recording, recipe, f"{label}.output")
            lines += [
                f"  {label}:",
                f"    Shape: {list(figures.shape)}",
                f"    Mean: {figures.mean:.6f}, Std: {figures.std:.6f}",
                f"    Range: [{figures.min:.6f}, {figures.max:.6f}]",
                f"    Has NaN: {figures.has_nan}, Has Inf: {figures.has_inf}",
                "",
            ]
    return "\n".join(lines)
