"""Diagnosis of the families of Mamba: nothing is said of what is healthy, and faults are named."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probe.data.samples import TextSamples
from probe.data.tokenizers import ByteTokenizer
from probe.diagnosis.causes import diagnose
from probe.diagnosis.layer_steps import layer_steps
from probe.diagnosis.path_steps import diagnose_path
from probe.models.loading import Loaded, weight_fingerprint
from probe.models.mamba import SiteMixer
from probe.models.mamba_blocks import mamba_blocks
from probe.running.calibration import Calibration, calibrate_on
from probe.running.kept_float import float_layers
from probe.running.modes import find_mode
from probe.running.paths import paths_of
from probe.running.recipes import Recipe
from probe.running.reference import Reference, run_reference
from probe.running.traces import LayerTrace
from probe.words import PATHS
from tests.faults.breaking import applying, during, recalled
from tests.models.random_models import make_bamba, make_falcon_mamba, make_jamba, make_mamba2, make_zamba

ROWS, SEQLEN = 2, 24
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "mamba2": make_mamba2,
    "bamba": make_bamba,
    "zamba": make_zamba,
    "falcon_mamba": make_falcon_mamba,
    "jamba": make_jamba,
}
RECIPES = [("0", "int8"), ("2-1", "fp4_e2m1"), ("2-3", "nvfp4"), ("2-4", "int8"), ("3", "fp8_e4m3"), ("3", "int8")]
Prepared = tuple[nn.Module, Reference, Calibration]


@pytest.fixture(scope="module")
def prepared() -> Callable[[str], Prepared]:
    made: dict[str, Prepared] = {}

    def prepare(family: str) -> Prepared:
        if family not in made:
            model = FAMILIES[family]().requires_grad_(False)
            for name, parameter in model.named_parameters():
                if "norm" in name:
                    parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
            loaded = Loaded(family, model, ByteTokenizer(), weight_fingerprint(model))
            batches = TextSamples("evaluation", ROWS, SEQLEN, ROWS).batches(loaded.tokenizer)
            made[family] = model, run_reference(model, batches), calibrate_on(loaded, "calibration", 2, 64)
        return made[family]

    return prepare


def traces(prepared: Prepared, recipe: Recipe) -> list[LayerTrace]:
    """Of all layers that the recipe changes."""
    model, reference, calibration = prepared
    left = float_layers(model, find_mode(recipe.mode), reference.modules)
    own = calibration if recipe.needs_calibration else None
    return [LayerTrace(model, recipe, reference, own, label) for label in reference.layers if label not in left]


@pytest.mark.parametrize(("mode", "format"), RECIPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_of_a_healthy_block_agrees_on_every_path(
    prepared: Callable[[str], Prepared], family: str, mode: str, format: str
) -> None:
    paths = paths_of(ROWS, SEQLEN, whole_rows=find_mode(mode).conv_input == "dynamic")
    assert set(paths) == set(PATHS)
    for trace in traces(prepared(family), Recipe(mode, format)):
        (batch,) = trace.batches()
        steps = [step for step in layer_steps(trace, batch.parts) if bool(step.differs().any())]
        assert [step.name for step in steps] == []
        for path in paths.values():
            assert diagnose_path(trace, path, None) == "", path.name


Damage = Callable[[Any], None]


def weight(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    return lambda mixer: mixer.get_parameter(name).copy_(change(mixer.get_parameter(name).clone()))


def grid(site: str) -> Damage:
    return lambda mixer: setattr(mixer.site(site), "grid", None)


def method(name: str, change: Callable[..., Any]) -> Damage:
    """`change(real, mixer, *args)` in the place of a method of the mixer."""

    def damage(mixer: Any) -> None:
        real = getattr(mixer, name)
        setattr(mixer, name, lambda *args: change(real, mixer, *args))

    return damage


def halves_swapped(real: Any, mixer: Any, *args: Tensor) -> Any:
    u, step, B, C = real(*args)
    return u, step, C, B


def groups_swapped(real: Any, mixer: Any, u: Tensor, delta: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    """Heads read B and C in turn, not group by group."""
    return real(u, delta, *(x.roll(x.shape[-1] // 2, -1) for x in (B, C)), state)


def norm_first(real: Any, mixer: Any, y: Tensor, u: Tensor, z: Tensor) -> Tensor:
    """The norm is taken before the gate."""
    made: Tensor = mixer.norm(mixer.gated(y, u, torch.full_like(z, 20.0)) / 20) * torch.nn.functional.silu(z)
    mixer.site("norm.output")(made)
    return made


def not_normed(mixer: Any) -> None:
    recalled(mixer.norm, lambda real, module, x: x)


def unrotated_output(mixer: SiteMixer) -> None:
    """The second rotation of every forward is left out."""
    made = [0]

    def rotate(x: Tensor) -> Tensor:
        from probe.numerics.hadamard import hadamard_transform

        made[0] += 1
        return hadamard_transform(x) if made[0] % 2 else x

    during(mixer, hadamard_transform=rotate)


def z_behind(real: Any, mixer: Any, projected: Tensor) -> Any:
    """x, B and C are taken from where z is."""
    sizes = [len(mixer.conv1d.weight), mixer.intermediate_size, len(mixer.dt_bias)]
    return tuple(torch.split(projected, sizes, dim=-1))


def in_halves(real: Any, mixer: Any, projected: Tensor) -> Any:
    return projected.chunk(2, -1)


MAMBA2_FAULTS: list[tuple[str, Damage]] = [
    ("weight dt_bias; not quantized", lambda mixer: mixer.dt_bias.copy_(mixer.stock.dt_bias)),
    ("weight A_log; not quantized", lambda mixer: mixer.A_log.copy_(mixer.stock.A_log)),
    ("weight norm.weight; the scale is off by a factor of 2^1", weight("norm.weight", lambda w: 2 * w)),
    ("site conv1d.output; not quantized", grid("conv1d.output")),
    ("the split into x and z; z is taken from behind x, B and C", method("split", z_behind)),
    ("the scan; B and C are swapped", method("scan_inputs", halves_swapped)),
    ("the scan; the bias of dt is left out", method("delta", lambda real, mixer, x: real(x - mixer.dt_bias))),
    ("the scan; A has lost its minus sign", method("rates", lambda real, mixer: -real())),
    ("D u, gate and norm; D u is left out", method("skip", lambda real, mixer: torch.zeros_like(real()))),
    ("D u, gate and norm; the norm is left out", not_normed),
    ("D u, gate and norm; the gate is applied after the norm", method("finished", norm_first)),
    ("rotation before out_proj; the Hadamard rotation is left out", unrotated_output),
]
ZAMBA_FAULTS: list[tuple[str, Damage]] = [
    ("weight x_proj_weight; ", weight("x_proj_weight", lambda w: w.flip(0))),
    ("weight dt_proj_weight; not quantized", lambda mixer: mixer.dt_proj_weight.copy_(mixer.stock.dt_proj_weight)),
    ("weight dt_proj_bias; ", weight("dt_proj_bias", lambda w: w.flip(0))),
    ("the split into x and z; x is the first half of the channels", method("split", in_halves)),
    ("the scan; B and C are swapped", method("scan_inputs", halves_swapped)),
    ("D u, gate and rotation; D u is left out", method("skip", lambda real, mixer: torch.zeros_like(real()))),
]
FAULTS = [
    *(("mamba2", *fault) for fault in MAMBA2_FAULTS),
    ("mamba2", "the scan; ", method("scanned", groups_swapped)),
    *(("bamba", *fault) for fault in MAMBA2_FAULTS[-2:]),
    *(("zamba", *fault) for fault in ZAMBA_FAULTS),
]


@pytest.mark.parametrize(("family", "cause", "damage"), FAULTS, ids=[f"{one}: {words}" for one, words, _ in FAULTS])
def test_a_fault_of_a_step_is_named(
    prepared: Callable[[str], Prepared], family: str, cause: str, damage: Damage
) -> None:
    with damaged(damage):
        (first, *_) = traces(prepared(family), Recipe("2-1", "int8"))
        assert diagnose(first).startswith(cause)


def forgetful(real: Any, mixer: Any, *args: Any) -> Any:
    return real(*args[:-1], None)


@pytest.mark.parametrize("family", ["mamba2", "bamba", "zamba"])
def test_a_fault_of_decode_is_named(prepared: Callable[[str], Prepared], family: str) -> None:
    with damaged(method("scanned", forgetful)):
        (first, *_) = traces(prepared(family), Recipe("2-1", "int8"))
        paths = paths_of(ROWS, SEQLEN)
        assert diagnose_path(first, paths["decode"], None) == "the scan; the state is not carried on"
        assert diagnose_path(first, paths["ragged"], None) == ""


def damaged(damage: Damage) -> AbstractContextManager[None]:
    """While it lasts, the first mixer of every quantized copy is damaged."""

    def broken(real: Any, model: nn.Module, recipe: Recipe, calibration: Calibration | None = None) -> nn.Module:
        twin: nn.Module = real(model, recipe, calibration)
        mixer: Any = next(mamba_blocks(twin)).sites
        object.__setattr__(mixer, "stock", next(mamba_blocks(model)).mixer)
        if find_mode(recipe.mode).is_quantized:
            with torch.no_grad():
                damage(mixer)
        return twin

    return applying(broken)
