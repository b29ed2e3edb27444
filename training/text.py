"""The text: six novels of Jane Austen (1811-1818), read from Debian's package r-cran-janeaustenr.

The package keeps each novel as an R character vector, one string per printed line, in
`data/Rdata.rdb`. That file is a row of records, `[size: 4 bytes][zlib stream]`, in alphabetical order of the
novels. A record is R's binary serialization of the vector; a few lines read it, so R itself is not needed.
"""

import struct
import subprocess
import zlib
from itertools import pairwise
from pathlib import Path

PACKAGE = "r-cran-janeaustenr"
NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")
HELD_OUT = "persuasion"
SAMPLE_BYTES = 64 * 1024

CHARACTER_VECTOR, STRING = 16, 9  # R's SEXPTYPE numbers


def load_novels(folder: Path) -> dict[str, bytes]:
    """The novels by name, as UTF-8. Downloads and unpacks the package into `folder` if it is not there."""
    archive = next(folder.glob("**/janeaustenr/data/Rdata.rdb"), None)
    if archive is None:
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", PACKAGE], cwd=folder, check=True)
        package = next(folder.glob(f"{PACKAGE}_*.deb"))
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=folder, check=True)
        archive = next(folder.glob("**/janeaustenr/data/Rdata.rdb"))
    return dict(zip(NOVELS, map(character_vector, records(archive.read_bytes())), strict=True))


def records(data: bytes) -> list[bytes]:
    """The decompressed records of an .rdb file."""
    found = []
    while data:
        stream = zlib.decompressobj()
        found.append(stream.decompress(data[4:]))
        data = stream.unused_data
    return found


def character_vector(record: bytes) -> bytes:
    """The strings of one serialized character vector, each followed by a newline.

    Layout, big-endian: "X\\n", format version, writer, oldest reader, native encoding (length, name), then
    the type and length of the vector, then each string as (flags, length, bytes). The low byte of a flags
    word is the type.
    """
    encoding_length = struct.unpack_from(">i", record, 14)[0]
    position = 18 + encoding_length
    kind, count = struct.unpack_from(">ii", record, position)
    if record[:2] != b"X\n" or kind & 0xFF != CHARACTER_VECTOR:
        raise ValueError(f"not an R character vector: starts {record[:2]!r}, type {kind & 0xFF}; expected 16")
    position += 8
    lines = []
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", record, position)
        if flags & 0xFF != STRING:
            raise ValueError(f"not a string at byte {position}: type {flags & 0xFF}, expected {STRING}")
        lines.append(record[position + 8 : position + 8 + length])
        position += 8 + length
    return b"\n".join(lines) + b"\n"


def training_text(novels: dict[str, bytes]) -> bytes:
    """The novels one after the other, without the held-out one."""
    return b"".join(text for name, text in novels.items() if name != HELD_OUT)


def calibration_text(novels: dict[str, bytes]) -> bytes:
    """64 KiB of training text: an equal share from the middle of each novel."""
    names = [name for name in NOVELS if name != HELD_OUT]
    ends = [SAMPLE_BYTES * i // len(names) for i in range(len(names) + 1)]
    shares = {name: end - start for name, (start, end) in zip(names, pairwise(ends), strict=True)}
    return b"".join(excerpt(novels[name], len(novels[name]) // 2, share) for name, share in shares.items())


def evaluation_text(novels: dict[str, bytes]) -> bytes:
    """64 KiB from the middle of the held-out novel."""
    return excerpt(novels[HELD_OUT], len(novels[HELD_OUT]) // 2, SAMPLE_BYTES)


def excerpt(text: bytes, start: int, size: int) -> bytes:
    """`size` bytes of `text` from the first line after `start`. Raises if the end splits a character."""
    start = text.index(b"\n", start) + 1
    piece = text[start : start + size]
    piece.decode("utf-8")
    return piece
