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
from types import TracebackType

import torch
from torch import Tensor

from probe.recordings.checked import RecordingError
from probe.recordings.disk import sync, writing
from probe.recordings.format import DTYPES, File
from probe.recordings.loading import Kind, dtype_of

#: Room for an entry of the header beside the name: dtype, offsets, a shape of up to ten axes.
ENTRY = 384
CHUNK = 1 << 20


@dataclass
class _Region:
    """Where a tensor lies: `begin` counts from the end of the header."""

    dtype: str
    rest: tuple[int, ...]
    begin: int
    row_bytes: int
    item_bytes: int
    rows: int = 0
    checksum: int = 0


class TensorStream:
    """`add` rows of tensors, then `finish`; leaving the block without it deletes the file."""

    def __init__(self, file: Path, names: Sequence[str], samples: int, *, what: str) -> None:
        self.file, self._samples, self._what = file, samples, what
        self._names = tuple(names)
        header = 2 + sum(len(json.dumps(name)) + ENTRY for name in names)
        self._start = 8 + header + -header % 8
        self._regions: dict[str, _Region] = {}
        self._end = 0
        with writing(file):
            self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
        self._whole = False

    def __enter__(self) -> "TensorStream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, at: TracebackType | None
    ) -> None:
        os.close(self._descriptor)
        if kind is not None or not self._whole:
            self.file.unlink(missing_ok=True)

    def add(self, name: str, rows: Tensor) -> None:
        """The next rows of a tensor, [some samples, ...]. Nothing is cropped, broadcast or converted."""
        rows = rows.detach().cpu()
        dtype, rest = dtype_of(rows), tuple(rows.shape[1:])
        region = self._regions.get(name)
        if region is None:
            if dtype not in DTYPES:
                raise RecordingError(f"{self._what}: {name} is {dtype}. Expected one of {', '.join(DTYPES)}.")
            row_bytes = rows[:1].numel() * rows.element_size() if rows.dim() and len(rows) else 0
            region = self._regions[name] = _Region(dtype, rest, self._end, row_bytes, rows.element_size())
            self._end += self._samples * row_bytes
        count = len(rows) if rows.dim() else 0
        if (dtype, rest) != (region.dtype, region.rest) or not count or region.rows + count > self._samples:
            kinds = {f"{region.dtype} {list(region.rest)}", f"{dtype} {list(rest)}"}
            raise self._misfit(name, region.rows + count, kinds)
        data = rows.contiguous().reshape(-1).view(torch.uint8).numpy().data
        region.checksum = zlib.crc32(data, region.checksum)
        self._write(data, self._start + region.begin + region.rows * region.row_bytes)
        region.rows += count

    def finish(self) -> tuple[dict[str, Kind], File]:
        """Write the header, read all back, and tell what the file holds."""
        for name in self._names:
            region = self._regions.get(name)
            if region is None:
                raise self._misfit(name, 0, ())
            if region.rows != self._samples:
                raise self._misfit(name, region.rows, [f"{region.dtype} {list(region.rest)}"])
        if any(region.begin % region.item_bytes for region in self._regions.values()):
            self._align()
        header = {
            name: {
                "dtype": DTYPES[region.dtype],
                "shape": [self._samples, *region.rest],
                "data_offsets": [region.begin, region.begin + self._samples * region.row_bytes],
            }
            for name, region in self._regions.items()
        }
        room = self._start - 8
        text = json.dumps(header, separators=(",", ":")).encode()
        if len(text) > room:
            raise RecordingError(f"{self._what}: the shapes have too many axes to be written.")
        self._write(memoryview(room.to_bytes(8, "little") + text.ljust(room)), 0)
        with writing(self.file):
            os.fsync(self._descriptor)
        facts = self._read_back()
        self._whole = True
        return {name: (one.dtype, (self._samples, *one.rest)) for name, one in self._regions.items()}, facts

    def _misfit(self, name: str, rows: int, kinds: Iterable[str]) -> RecordingError:
        return RecordingError(
            f"{self._what}: {name} has {rows} samples of {' and '.join(sorted(kinds))}. Expected {self._samples} of "
            "one dtype and shape: choose a module that runs once in every forward, samples along its first axis."
        )

    def _write(self, data: memoryview, place: int) -> None:
        with writing(self.file):
            while data:
                count = os.pwrite(self._descriptor, data, place)
                data, place = data[count:], place + count

    def _align(self) -> None:
        """Put the regions in the order of their items' size, largest first: then each begins at a multiple of it."""
        old, self._end = dict(self._regions), 0
        fresh = self.file.with_name(f"{self.file.name}.aligned")
        source = self._descriptor
        try:
            with writing(fresh):
                self._descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o666)
            self._regions = dict(sorted(old.items(), key=lambda pair: -pair[1].item_bytes))
            for region in self._regions.values():
                size = self._samples * region.row_bytes
                for done in range(0, size, CHUNK):
                    chunk = os.pread(source, min(CHUNK, size - done), self._start + region.begin + done)
                    self._write(memoryview(chunk), self._start + self._end + done)
                region.begin, self._end = self._end, self._end + size
            with writing(self.file):
                fresh.replace(self.file)
                sync(self.file.parent)
        finally:
            os.close(source)
            fresh.unlink(missing_ok=True)

    def _read_back(self) -> File:
        """The size and sha256 of the file, once every tensor in it is known to be what was given."""
        digest = hashlib.sha256()
        place = 0

        def read(end: int, checksum: int = 0) -> int:
            nonlocal place
            while place < end:
                chunk = os.pread(self._descriptor, min(CHUNK, end - place), place)
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
        return File(place, digest.hexdigest())
