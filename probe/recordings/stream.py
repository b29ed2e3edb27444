"""Tensors streamed to disk: a safetensors file written batch by batch, and `write_recording` for the caller's tensors.

    8 bytes: n | n bytes: header, padded with spaces | the tensors, one after the other

The names are known beforehand, so room is kept for the header. A tensor gets its region when its first rows appear and
its shape is known. The header is written last: until then the file begins with eight zeros, so every reader refuses it.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from probe.data.calls import Batch, Call, as_call, input_fingerprint
from probe.files.atomic import create, move, write
from probe.files.tensors import CHUNK, SAFETENSORS_TYPES, Kind, kind_of
from probe.recordings.manifest import (
    DTYPES,
    ENDS,
    PARTS,
    TENSOR_NAME,
    TOKENS,
    Manifest,
    RecordedRecipe,
    RecordingError,
    StoredFile,
    StoredTensor,
    Tokens,
    writing,
)
from probe.recordings.publishing import is_to_be_replaced, locked_folder, new_files, put_in_place
from probe.recordings.reading import Recording, check_files
from probe.running.environment import environment
from probe.running.modes import find_mode
from probe.running.recipes import Recipe
from probe.words import LOGITS, OUTPUT

#: Room for an entry of the header beside the name: dtype, offsets, a shape of up to ten axes.
ENTRY = 384


@dataclass
class _Region:
    """The place of a tensor: `begin` counts from the end of the header."""

    row: Kind  # without the axis of the samples
    begin: int
    row_bytes: int
    item_bytes: int
    rows: int = 0
    checksum: int = 0


class TensorStream:
    """`add` rows of tensors, then `finish`; a block that ends without `finish` deletes the file.

    Error messages begin with `label`, the recipe.
    """

    def __init__(self, file: Path, names: Sequence[str], samples: int, *, label: str) -> None:
        self.file, self._samples, self._label = file, samples, label
        self._names = tuple(names)
        header = 2 + sum(len(json.dumps(name)) + ENTRY for name in names)
        self._start = 8 + header + -header % 8
        self._regions: dict[str, _Region] = {}
        self._end = 0
        with writing(file):
            self._opened = create(file)
        self._whole = False

    def __enter__(self) -> "TensorStream":
        return self

    def __exit__(self, problem: type[BaseException] | None, *more: object) -> None:
        self._opened.close()
        if problem is not None or not self._whole:
            self.file.unlink(missing_ok=True)

    def add(self, name: str, rows: Tensor) -> None:
        """Write the next rows of a tensor, [some samples, ...]. Nothing is cropped, broadcast or converted."""
        rows = rows.detach().cpu()
        count = len(rows) if rows.dim() else 0
        row = Kind(kind_of(rows).dtype, tuple(rows.shape[1:]))
        region = self._regions.get(name)
        if region is None:
            if row.dtype not in DTYPES:
                raise RecordingError(f"{self._label}: {name} is {row.dtype}. Expected one of {', '.join(DTYPES)}.")
            row_bytes = rows[:1].numel() * rows.element_size() if count else 0
            region = self._regions[name] = _Region(row, self._end, row_bytes, rows.element_size())
            self._end += self._samples * row_bytes
        if row != region.row or not count or region.rows + count > self._samples:
            raise self._misfit(name, region.rows + count, {region.row, row})
        data = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
        region.checksum = zlib.crc32(data, region.checksum)
        self._write(data, self._start + region.begin + region.rows * region.row_bytes)
        region.rows += count

    def finish(self) -> tuple[dict[str, Kind], StoredFile]:
        """Write the header, read the file back, and return its tensors and its size and digest."""
        for name in self._names:
            region = self._regions.get(name)
            if region is None or region.rows != self._samples:
                raise self._misfit(name, region.rows, [region.row]) if region else self._misfit(name, 0, ())
        if any(region.begin % region.item_bytes for region in self._regions.values()):
            self._align()
        kinds = {name: Kind(one.row.dtype, (self._samples, *one.row.shape)) for name, one in self._regions.items()}
        header = {}
        for name, region in self._regions.items():
            offsets = [region.begin, region.begin + self._samples * region.row_bytes]
            kind = {"dtype": SAFETENSORS_TYPES[kinds[name].dtype], "shape": kinds[name].shape}
            header[name] = {**kind, "data_offsets": offsets}
        room = self._start - 8
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > room:
            raise RecordingError(f"{self._label}: the shapes have too many axes to be written.")
        self._write(memoryview(room.to_bytes(8, "little") + text.ljust(room)), 0)
        with writing(self.file):
            os.fsync(self._opened.fileno())
        facts = self._read_back()
        self._whole = True
        return kinds, facts

    def _misfit(self, name: str, rows: int, kinds: Iterable[Kind]) -> RecordingError:
        return RecordingError(
            f"{self._label}: {name} has {rows} samples of {' and '.join(sorted(map(str, kinds)))}. Expected "
            f"{self._samples} of one dtype and shape: choose a module that runs once in every forward, samples along "
            "its first axis."
        )

    def _write(self, data: memoryview, place: int) -> None:
        with writing(self.file):
            while data:
                count = os.pwrite(self._opened.fileno(), data, place)
                data, place = data[count:], place + count

    def _align(self) -> None:
        """Put the regions in the order of their items' size, largest first: then each begins at a multiple of it."""
        source, old, self._end = self._opened, self._regions, 0
        aligned = self.file.with_name(f"{self.file.name}.aligned")
        try:
            with writing(aligned):
                self._opened = create(aligned)
            self._regions = dict(sorted(old.items(), key=lambda pair: -pair[1].item_bytes))
            for region in self._regions.values():
                size = self._samples * region.row_bytes
                for done in range(0, size, CHUNK):
                    chunk = os.pread(source.fileno(), min(CHUNK, size - done), self._start + region.begin + done)
                    self._write(memoryview(chunk), self._start + self._end + done)
                region.begin, self._end = self._end, self._end + size
            with writing(self.file):
                move(aligned, self.file)
        finally:
            source.close()
            aligned.unlink(missing_ok=True)

    def _read_back(self) -> StoredFile:
        """The size and sha256 of the file, after checking that every tensor reads back as it was added."""
        digest = hashlib.sha256()
        place = 0

        def read(end: int, checksum: int = 0) -> int:
            nonlocal place
            while place < end:
                chunk = os.pread(self._opened.fileno(), min(CHUNK, end - place), place)
                if not chunk:
                    raise RecordingError(f"cannot write {self.file}: it ends at {place} bytes. Is the disk full?")
                digest.update(chunk)
                checksum = zlib.crc32(chunk, checksum)
                place += len(chunk)
            return checksum

        read(self._start)
        for name, region in sorted(self._regions.items(), key=lambda pair: pair[1].begin):
            end = self._start + region.begin + self._samples * region.row_bytes
            if read(end) != region.checksum:
                raise RecordingError(f"cannot write {self.file}: {name} reads back differently. Is the disk sound?")
        return StoredFile(place, digest.hexdigest())


# --------------------------------------------------------------------------------- tensors that the caller has


def write_recording(
    folder: Path | str,
    recipes: Iterable[tuple[Recipe, Mapping[str, Sequence[Tensor]]]],
    *,
    model: str,
    batches: Sequence[Batch],
    device: str,
    model_fingerprint: str | None = None,
    versions: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> Recording:
    """Write the tensors of recipes, run over `batches` on a device that probe does not run itself.

    For each recipe, `recipes` has `layer_0.output`, `logits` and so on, each as one tensor for every batch. It may be a
    generator: each recipe is on disk before the next is generated. All is read back before it takes its place. With
    `overwrite` an older recording is replaced, but never a folder with other files in it.
    """
    folder = Path(os.path.realpath(folder))
    tokens = tokens_of(batches)
    with locked_folder(folder):
        is_to_be_replaced(folder, overwrite=overwrite)
        with new_files(folder) as fresh:
            files = write_tokens(fresh, batches)
            recorded: dict[str, RecordedRecipe] = {}
            for recipe, parts in recipes:
                key = str(recipe)
                if key in recorded:
                    raise RecordingError(f"{recipe} is given twice. Record each recipe once.")
                with TensorStream(fresh / f"{key}.safetensors", list(parts), tokens.samples, label=key) as stream:
                    for name, some in parts.items():
                        if not TENSOR_NAME.fullmatch(name):
                            expected = f"Expected layer_0.output, layer_0.input, {LOGITS} or {OUTPUT}."
                            raise RecordingError(f"{key}: {name!r} names no tensor. {expected}")
                        for part in some:
                            stream.add(name, part)
                    recorded[key], files[stream.file.name] = finished(recipe, stream)
            if not recorded:
                raise RecordingError(f"nothing was recorded for {folder}: not one recipe was given. Give at least one.")
            known = environment() | dict(versions or {})
            manifest = Manifest(model, model_fingerprint, device, tokens, recorded, known, files=files)
            check_files(fresh, manifest, verify=True)
            is_to_be_replaced(folder, overwrite=overwrite)
            put_in_place(folder, manifest)
    return Recording(folder, manifest)


def tokens_of(batches: Sequence[Batch], source: str | None = None) -> Tokens:
    """The facts about the input of a model; token ids must be in rows of one length."""
    if any(isinstance(batch, Call) for batch in batches):
        samples = sum(map(len, batches))
        return Tokens(samples, samples, 1, input_fingerprint(batches), None, source, "inputs")
    shapes = [tuple(batch.shape) for batch in batches]
    if not shapes or any(len(shape) != 2 or shape[1] != shapes[0][1] or 0 in shape for shape in shapes):
        raise RecordingError(f"batches have the shapes {shapes}. Expected [samples, tokens], all of one length.")
    kinds = [as_call(batch).main.dtype for batch in batches]
    if any(kind.is_floating_point or kind.is_complex for kind in kinds):
        raise RecordingError(f"batches are {kinds[0]}. Expected token ids, whole numbers.")
    samples, seqlen = sum(shape[0] for shape in shapes), shapes[0][1]
    return Tokens(samples * seqlen, samples, seqlen, input_fingerprint(batches), TOKENS, source)


def write_tokens(folder: Path, batches: Sequence[Batch]) -> dict[str, StoredFile]:
    """Write the token ids, so that a comparison with another recording can say which token differs; the file by name.

    Other inputs are not written: their fingerprint is in the manifest.
    """
    rows = [batch.detach().cpu().to(torch.int64) for batch in batches if isinstance(batch, Tensor)]
    if not rows:
        return {}
    with writing(folder / TOKENS):
        return {TOKENS: StoredFile.of(write(folder / TOKENS, save({"input_ids": torch.cat(rows)})))}


def finished(
    recipe: Recipe, stream: TensorStream, layers: Sequence[str] | None = None
) -> tuple[RecordedRecipe, StoredFile]:
    """The content of a stream, which is finished. Without `layers`, every output is a layer except ends and parts."""
    kinds, file = stream.finish()
    if layers is None:
        labels = [name.removesuffix(".output") for name in kinds if name.endswith(".output")]
        parts = {f"{label}.{part}" for label in labels for part in PARTS}
        layers = [label for label in labels if label not in (*ENDS, *parts)]
    if not layers:
        raise RecordingError(f"{recipe} recorded not one layer. Expected tensors such as layer_0.output.")
    tensors = {name: StoredTensor(*kind, stream.file.name, name) for name, kind in kinds.items()}
    return RecordedRecipe(
        find_mode(recipe.mode).id, recipe.format, tuple(layers), tensors, include=recipe.include
    ), file
