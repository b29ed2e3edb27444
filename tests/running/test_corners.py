"""Corner answers: every site that the recipe puts on a grid is asked, with corner values of that grid."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from probe.formats import FORMATS, GATE_FORMATS, Format
from probe.models.loading import Loaded, load_model
from probe.models.mamba import MAMBA, SiteMixer
from probe.numerics import integers, quantize
from probe.numerics.corners import corner_values
from probe.numerics.grids import BlockGrid, IntegerGrid, activation_grid, sequence_grid
from probe.numerics.quantize import fake_quantize, round_to
from probe.running.calibration import Calibration, calibrate_on
from probe.running.corners import corner_answers
from probe.running.digests import digest_of
from probe.running.modes import GROUPS
from probe.running.recipes import Recipe, SiteGrid, apply

FORMAT = pytest.mark.parametrize("format", [FORMATS[name] for name in (*GATE_FORMATS, "int4")], ids=lambda f: f.name)
WIDTH = pytest.mark.parametrize("width", [8, 40, 128])
AMAX = 3.7


@pytest.fixture(scope="module")
def mamba() -> Loaded:
    return load_model("tiny-mamba")


@pytest.fixture(scope="module")
def calibration(mamba: Loaded) -> Calibration:
    return calibrate_on(mamba, "calibration", 2, 64)


@pytest.mark.parametrize("mode", GROUPS["all"])
@pytest.mark.parametrize("format", ["int8", "fp8_e4m3", "nvfp4"])
def test_the_sites_that_are_asked_are_those_that_the_recipe_put_on_a_grid(
    mamba: Loaded, calibration: Calibration, mode: str, format: str
) -> None:
    twin = apply(mamba.model, Recipe(mode, format), calibration)
    asked = {one.site.rpartition(".mixer.")[2] for one in corner_answers(twin, Recipe(mode, format), calibration)}
    mixer = twin.get_submodule("backbone.layers.0.mixer")
    assert isinstance(mixer, SiteMixer)
    assert asked == {site for site in MAMBA.sites if mixer.site(site).grid is not None}


def test_a_site_is_asked_alone_and_answers_with_values_of_its_grid(mamba: Loaded, calibration: Calibration) -> None:
    recipe = Recipe("3", "int8")
    twin = apply(mamba.model, recipe, calibration)
    ran: list[str] = []
    for name, module in twin.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    answers = corner_answers(twin, recipe, calibration)
    assert ran == []  # the model does not run, and no hook fires
    first, second = (one for one in answers if one.site == "backbone.layers.0.mixer.in_proj.input")
    assert first.grid == SiteGrid(FORMATS["int8"], calibration.amax_of(first.site))
    given = corner_values(FORMATS["int8"], 128, amax=first.grid.amax)
    assert torch.equal(first.given, given[0])
    assert torch.equal(second.given, given[1])
    assert torch.unique(first.answer).numel() == 256  # every code, and nothing between


def test_a_float_mode_has_no_corners_and_linears_are_asked_at_their_inputs() -> None:
    llama = load_model("tiny-llama")
    scales = calibrate_on(llama, "calibration", 1, 32)
    found = {}
    for recipe in (Recipe("bf16"), Recipe("linear_w", "int8"), Recipe("linear_wa", "int8")):
        found[recipe.mode] = [one.site for one in corner_answers(apply(llama.model, recipe, scales), recipe, scales)]
    assert found["bf16"] == found["linear_w"] == []
    assert found["linear_wa"][0] == "model.layers.0.self_attn.q_proj.input"


def asked(format: Format, width: int, *, per_sequence: bool = False) -> tuple[Tensor, ...]:
    return corner_values(format, width, amax=AMAX if format.needs_calibration else None, per_sequence=per_sequence)


@FORMAT
@WIDTH
@pytest.mark.parametrize("per_sequence", [False, True])
def test_there_are_two_sequences_of_unlike_size_and_ragged_blocks(
    format: Format, width: int, per_sequence: bool
) -> None:
    whole, *others = asked(format, width, per_sequence=per_sequence)
    assert whole.shape[0] == 2
    assert whole.shape[1] >= 4
    assert whole.shape[2] == width
    sizes = whole.abs().amax((1, 2))
    assert sizes[1] > 4 * sizes[0]
    if format.block_size and not per_sequence:
        assert any(one.shape[2] % format.block_size for one in (whole, *others))


@FORMAT
@WIDTH
@pytest.mark.parametrize("per_sequence", [False, True])
def test_the_answers_are_every_value_of_the_element_in_both_signs(
    format: Format, width: int, per_sequence: bool
) -> None:
    """By the scale that each block, sequence or tensor has, the elements are all of the grid: subnormals too."""
    given = asked(format, width, per_sequence=per_sequence)[0]
    amax = AMAX if format.needs_calibration else None
    grid = sequence_grid(format.name, amax) if per_sequence else activation_grid(format.name, amax)
    steps = {float(x) for x in elements(format, given, grid(given), per_sequence=per_sequence)}
    top = int(format.max)
    if format.scale == "float32":
        assert steps >= set(range(-top, top + 1))
        assert per_sequence or steps == set(range(-top - 1, top + 1))
    else:
        wanted = {format.decode(code) for code in range(1 << format.bits)}
        assert steps >= {x for x in wanted if abs(x) <= format.max}


def elements(format: Format, given: Tensor, made: Tensor, *, per_sequence: bool) -> Tensor:
    """The elements of values on a grid: divided by the scale that they must have been given."""
    if format.scale == "float32":
        amax = given.abs().amax((1, 2), keepdim=True) if per_sequence else torch.tensor(AMAX)
        codes: Tensor = torch.unique((made / (amax / format.max)).round())
        return codes
    size = given[0].numel() if per_sequence else format.block_size or 1
    rows = [x.reshape(-1, size) if per_sequence else x for x in (given, made)]
    blocks = [[part for one in x for part in one.reshape(-1, one.shape[-1]).split(size, -1)] for x in rows]
    found = []
    for block, answer in zip(*blocks, strict=True):
        amax = block.double().abs().amax(-1, keepdim=True)
        if format.scale == "e4m3":
            second = torch.tensor(AMAX).double() / (448 * 6)
            scale = round_to(amax / (6 * second.float().double()), "fp8_e4m3").clamp(min=2.0**-9) * second.float()
            found.append((answer.double() / scale * 2).round().reshape(-1) / 2)
        else:
            exponent = torch.frexp(amax).exponent - 1 - format.max_exponent
            found.append(
                (answer.double() / torch.ldexp(torch.ones_like(amax), exponent))[amax.squeeze(-1) > 0].reshape(-1)
            )
    different: Tensor = torch.unique(torch.cat(found))
    return different


@FORMAT
@pytest.mark.parametrize("per_sequence", [False, True])
def test_every_tie_is_given_and_both_of_its_neighbours(format: Format, per_sequence: bool) -> None:
    """At least one tensor has, in both signs, quotients that are ties, and quotients just beside them."""
    ties = 0
    for given in asked(format, 128, per_sequence=per_sequence):
        for name in ("half_even", "half_away", "toward_zero"):
            made = by_hand(format, given, name, per_sequence=per_sequence)
            other = by_hand(format, given, "half_even", per_sequence=per_sequence)
            ties += int((made != other).sum()) if name == "half_away" else 0
    levels = 2 * int(format.max) if format.scale == "float32" else 2 ** (format.bits - 1) - 2
    assert ties >= levels // 2  # of the ties, half to even is half away from zero in every other


def by_hand(format: Format, given: Tensor, rounding: str, *, per_sequence: bool) -> Tensor:
    grid = activation_grid(format.name, AMAX if format.needs_calibration else None, rounding=rounding)
    second = grid.tensor_scale if isinstance(grid, BlockGrid) else None
    if per_sequence:
        lines = given.reshape(2, -1)
        return fake_quantize(lines, format.name, block_size=lines.shape[1], rounding=rounding, tensor_scale=second)
    if isinstance(grid, IntegerGrid):
        return grid(given)
    return fake_quantize(given, format.name, rounding=rounding, tensor_scale=second)


def answers_of(format: str, *, per_sequence: bool = False) -> str:
    amax = AMAX if FORMATS[format].needs_calibration else None
    grid = sequence_grid(format, amax) if per_sequence else activation_grid(format, amax)
    return digest_of(*(grid(given.clone()) for given in asked(FORMATS[format], 128, per_sequence=per_sequence)))


def ties_toward_zero(x: Tensor, rounding: str, noise: Tensor | None) -> Tensor:
    whole = torch.round(x)
    return torch.where((x - x.trunc()).abs() == 0.5, x.trunc(), whole)


def test_integer_ties_toward_zero_give_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (integers, quantize):  # the definition, which can be broken here; the kernel gives the same bits
        monkeypatch.setattr(module, "numba_twin", lambda *_: None)
    healthy = answers_of("int8"), answers_of("int8", per_sequence=True)
    monkeypatch.setattr(integers, "round_integer", ties_toward_zero)
    broken = answers_of("int8"), answers_of("int8", per_sequence=True)
    assert broken[0] != healthy[0]
    assert broken[1] != healthy[1]


@pytest.mark.parametrize("format", ["fp8_e5m2", "fp8_e4m3", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1"])
def test_each_single_subnormal_that_is_lost_gives_another_digest(format: str) -> None:
    fmt = FORMATS[format]
    given = asked(fmt, 128)
    healthy = [fake_quantize(one, format) for one in given]
    lost = 0
    for code in range(1, 1 << fmt.mantissa_bits):
        value = fmt.decode(code)
        assert fmt.min_normal is not None
        assert value < fmt.min_normal
        flushed = []
        for one, made in zip(given, healthy, strict=True):
            blocks = one.abs().unfold(-1, 32, 32).amax(-1) if one.shape[-1] % 32 == 0 else None
            if blocks is None:
                flushed.append(made)
                continue
            scale = torch.ldexp(torch.ones_like(blocks), torch.frexp(blocks).exponent - 1 - fmt.max_exponent)
            element = made / scale.repeat_interleave(32, -1)
            flushed.append(torch.where(element.abs() == value, 0.0, made))
        assert digest_of(*flushed) != digest_of(*healthy)
        lost += 1
    assert lost == (1 << fmt.mantissa_bits) - 1


@pytest.mark.parametrize("format", GATE_FORMATS)
def test_one_scale_for_the_batch_gives_another_digest(format: str) -> None:
    amax = AMAX if FORMATS[format].needs_calibration else None
    grid = sequence_grid(format, amax)
    for given in asked(FORMATS[format], 128, per_sequence=True):
        together = grid(given.reshape(1, -1, 128)).reshape(given.shape)
        assert digest_of(together) != digest_of(grid(given))


def test_a_scale_one_ulp_up_gives_another_digest() -> None:
    limit = torch.tensor(AMAX)
    parameters = integers.integer_parameters(-limit, limit)
    up = integers.IntegerParameters(
        torch.nextafter(parameters.scale, torch.tensor(torch.inf)), parameters.zero_point, 8, True
    )
    given = asked(FORMATS["int8"], 128)
    healthy, other = (
        [integers.fake_quantize_integer(one, parameters=chosen) for one in given] for chosen in (parameters, up)
    )
    assert digest_of(*healthy) != digest_of(*other)


def test_a_ragged_block_that_is_left_float_gives_another_digest() -> None:
    given = asked(FORMATS["fp8_e4m3"], 128)
    healthy = [fake_quantize(one, "fp8_e4m3") for one in given]
    broken = [one.clone() for one in healthy]
    for one, made in zip(given, broken, strict=True):
        whole = one.shape[-1] // 32 * 32
        made[..., whole:] = one[..., whole:]
    assert digest_of(*broken) != digest_of(*healthy)


EVERY_DIGEST = """
from probe.formats import FORMATS, GATE_FORMATS
from probe.numerics.corners import corner_values
from probe.numerics.grids import BlockGrid, IntegerGrid, activation_grid, sequence_grid
from probe.running.digests import digest_of

for name in GATE_FORMATS:
    for make, per_sequence in ((activation_grid, False), (sequence_grid, True)):
        given = corner_values(FORMATS[name], 72, amax=3.7, per_sequence=per_sequence)
        print(name, per_sequence, digest_of(*given), digest_of(*map(make(name, 3.7), given)))
"""


def test_values_and_answers_do_not_depend_on_the_instruction_set() -> None:
    found = set()
    for capability in ("default", "avx2", ""):
        environment = {**os.environ, "ATEN_CPU_CAPABILITY": capability} if capability else dict(os.environ)
        run = subprocess.run([sys.executable, "-c", EVERY_DIGEST], env=environment, capture_output=True, check=True)
        found.add(run.stdout)
    assert len(found) == 1
    assert found.pop().count(b"\n") == 2 * len(GATE_FORMATS)
