"""Runs that start in the middle of a model give what whole runs give, on every kind of model."""

from typing import Any

import pytest
import torch
from torch import Tensor

from probe.models.loading import Loaded
from probe.running.calibration import Calibration
from probe.running.recipes import Recipe
from probe.running.shared_models import SharedModel
from probe.sensitivity import rank_layers
from probe.sensitivity.job import Options, SensitivityJob, SideRuns, make_workbench
from probe.sensitivity.runs import at_once, restart_plan
from tests.sensitivity.models import Stack, assert_same, batches_of, random_batch

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


@pytest.mark.parametrize(
    ("how", "stackable"),
    [
        ("plain", True),
        ("tuple", True),
        ("by sample", True),
        ("by place", False),
        ("residual", False),
        ("skip", True),
        ("in place", True),
    ],
)
def test_layers_called_in_other_ways_restart(how: str, stackable: bool) -> None:
    """By keyword alone, with a tuple returned, with a row per sample or per place in the batch, with a second stream
    from layer to layer, with the first output added to the last, and with outputs that the model writes to.

    Where a row depends on its place in the batch, or a layer returns two tensors, each run has a forward of its own.
    """
    model = Stack(how).eval()
    plan = restart_plan(model, torch.arange(6).view(2, 3), [f"layers.{i}" for i in range(3)])
    assert plan.stackable == stackable
    given: Any = (model, Recipe("linear_w", "fp4_e2m1"), [random_batch(3)])
    found = rank_layers(*given, advice=False)
    assert found.notes == ()
    assert_same(found, rank_layers(*given, restart=False, advice=False))
    alone = rank_layers(*given, together=1, advice=False)
    assert alone.effects == rank_layers(*given, restart=False, advice=False).effects


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("twice", "layers.0 runs more than once in a forward"),
        ("object", "layers.0 is given a _State, which may carry more than one tensor"),
        ("memory", "layers.1 is given something that the layers before it do not return"),
        ("last memory", "its output depends on more than what its layers return"),
    ],
)
def test_a_model_that_cannot_be_restarted_is_run_whole_and_says_so(how: str, why: str) -> None:
    model = Stack(how).eval()
    given: Any = (model, Recipe("linear_w", "fp4_e2m1"), [random_batch()])
    found = rank_layers(*given, advice=False)
    assert found.notes == (f"every run is a whole run, which takes longer: {why}.",)
    assert found.effects == rank_layers(*given, restart=False, advice=False).effects


def test_modules_outside_the_stack_are_whole_runs_of_their_own() -> None:
    model: Any = Stack("plain").eval()
    model.get_output_embeddings = lambda: None
    given: Any = (model, Recipe("linear_w", "fp4_e2m1"), [random_batch()])
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
        if hidden_states.shape[1] == 24 and len(hidden_states) > 1:  # the trial runs fewer tokens, a check one sequence
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


@pytest.mark.parametrize("together", [1, 2, 100])
def test_a_part_of_the_runs_is_its_units_whatever_a_worker_puts_together(
    llama: tuple[Loaded, Calibration], together: int
) -> None:
    """The driver divided them by groups of its own; no unit may be in two parts, or in none."""
    loaded, calibration = llama
    recipe, batches, options = Recipe("linear_wa", "int8"), tuple(batches_of(loaded)), Options(together=together)
    bench = make_workbench(loaded.model, recipe, batches, calibration, options)
    names = [unit.name for unit in bench.units]
    here = SharedModel.here("llama", "fingerprint")
    job = SensitivityJob(model=here, recipe=recipe, batches=batches, calibration=calibration, options=options)
    parts = [SideRuns(0, "alone", tuple(some), "", is_first=False) for some in (names[:1], names[1:])]
    found = [job.run(bench, part, None, lambda item: None) for part in parts]
    assert [name for part in found for name in part] == names
