"""Promises of probe.data: the texts, the windows, and what is refused with which words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from probe.data.calls import input_fingerprint
from probe.data.samples import bytes_per_target, token_batches
from probe.data.texts import TEXTS, text_of
from probe.data.tokenizers import ByteTokenizer

BYTES = ByteTokenizer()


@pytest.mark.parametrize("name", TEXTS)
def test_a_builtin_text_is_64_kib_of_running_text(name: str) -> None:
    text = text_of(name)
    assert len(text.encode()) == 65536
    assert text.count(" the ") > 200


def test_the_builtin_texts_are_different() -> None:
    assert text_of("calibration") != text_of("evaluation")


def test_a_file_is_read_byte_for_byte(tmp_path: Path) -> None:
    (tmp_path / "own.txt").write_bytes("été\r\nend\n".encode())
    assert text_of(str(tmp_path / "own.txt")) == "été\r\nend\n"


def test_an_unknown_text_offers_the_nearest() -> None:
    with pytest.raises(
        ValueError, match=r"unknown text 'calibraton'\. Did you mean 'calibration'\? Known: calibration, "
    ):
        text_of("calibraton")
    with pytest.raises(ValueError, match=r"evaluation\. Or give the path of a \.txt file\.$"):
        text_of("")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"text file '{tmp_path}/no.txt' does not exist .* or one of: calibration, "):
        text_of(str(tmp_path / "no.txt"))


def test_another_kind_of_file(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("text")
    for path in (tmp_path / "page.html", tmp_path):
        with pytest.raises(ValueError, match=r"is not a \.txt file\. Expected plain text in UTF-8"):
            text_of(str(path))


def test_a_file_that_is_not_utf_8(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ")
    with pytest.raises(ValueError, match=r"latin.txt' is not UTF-8: byte 3 is 0xe9\. Convert it, .* iconv -f LATIN1"):
        text_of(str(tmp_path / "latin.txt"))


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_an_empty_file(tmp_path: Path, text: str) -> None:
    (tmp_path / "empty.txt").write_text(text)
    with pytest.raises(ValueError, match=r"empty.txt' is empty\. Expected text"):
        text_of(str(tmp_path / "empty.txt"))


def test_windows_are_consecutive_from_the_start_and_the_last_batch_may_be_smaller() -> None:
    batches = token_batches(list(range(100, 120)), BYTES, samples=3, seqlen=5, batch_size=2)
    assert [batch.tolist() for batch in batches] == [
        [[100, 101, 102, 103, 104], [105, 106, 107, 108, 109]],
        [[110, 111, 112, 113, 114]],
    ]
    assert {batch.dtype for batch in batches} == {torch.int64}


@pytest.mark.parametrize("source", ["abcdef", [97, 98, 99, 100, 101, 102], torch.arange(97, 103, dtype=torch.uint8)])
def test_text_and_tokens_give_the_same_batches(source: str | list[int] | torch.Tensor) -> None:
    (batch,) = token_batches(source, BYTES, samples=2, seqlen=3, batch_size=8)
    assert batch.dtype == torch.int64
    assert batch.tolist() == [[97, 98, 99], [100, 101, 102]]


def test_a_text_of_exactly_the_size_fits_and_one_token_less_does_not() -> None:
    assert len(token_batches("x" * 12, BYTES, samples=3, seqlen=4, batch_size=1)) == 3
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        token_batches("x" * 11, BYTES, samples=3, seqlen=4, batch_size=1)
    assert str(caught.value) == (
        "the text has 11 tokens; 3 samples of 4 need 12. At most samples=2 fit at this seqlen."
    )
    with pytest.raises(ValueError, match=r"the text has 3 tokens; .* Not one sample fits: seqlen <= 3\."):
        token_batches("xxx", BYTES, samples=1, seqlen=4, batch_size=1)


@pytest.mark.parametrize("name", ["samples", "seqlen", "batch_size"])
@pytest.mark.parametrize("value", [0, -1])
def test_sizes_below_one(name: str, value: int) -> None:
    sizes = {"samples": 1, "seqlen": 1, "batch_size": 1} | {name: value}
    with pytest.raises(ValueError, match=f"{name} is {value}; expected 1 or more."):
        token_batches("text", BYTES, **sizes)


@pytest.mark.parametrize("tokens", [torch.zeros(2, 2, dtype=torch.long), torch.zeros(4), [0.5, 1.5]])
def test_tokens_that_are_not_a_row_of_ids(tokens: Any) -> None:
    with pytest.raises(ValueError, match="expected a row of integer ids"):
        token_batches(tokens, BYTES, samples=1, seqlen=1, batch_size=1)


class Words:
    """A token is a word of unlike length."""

    words = ("aaaa", "b", "cc", "ü")

    def encode(self, text: str) -> list[int]:
        return [self.words.index(word) for word in text.split()]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(self.words[token] for token in tokens)


def test_bytes_per_target_are_those_of_what_is_predicted() -> None:
    batches = [torch.tensor([[0, 1, 2], [0, 3, 1]])]
    assert bytes_per_target(batches, Words()) == (1 + 2 + 2 + 1) / 4  # all six tokens: (4 + 1 + 2 + 4 + 2 + 1) / 6


def test_the_fingerprint_does_not_depend_on_the_batching() -> None:
    text = text_of("evaluation")
    batched = [token_batches(text, BYTES, samples=7, seqlen=16, batch_size=size) for size in (1, 2, 3, 7, 50)]
    prints = {input_fingerprint(batches) for batches in batched}
    assert len(prints) == 1
    assert len(prints.pop()) == 16


def test_the_fingerprint_sees_tokens_order_count_and_length() -> None:
    variants = [[[1, 2, 3, 4]], [[1, 2], [3, 4]], [[3, 4], [1, 2]], [[1, 2]], [[1, 2], [3, 5]], []]
    prints = {input_fingerprint(list(torch.tensor([rows]))) for rows in variants if rows}
    assert len(prints | {input_fingerprint([])}) == len(variants)
    assert input_fingerprint([torch.tensor([[1, 2]])]) == input_fingerprint([torch.tensor([[1, 2]], dtype=torch.int32)])
