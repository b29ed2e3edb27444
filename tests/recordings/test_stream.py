"""The streaming writer: safetensors by its own reader, whole or nothing, aligned, in little memory."""

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from probe.recordings import RecordingError
from probe.recordings.manifest import DTYPES
from probe.recordings.stream import TensorStream
from tests.files.accidents import files_of_at_most

SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)
KINDS = st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=5)


def stream(file: Path, names: list[str], samples: int) -> TensorStream:
    return TensorStream(file, names, samples, label="fp32")


def write(file: Path, rows: Sequence[Tensor], samples: int) -> None:
    with stream(file, ["a.output"], samples) as writer:
        for one in rows:
            writer.add("a.output", one)
        writer.finish()


@settings(max_examples=60, deadline=None)
@given(kinds=KINDS, sizes=st.lists(st.integers(1, 3), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_any_mixture_of_dtypes_and_batches_reads_back(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[str, tuple[int, ...]]], sizes: list[int], seed: int
) -> None:
    """load_file is the oracle: it refuses holes, overlaps, wrong offsets and misaligned tensors."""
    file = tmp_path_factory.mktemp("s") / "x.safetensors"
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"layer_{index}.output": torch.randn(sum(sizes), *rest, generator=generator).to(getattr(torch, dtype))
        for index, (dtype, rest) in enumerate(kinds)
    }
    with stream(file, list(tensors), sum(sizes)) as writer:
        for rows in zip(*(torch.split(tensor, sizes) for tensor in tensors.values()), strict=True):
            for name, row in zip(tensors, rows, strict=True):
                writer.add(name, row)
        kinds_found, facts = writer.finish()
    found = load_file(file)
    assert found.keys() == tensors.keys() == kinds_found.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].double(), tensor.double())
        assert found[name].data_ptr() % tensor.element_size() == 0
    assert facts.bytes == file.stat().st_size
    assert sorted(os.listdir(file.parent)) == ["x.safetensors"]


def test_memory_that_is_not_in_a_row_is_written_as_it_is_seen(tmp_path: Path) -> None:
    turned = torch.arange(24.0).view(2, 3, 4).transpose(1, 2)
    write(tmp_path / "x", [turned], 2)
    assert torch.equal(load_file(tmp_path / "x")["a.output"], turned)


def test_until_the_end_no_reader_takes_it_for_whole(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    with stream(file, ["a.output"], 1) as writer:
        writer.add("a.output", torch.ones(1, 3))
        with pytest.raises(SafetensorError):
            load_file(file)
        writer.finish()
        load_file(file)


def test_a_block_that_fails_leaves_no_file(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"

    def fail(*, finish: bool) -> None:
        with stream(file, ["a.output"], 1) as writer:
            writer.add("a.output", torch.ones(1, 3))
            if finish:
                writer.finish()
            raise RuntimeError

    for finish in (False, True):
        with pytest.raises(RuntimeError):
            fail(finish=finish)
        assert not file.exists()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([torch.ones(2, 3)], r"fp32: a\.output has 2 samples of float32 \[3\]\. Expected 3 of one dtype and shape"),
        ([torch.ones(2, 3), torch.ones(2, 3)], r"a\.output has 4 samples of float32 \[3\]\. Expected 3"),
        ([torch.ones(2, 3), torch.ones(1, 4)], r"a\.output has 3 samples of float32 \[3\] and float32 \[4\]"),
        ([torch.ones(2, 3), torch.ones(1, 3).half()], r"a\.output has 3 samples of float16 \[3\] and float32 \[3\]"),
        ([torch.tensor(1.0)], r"a\.output has 0 samples of float32 \[\]"),
        ([torch.ones(0, 3)], r"a\.output has 0 samples"),
        ([torch.ones(3, 3).int()], r"a\.output is int32\. Expected one of float64, float32"),
        ([], r"a\.output has 0 samples of \. Expected 3"),
    ],
)
def test_what_is_not_whole_is_never_finished(tmp_path: Path, rows: list[Tensor], message: str) -> None:
    with pytest.raises(RecordingError, match=message):
        write(tmp_path / "x", rows, 3)
    assert not any(tmp_path.iterdir())


def test_a_full_disk_is_told_and_leaves_no_file(tmp_path: Path) -> None:
    message = r"cannot write .*x\.safetensors: File too large\. What was there before is whole\."
    with pytest.raises(RecordingError, match=message), files_of_at_most(8000):
        write(tmp_path / "x.safetensors", [torch.ones(1, 1000), torch.ones(1, 1000)], 2)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("lies", ["places", "bytes"])
def test_a_disk_that_keeps_something_else_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lies: str
) -> None:
    true = os.pwrite

    def pwrite(descriptor: int, data: Any, place: int) -> int:
        if place > 300 and lies == "places":
            place -= 4
        if place > 300 and lies == "bytes":
            data = bytes(len(data))
        return true(descriptor, data, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(RecordingError, match=r"a\.output reads back differently|it ends at \d+ bytes"):
        write(tmp_path / "x", [torch.arange(1.0, 9.0).view(2, 4)], 2)
    assert not any(tmp_path.iterdir())


def test_the_checksum_is_over_all_batches(tmp_path: Path) -> None:
    """crc32 is taken batch by batch: it is that of the whole."""
    rows = torch.randn(3, 5)
    with stream(tmp_path / "x", ["a.output"], 3) as writer:
        for row in torch.split(rows, 1):
            writer.add("a.output", row)
        assert writer._regions["a.output"].checksum == zlib.crc32(rows.numpy().tobytes())
        writer.finish()
