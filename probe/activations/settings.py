"""The settings of an analysis: a dataclass for each section, a check for each key, and how the YAML file is read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from probe.data.texts import READERS
from probe.files.defects import parsing, read_document, reading
from probe.models.factories import check_factory
from probe.settings import (
    ConfigurationError,
    key,
    key_hint,
    keys_of,
    one_of,
    positive,
    some_of,
    whole,
    with_value,
    with_values,
    word,
    word_or_none,
    yes_or_no,
)

#: Where all keys are listed.
ALL_KEYS = "All keys: probe analyze --keys"

PLOT_TYPES = ("boxplot", "histogram")
FORMATS = ("png", "html", "csv", "json")
DTYPES = ("float32", "bfloat16", "float16", "auto")
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMG]i?B|B|)\s*", re.IGNORECASE)


def _pattern(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("a regular expression over module names")
    try:
        re.compile(value)
    except re.error as problem:
        raise ValueError(f"a regular expression ({problem}; escape special characters with a backslash)") from None
    return value


def _patterns(value: Any, *, empty: bool = False) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not (given or empty):
        raise ValueError("a list of regular expressions over module names")
    return tuple(map(_pattern, given))


def _angles(value: Any) -> tuple[float, float]:
    good = isinstance(value, list | tuple) and len(value) == 2
    if not good or any(isinstance(x, bool) or not isinstance(x, int | float) or not -360 <= x <= 360 for x in value):
        raise ValueError("two numbers, elevation and azimuth in degrees, such as [30, 45]")
    return float(value[0]), float(value[1])


def _size(value: Any) -> int | None:
    """Bytes of `2GB`, `500 MiB` or a whole number."""
    if value is None:
        return None
    found = None if isinstance(value, bool) else _SIZE.fullmatch(str(value))
    size = float(found[1]) * _SIZES[found[2].upper()] if found else 0.0
    if size < 1:
        raise ValueError("a size such as 2GB, 500MB or a number of bytes, or null for what the device has")
    return int(size)


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how it is loaded."""

    path: str = key("tiny-mamba", word)
    name: str | None = key(None, word_or_none)
    """What the report calls it; null: its path."""
    dtype: str = key("float32", one_of(*DTYPES))
    sites: bool = key(False, yes_or_no)
    """Mamba-1: reach the tensors inside the mixer too, `mixer.sites.scan.u`."""


@dataclass(frozen=True)
class CustomSettings:
    """How a file of the user's own is read."""

    format: str | None = key(None, one_of(None, *READERS))
    """null: by the name of the file."""
    text_column: str = key("text", word)


@dataclass(frozen=True)
class DataSettings:
    """Which text the model runs on."""

    source: str = key("builtin", word)
    num_samples: int = key(8, whole(1))
    seq_len: int = key(256, whole(1))
    batch_size: int = key(8, whole(1))
    seed: int = key(0, whole(0))
    split: str | None = key(None, word_or_none)
    """Of a hub dataset; null: the one that is usual for it, else train."""
    inputs: str | None = key(None, word_or_none)
    """package.module:function, which returns the batches, instead of a source; null: none."""
    custom: CustomSettings = CustomSettings()


@dataclass(frozen=True)
class EnabledSettings:
    """What is analyzed and drawn."""

    magnitude_input: bool = key(True, yes_or_no)
    magnitude_output: bool = key(True, yes_or_no)
    magnitude_weight: bool = key(True, yes_or_no)
    outlier_layer_wise: bool = key(True, yes_or_no)
    outlier_position: bool = key(True, yes_or_no)
    outlier_token: bool = key(True, yes_or_no)
    heatmap_3d: bool = key(True, yes_or_no)
    distribution: bool = key(True, yes_or_no)
    percentile_range: bool = key(True, yes_or_no)


#: Linear layers of Mamba and of the usual transformers, and the layers of the stack; not the parts of a block of T5.
LINEAR = (
    r"\b((in|x|out|q|k|v|o|qkv|gate|up|down|gate_up)_proj|c_(attn|proj|fc)|fc[12]|dense\w*|query_key_value"
    r"|query|key|value|[qkvo]|w[io](_\d)?|(q|k|v|out)_lin|lin[12]|experts\.(input|middle))$"
)
LAYERS = r"^(?!.*block\.\d+\.layer).*(layers?|h|blocks?)\.\d+$"


@dataclass(frozen=True)
class MagnitudeSettings:
    """Top-1/2/3, median and min."""

    patterns: tuple[str, ...] = key((LINEAR,), _patterns)
    reduce_dim: int | None = key(None, one_of(None, -1, -2))
    """null: all elements; -1: over channels, a value per token; -2: over tokens, a value per channel."""


@dataclass(frozen=True)
class OutlierSettings:
    """Tokens whose max |x| is above threshold x the median of their layer and sample."""

    threshold: float = key(64.0, positive)
    pattern: str = key(LAYERS, _pattern)
    decode_tokens: bool = key(True, yes_or_no)


@dataclass(frozen=True)
class DistributionSettings:
    """Box plots and histograms."""

    patterns: tuple[str, ...] = key((LINEAR,), _patterns)
    plot_types: tuple[str, ...] = key(PLOT_TYPES, some_of(*PLOT_TYPES))
    is_input: bool = key(True, yes_or_no)


@dataclass(frozen=True)
class HeatmapSettings:
    """|x| by token and channel, for one sample."""

    pattern: str = key(LAYERS, _pattern)
    sample_idx: int = key(0, whole(0))
    is_input: bool = key(False, yes_or_no)
    view_angle: tuple[float, float] = key((30.0, 45.0), _angles)


@dataclass(frozen=True)
class PercentileSettings:
    """Bands of x by channel."""

    patterns: tuple[str, ...] = key((LAYERS,), _patterns)
    is_input: bool = key(False, yes_or_no)


@dataclass(frozen=True)
class SelectionSettings:
    """Limits all sections above to layers that match one of these patterns; empty: no limit.

    Where that leaves a section nothing, it takes these patterns instead of the default ones; patterns of its own stay.
    """

    patterns: tuple[str, ...] = key((), partial(_patterns, empty=True))


@dataclass(frozen=True)
class VisualizationSettings:
    """What is drawn, for which layers, into which folder."""

    save_dir: str = key("figures", word)
    dpi: int = key(150, whole(20))
    enabled: EnabledSettings = EnabledSettings()
    magnitude: MagnitudeSettings = MagnitudeSettings()
    outlier: OutlierSettings = OutlierSettings()
    distribution: DistributionSettings = DistributionSettings()
    heatmap_3d: HeatmapSettings = HeatmapSettings()
    percentile_range: PercentileSettings = PercentileSettings()
    layer_selection: SelectionSettings = SelectionSettings()


@dataclass(frozen=True)
class MemorySettings:
    """Where the model runs, and where weights that do not fit there are kept."""

    device: str = key("auto", word)
    offload_device: str = key("cpu", one_of("cpu", "disk"))
    auto_offload: bool = key(True, yes_or_no)
    max_memory: int | None = key(None, _size)
    """Bytes of weights that `device` may hold; null: what it has."""


@dataclass(frozen=True)
class OutputSettings:
    """Which kinds of files are written."""

    formats: tuple[str, ...] = key(FORMATS, some_of(*FORMATS))


@dataclass(frozen=True)
class Settings:
    """All settings of an analysis."""

    model: ModelSettings = ModelSettings()
    data: DataSettings = DataSettings()
    visualization: VisualizationSettings = VisualizationSettings()
    memory: MemorySettings = MemorySettings()
    output: OutputSettings = OutputSettings()

    def as_dict(self) -> dict[str, Any]:
        """Nested dicts of plain values and lists, as in the YAML file."""
        return asdict(self, dict_factory=lambda pairs: {k: list(v) if isinstance(v, tuple) else v for k, v in pairs})


def read_configuration(
    path: str | Path | None, overrides: Sequence[tuple[str, str]] = (), *, allow_factory: bool = False
) -> Settings:
    """The settings of a YAML file (None: the defaults), then the overrides: pairs of a dotted key and a text.

    A file may come from elsewhere. A `package.module:factory` in it is refused unless it lies in the project of the
    current folder, or `allow_factory`.
    """
    settings = Settings()
    if path is not None:
        settings = with_values(settings, _read(Path(path)), where=str(path), see=ALL_KEYS)
    names = [full_key(given) for given, _ in overrides]
    for name, (given, text) in zip(names, overrides, strict=True):
        settings = with_value(settings, name.split("."), _value(text), where=f"--{given}")
    if "model.path" not in names and not allow_factory:
        check_factory(settings.model.path, where=f"{path}: model.path")
    if "data.inputs" not in names and not allow_factory and settings.data.inputs:
        check_factory(settings.data.inputs, where=f"{path}: data.inputs")
    return settings


def _read(path: Path) -> Any:
    if not path.is_file():
        what = "is a folder" if path.is_dir() else f"does not exist (looked for {path.absolute()})"
        raise ConfigurationError(f"configuration {str(path)!r} {what}. Expected a YAML file, as configs/default.yaml.")
    with reading(path, ConfigurationError, remedy="Correct it and run again."):
        data = read_document(path)
        with parsing("YAML"):
            text = data.decode("utf-8")
            repeated = _repeated_key(yaml.compose(text, Loader=yaml.SafeLoader), set())
            content = yaml.safe_load(text)
    if repeated:
        raise ConfigurationError(f"{path}: {repeated}")
    return content


def _repeated_key(node: Any, seen: set[int]) -> str:
    """What is wrong if a table has a key twice, of which YAML would silently keep the last; else nothing."""
    if not isinstance(node, yaml.CollectionNode) or id(node) in seen:
        return ""
    seen.add(id(node))
    lines: dict[str, int] = {}
    for member in node.value:
        name, value = member if isinstance(node, yaml.MappingNode) else (None, member)
        if isinstance(name, yaml.ScalarNode) and name.value != "<<":
            line = name.start_mark.line + 1
            if name.value in lines:
                return f"key {name.value!r} is there twice, in lines {lines[name.value]} and {line}. Keep one."
            lines[name.value] = line
        if found := _repeated_key(value, seen):
            return found
    return ""


def _value(text: str) -> Any:
    """A value from the command line, read as YAML; if YAML cannot read it, the text (e.g. a regular expression)."""
    try:
        value = None if text == "None" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    unread = isinstance(value, Mapping) or (value is None and text.strip().lower() not in ("null", "~", "none"))
    return text if unread else value


def full_key(given: str) -> str:
    """The full key of an abbreviation such as `outlier.threshold`, which must be the end of exactly one key."""
    names = [name for name, _ in keys_of(Settings())]
    name = given.replace("-", "_")
    if name in names:
        return name
    ending = [full for full in names if full.endswith(f".{name}")]
    if len(ending) == 1:
        return ending[0]
    if ending:
        raise ConfigurationError(f"--{given} can be any of {', '.join(ending)}. Write out which one.")
    inside = [full for full in names if f".{name}." in f".{full}"]
    if inside:
        raise ConfigurationError(f"--{given} is a section. Give one of its keys: {', '.join(inside)}.")
    raise ConfigurationError(f"unknown key --{given}.{key_hint(name, Settings(), see=ALL_KEYS)}")
