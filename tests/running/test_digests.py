"""Digests of weights: every bit of every parameter counts, whatever kind of tensor holds it."""

import pytest
import torch
from torch import nn

from probe.models.loading import load_model
from probe.running.digests import VARIES, digest_of, weight_digests
from probe.running.recipes import Recipe, apply


def test_a_digest_sees_dtype_shape_bits_and_the_sign_of_zero() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0])
    others = [x.double(), x.reshape(2, 2), torch.tensor([-0.0, 1, 2, 3]), torch.nextafter(x, x + 1), x.flip(0)]
    found = [digest_of(one) for one in (x, *others)]
    assert len({*found}) == len(found)
    assert all(len(one) == 8 and int(one, 16) >= 0 for one in found)
    assert digest_of(x) == digest_of(x.clone()) == digest_of(torch.stack([x, x], 1)[:, 0])
    assert digest_of(x, x) != digest_of(x)
    assert digest_of(torch.zeros(0)) == digest_of(torch.zeros(0))


def test_parameters_and_saved_buffers_are_named_and_one_bit_is_seen() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    module.register_buffer("computed", torch.ones(2), persistent=False)
    before = weight_digests(module)
    assert list(before) == sorted(module.state_dict())
    assert "computed" not in before
    with torch.no_grad():
        weight = module.get_parameter("0.weight")
        weight[2, 1] = torch.nextafter(weight[2, 1], torch.tensor(9.0))
    after = weight_digests(module)
    assert [name for name in before if before[name] != after[name]] == ["0.weight"]


def test_a_parameter_without_numbers_varies() -> None:
    assert weight_digests(nn.Linear(2, 2, bias=False, device="meta")) == {"weight": VARIES}


def test_codes_and_scales_of_torchao_are_digested() -> None:
    pytest.importorskip("torchao")
    twin = apply(load_model("tiny-llama").model, Recipe("torchao_w", "int8"))
    layer = twin.get_submodule("model.layers.0")
    before = weight_digests(layer)
    weight = layer.get_parameter("mlp.up_proj.weight")
    names, _ = weight.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {name: getattr(weight, name) for name in names if isinstance(getattr(weight, name), torch.Tensor)}
    assert len(inner) >= 2
    for part in inner.values():
        flat = part.data.view(-1)
        old = flat[0].clone()
        flat[0] = old + 1
        after = weight_digests(layer)
        assert [name for name in before if before[name] != after[name]] == ["mlp.up_proj.weight"]
        flat[0] = old
    assert weight_digests(layer) == before
