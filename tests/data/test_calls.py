"""Calls: the arguments of a forward, cut, repeated and identified by sample."""

from typing import Any

import pytest
import torch
from torch import Tensor

from probe.data.calls import Call, as_call, call_of, input_fingerprint, repeated, shortened, split_rows

PIXELS = torch.arange(24.0).reshape(4, 2, 3)
IDS = torch.arange(8).reshape(4, 2)
SHARED = torch.arange(5.0)  # not by sample


def call() -> Call:
    return Call((PIXELS,), {"ids": IDS, "shared": SHARED, "scale": 0.5, "mask": None})


def test_a_batch_is_a_tensor_a_tuple_or_a_dict() -> None:
    assert call_of(PIXELS, where="x").args == (PIXELS,)
    assert call_of((PIXELS, 3), where="x").args == (PIXELS, 3)
    assert call_of({"a": PIXELS, "b": None}, where="x").kwargs == {"a": PIXELS, "b": None}
    assert as_call(IDS).main is IDS
    assert str(call()) == "0 [4, 2, 3] of float32, ids [4, 2] of int64, shared [5] of float32"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"a": [PIXELS]}, "x: argument a is a list. Expected a tensor or a plain value"),
        ((PIXELS, object()), "x: argument 1 is a object"),
        ({1: PIXELS}, "a dict names the arguments of the forward by text"),
        ((), "x has no tensor with samples"),
        ({"a": 3}, "x has no tensor with samples"),
        (torch.tensor(3.0), "x has no tensor with samples"),
        (torch.zeros(0, 3), "x has no tensor with samples"),
    ],
)
def test_anything_else_is_told(given: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        call_of(given, where="x")
    assert message in str(caught.value)


def test_what_is_by_sample_is_cut_and_the_rest_is_shared() -> None:
    some = call().rows(1, 3)
    assert torch.equal(some.args[0], PIXELS[1:3])
    assert torch.equal(some.kwargs["ids"], IDS[1:3])
    assert some.kwargs["shared"] is SHARED
    assert (some.kwargs["scale"], some.kwargs["mask"], len(some)) == (0.5, None, 2)
    twice = repeated(call(), 2)
    assert isinstance(twice, Call)
    assert torch.equal(twice.main, torch.cat([PIXELS, PIXELS]))
    assert twice.kwargs["shared"] is SHARED


def test_splitting_keeps_every_sample_once_and_in_order() -> None:
    parts = split_rows([call(), call().rows(0, 1)], 3)
    assert [len(part) for part in parts] == [3, 1, 1]
    assert torch.equal(torch.cat([as_call(part).main for part in parts]), torch.cat([PIXELS, PIXELS[:1]]))


def test_token_ids_are_shortened_in_both_axes_and_calls_in_samples() -> None:
    tokens = torch.arange(40).reshape(2, 20)
    assert torch.equal(as_call(shortened(tokens, samples=1, tokens=5)).main, tokens[:1, :5])
    assert shortened(call(), samples=2, tokens=1).shape == (2, 2, 3)


def test_the_fingerprint_does_not_depend_on_the_batches_but_on_everything_else() -> None:
    known = input_fingerprint([call()])
    assert input_fingerprint(split_rows([call()], 1)) == input_fingerprint(split_rows([call()], 3)) == known
    changes: list[Call] = [
        call().with_argument("scale", 0.25),
        call().with_argument("ids", IDS.int()),
        call().with_argument("0", PIXELS + (torch.arange(24.0).reshape(4, 2, 3) == 23) * 1e-5),
        Call((PIXELS,), {"other": IDS, "shared": SHARED, "scale": 0.5, "mask": None}),
    ]
    found = [input_fingerprint([one]) for one in changes]
    assert len({known, *found}) == 5


def test_an_argument_is_exchanged_by_place_and_by_name() -> None:
    other = torch.ones(4, 2)
    assert call().with_argument("0", other).main is other
    assert call().with_argument("ids", other).kwargs["ids"] is other


def test_tensors_move_and_values_stay() -> None:
    moved = call().to(torch.device("meta"))
    assert all(tensor.is_meta for tensor in moved.tensors.values())
    assert moved.kwargs["scale"] == 0.5


def test_tokens_of_any_batching_have_one_fingerprint() -> None:
    tokens: Tensor = torch.arange(40).reshape(4, 10)
    assert input_fingerprint([tokens]) == input_fingerprint([tokens[:3], tokens[3:]])
    assert input_fingerprint([tokens]) != input_fingerprint([tokens.reshape(2, 20)])
