"""Faults of a user's own modes, of which the gate sees outputs only: one for tiny-llama, one for a small network."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.numerics.quantize import fake_quantize
from probe.running.calibration import Calibration
from probe.running.modes import register_mode, unregister_mode
from tests.faults.breaking import Damage, Patient, body, submodule
from tests.faults.catalogue import NOT_APPLIED, NOT_FINITE, PATH, Fault
from tests.faults.path_faults import attending, caching, oldest_lost, uneven, unmasked_attention
from tests.plugin.project import NETWORK

OWN, OWN8, NET, NET8 = "own-int8", "own-fp8_e4m3", "net-int8", "net-fp8_e4m3"
LLAMA, NETWORK_MODEL = "tiny-llama", "tests.faults.user_faults:network"


def network() -> nn.Module:
    """The model of the repository in tests/plugin/project.py."""
    names: dict[str, Any] = {}
    exec(compile(NETWORK.format(fault="", depth=3), "network.py", "exec"), names)
    made: nn.Module = names["make"]()
    return made


class OwnLinear(nn.Module):
    """Weights with a scale for each row, inputs with one for each token."""

    def __init__(self, linear: nn.Linear, format: str) -> None:
        super().__init__()
        rows: dict[str, Any] = {"block_size": linear.in_features} if format == "int8" else {}
        self.format, self.rows = format, rows
        self.weight = nn.Parameter(fake_quantize(linear.weight.detach(), format, **rows), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(fake_quantize(x, self.format, **self.rows), self.weight)


def own(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
    """Every linear layer of the decoder blocks."""
    for layer in body(model).layers:
        for name, module in list(layer.named_modules()):
            if isinstance(module, nn.Linear):
                parent, _, child = name.rpartition(".")
                setattr(layer.get_submodule(parent), child, OwnLinear(module, format))
    return model


def net(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
    """The weights of every block."""
    with torch.no_grad():
        for layer in body(model).layers:
            for linear in (layer.up, layer.down):
                linear.weight.copy_(fake_quantize(linear.weight, format))
    return model


@contextmanager
def registered() -> Iterator[None]:
    """The modes are in the table while it lasts."""
    register_mode("own", own)
    register_mode("net", net)
    try:
        yield
    finally:
        unregister_mode("own")
        unregister_mode("net")


def output(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """The output of a module of the layer is changed."""
    return submodule(name, lambda real, module, *args, **kwargs: change(real(*args, **kwargs)))


def given(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """The input of a module of the layer is changed."""
    return submodule(name, lambda real, module, x: real(change(x)))


def put(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    """A weight of the layer is changed."""

    def damage(patient: Patient) -> None:
        parameter = patient.block.get_parameter(name)
        parameter.copy_(change(parameter.clone()))

    return damage


def row_zero(w: Tensor) -> Tensor:
    w[9] = 0
    return w


def rows_swapped(w: Tensor) -> Tensor:
    w[[3, 7]] = w[[7, 3]]
    return w


def token_lost(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 5] = 0
    return x


def sequence_of_another(x: Tensor) -> Tensor:
    """The second sequence is given what belongs to the first."""
    x = x.clone()
    if x.shape[0] > 1:
        x[1] = x[0]
    return x


def one_nan(x: Tensor) -> Tensor:
    x = x.clone()
    x[0, 3, 7] = torch.nan
    return x


def whole_tensor(patient: Patient) -> None:
    """One scale for the whole weight, and not one for each row."""
    linear = patient.block.mlp.down_proj
    linear.weight.copy_(fake_quantize(patient.stock.mlp.down_proj.weight, "int8"))


def four_bits(patient: Patient) -> None:
    linear = patient.block.mlp.up_proj
    linear.weight.copy_(fake_quantize(patient.stock.mlp.up_proj.weight, "int4", block_size=128))


def of_layer(other: int) -> Damage:
    def damage(patient: Patient) -> None:
        patient.block.down.weight.copy_(body(patient.twin).layers[other].down.weight)

    return damage


def left_float(patient: Patient) -> None:
    for name in ("up", "down"):
        getattr(patient.block, name).weight.copy_(getattr(patient.stock, name).weight)


def in_dtype(dtype: torch.dtype) -> Callable[..., Tensor]:
    def call(real: Any, module: Any, x: Tensor) -> Tensor:
        bias = None if getattr(module, "bias", None) is None else module.bias.to(dtype)
        return functional.linear(x.to(dtype), module.weight.to(dtype), bias).float()

    return call


def llama(name: str, recipe: str, damage: Damage, cause: str, **rest: Any) -> Fault:
    return user(name, recipe, damage, cause, model=LLAMA, **rest)


def small(name: str, recipe: str, damage: Damage, cause: str, **rest: Any) -> Fault:
    return user(name, recipe, damage, cause, model=NETWORK_MODEL, **rest)


def user(name: str, recipe: str, damage: Damage, cause: str, **rest: Any) -> Fault:
    """A fault of a mode of a user: of a layer, or of a path, which is told with its name."""
    where = f"layer_{rest.get('layer', 1)}"
    said = f"{rest['case']}, {where}: {cause}" if "case" in rest else f"{where}; {cause}"
    return Fault(f"user: {name}", recipe, damage, said, **rest)


USER = (
    llama(
        "a plain factor 1.01",
        OWN,
        output("mlp.down_proj", lambda x: 1.01 * x),
        "the output of mlp.down_proj is 1.01 times the stored one",
    ),
    llama(
        "a factor 0.5",
        OWN8,
        output("self_attn.o_proj", lambda x: 0.5 * x),
        "as if the output of self_attn.o_proj were 0.5 times that of the stored run",
        layer=2,
    ),
    llama("channels permuted", OWN, output("", lambda x: x.roll(32, -1)), "channels are permuted: shifted by 32"),
    llama("one channel lost", OWN, put("mlp.down_proj.weight", row_zero), "only channel 9 has changed"),
    llama("one token lost", OWN, output("mlp.down_proj", token_lost), "only token 5 has changed"),
    llama(
        "one sequence given another's", OWN8, given("mlp.down_proj", sequence_of_another), "only sequence 1 has changed"
    ),
    llama(
        "one token late",
        OWN,
        output("mlp.down_proj", lambda x: x.roll(1, 1)),
        "what it adds: it is one token late",
        layer=3,
    ),
    llama(
        "mlp in bf16",
        OWN,
        submodule("mlp.down_proj", in_dtype(torch.bfloat16)),
        "no known cause: its output moved by # of what it adds",
    ),
    llama(
        "layer rounded to bf16", OWN, output("", lambda x: x.bfloat16().float()), "its output is rounded to bfloat16"
    ),
    llama(
        "two rows swapped",
        OWN,
        put("mlp.down_proj.weight", rows_swapped),
        "the output of mlp.down_proj: channels 3 and 7 are swapped",
    ),
    llama("one scale for a weight", OWN, whole_tensor, "no known cause: its output moved by # of what it adds"),
    llama("four bits", OWN, four_bits, "no known cause: its output moved by # of what it adds", layer=2),
    llama(
        "one NaN",
        OWN8,
        output("mlp.down_proj", one_nan),
        "NaN in 1 of 32768 values, the first at [0, 3, 7]",
        verdicts=NOT_FINITE,
    ),
    small(
        "a plain factor 1.01, small net",
        NET,
        output("down", lambda x: 1.01 * x),
        "what it adds is 1.01 times the stored one",
    ),
    small(
        "a factor 1.01, e4m3",
        NET8,
        output("down", lambda x: 1.01 * x),
        "what it adds is 1.01 times the stored one",
        layer=2,
    ),
    small("sign flipped", NET, output("down", lambda x: -x), "what it adds has the other sign"),
    small("a constant added", NET8, output("down", lambda x: x + 0.1), "a constant, +0.1, is added to every value"),
    small("channels one on", NET, output("", lambda x: x.roll(1, -1)), "channels are permuted: shifted by 1"),
    small("one row", NET8, put("down.weight", row_zero), "only channel 9 has changed"),
    small(
        "one sequence lost",
        NET,
        output("down", lambda x: torch.cat([x[:-1], 0 * x[-1:]])),
        "only sequence 3 is returned as it came in",
        layer=0,
    ),
    small(
        "one token late, small net", NET8, output("down", lambda x: x.roll(1, 1)), "what it adds: it is one token late"
    ),
    small("weight of another layer", NET, of_layer(2), "no known cause: its output moved by # of what it adds"),
    small(
        "not applied to a layer",
        NET,
        left_float,
        "its output is the float layer's: the mode was not applied to it",
        verdicts=NOT_APPLIED,
    ),
    small("layer in fp16", NET8, output("", lambda x: x.half().float()), "its output is rounded to float16"),
)
USER_PATHS = (
    llama(
        "decode, oldest token lost",
        OWN,
        caching(oldest_lost),
        "between self_attn.v_proj, as in the prefill, and self_attn.o_proj",
        case="decode",
        verdicts=PATH,
    ),
    llama(
        "decode, cache in bf16",
        OWN8,
        caching(lambda k, v: (k.bfloat16().float(), v.bfloat16().float())),
        "between self_attn.v_proj, as in the prefill, and self_attn.o_proj",
        case="decode",
        verdicts=PATH,
        layer=2,
    ),
    llama(
        "mask ignored",
        OWN,
        attending(uneven, unmasked_attention),
        "between self_attn.v_proj, as in the prefill, and self_attn.o_proj; only sequence 0",
        case="padded",
        verdicts=PATH,
    ),
    small(
        "batch 1 in bf16",
        NET,
        submodule(
            "down", lambda real, module, x: in_dtype(torch.bfloat16)(real, module, x) if len(x) == 1 else real(x)
        ),
        "down; computed in bfloat16",
        case="batch_1",
        verdicts=PATH,
    ),
)
