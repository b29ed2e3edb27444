"""Every kind of weight on a grid, against a plain loop over its rows and blocks; and the inputs of convolutions."""

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from probe.data.library_logs import quietly
from probe.models.grid_modules import GridConvolution
from probe.models.linear import linear_key, linear_layers
from probe.models.linear_grids import grid_linears
from probe.models.loading import weight_fingerprint
from probe.models.mamba import SiteMixer
from probe.running.calibration import calibrate
from probe.running.corners import corner_answers
from probe.running.coverage import watching
from probe.running.recipes import Recipe, apply
from probe.running.weights import count_weights
from probe.words import INCLUDABLE
from tests.models.random_models import (
    make_gpt2,
    make_jamba,
    make_mixtral,
    make_phimoe,
    make_qwen3_next,
    make_t5,
    make_vit,
    make_whisper,
)

#: Of a float format: its type in ml_dtypes, its largest value and the exponent of that.
ELEMENTS: dict[str, tuple[Any, float, int]] = {
    "fp8_e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 8),
    "fp4_e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 2),
}
FORMATS = pytest.mark.parametrize("format", ["int8", *ELEMENTS])
AMAX = 3.0


def looped_line(line: list[float], format: str) -> list[float]:
    """A row in blocks of 32, each over 2^(floor(log2 amax) - largest exponent) and rounded by ml_dtypes."""
    kind, biggest, exponent = ELEMENTS[format]
    found: list[float] = []
    for start in range(0, len(line), 32):
        block = line[start : start + 32]
        amax = max(map(abs, block))
        scale = 2.0 ** (math.floor(math.log2(amax)) - exponent) if amax else 1.0
        for x in block:
            clipped = np.float32(min(max(x / scale, -biggest), biggest))
            found.append(float(clipped.astype(kind)) * scale)
    return found


def looped(rows: list[list[float]], format: str) -> list[list[float]]:
    """A matrix on the grid: one scale for the integers, blocks along the rows of the others."""
    if format != "int8":
        return [looped_line(row, format) for row in rows]
    return [integers(row, max(abs(x) for row in rows for x in row)) for row in rows]


def integers(line: list[float], amax: float) -> list[float]:
    """Codes by the exact quotient, half to even, times the scale."""
    step = float(np.float32(amax / 127))
    return [float(np.float32(min(max(round(Fraction(x) / Fraction(step)), -128), 127) * step)) for x in line]


def places_of(module: Any, parameter: str) -> list[list[list[tuple[int, ...]]]]:
    """Of every matrix of a weight, the rows; of a row, the indices of the elements that one output reads, in order."""
    weight = module.get_parameter(parameter)
    if parameter != "weight":  # experts
        experts, out, inputs = weight.shape
        return [[[(e, o, i) for i in range(inputs)] for o in range(out)] for e in range(experts)]
    if type(module).__name__.endswith("Conv1D"):
        return [[[(i, o) for i in range(weight.shape[0])] for o in range(weight.shape[1])]]
    kernel = list(product(*(range(size) for size in weight.shape[2:])))
    if getattr(module, "transposed", False):
        own, out = weight.shape[0] // module.groups, weight.shape[1]
        return [
            [
                [(group * own + c, o, *place) for c in range(own) for place in kernel]
                for group in range(module.groups)
                for o in range(out)
            ]
        ]
    return [[[(o, c, *place) for c in range(weight.shape[1]) for place in kernel] for o in range(weight.shape[0])]]


def expected_weight(module: nn.Module, parameter: str, format: str) -> Tensor:
    plain = module.get_parameter(parameter).detach()
    values, found = plain.tolist(), torch.empty_like(plain)

    def at(index: tuple[int, ...]) -> float:
        value: Any = values
        for one in index:
            value = value[one]
        return float(value)

    for places in places_of(module, parameter):
        rows = looped([[at(index) for index in row] for row in places], format)
        for row, quantized in zip(places, rows, strict=True):
            for index, value in zip(row, quantized, strict=True):
                found[index] = value
    return found


def changed_weights(plain: nn.Module, twin: nn.Module) -> Iterator[tuple[str, str]]:
    """The parameters that differ between two models, by module."""
    copies = dict(twin.named_parameters(remove_duplicate=False))
    for name, parameter in plain.named_parameters(remove_duplicate=False):
        if not torch.equal(parameter, copies[name]):
            owner, _, own = name.rpartition(".")
            yield owner, own


#: The model, and modules that must be among those on the grid when everything is asked for.
MODELS: dict[str, tuple[Callable[[], nn.Module], set[str], tuple[str, ...]]] = {
    "vit": (make_vit, {"vit.embeddings.patch_embeddings.projection", "classifier"}, ()),
    "whisper": (
        make_whisper,
        {"model.encoder.conv1", "model.encoder.conv2", "proj_out", "model.decoder.embed_tokens"},
        ("embedding", "head"),
    ),
    "gpt2": (make_gpt2, {"transformer.h.0.attn.c_attn", "transformer.wte", "lm_head"}, ("embedding", "head")),
    "mixtral": (
        make_mixtral,
        {"model.layers.1.mlp.gate", "model.layers.1.mlp.experts", "model.embed_tokens", "lm_head"},
        INCLUDABLE,
    ),
    "qwen3_next": (make_qwen3_next, {"model.layers.0.linear_attn.conv1d", "model.layers.0.mlp.gate"}, INCLUDABLE),
    "phimoe": (make_phimoe, {"model.layers.0.mlp.router", "lm_head"}, INCLUDABLE),
    "t5": (
        make_t5,
        {"encoder.embed_tokens", "decoder.embed_tokens", "lm_head", "encoder.block.0.layer.0.SelfAttention.q"},
        ("embedding", "head"),
    ),
}


@FORMATS
@pytest.mark.parametrize("family", MODELS)
def test_every_weight_is_what_a_plain_loop_makes_of_it(family: str, format: str) -> None:
    make, expected, include = MODELS[family]
    plain = make()
    recipe = Recipe("linear_w", format, include=include)
    twin = apply(plain, recipe)
    found = set()
    for owner, parameter in changed_weights(plain, twin):
        wanted = expected_weight(plain.get_submodule(owner), parameter, format)
        now = twin.get_submodule(owner).get_parameter(parameter)
        assert torch.equal(now, wanted), owner
        found.add(owner)
    assert found >= expected
    assert found == set(linear_layers(twin)) | ({"shared"} if family == "t5" else set())
    with watching(twin, recipe) as strays:
        pass
    assert not strays
    assert {group.what for group in count_weights(plain, twin, recipe).float_weights} <= {
        "2-D parameters",
        "3-D parameters",
    }


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "1d": lambda: nn.Conv1d(40, 6, 3, stride=2, padding=1),
    "1d reflect": lambda: nn.Conv1d(40, 6, 5, padding=2, padding_mode="reflect"),
    "1d dilated": lambda: nn.Conv1d(40, 6, 3, dilation=2, padding="same"),
    "2d grouped": lambda: nn.Conv2d(40, 8, (3, 2), groups=4, padding=(1, 0), padding_mode="circular"),
    "2d depthwise": lambda: nn.Conv2d(6, 12, 3, groups=6),
    "3d": lambda: nn.Conv3d(5, 4, 2, bias=False),
    "transposed 1d": lambda: nn.ConvTranspose1d(40, 6, 3, stride=2, output_padding=1),
    "transposed 2d grouped": lambda: nn.ConvTranspose2d(8, 12, 3, groups=4),
    "transposed 3d": lambda: nn.ConvTranspose3d(5, 4, 2),
}


def gridded(kind: str, format: str, *, inputs: bool) -> tuple[Any, Any, Tensor]:
    """A convolution, the same on a grid, and an input."""
    torch.manual_seed(0)
    plain: Any = CONVOLUTIONS[kind]()
    torch.manual_seed(0)
    twin: Any = grid_linears(nn.Sequential(CONVOLUTIONS[kind]()), format, lambda name: AMAX, inputs=inputs)[0]  # type: ignore[index]
    assert isinstance(twin, GridConvolution)
    return plain, twin, torch.randn(2, plain.in_channels, *[7] * (plain.weight.dim() - 2))


@FORMATS
@pytest.mark.parametrize("kind", CONVOLUTIONS)
@torch.no_grad()
def test_a_convolution_runs_its_own_forward_with_weight_and_input_on_the_grid(kind: str, format: str) -> None:
    plain, twin, x = gridded(kind, format, inputs=True)
    assert torch.equal(twin.weight, expected_weight(plain, "weight", format))
    plain.weight.copy_(twin.weight)
    on_grid = torch.empty_like(x)
    for sample in range(len(x)):
        for place in product(*(range(size) for size in x.shape[2:])):
            here: Any = (sample, slice(None), *place)
            channels = [float(value) for value in x[here]]
            line = integers(channels, AMAX) if format == "int8" else looped_line(channels, format)
            on_grid[here] = torch.tensor(line)
    assert torch.equal(twin(x), plain(on_grid))
    assert torch.equal(twin(input=x), twin(x))
    assert torch.allclose(twin(x[0]), twin(x)[0], atol=1e-6), "without a batch the channels are the first axis"


@pytest.mark.parametrize("kind", CONVOLUTIONS)
@torch.no_grad()
def test_without_grids_for_inputs_the_input_passes_as_it_is(kind: str) -> None:
    plain, twin, x = gridded(kind, "fp4_e2m1", inputs=False)
    plain.weight.copy_(twin.weight)
    assert torch.equal(twin(x), plain(x))
    if x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
        assert torch.equal(twin(x), plain(x)), "the layout in memory is kept"


@pytest.mark.parametrize("format", ["int8", "fp8_e4m3"])
def test_the_input_of_a_convolution_is_calibrated_and_its_corners_are_asked(format: str) -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embedding = nn.Embedding(256, 40)
            self.conv = nn.Conv1d(40, 40, 3, padding=1)

        def forward(self, tokens: Tensor) -> Tensor:
            found: Tensor = self.conv(input=self.embedding(tokens).mT)
            return found.mT

    model, tokens = Patches(), torch.arange(24).reshape(2, 12)
    scales = calibrate(model, [tokens], model_fingerprint=weight_fingerprint(model), data_fingerprint="-")
    assert scales.amax_of(linear_key("conv")) == float(model.embedding(tokens).detach().abs().max())
    recipe = Recipe("linear_wa", format)
    twin = apply(model, recipe, scales)
    answers = corner_answers(twin, recipe, scales)
    assert {one.site for one in answers} == {"conv.input"}
    assert {one.width for one in answers} == {40}
    with watching(twin, recipe) as strays, torch.no_grad():
        twin(tokens)
    assert not strays


@pytest.mark.parametrize("make", [make_jamba, make_qwen3_next])
def test_the_convolution_of_a_token_mixer_runs(make: Callable[[], nn.Module]) -> None:
    """That of a Mamba mixer belongs to the SSM modes; the others have a weight on the grid and a float input."""
    plain = make()
    twin: Any = apply(plain, Recipe("linear_wa", "fp8_e4m3"))
    name = "model.layers.0.mamba.conv1d" if make is make_jamba else "model.layers.0.linear_attn.conv1d"
    own, now = (side.get_submodule(name).get_parameter("weight") for side in (plain, twin))
    assert torch.equal(own, now) == (make is make_jamba)
    assert (name in linear_layers(plain)) == (make is make_qwen3_next)
    assert isinstance(twin.get_submodule(name.rpartition(".")[0]), SiteMixer) == (make is make_jamba)
    with torch.no_grad(), quietly():
        assert bool(twin(torch.arange(20)[None]).logits.isfinite().all())


@pytest.mark.parametrize("include", [(), ("router",)])
def test_a_router_with_a_forward_of_its_own_keeps_it(include: tuple[str, ...]) -> None:
    plain: Any = make_phimoe()
    twin: Any = apply(plain, Recipe("linear_wa", "fp8_e4m3", include=include))
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    router = plain.model.layers[0].mlp.router
    with torch.no_grad():
        if include:
            router.weight.copy_(expected_weight(router, "weight", "fp8_e4m3"))
        lines = torch.tensor([looped_line(row, "fp8_e4m3") for row in x.tolist()]) if include else x
        made, wanted = twin.model.layers[0].mlp.router(x), router(lines)
    assert all(torch.equal(one, other) for one, other in zip(made, wanted, strict=True))


@pytest.mark.parametrize(
    ("make", "inputs", "sites"),
    [
        (make_vit, {"pixel_values": (2, 3, 16, 16)}, {"vit.embeddings.patch_embeddings.projection": 3}),
        (make_whisper, {"input_features": (2, 20, 32)}, {"model.encoder.conv1": 20, "model.encoder.conv2": 32}),
    ],
    ids=["vit", "whisper"],
)
@torch.no_grad()
def test_a_model_that_starts_with_convolutions_runs_with_their_inputs_on_the_grid(
    make: Callable[[], nn.Module], inputs: dict[str, tuple[int, ...]], sites: dict[str, int]
) -> None:
    plain: Any = make()
    recipe = Recipe("linear_wa", "fp8_e4m3")
    twin: Any = apply(plain, recipe)
    given = {name: torch.randn(shape, generator=torch.Generator().manual_seed(0)) for name, shape in inputs.items()}
    given |= {"decoder_input_ids": torch.arange(8).reshape(2, 4)} if make is make_whisper else {}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name in sites:
        site = twin.get_submodule(f"{name}.input")
        site.register_forward_hook(lambda module, args, output, name=name: seen.update({name: (args[0], output)}))
    with watching(twin, recipe) as strays:
        logits = twin(**given).logits
    assert not strays
    assert bool(logits.isfinite().all())
    assert not torch.equal(logits, plain(**given).logits)
    for name, channels in sites.items():
        before, after = (tensor.reshape(-1, channels) for tensor in seen[name])
        wanted = [looped_line(row, "fp8_e4m3") for row in before.tolist()]
        assert torch.equal(after, torch.tensor(wanted)), name
