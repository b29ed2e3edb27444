"""How the layouts of the users' own scripts spell recipes and tensors in names of files and keys.

    recipe             tensor              npy                              npz, one layer       pt
    fp32               layer_0.output      mode_fp32_layer_0.npy            mode_fp32_output     layer_0_output.pt
    mode_2_1-int8      layer_0.input       mode_2-1_layer_0_input.npy       mode_2-1_input       layer_0_input.pt
    mode_2_1-int8      embedding.output    mode_2-1_embedding.npy           mode_2-1_embedding   embedding_output.pt
    mode_2_1-fp8_e4m3  layer_0.scan.input  mode_2-1-fp8_e4m3_layer_0_...    mode_..._scan_input  layer_0_scan_input.pt

int8 is what these scripts quantize to, and goes without saying; other formats are named.
"""

import re
from collections.abc import Sequence

from probe.formats import FORMATS
from probe.recordings.format import ENDS, PARTS
from probe.running.modes import MODES
from probe.words import LOGITS

UNSAID = "int8"
NPZ = "first_layer_io_all_modes.npz"
METADATA = "metadata.pt"

_PLACE = rf"(?P<label>layer_\d+)(?:_(?P<part>{'|'.join(PARTS)}))?(?:_(?P<kind>input|output))?"
_END = rf"(?P<end>{'|'.join(ENDS)})(?:_output)?|(?P<logits>{LOGITS})"
NPY_FILE = re.compile(rf"mode_(?P<mode>.+?)_(?:{_PLACE}|{_END})\.npy")
_FIRST = rf"(?:(?P<first_part>{'|'.join(PARTS)})_)?(?P<first>input|output)"
NPZ_KEY = re.compile(rf"mode_(?P<mode>.+?)_(?:{_FIRST}|{_PLACE}|{_END})")
PT_FILE = re.compile(rf"(?:{_PLACE}|{_END})\.pt")


def spelled(mode: str, format: str | None) -> str:
    """`mode_2_1` and `int8` as the scripts have it: 2-1."""
    name = mode.removeprefix("mode_").replace("_", "-") if mode.startswith("mode_") else mode
    return name if format in (None, UNSAID) else f"{name}-{format}"


def understood(text: str) -> tuple[str, str | None]:
    """The mode, as in test ids, and the format of what a script calls `text`; modes that nobody knows keep its name."""
    name, format = text, None
    for known in FORMATS:
        if text.endswith(f"-{known}"):
            name, format = text.removesuffix(f"-{known}"), known
    if name in MODES:
        row = MODES[name]
        return row.id, format or (UNSAID if row.is_quantized else None)
    return (f"mode_{name.replace('-', '_')}" if name[0].isdigit() else name), format


def tensor_name(match: re.Match[str]) -> str:
    """The name of the tensor that a name of a file or a key stands for."""
    found = match.groupdict()
    if found["logits"]:
        return LOGITS
    if found["end"]:
        return f"{found['end']}.output"
    if found.get("first"):
        return ".".join(filter(None, ("layer_0", found["first_part"], found["first"])))
    return ".".join(filter(None, (found["label"], found["part"], found["kind"] or "output")))


def npy_file(recipe: str, name: str, layers: Sequence[str]) -> str:
    """`recipe` as spelled."""
    stem = _stem(name, layers)
    return f"mode_{recipe}_{stem if stem.endswith('_scan_output') else stem.removesuffix('_output')}.npy"


def npz_key(recipe: str, name: str, layers: Sequence[str]) -> str:
    """Without the layer, if there is only one."""
    stem = _stem(name, layers)
    if len(layers) == 1:
        stem = stem.removeprefix(f"{layers[0]}_")
    return f"mode_{recipe}_{stem if name.startswith(tuple(layers)) else stem.removesuffix('_output')}"


def pt_file(name: str, layers: Sequence[str]) -> str:
    """One tensor."""
    return f"{_stem(name, layers)}.pt"


def _stem(name: str, layers: Sequence[str]) -> str:
    """`layer_0.scan.input` with underscores; the dots in names of modules stay."""
    label, dot, kind = name.rpartition(".")
    layer, _, part = label.rpartition(".")
    if layer in layers and part in PARTS:
        label = f"{layer}_{part}"
    return f"{label}_{kind}" if dot else name
