"""Linear layers of every kind on a grid, against nn.Linear: a Conv1D is a transposed one, an expert is one."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from probe.data.library_logs import quietly
from probe.formats import GATE_FORMATS
from probe.metrics import Comparison
from probe.models.grid_modules import GridExperts, GridLinear
from probe.models.linear import linear_key, linear_layers
from probe.models.linear_grids import expert_sites, grid_linears
from probe.models.loading import weight_fingerprint
from probe.numerics.quantize import fake_quantize
from probe.running.calibration import calibrate
from probe.running.capture import capture
from probe.running.recipes import Recipe, apply
from tests.models.random_models import make_gpt2, make_gpt_oss, make_jamba, make_mixtral, make_qwen3_next

FORMAT = pytest.mark.parametrize("format", GATE_FORMATS)
EXPERTS = {
    "mixtral": (make_mixtral, "model.layers.1.mlp.experts"),
    "jamba": (make_jamba, "model.layers.0.feed_forward.experts"),
    "qwen3_next": (make_qwen3_next, "model.layers.1.mlp.experts"),
    "gpt_oss": (make_gpt_oss, "model.layers.1.mlp.experts"),
}
FAMILY = pytest.mark.parametrize(("make", "name"), EXPERTS.values(), ids=EXPERTS)
TOKENS = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(1))
AMAX = 3.0


def logits(model: Any) -> Tensor:
    with torch.no_grad(), quietly():
        found: Tensor = model(TOKENS).logits
        return found


def gridded(model: nn.Module, format: str, *, inputs: bool) -> nn.Module:
    return grid_linears(model, format, lambda name: AMAX, inputs=inputs)


def as_linear(weight: Tensor, bias: Tensor | None, format: str) -> nn.Linear:
    """A matrix [out, in] as the nn.Linear that mode linear_wa makes of it."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    with torch.no_grad():
        linear.weight.copy_(weight)
        if bias is not None:
            linear.bias.copy_(bias)
    made = gridded(nn.Sequential(linear), format, inputs=True)[0]  # type: ignore[index]
    assert isinstance(made, GridLinear)
    return made  # type: ignore[return-value]


@FORMAT
def test_a_conv1d_is_the_transposed_linear_to_the_bit(format: str) -> None:
    from transformers import pytorch_utils

    torch.manual_seed(0)
    library: Any = pytorch_utils
    conv = library.Conv1D(70, 44)  # out, in: the last block of an input is shorter
    nn.init.normal_(conv.bias)
    linear = as_linear(conv.weight.detach().T, conv.bias, format)
    made = gridded(nn.Sequential(conv), format, inputs=True)[0]  # type: ignore[index]
    assert made.weight.shape == (44, 70)
    assert torch.equal(made.weight.T, linear.weight)
    assert made.matrix.is_contiguous(), "the same layout in memory, so the same product on every machine"
    x = torch.randn(3, 5, 44)
    with torch.no_grad():
        assert torch.equal(made(x), linear(x))
        figures = []
        for module in (made, linear):
            comparison = Comparison()
            comparison.update(module(x), conv(x))
            figures.append(comparison.metrics())
    assert figures[0] == figures[1]
    assert figures[0].mse


@FORMAT
def test_gpt2_gives_the_bits_of_a_gpt2_of_linears(format: str) -> None:
    """The whole model, with every Conv1D exchanged for the nn.Linear of the transposed weight before the mode."""
    plain: Any = make_gpt2()
    other: Any = make_gpt2()
    names = [name for name, layer in linear_layers(plain).items() if layer.inputs_first]
    assert len(names) == 8
    for name in names:
        conv: Any = other.get_submodule(name)
        linear = nn.Linear(conv.nx, conv.nf)
        with torch.no_grad():
            linear.weight.copy_(conv.weight.T)
            linear.bias.copy_(conv.bias)
        parent, _, child = name.rpartition(".")
        setattr(other.get_submodule(parent), child, linear)
    found = logits(gridded(plain, format, inputs=True))
    assert torch.equal(found, logits(gridded(other, format, inputs=True)))
    assert not torch.equal(found, logits(make_gpt2()))


@FORMAT
@FAMILY
def test_every_expert_has_the_weights_of_a_linear_on_the_grid(
    make: Callable[[], nn.Module], name: str, format: str
) -> None:
    plain, twin = make(), gridded(make(), format, inputs=False)
    is_transposed = name == EXPERTS["gpt_oss"][1] and make is make_gpt_oss
    for parameter in ("gate_up_proj", "down_proj"):
        own, on_grid = (model.get_submodule(name).get_parameter(parameter) for model in (plain, twin))
        for expert in range(3):
            matrix = own[expert].detach().T if is_transposed else own[expert].detach()
            found = on_grid[expert].T if is_transposed else on_grid[expert]
            assert torch.equal(found, as_linear(matrix, None, format).weight), (parameter, expert)
            assert not torch.equal(found, matrix)


def gated(family: Any, module: Any, both: Tensor) -> Tensor:
    """act(gate) * up, as each family writes it in its own forward."""
    if family is make_gpt_oss:
        gate, up = both[..., ::2].clamp(max=module.limit), both[..., 1::2].clamp(-module.limit, module.limit)
        return (up + 1) * gate * torch.sigmoid(gate * module.alpha)
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("format", ["int8", "fp4_e2m1"])
@FAMILY
def test_experts_are_a_loop_over_linears(
    make: Callable[[], nn.Module], name: str, format: str, implementation: str
) -> None:
    """The forward, token by token, of experts that are nn.Linear on the grid; equal up to the order of sums."""
    plain, twin = make(), gridded(make(), format, inputs=True)
    twin.config._experts_implementation = implementation  # type: ignore[union-attr]
    stock, module = plain.get_submodule(name), twin.get_submodule(name)
    assert isinstance(module, GridExperts)
    is_transposed = make is make_gpt_oss
    own = {parameter: value.detach() for parameter, value in stock.named_parameters()}
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, 32, generator=generator)
    chosen = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(7)])
    shares = torch.rand(7, 2, generator=generator)
    expected = torch.zeros_like(x)
    for expert in range(3):
        up, down = (
            as_linear(
                own[weight][expert].T if is_transposed else own[weight][expert],
                own[f"{weight}_bias"][expert] if is_transposed else None,
                format,
            )
            for weight in ("gate_up_proj", "down_proj")
        )
        with torch.no_grad():
            for token, slot in (chosen == expert).nonzero().tolist():
                middle = gated(make, stock, up(x[token : token + 1]))
                expected[token] += shares[token, slot] * down(middle)[0]
    with torch.no_grad(), quietly():
        found = module(x, chosen, shares)
        plainly = stock(x, chosen, shares)
        if make is make_mixtral:  # others have other names
            assert torch.equal(module(hidden_states=x, top_k_index=chosen, top_k_weights=shares), found)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert float((found - plainly).square().mean()) > 1e-6


@FORMAT
@FAMILY
def test_linear_w_is_the_plain_model_with_every_matrix_quantized(
    make: Callable[[], nn.Module], name: str, format: str
) -> None:
    """The eager loop of transformers over experts that were quantized one by one, as separate nn.Linear."""
    plain: Any = make()
    twin = apply(plain, Recipe("linear_w", format))
    plain.config._experts_implementation = "eager"
    with torch.no_grad():
        for parameter, weight in plain.named_parameters():
            if ".experts." in parameter and weight.dim() == 3:
                oriented = weight.mT if make is make_gpt_oss else weight
                for matrix in oriented:
                    matrix.copy_(fake_quantize(matrix.contiguous(), format))
        for module in plain.modules():
            if isinstance(module, nn.Linear) and module is not plain.lm_head:
                module.weight.copy_(fake_quantize(module.weight, format))
            if isinstance(module, nn.Conv1d) and make is make_qwen3_next:
                module.weight.copy_(fake_quantize(module.weight, format))  # depthwise: an output reads one channel
    assert logits(twin) == pytest.approx(logits(plain), rel=1e-5, abs=1e-5)


@FAMILY
def test_both_inputs_of_experts_are_calibrated_and_lie_on_the_grid(make: Callable[[], nn.Module], name: str) -> None:
    model = make()
    before = logits(model)
    with quietly():
        calibration = calibrate(model, [TOKENS], model_fingerprint=weight_fingerprint(model), data_fingerprint="-")
    assert torch.equal(logits(model), before), "calibration leaves the model as it was"
    assert not any(isinstance(module, GridExperts) for module in model.modules())
    with expert_sites(model), capture(model, [f"{name}.(input|middle)$"]) as seen:
        logits(model)
    for site in ("input", "middle"):
        (tensor,) = seen.tensors[f"{name}.{site}.output"]
        assert calibration.amax_of(linear_key(name, site)) == float(tensor.abs().max())
    twin = apply(model, Recipe("linear_wa", "int8"), calibration)
    with capture(twin, [f"{name}.(input|middle)$"]) as seen:
        logits(twin)
    for site in ("input", "middle"):
        (tensor,) = seen.tensors[f"{name}.{site}.output"]
        step = calibration.amax_of(linear_key(name, site)) / 127
        codes = tensor.double() / step
        assert float((codes - codes.round()).abs().max()) < 1e-3, site
        assert len(set(tensor.flatten().tolist())) > 20, site
    only_weights = apply(model, Recipe("linear_w", "int8"), calibration)
    assert not torch.equal(logits(only_weights), logits(twin))


class Experts(nn.Module):
    """Experts that say nothing about themselves; their shapes tell the order of axes, or do not."""

    def __init__(self, up: tuple[int, ...], down: tuple[int, ...], first: str = "gate_up_proj") -> None:
        super().__init__()
        setattr(self, first, nn.Parameter(torch.randn(up)))
        self.down_proj = nn.Parameter(torch.randn(down))
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


@pytest.mark.parametrize(
    ("experts", "inputs_first"),
    [
        (Experts((3, 16, 32), (3, 32, 8)), False),
        (Experts((3, 32, 16), (3, 8, 32)), True),  # as those of Llama 4
        (Experts((3, 8, 32), (3, 32, 8), "up_proj"), None),  # without a gate both orders fit
        (Experts((3, 16, 32), (3, 32, 16)), None),
        (Experts((3, 16, 32), (2, 32, 8)), None),
        (Experts((48, 32), (48, 32)), None),  # as those of DBRX, in two dimensions
    ],
)
def test_the_order_of_axes_is_never_guessed(experts: nn.Module, inputs_first: bool | None) -> None:
    found = linear_layers(nn.Sequential(experts))
    if inputs_first is None:
        assert found == {}
        return
    assert found["0"].inputs_first is inputs_first
    assert found["0"].inputs == ("input",)
    assert found["0"].float_inputs == ("middle",)
    experts.is_transposed = not inputs_first  # type: ignore[assignment]
    assert linear_layers(nn.Sequential(experts)) == {}, "what it says contradicts its shapes"


@pytest.mark.parametrize("format", ["nvfp4", "int8"])
def test_transposed_experts_have_blocks_along_their_inputs(format: str) -> None:
    experts = Experts((3, 32, 16), (3, 8, 32))
    before = experts.get_parameter("down_proj").detach().clone()
    gridded(nn.Sequential(experts), format, inputs=False)
    expected = torch.stack([fake_quantize(one.T.contiguous(), format).T for one in before])
    assert torch.equal(experts.get_parameter("down_proj"), expected)


def test_experts_without_a_gate_have_both_sites() -> None:
    """As those of Nemotron-H; the functions of transformers call act_fn alone."""
    from transformers.integrations.moe import use_experts_implementation

    class Plain(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts = 2
            self.up_proj = nn.Parameter(torch.randn(2, 8, 32))
            self.down_proj = nn.Parameter(torch.randn(2, 32, 8))
            self.act_fn = nn.ReLU()

        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            raise NotImplementedError

    class Config:
        _experts_implementation = "grouped_mm"

    decorate: Any = partial(use_experts_implementation, has_gate=False)
    torch.manual_seed(0)
    experts = decorate(Plain)(Config())
    x, chosen, shares = torch.randn(5, 32), torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)
    up, down = (as_linear(experts.get_parameter(name)[0].detach(), None, "int8") for name in ("up_proj", "down_proj"))
    with torch.no_grad():
        expected = down(torch.relu(up(x)))
        made: Any = gridded(nn.Sequential(experts), "int8", inputs=True)[0]  # type: ignore[index]
        assert made(x, chosen, shares) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_model_without_linear_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="Sequential has no linear layer to quantize: no nn"):
        gridded(nn.Sequential(nn.ReLU()), "int8", inputs=False)
