"""Pictures and sounds in a folder, and the processor of a model that turns them into tensors."""

import os
import wave
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from probe.data.library_logs import quietly
from probe.words import describe_error, first_few, natural_key

PICTURES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
SOUNDS = (".wav",)
#: The file that says how a model wants its pictures or sounds.
PROCESSOR_FILE = "preprocessor_config.json"


def media_files(folder: Path, suffixes: Sequence[str], *, samples: int) -> list[Path]:
    """The first files of these kinds in a folder, by name in natural order; fewer than `samples` is a ValueError."""
    found = sorted(
        (one for one in folder.iterdir() if one.suffix.lower() in suffixes), key=lambda f: natural_key(f.name)
    )
    if len(found) < samples:
        kinds = ", ".join(suffixes)
        raise ValueError(
            f"data {str(folder)!r} has {len(found)} files ({kinds}), and {samples} samples were asked for. "
            f"{f'Give samples {len(found)} or less.' if found else f'Expected a folder with files {kinds}.'}"
        )
    return found[:samples]


def is_folder(source: str) -> bool:
    """Whether a source of data is a folder."""
    return Path(os.path.expanduser(source)).is_dir()


def read_picture(file: Path) -> Any:
    """A picture of PIL, in RGB."""
    from PIL import Image

    try:
        with Image.open(file) as opened:
            return opened.convert("RGB")
    except Exception as problem:
        raise ValueError(f"picture {str(file)!r} cannot be read: {describe_error(problem)}") from None


#: Bytes of a sample in a .wav, and what one means.
_PCM: dict[int, tuple[np.dtype[Any], int, float]] = {
    1: (np.dtype("u1"), 128, 128.0),
    2: (np.dtype("<i2"), 0, 32768.0),
    4: (np.dtype("<i4"), 0, 2147483648.0),
}


def read_sound(file: Path, rate: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The samples of a .wav in [-1, 1), the mean of its channels; one of another rate is a ValueError."""
    try:
        with wave.open(str(file), "rb") as opened:
            width, channels, found = opened.getsampwidth(), opened.getnchannels(), opened.getframerate()
            data = opened.readframes(opened.getnframes())
    except (wave.Error, EOFError, OSError) as problem:
        raise ValueError(
            f"sound {str(file)!r} cannot be read: {describe_error(problem)} Expected a PCM .wav."
        ) from None
    if found != rate:
        raise ValueError(
            f"sound {str(file)!r} has {found} samples a second, and the model wants {rate}. Convert it first: a "
            "change of the rate is a filter of its own, which would be part of the result."
        )
    if width not in _PCM:
        raise ValueError(f"sound {str(file)!r} has {8 * width} bits a sample. Expected 8, 16 or 32.")
    kind, zero, full = _PCM[width]
    values = (np.frombuffer(data, dtype=kind).astype(np.float64) - zero) / full
    return np.asarray(values.reshape(-1, channels).mean(axis=1), dtype=np.float32)


def processor_of(model_folder: Path | None, own: Any, kind: str, *, trust_remote_code: bool = False) -> Any:
    """The processor for "pictures" or "sounds": `own`, the attribute of a model, or that of the model's folder."""
    if own is not None:
        return own
    if model_folder is None or not (model_folder / PROCESSOR_FILE).is_file():
        where = "the model" if model_folder is None else f"model folder {str(model_folder)!r}"
        raise ValueError(
            f"{where} has no {PROCESSOR_FILE}, so it is not known how it wants {kind}. Save its processor there "
            'with save_pretrained, or give the tensors themselves: inputs = "package.module:function" (--inputs).'
        )
    with quietly():
        import transformers

        auto: Any = transformers.AutoImageProcessor if kind == "pictures" else transformers.AutoFeatureExtractor
        try:
            return auto.from_pretrained(str(model_folder), local_files_only=True, trust_remote_code=trust_remote_code)
        except Exception as problem:
            raise ValueError(
                f"the processor in {str(model_folder)!r} cannot be loaded: {describe_error(problem)} Give the tensors "
                'themselves: inputs = "package.module:function" (--inputs).'
            ) from problem


def processed(processor: Any, files: Sequence[Path], kind: str, name: str) -> Tensor:
    """The tensor `name` that a processor makes of files, [samples, ...]."""
    try:
        with quietly():
            if kind == "pictures":
                made = processor(images=[read_picture(file) for file in files], return_tensors="pt")
            else:
                rate = int(processor.sampling_rate)
                sounds = [read_sound(file, rate) for file in files]
                options = {} if len({len(one) for one in sounds}) == 1 else {"padding": True}
                made = processor(sounds, sampling_rate=rate, return_tensors="pt", **options)
    except ValueError as problem:
        raise ValueError(f"{problem}") from None
    except Exception as problem:
        raise ValueError(
            f"the processor failed on {first_few([f.name for f in files])}: {describe_error(problem)}"
        ) from problem
    if not isinstance(made.get(name), Tensor):
        raise ValueError(f"the processor returned {', '.join(map(str, made))} and no {name}, which the model reads.")
    found: Tensor = made[name]
    return found
