"""Whether two recordings are of the same inputs: told before any layer is compared."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from probe.recordings import Recording


@dataclass(frozen=True)
class Inputs:
    """`same`, `different` or `unknown`, and what that is known from."""

    status: Literal["same", "different", "unknown"]
    said: str


def compare_inputs(a: Recording, b: Recording, *, names: tuple[str, str] = ("A", "B")) -> Inputs:
    """By the number of samples, their length, and the token ids or their fingerprint. Nothing is cropped."""
    first, second = a.manifest.tokens, b.manifest.tokens
    for what, x, y in (
        ("samples", first.samples, second.samples),
        ("tokens in a sample", first.seqlen, second.seqlen),
    ):
        if x != y:
            return Inputs("different", f"{names[0]} has {x} {what}, {names[1]} has {y}")
    ids, others = a.input_ids(), b.input_ids()
    if ids is not None and others is not None:
        return _compare_ids(ids, others, names)
    if first.fingerprint is not None and second.fingerprint is not None:
        if first.fingerprint == second.fingerprint:
            return Inputs("same", f"the fingerprints of the token ids agree: {first.fingerprint}")
        prints = f"{first.fingerprint} on {names[0]}, {second.fingerprint} on {names[1]}"
        return Inputs("different", f"the fingerprints of the token ids differ: {prints}")
    silent = [name for name, tokens in zip(names, (first, second), strict=True) if tokens.fingerprint is None]
    return Inputs("unknown", f"{' and '.join(silent)} did not keep the token ids: whether inputs agree is not known")


def _compare_ids(ids: Tensor, others: Tensor, names: tuple[str, str]) -> Inputs:
    if ids.shape != others.shape:
        shapes = f"{list(ids.shape)} on {names[0]}, {list(others.shape)} on {names[1]}"
        return Inputs("different", f"the token ids have other shapes: {shapes}")
    differ = (ids != others).nonzero()
    if not len(differ):
        return Inputs("same", f"the token ids agree: {ids.shape[0]} samples of {ids.shape[1]}")
    sample, position = (int(x) for x in differ[0])
    order = ""
    if torch.equal(torch.unique(ids, dim=0), torch.unique(others, dim=0)):
        order = "; the samples are the same ones in another order"
    return Inputs(
        "different",
        f"{len(differ)} of {ids.numel()} token ids differ, the first in sample {sample} at position {position}: "
        f"{int(ids[sample, position])} on {names[0]}, {int(others[sample, position])} on {names[1]}{order}",
    )
