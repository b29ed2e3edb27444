"""One layer or site at a time: restarted runs give what whole runs give, on every kind of model."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from probe.data import text_of, token_batches
from probe.metrics import LogitComparison
from probe.models.loading import Loaded, load_model
from probe.running.calibration import Calibration, calibrate_on
from probe.running.capture import capture
from probe.running.modes import register_mode, unregister_mode
from probe.running.recipes import Recipe, apply
from probe.sensitivity import Sensitivity, rank_layers
from probe.sensitivity.restart import rehearse
from probe.sensitivity.threads import at_once
from probe.sensitivity.units import make_twins, mixed, site_units


@pytest.fixture(scope="module")
def mamba() -> tuple[Loaded, Calibration]:
    loaded = load_model("tiny-mamba")
    return loaded, calibrate_on(loaded, "calibration", 2, 64)


@pytest.fixture(scope="module")
def llama() -> tuple[Loaded, Calibration]:
    loaded = load_model("tiny-llama")
    return loaded, calibrate_on(loaded, "calibration", 2, 64)


def batches_of(loaded: Loaded, samples: int = 3, seqlen: int = 12) -> list[Tensor]:
    return token_batches(text_of("evaluation"), loaded.tokenizer, samples=samples, seqlen=seqlen, batch_size=2)


def assert_same(found: Sensitivity, expected: Sensitivity) -> None:
    """Bit for bit here; elsewhere a matrix product over more rows may add in another order."""
    assert found.notes == expected.notes
    for one, other in zip((*found.effects,), (*expected.effects,), strict=True):
        assert one.name == other.name
        for side in ("alone", "without"):
            mine, theirs = getattr(one, side), getattr(other, side)
            assert mine.kl == pytest.approx(theirs.kl, rel=1e-3, abs=1e-10), (one.name, side)
            assert mine.mse == pytest.approx(theirs.mse, rel=1e-3, abs=1e-10), (one.name, side)
            assert mine.top1_agreement == pytest.approx(theirs.top1_agreement, abs=0.02)


MAMBA = [("2-1", "int8"), ("2-1", "fp8_e4m3"), ("0", "nvfp4"), ("3", "int8"), ("linear_wa", "fp4_e2m1")]


@pytest.mark.parametrize(("mode", "format"), MAMBA, ids=lambda value: str(value))
def test_restarted_runs_of_a_mamba_give_what_whole_runs_give(
    mamba: tuple[Loaded, Calibration], mode: str, format: str
) -> None:
    loaded, calibration = mamba
    given: Any = (loaded.model, Recipe(mode, format), batches_of(loaded), calibration)
    whole = rank_layers(*given, restart=False, advice=False)
    assert rank_layers(*given, together=1, advice=False) == whole  # the same shapes, so the same bits
    assert_same(rank_layers(*given, advice=False), whole)


@pytest.mark.parametrize(
    ("mode", "format", "sites"),
    [("linear_w", "int8", None), *[("linear_wa", "fp8_e5m2", sites) for sites in (None, "across", "within")]],
)
def test_restarted_runs_of_a_llama_give_what_whole_runs_give(
    llama: tuple[Loaded, Calibration], mode: str, format: str, sites: Any
) -> None:
    """Its layers are given masks and position embeddings by keyword."""
    loaded, calibration = llama
    given: Any = (loaded.model, Recipe(mode, format), batches_of(loaded), calibration)
    found = rank_layers(*given, sites=sites, advice=False)
    assert_same(found, rank_layers(*given, restart=False, sites=sites, advice=False))
    assert len(found.effects) == {None: 4, "across": 7, "within": 28}[sites]


@pytest.mark.parametrize("sites", ["across", "within"])
def test_sites_of_mamba_blocks_restart_too(mamba: tuple[Loaded, Calibration], sites: Any) -> None:
    loaded, calibration = mamba
    given: Any = (loaded.model, Recipe("3", "int8"), batches_of(loaded, 1, 16), calibration)
    found = rank_layers(*given, sites=sites, advice=False, layers=[1, 2])
    assert_same(found, rank_layers(*given, restart=False, sites=sites, advice=False, layers=[1, 2]))


def test_the_definition_is_a_model_with_one_block_of_the_other(mamba: tuple[Loaded, Calibration]) -> None:
    """Against blocks swapped by hand and the figures of a LogitComparison: nothing of ours but the twins."""
    loaded, calibration = mamba
    recipe, batches = Recipe("2-1", "int8"), batches_of(loaded)
    found = rank_layers(loaded.model, recipe, batches, calibration, advice=False)
    with torch.no_grad():
        for index in (0, 2):
            for side, (first, second) in {
                "alone": (Recipe("fp32"), recipe),
                "without": (recipe, Recipe("fp32")),
            }.items():
                shell: Any = apply(loaded.model, first, calibration if first.format else None)
                other: Any = apply(loaded.model, second, calibration if second.format else None)
                shell.backbone.layers[index] = other.backbone.layers[index]
                reference: Any = apply(loaded.model, Recipe("fp32"))
                compared, squares, count = LogitComparison(), 0.0, 0
                for batch in batches:
                    logits, expected = (m(batch, use_cache=False).logits[:, :-1] for m in (shell, reference))
                    compared.update(logits, expected, batch[:, 1:])
                    squares += float((logits - expected).double().square().sum())
                    count += logits.numel()
                figures = getattr(found.effects[index], side)
                assert figures.kl == pytest.approx(compared.metrics().kl, rel=1e-6)
                assert figures.mse == pytest.approx(squares / count, rel=1e-6), "at the same positions"


def test_sites_alone_sum_up_to_what_their_layer_holds(mamba: tuple[Loaded, Calibration]) -> None:
    """All sites of a layer taken from the quantized twin are the layer itself: to the order of sums, in every mode."""
    loaded, calibration = mamba
    batch = batches_of(loaded)[0]
    for mode, format in (("2-1", "int8"), ("2-4", "fp8_e4m3"), ("3", "int8"), ("2-0", "nvfp4")):
        recipe = Recipe(mode, format)
        twins = make_twins(loaded.model, recipe, calibration, sites=True)
        paths = [path for unit in site_units(twins, recipe, ["all"], across=True) for path in unit.paths]
        with torch.no_grad():
            together: Any = mixed(twins.floating, twins.quantized, paths)
            quantized, floating, plain = (
                m(batch, use_cache=False).logits for m in (twins.quantized, twins.floating, twins.plain)
            )
            assert torch.equal(together(batch, use_cache=False).logits, quantized)
            assert torch.allclose(floating, plain, rtol=1e-4, atol=1e-3)
            assert not torch.allclose(quantized, plain, rtol=1e-4, atol=1e-3)


def test_conv1d_of_mode_3_reads_float_when_its_own_grid_is_not_taken(mamba: tuple[Loaded, Calibration]) -> None:
    """And not what lies on the grid of in_proj.output, which is that of z alone in this mode."""
    loaded, calibration = mamba
    batch = batches_of(loaded)[0]
    twins = make_twins(loaded.model, Recipe("3", "int8"), calibration, sites=True)
    site = "backbone.layers.0.mixer.sites.in_proj.output"
    seen: list[Tensor] = []
    for model in (twins.floating, mixed(twins.floating, twins.quantized, [site])):
        with capture(model, [r"layers\.0\.mixer\.sites\.conv1d\.input$"]) as captured, torch.no_grad():
            model(batch, use_cache=False)
        seen += captured.tensors["backbone.layers.0.mixer.sites.conv1d.input.output"]
    assert torch.equal(*seen)


def test_every_site_of_every_mode_has_an_effect(mamba: tuple[Loaded, Calibration]) -> None:
    loaded, calibration = mamba
    found = rank_layers(
        loaded.model, Recipe("3", "int8"), batches_of(loaded, 1, 16), calibration, sites="across", advice=False
    )
    names = [effect.name for effect in found.effects]
    assert names[:4] == ["in_proj.input", "in_proj.output", "conv1d.input", "x_proj.input"]
    assert {"A_log", "D", "conv1d.weight", "dt_proj.weight"} <= set(names)
    assert "scan.state" not in names
    assert all(effect.alone.kl and effect.alone.kl > 1e-9 and not effect.alone.identical for effect in found.effects)


@pytest.mark.parametrize("threads", [2, 5])
def test_forwards_at_the_same_time_give_what_one_after_the_other_gives(
    mamba: tuple[Loaded, Calibration], threads: int
) -> None:
    loaded, calibration = mamba
    given: Any = (loaded.model, Recipe("2-1", "int8"), batches_of(loaded), calibration)
    own = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = rank_layers(*given, advice=False, together=1, threads=1)
        torch.set_num_threads(threads)
        found = rank_layers(*given, advice=False, together=1, threads=threads)
        assert torch.get_num_threads() == threads, "as before"
    finally:
        torch.set_num_threads(own)
    assert [effect.name for effect in found.effects] == [effect.name for effect in expected.effects]
    for a, b in zip(found.effects, expected.effects, strict=True):
        for side in ("alone", "without"):
            x, y = getattr(a, side), getattr(b, side)
            assert (x.kl, x.mse) == (pytest.approx(y.kl, rel=1e-4), pytest.approx(y.mse, rel=1e-4))


def test_forwards_run_at_the_same_time_and_in_the_order_given() -> None:
    from concurrent.futures import ThreadPoolExecutor
    from threading import Barrier

    meet = Barrier(3, timeout=20)  # breaks unless three are there at once

    def work(item: int) -> int:
        meet.wait()
        return item * 10 + torch.get_num_threads()

    own = torch.get_num_threads()
    try:
        torch.set_num_threads(6)
        assert list(at_once(work, range(6), 3)) == [(i, i * 10 + 2) for i in range(6)]
        with ThreadPoolExecutor(1) as pool:
            threads = [torch.get_num_threads(), pool.submit(torch.get_num_threads).result()]
        assert threads == [6, 6], "here, and in threads to come"
    finally:
        torch.set_num_threads(own)


def test_the_model_is_left_as_it_was(mamba: tuple[Loaded, Calibration]) -> None:
    from probe.models.loading import weight_fingerprint

    loaded, calibration = mamba
    before = [name for name, _ in loaded.model.named_modules()]
    rank_layers(loaded.model, Recipe("2-1", "int8"), batches_of(loaded, 1, 16), calibration, advice=False)
    assert [name for name, _ in loaded.model.named_modules()] == before
    assert weight_fingerprint(loaded.model) == loaded.fingerprint
    assert not any("forward" in vars(module) for module in loaded.model.modules())


class Stack(nn.Module):
    """A language model of a few linears; what differs is how its layers are called."""

    def __init__(self, how: str, depth: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.embedding = nn.Embedding(16, 32)
        self.layers = nn.ModuleList(Layer(how) for _ in range(depth))
        self.out = nn.Linear(32, 16)

    def forward(self, batch: Tensor) -> Tensor:
        h = first = self.embedding(batch)
        rows = batch.float().mean(1)[:, None, None] / 8
        if self.how == "by place":
            rows = torch.arange(len(batch), dtype=torch.float32)[:, None, None] / 10 + 1
        positions = torch.linspace(0, 1, batch.shape[1])[:, None]
        for _ in range(2 if self.how == "twice" else 1):
            extra = None
            for layer in self.layers:
                if self.how == "residual":
                    h, extra = layer(h, extra if extra is not None else first)
                elif self.how == "tuple":
                    h = layer(h, positions=positions)[0]
                elif self.how.startswith("by"):
                    h = layer(h, weights=rows, positions=positions)
                elif self.how == "object":
                    h = layer(h, state=_State())
                else:
                    h = layer(hidden_states=h)
                    extra = h if extra is None else extra
        if self.how == "skip":
            h = h + extra
        return self.out(h)

    def get_output_embeddings(self) -> nn.Module:
        return self.out


class _State:
    pass


class Layer(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.up = how, nn.Linear(32, 32)

    def forward(
        self,
        hidden_states: Tensor,
        extra: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        weights: Tensor | None = None,
        state: object = None,
    ) -> Any:
        h = hidden_states + torch.tanh(self.up(hidden_states))
        h = h if positions is None else h + positions
        h = h if weights is None else h * weights
        if self.how == "residual":
            return h, hidden_states + (0 if extra is None else extra)
        return (h, None) if self.how == "tuple" else h


@pytest.mark.parametrize(
    ("how", "stackable"), [("plain", True), ("tuple", True), ("by sample", True), ("by place", False)]
)
def test_layers_called_in_other_ways_restart(how: str, stackable: bool) -> None:
    """By keyword alone, with a tuple returned, and with a tensor that holds a row per sample.

    Where that row depends on the place in the batch, a batch that is there twice is not what it was: one run a forward.
    """
    model = Stack(how).eval()
    assert rehearse(model, torch.arange(6).view(2, 3), [f"layers.{i}" for i in range(3)]).stackable == stackable
    batches = [torch.randint(0, 16, (3, 8), generator=torch.Generator().manual_seed(1))]
    given: Any = (model, Recipe("linear_w", "fp4_e2m1"), batches)
    found = rank_layers(*given, advice=False)
    assert found.notes == ()
    assert_same(found, rank_layers(*given, restart=False, advice=False))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("twice", "layers.0 runs more than once in a forward"),
        ("residual", "layers.0 returns a Tensor beside its activation"),
        ("object", "layers.0 is given a _State, which may carry more than one tensor"),
        ("skip", "its logits are not made of the output of its last layer alone"),
    ],
)
def test_a_model_that_cannot_be_restarted_is_run_whole_and_says_so(how: str, why: str) -> None:
    model = Stack(how).eval()
    batches = [torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(1))]
    given: Any = (model, Recipe("linear_w", "fp4_e2m1"), batches)
    found = rank_layers(*given, advice=False)
    assert found.notes == (f"every run is a whole run, which takes longer: {why}.",)
    assert found.effects == rank_layers(*given, restart=False, advice=False).effects


class Hidden(Stack):
    """Calls its layers through a list that is no module."""

    def __init__(self) -> None:
        super().__init__("named")
        self.order = list(self.layers)

    def forward(self, batch: Tensor) -> Tensor:
        h = self.embedding(batch)
        for layer in self.order:
            h = layer(h)
        return self.out(h)


def test_layers_that_cannot_be_exchanged_are_an_error_and_not_a_ranking_of_zeros() -> None:
    batches = [torch.arange(12).reshape(2, 6)]
    assert rank_layers(Stack("named"), Recipe("linear_wa", "fp4_e2m1"), batches, advice=False).effects
    for layers in (("all",), ("embedding",)):
        model = Hidden() if layers == ("all",) else Stack("named")
        with pytest.raises(ValueError, match=r"quantized alone, none of these \d \(.*\) changes a bit of the logits"):
            rank_layers(model, Recipe("linear_wa", "fp4_e2m1"), batches, layers=layers, advice=False)


def test_modules_outside_the_stack_are_whole_runs_of_their_own() -> None:
    model = Stack("plain").eval()
    model.get_output_embeddings = lambda: None  # type: ignore[method-assign]
    batches = [torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(1))]
    given: Any = (model, Recipe("linear_w", "fp4_e2m1"), batches)
    found = rank_layers(*given, layers=["^out$", 1], advice=False)
    assert [effect.name for effect in found.effects] == ["layer_1", "out"]
    assert_same(found, rank_layers(*given, layers=["^out$", 1], restart=False, advice=False))
    assert all(effect.alone.kl and effect.alone.kl > 0 for effect in found.effects)


def test_restarting_does_the_work_of_the_layers_that_differ_only(
    mamba: tuple[Loaded, Calibration], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 layers: two whole runs, and 4 + 3 + 2 + 1 layers on each side; whole runs take 4 a run."""
    from probe.models.mamba import SiteMixer

    loaded, calibration = mamba
    rows: list[int] = []
    plain = SiteMixer.forward

    def counting(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if hidden_states.shape[1] == 24:  # the rehearsal runs fewer tokens
            rows.append(len(hidden_states))
        return plain(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(SiteMixer, "forward", counting)
    given: Any = (loaded.model, Recipe("2-1", "int8"), batches_of(loaded, 2, 24), calibration)
    rank_layers(*given, advice=False)
    assert sum(rows) == 2 * (2 * 4 + 2 * (4 + 3 + 2 + 1))
    stacked = len(rows)
    rows.clear()
    rank_layers(*given, advice=False, together=1)
    assert sum(rows) == 2 * (2 * 4 + 2 * (4 + 3 + 2 + 1))
    assert len(rows) == 28 > stacked
    rows.clear()
    rank_layers(*given, advice=False, restart=False)
    assert sum(rows) == 2 * (2 * 4 + 2 * 4 * 4)


def test_a_users_mode_is_ranked_and_a_unit_without_effect_is_named() -> None:
    def first_only(model: nn.Module, format: str, calibration: Calibration | None) -> nn.Module:
        from probe.numerics.quantize import fake_quantize

        changed: Any = model
        changed.layers[0].up.weight.data = fake_quantize(changed.layers[0].up.weight.data, format)
        return model

    register_mode("first_only", first_only)
    try:
        batches = [torch.randint(0, 16, (2, 8), generator=torch.Generator().manual_seed(1))]
        model = Stack("plain").eval()
        found = rank_layers(model, Recipe("first_only", "fp4_e2m1"), batches)
        assert found.notes == ("2 of 3 change no bit of the logits when quantized alone: layer_1, layer_2.",)
        assert found.by_kl()[0].name == "layer_0"
        assert found.advice.keep == ("layer_0",)
        with pytest.raises(ValueError, match="builds its model by itself, so its sites are not known"):
            rank_layers(model, Recipe("first_only", "fp4_e2m1"), batches, sites="across")
    finally:
        unregister_mode("first_only")


def test_progress_ends_at_the_whole_of_the_work(llama: tuple[Loaded, Calibration]) -> None:
    loaded, calibration = llama
    told: list[tuple[int, int, str]] = []
    rank_layers(
        loaded.model,
        Recipe("linear_w", "int8"),
        batches_of(loaded),
        calibration,
        progress=lambda *one: told.append(one),
        advice=False,
    )
    assert [done for done, _, _ in told] == sorted(done for done, _, _ in told)
    assert told[-1] == (2 * 28, 2 * 28, "layer_3 without")


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"recipe": Recipe("bf16")}, "mode bf16 is a float mode: no layer of it is on a grid"),
    ({"batches": []}, "there is nothing to run: not one batch was given"),
    ({"batches": [torch.zeros(1, 1, dtype=torch.int64)]}, "a batch has sequences of one token"),
    ({"sites": "all"}, "sites is 'all'. Give 'across', 'within'"),
    ({"together": 0}, "together is 0; expected 1 or more"),
    ({"layers": [9]}, "layer 9 matches none"),
    ({"sites": "within", "layers": ["norm_f"]}, "there is no site in backbone.norm_f"),
    ({"recipe": Recipe("2-1", "int8"), "calibration": None}, "needs calibrated scales"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=[message[:30] for _, message in MISTAKES])
def test_mistakes_are_one_message(mamba: tuple[Loaded, Calibration], change: dict[str, Any], message: str) -> None:
    loaded, calibration = mamba
    given: dict[str, Any] = {
        "recipe": Recipe("2-1", "fp8_e4m3"),
        "batches": batches_of(loaded, 1, 8),
        "calibration": calibration,
    }
    with pytest.raises(ValueError, match=message.replace("'", ".")):
        rank_layers(loaded.model, **(given | change))
