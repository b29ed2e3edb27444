"""What a mode keeps float is float to the bit, in every kind of mode; everything else is quantized."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import probe.running.recipes
from probe.models.forward import output_of
from probe.models.loading import Loaded
from probe.models.mamba import MAMBA, SiteMixer
from probe.numerics.quantize import fake_quantize
from probe.running.calibration import Calibration, calibrate_on
from probe.running.capture import capture
from probe.running.coverage import watching
from probe.running.kept_float import changed_weights, float_layers
from probe.running.measurement import NotAppliedError, check_applied, measure
from probe.running.modes import GROUPS, MODES, find_mode, register_mode
from probe.running.recipes import Recipe, apply, as_it_is, check_recipes, gridded_sites
from probe.running.reference import run_reference
from tests.running.declared import declared


@pytest.mark.parametrize("format", ["int8", "fp4_e2m1", "nvfp4"])
@pytest.mark.parametrize("mode", GROUPS["all"])
def test_a_kept_mamba_block_has_the_bits_of_the_reference_and_all_others_change(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, mode: str, format: str
) -> None:
    reference = run_reference(loaded.model, [tokens])
    with declared(mode, "layers.2") as name:
        measured = check_applied(loaded.model, Recipe(name, format), reference, calibration)
        twin = apply(loaded.model, Recipe(name, format), calibration)
        with watching(twin, Recipe(name, format)) as strays:
            output_of(twin, tokens)
    assert [label for label, metrics in measured.layers.items() if metrics.identical] == ["layer_2"]
    assert strays == {}, "what is declared float is not missed on its grid"


@pytest.mark.parametrize("pattern", ["layers.2", "layers.2.*", "layers.2.mixer", "backbone.layers.2"])
def test_every_way_to_name_the_weights_of_a_layer_declares_it(loaded: Loaded, pattern: str) -> None:
    modules = {f"layer_{index}": f"backbone.layers.{index}" for index in range(4)}
    with declared("2-1", pattern) as name:
        assert float_layers(loaded.model, find_mode(name), modules) == {"layer_2"}


def test_a_part_of_a_layer_does_not_declare_the_layer(loaded: Loaded, tokens: Tensor, calibration: Calibration) -> None:
    modules = {"layer_2": "backbone.layers.2", "norm": "backbone.norm_f"}
    with declared("2-1", "layers.2.mixer.in_proj", "norm_f") as name:
        assert float_layers(loaded.model, find_mode(name), modules) == {"norm"}, "a norm has no weights to quantize"
        reference = run_reference(loaded.model, [tokens])
        assert not check_applied(loaded.model, Recipe(name, "int8"), reference, calibration).layers["layer_2"].identical


@pytest.mark.parametrize("base", ["linear_w", "linear_wa"])
def test_a_kept_layer_of_a_transformer_has_the_bits_of_the_reference(llama: Loaded, tokens: Tensor, base: str) -> None:
    reference, scales = run_reference(llama.model, [tokens]), calibrate_on(llama, "calibration", 2, 64)
    with declared(base, "layers.1.mlp.*", "layers.1.self_attn") as name:
        layers = check_applied(llama.model, Recipe(name, "int8"), reference, scales).layers
    assert [label for label, metrics in layers.items() if metrics.identical] == ["layer_1"]


def test_a_kept_linear_is_the_float_one_with_its_input(llama: Loaded, tokens: Tensor) -> None:
    scales = calibrate_on(llama, "calibration", 2, 64)
    with declared("linear_wa", "layers.*.mlp.down_proj") as name:
        twin = apply(llama.model, Recipe(name, "int8"), scales)
    kinds = {path.rpartition(".")[2]: type(module) for path, module in twin.named_modules()}
    assert kinds["down_proj"] is nn.Linear
    assert kinds["up_proj"] is not nn.Linear


class Net(nn.Module):
    """Two linears and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.head = nn.Linear(32, 16)

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        logits: Tensor = self.head(x)
        return logits


TOKENS = torch.arange(32).reshape(2, 16) % 16


def rounded(model: Any, format: str, *, leave: tuple[int, ...] = ()) -> nn.Module:
    with torch.no_grad():
        for index, layer in enumerate(model.layers):
            if index not in leave:
                layer.weight.copy_(fake_quantize(layer.weight, format))
    return model  # type: ignore[no-any-return]


@contextmanager
def registered(leave: tuple[int, ...], **options: Any) -> Iterator[str]:
    register_mode("own", lambda model, format, calibration: rounded(model, format, leave=leave), **options)
    try:
        yield "own"
    finally:
        del MODES["own"]


def test_a_users_mode_is_held_to_its_declaration() -> None:
    model = Net().eval()
    reference = run_reference(model, [TOKENS])
    recipe = ("own", "fp4_e2m1")
    with registered((1,), keep_float=["layers.1"]):
        layers = check_applied(model, Recipe(*recipe), reference).layers
        assert [label for label, metrics in layers.items() if metrics.identical] == ["layer_1"]
        assert changed_weights(model, apply(model, Recipe(*recipe)), find_mode("own")) == []
    with registered((), keep_float=["layers.1"]):
        with pytest.raises(
            NotAppliedError, match=r"not applied as declared: layer_1 is declared float, but changed: mse .*keep_float"
        ):
            check_applied(model, Recipe(*recipe), reference)
        assert changed_weights(model, apply(model, Recipe(*recipe)), find_mode("own")) == ["layers.1.weight"]
    with registered((1, 2), keep_float=["layers.1"]), pytest.raises(NotAppliedError, match="not applied to layer_2: "):
        check_applied(model, Recipe(*recipe), reference)
    with registered((1,)), pytest.raises(NotAppliedError, match="not applied to layer_1: "):
        check_applied(model, Recipe(*recipe), reference)


@pytest.mark.parametrize("injected", [False, True], ids=["propagated", "injected"])
def test_a_weight_outside_the_layers_that_is_declared_float_and_changed_is_noticed(*, injected: bool) -> None:
    def build(model: Any, format: str, calibration: Calibration | None) -> nn.Module:
        model.head.weight.data.mul_(1.01)
        return rounded(model, format)

    model = Net().eval()
    register_mode("own", build, keep_float=["head"])
    try:
        with pytest.raises(NotAppliedError, match=r"as declared: head\.weight is declared float, but changed\. Keep"):
            measure(model, Recipe("own", "fp4_e2m1"), run_reference(model, [TOKENS]), injected=injected)
    finally:
        del MODES["own"]


def test_a_mode_that_is_declared_over_a_users_mode_puts_the_float_modules_back() -> None:
    model = Net().eval()
    reference = run_reference(model, [TOKENS])
    with registered(()), declared("own", "layers.1") as name:
        layers = check_applied(model, Recipe(name, "fp4_e2m1"), reference).layers
    assert [label for label, metrics in layers.items() if metrics.identical] == ["layer_1"]


def test_a_kept_layer_that_is_quantized_all_the_same_is_noticed_when_the_whole_model_runs(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The propagated run alone would not show it: there every layer after the first differs."""
    monkeypatch.setattr(probe.running.recipes, "float_blocks", lambda model, mode: [])
    with declared("2-1", "layers.2") as name, pytest.raises(NotAppliedError, match="layer_2 is declared float, but ch"):
        measure(loaded.model, Recipe(name, "int8"), run_reference(loaded.model, [tokens]), calibration)


@pytest.mark.parametrize("mode", ["2-1", "3"])
@pytest.mark.parametrize("site", MAMBA.sites)
def test_a_kept_site_has_no_grid_in_its_layer_and_in_no_other(
    loaded: Loaded, tokens: Tensor, calibration: Calibration, mode: str, site: str
) -> None:
    with declared(mode, f"layers.1.mixer.sites.{site}") as name:
        twin: Any = apply(loaded.model, Recipe(name, "int8"), calibration)
        row = find_mode(name)
        assert site not in gridded_sites(row, _int8(), MAMBA, "backbone.layers.1.mixer")
        with watching(twin, Recipe(name, "int8")) as strays:
            output_of(twin, tokens)
    assert strays == {}
    plain: Any = apply(loaded.model, Recipe(mode, "int8"), calibration)
    for index in range(4):
        for other in MAMBA.sites:
            mine, theirs = (model.backbone.layers[index].mixer.site(other).grid for model in (twin, plain))
            if (index, other) == (1, site):
                assert mine in (None, as_it_is)
            else:
                assert (mine is None) == (theirs is None)


def _int8() -> Any:
    from probe.formats import FORMATS

    return FORMATS["int8"]


def test_the_input_of_conv1d_that_mode_3_keeps_float_is_not_rounded(
    loaded: Loaded, tokens: Tensor, calibration: Calibration
) -> None:
    with declared("3", "layers.0.mixer.sites.conv1d.input") as name:
        twin = apply(loaded.model, Recipe(name, "int8"), calibration)
    with capture(twin, [r"layers\.0\.mixer\.(in_proj|sites\.conv1d\.input)$"]) as captured:
        output_of(twin, tokens)
    projected, seen = (tensors[0] for tensors in captured.tensors.values())
    assert torch.equal(seen, projected.chunk(2, dim=-1)[0])


@pytest.mark.parametrize("weight", ["in_proj", "conv1d", "x_proj", "dt_proj", "out_proj", "A_log", "D"])
def test_a_kept_weight_is_off_the_grid_in_the_basis_of_its_mixer(
    loaded: Loaded, calibration: Calibration, weight: str
) -> None:
    from probe.models.mamba_blocks import rotated_twin

    with declared("2-1", f"layers.1.mixer.{weight}") as name:
        twin = apply(loaded.model, Recipe(name, "fp4_e2m1"), calibration)
    plain, all_on_grid = rotated_twin(loaded.model, scan="sequential"), apply(loaded.model, Recipe("2-1", "fp4_e2m1"))
    for path, parameter in twin.named_parameters():
        owner = f"backbone.layers.1.mixer.{weight}"
        source = plain if path == owner or path.startswith(f"{owner}.") else all_on_grid
        assert torch.equal(parameter, source.get_parameter(path)), path
    assert isinstance(twin.get_submodule("backbone.layers.1.mixer"), SiteMixer)


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (
            ["layers.9"],
            r"keep_float of mode mixed: 'layers\.9' matches no module of tiny-mamba\. Nearest: .*probe layers",
        ),
        (["layers.1", "mixr"], r"'mixr' matches no module"),
        (["backbone"], r"matches all \d+ weights of tiny-mamba, so nothing would be quantized"),
        (["layers.[01]", "layers.[23].mixer"], r"matches all \d+ weights of tiny-mamba"),
    ],
)
def test_a_pattern_that_matches_nothing_or_everything_is_refused(
    loaded: Loaded, patterns: list[str], message: str
) -> None:
    with declared("2-1", *patterns) as name:
        with pytest.raises(ValueError, match=message):
            check_recipes(loaded, [Recipe(name, "int8")])
        with pytest.raises(ValueError, match=message.replace("tiny-mamba", "MambaForCausalLM")):
            apply(loaded.model, Recipe(name, "mxint8"))
