"""A safetensors file that is written while its tensors appear, a batch of rows at a time.

    8 bytes: n | n bytes: header, padded with spaces | the tensors, one after the other

The names are known beforehand, so room is kept for the header. A tensor gets its region when it first appears, since
its shape is known then: samples x the rest. The header is written last: until then the file begins with eight zeros,
and no reader takes it for whole.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from probe.files.atomic import create, move
from probe.files.tensors import CHUNK, SAFETENSORS_TYPES, Kind, kind_of
from probe.recordings.manifest import DTYPES, RecordingError, StoredFile, writing

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
    """`add` rows of tensors, then `finish`; leaving the block without it deletes the file.

    `label` begins the messages: whose tensors these are.
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
        """The next rows of a tensor, [some samples, ...]. Nothing is cropped, broadcast or converted."""
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
        """Write the header, read all back, and return what the file holds."""
        for name in self._names:
            region = self._regions.get(name)
            if region is None:
                raise self._misfit(name, 0, ())
            if region.rows != self._samples:
                raise self._misfit(name, region.rows, [region.row])
        if any(region.begin % region.item_bytes for region in self._regions.values()):
            self._align()
        kinds = {name: Kind(one.row.dtype, (self._samples, *one.row.shape)) for name, one in self._regions.items()}
        header = {
            name: {
                "dtype": SAFETENSORS_TYPES[kinds[name].dtype],
                "shape": kinds[name].shape,
                "data_offsets": [region.begin, region.begin + self._samples * region.row_bytes],
            }
            for name, region in self._regions.items()
        }
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
        """The size and sha256 of the file, once every tensor in it is known to be what was given."""
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
