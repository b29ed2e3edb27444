import json
import math
import random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from probe import metrics
from probe.metrics import (
    PERCENTILE_ERROR,
    Comparison,
    LogitComparison,
    LogitMetrics,
    Metrics,
    label_correlation,
    label_mse,
)

INF, NAN = math.inf, math.nan
PERCENTILES = ("p50", "p90", "p95", "p99")
EXACT = {
    *("count", "compared", "finite", "identical", "max_abs", "percentiles_exact", "zeroed", "saturated", "moved"),
    *("min_output", "max_output", "min_reference", "max_reference", *PERCENTILES),
    *("nan_output", "inf_output", "nan_reference", "inf_reference", "first_nonfinite"),
}


def expected(output: Tensor, reference: Tensor) -> dict[str, Any]:
    """Every figure in plain numpy, with everything in memory."""
    o, r = (x.double().numpy().ravel() for x in (output, reference))
    good = np.isfinite(o) & np.isfinite(r)
    lost = np.flatnonzero(~np.isfinite(o) & np.isfinite(r))
    moved = np.mean(o.view(np.int64) != r.view(np.int64))
    figures: dict[str, Any] = {
        "count": o.size,
        "compared": good.sum(),
        "finite": np.isfinite(o).all() and np.isfinite(r).all(),
        "identical": moved == 0,
        "nan_output": np.isnan(o).sum(),
        "inf_output": np.isinf(o).sum(),
        "nan_reference": np.isnan(r).sum(),
        "inf_reference": np.isinf(r).sum(),
        "first_nonfinite": lost[0] if lost.size else None,
        "moved": moved,
    }
    o, r = o[good], r[good]
    d = o - r
    if not o.size:
        return figures
    mse, power, peak = np.mean(d**2), np.mean(r**2), np.abs(r).max()
    norms = np.linalg.norm(o) * np.linalg.norm(r)
    varies = np.ptp(o) > 0 and np.ptp(r) > 0
    centred = [x - x.mean() for x in (o, r)]
    limit = np.abs(o).max()
    at_limit = np.sum(np.abs(o) == limit)
    lossless = not d.any()
    figures |= {
        "mse": mse,
        "rmse": np.sqrt(mse),
        "mae": np.abs(d).mean(),
        "max_abs": np.abs(d).max(),
        "relative_mse": mse / (power + 1e-8),
        "relative_mae": np.abs(d).mean() / (np.abs(r).mean() + 1e-8),
        "correlation": centred[0] @ centred[1] / np.sqrt((centred[0] @ centred[0]) * (centred[1] @ centred[1]))
        if varies
        else None,
        "cosine": o @ r / norms if norms else None,
        "psnr": INF if lossless else 20 * np.log10(peak / np.sqrt(mse)) if peak else None,
        "sqnr": INF if lossless else 10 * np.log10(np.sum(r**2) / np.sum(d**2)) if peak else None,
        "percentiles_exact": True,
        "zeroed": np.mean((o == 0) & (r != 0)),
        "saturated": at_limit / o.size if at_limit > 1 and limit > 0 else 0.0,
    }
    figures |= {name: np.percentile(np.abs(d), int(name[1:])) for name in PERCENTILES}
    for side, x in (("output", o), ("reference", r)):
        figures |= {f"mean_{side}": x.mean(), f"std_{side}": x.std() if np.ptp(x) else 0.0}
        figures |= {f"min_{side}": x.min(), f"max_{side}": x.max()}
    return figures | {"mean_difference": d.mean(), "std_difference": d.std() if np.ptp(d) else 0.0}


def assert_agrees(found: Metrics, output: Tensor, reference: Tensor, *, skip: tuple[str, ...] = ()) -> None:
    """Counts, extremes and percentiles to the bit; sums to 1e-12, times the condition where they are centred."""
    wanted = expected(output, reference)
    sides = {"output": output.double(), "reference": reference.double()}
    good = sides["output"].isfinite() & sides["reference"].isfinite()
    sides = {name: x[good].flatten() for name, x in sides.items()}
    sides["difference"] = sides["output"] - sides["reference"]
    assert list(found.as_dict()) == [*Metrics.__dataclass_fields__]
    for name, figure in found.as_dict().items():
        want = wanted.get(name)
        if name in skip:
            continue
        cancels = name in ("cosine", "correlation") or name.startswith("mean_")  # zero but for the rounding of the sum
        if want is None or figure is None or name in EXACT or want == INF or (want == 0 and not cancels):
            assert figure == want, (name, figure, want)
            continue
        tolerance = 1e-12 * abs(want)
        side = name.partition("_")[2]
        if side in sides:
            tolerance += 1e-12 * float(sides[side].abs().max())
        elif name == "correlation":
            tolerance = 1e-12 * max(1 + float(x.abs().max() / x.std(correction=0)) for x in sides.values() if x.any())
        elif name == "cosine":
            tolerance = 1e-12
        elif name in ("psnr", "sqnr"):
            tolerance = 1e-10
        assert abs(figure - want) <= tolerance, (name, figure, want)


def seen(*batches: tuple[Tensor, Tensor], **options: Any) -> Comparison:
    comparison = Comparison(**options)
    for output, reference in batches:
        comparison.update(output, reference)
    return comparison


def figures(output: Any, reference: Any, **options: Any) -> Metrics:
    pair = (torch.as_tensor(x, dtype=torch.float32) for x in (output, reference))
    return seen(tuple(pair), **options).metrics()  # type: ignore[arg-type]


def pair(*shape: int, seed: int = 0, scale: float = 1.0, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    plain = torch.randn(shape, generator=g)
    output = (plain * 8).round().clamp(-12, 12) / 8
    return output * scale + offset, plain * scale + offset


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CHUNK", 7)


floats = st.one_of(
    st.floats(width=32, allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e30, -1e30, 1e-30, 448.0]),
    st.floats(-1, 1, width=32),
)
odd = st.one_of(floats, st.sampled_from([NAN, INF, -INF]))


def stream(elements: st.SearchStrategy[float]) -> st.SearchStrategy[list[tuple[float, float]]]:
    return st.lists(st.one_of(st.tuples(elements, elements), floats.map(lambda x: (x, x))), min_size=1, max_size=50)


def split(values: Any) -> tuple[Tensor, Tensor]:
    both = torch.tensor(values, dtype=torch.float32)
    return both[:, 0], both[:, 1]


@pytest.mark.parametrize("shape", [(5,), (64, 48), (3, 5, 7), ()])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_every_figure_is_numpys(shape: tuple[int, ...], offset: float) -> None:
    output, reference = pair(*shape, offset=offset)
    assert_agrees(seen((output, reference)).metrics(), output, reference)


def test_more_than_one_chunk_is_numpys() -> None:
    output, reference = pair(2 * metrics.CHUNK + 1)
    assert_agrees(seen((output, reference)).metrics(), output, reference)


@pytest.mark.parametrize("scale", [1e30, 1e-30, 1e-10])
def test_huge_and_tiny_values_are_numpys(scale: float) -> None:
    output, reference = pair(50, 40, scale=scale)
    found = seen((output, reference)).metrics()
    assert_agrees(found, output, reference)
    assert found.mse is not None
    assert found.mse > 0


@given(stream(floats))
def test_any_floats_give_numpys_figures(values: list[tuple[float, float]]) -> None:
    output, reference = split(values)
    assert_agrees(seen((output, reference)).metrics(), output, reference)


@given(stream(odd))
def test_nan_and_inf_are_counted_and_left_out(values: list[tuple[float, float]]) -> None:
    output, reference = split(values)
    assert_agrees(seen((output, reference)).metrics(), output, reference)


@given(stream(odd), st.integers(0, 2**32))
def test_splits_and_merges_change_nothing(values: list[tuple[float, float]], seed: int) -> None:
    output, reference = split(values)
    pick = random.Random(seed)
    whole = Comparison()
    start = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "CHUNK", pick.randint(1, 20))
        while start < len(output):
            part = Comparison()
            for _ in range(pick.randint(0, 3)):
                stop = start + pick.randint(0, 12)
                part.update(output[start:stop], reference[start:stop])
                start = min(stop, len(output))
            before = part.metrics() if part._tally.seen else None
            assert whole.merge(part) is whole
            assert (part.metrics() if part._tally.seen else None) == before
    assert_agrees(whole.metrics(), output, reference)


@pytest.mark.parametrize("batch", [1, 3, 64, 640])
def test_figures_do_not_depend_on_the_batch_size(batch: int) -> None:
    output, reference = pair(640, 16, offset=3.0)
    batches = zip(output.split(batch), reference.split(batch), strict=True)
    assert_agrees(seen(*batches).metrics(), output, reference)


def test_correlation_survives_a_large_mean() -> None:
    g = torch.Generator().manual_seed(0)
    reference = 1e8 + torch.randn(4000, generator=g, dtype=torch.float64)
    output = reference + 0.1 * torch.randn(4000, generator=g, dtype=torch.float64)
    found = seen(*zip(output.split(100), reference.split(100), strict=True)).metrics()
    shifted = expected(output - 1e8, reference - 1e8)
    assert found.correlation == pytest.approx(shifted["correlation"], abs=1e-8)
    assert found.std_output == pytest.approx(shifted["std_output"], rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_every_float_dtype_is_read_as_it_is(dtype: torch.dtype) -> None:
    output, reference = (x.to(dtype) for x in pair(30, 20))
    assert_agrees(seen((output, reference)).metrics(), output, reference)
    wide = pair(30, 20)[1]
    assert_agrees(seen((output, wide)).metrics(), output, wide)


def test_views_and_gradients_are_accepted_and_inputs_left_alone() -> None:
    output, reference = (x.double() for x in pair(30, 20))
    kept = output.clone(), reference.clone()
    found = seen((output.T.requires_grad_(), reference.T)).metrics()
    assert torch.equal(output, kept[0])
    assert torch.equal(reference, kept[1])
    assert_agrees(found, output.detach().T, reference.T)


def test_no_loss_is_perfect() -> None:
    _, reference = pair(100)
    found = seen((reference, reference)).metrics()
    assert (found.mse, found.max_abs, found.p99, found.moved, found.identical) == (0, 0, 0, 0, True)
    assert (found.psnr, found.sqnr, found.correlation, found.cosine) == (INF, INF, 1.0, 1.0)


def test_a_changed_sign_of_zero_is_moved_but_not_lost() -> None:
    found = figures([-0.0, 1.0], [0.0, 1.0])
    assert (found.identical, found.moved, found.mse, found.psnr) == (False, 0.5, 0, INF)
    assert math.copysign(1, found.max_abs or 0.0) == 1


@pytest.mark.parametrize(
    ("output", "reference", "undefined"),
    [
        ([0.1] * 9, [0.1] * 9, {"correlation"}),
        ([0.1] * 9, list(range(9)), {"correlation"}),
        (list(range(9)), [0.1] * 9, {"correlation"}),
        ([0.0] * 9, [0.0] * 9, {"correlation", "cosine"}),
        (list(range(9)), [0.0] * 9, {"correlation", "cosine", "psnr", "sqnr"}),
        ([0.0] * 9, list(range(9)), {"correlation", "cosine"}),
        ([2.0], [3.0], {"correlation"}),
    ],
)
@pytest.mark.usefixtures("small_chunks")
def test_what_constants_leave_undefined_is_none(
    output: list[float], reference: list[float], undefined: set[str]
) -> None:
    found = figures(output, reference).as_dict()
    assert {name for name, figure in found.items() if figure is None} - {"first_nonfinite"} == undefined
    for name, values in (("std_output", output), ("std_reference", reference)):
        assert (found[name] == 0) == (len(set(values)) == 1)


def test_nothing_finite_leaves_only_counts() -> None:
    found = figures([NAN, INF, 1.0], [1.0, 1.0, -INF])
    assert (found.count, found.compared, found.finite, found.first_nonfinite) == (3, 0, False, 0)
    known = {name for name, figure in found.as_dict().items() if figure is not None}
    assert known == {
        *("count", "compared", "finite", "identical", "moved", "first_nonfinite"),
        *("nan_output", "inf_output", "nan_reference", "inf_reference"),
    }


def test_nan_on_either_side_is_never_finite() -> None:
    for bad in (NAN, INF, -INF):
        assert not figures([bad, 1.0], [1.0, 1.0]).finite
        assert not figures([1.0, 1.0], [bad, 1.0]).finite
        assert not figures([bad, 1.0], [bad, 1.0]).finite


def test_the_first_nonfinite_counts_the_whole_stream_and_skips_a_bad_reference() -> None:
    good, bad, both = (torch.tensor(x) for x in ([1.0, 2.0], [1.0, NAN], [INF, 2.0]))
    a = seen((good, good), (both, both))
    assert a.metrics().first_nonfinite is None
    b = seen((good, good), (bad, good), (bad, good))
    assert b.metrics().first_nonfinite == 3
    assert a.merge(b).metrics().first_nonfinite == 7
    assert seen((bad, good)).merge(a).metrics().first_nonfinite == 1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("keep", [0, 100])
def test_beyond_float64_is_none_not_nan(keep: int) -> None:
    big = torch.tensor([1.7e308, -1.7e308, 1.7e308, 1.0], dtype=torch.float64)
    found = seen((big, -big), (big, -big), keep=keep).metrics()
    for name in ("mse", "psnr", "max_abs", "p99", "correlation", "cosine", "std_output", "relative_mse"):
        assert getattr(found, name) is None, name
    assert not any(isinstance(x, float) and not math.isfinite(x) for x in found.as_dict().values())
    assert found.max_output == 1.7e308
    assert seen((big[:1].expand(3), big[:1].expand(3))).metrics().mean_output is None


def test_squares_below_float64_are_not_taken_for_lossless() -> None:
    tiny = torch.tensor([1e-200, 2e-200], dtype=torch.float64)
    found = seen((tiny, 2 * tiny)).metrics()
    assert (found.mse, found.psnr, found.sqnr, found.correlation, found.max_abs) == (0, None, None, None, 2e-200)


def test_zeroed_is_where_the_output_alone_is_zero() -> None:
    assert figures([0.0, -0.0, 0.0, 1.0], [1.0, 2.0, 0.0, 0.0]).zeroed == 0.5


def test_saturated_needs_the_largest_magnitude_twice() -> None:
    assert figures([4.0, -4.0, 4.0, 1.0], [9.0, -9.0, 5.0, 1.0]).saturated == 0.75
    assert figures([4.0, -3.0, 3.0, 1.0], [9.0, -9.0, 5.0, 1.0]).saturated == 0
    assert figures([0.0, 0.0], [1.0, 2.0]).saturated == 0
    low, high = (torch.tensor(x) for x in ([3.0, -3.0], [3.0, 4.0]))
    assert seen((low, low)).merge(seen((high, high))).metrics().saturated == 0
    assert seen((high, high), (low, low)).merge(seen((-high, high))).metrics().saturated == 2 / 6


def test_percentiles_can_be_left_out() -> None:
    output, reference = pair(50)
    comparison = seen((output, reference), percentiles=False)
    found = comparison.metrics()
    assert [getattr(found, name) for name in (*PERCENTILES, "percentiles_exact")] == [None] * 5
    assert_agrees(found, output, reference, skip=(*PERCENTILES, "percentiles_exact"))
    assert not comparison._magnitudes._kept


def test_percentiles_are_exact_up_to_the_cap_however_they_came() -> None:
    output, reference = pair(100)
    for cut in (1, 50, 99):
        a = seen((output[:cut], reference[:cut]), keep=100).merge(seen((output[cut:], reference[cut:]), keep=100))
        assert_agrees(a.metrics(), output, reference)
        b = seen((output[:cut], reference[:cut]), keep=99).merge(seen((output[cut:], reference[cut:]), keep=99))
        assert b.metrics().percentiles_exact is False
    assert seen((output, reference), keep=99).metrics().percentiles_exact is False


def assert_within_bound(found: Metrics, output: Tensor, reference: Tensor) -> None:
    wanted = expected(output, reference)
    assert found.percentiles_exact is False
    for name in PERCENTILES:
        assert abs(getattr(found, name) - wanted[name]) <= PERCENTILE_ERROR * (1 + 1e-12) * wanted[name], name
        assert getattr(found, name) <= wanted["max_abs"]
    assert_agrees(found, output, reference, skip=(*PERCENTILES, "percentiles_exact"))


@given(stream(floats))
def test_histogram_percentiles_keep_their_bound(values: list[tuple[float, float]]) -> None:
    output, reference = split(values)
    assert_within_bound(seen((output, reference), keep=0).metrics(), output, reference)


@pytest.mark.parametrize("cuts", [(1000,), (10, 990), (300, 300, 400)])
@pytest.mark.parametrize("keep", [0, 299, 700])
def test_histogram_percentiles_do_not_depend_on_the_cuts(cuts: tuple[int, ...], keep: int) -> None:
    output, reference = pair(1000)
    output[::3] = reference[::3]  # zeros among |d|
    whole = seen((output, reference), keep=keep)
    parts = [
        seen((o, r), keep=keep) for o, r in zip(output.split(list(cuts)), reference.split(list(cuts)), strict=True)
    ]
    merged = Comparison(keep=keep)
    for part in parts:
        merged.merge(part)
    assert_within_bound(merged.metrics(), output, reference)
    assert [getattr(merged.metrics(), p) for p in PERCENTILES] == [getattr(whole.metrics(), p) for p in PERCENTILES]
    parts[0].update(output, reference)  # whoever was merged shares nothing with the merger
    assert_within_bound(merged.metrics(), output, reference)


def test_the_histogram_bound_is_stated_as_it_is_reached() -> None:
    assert PERCENTILE_ERROR == 2.0**-9
    edge = torch.full((5,), 1.0)
    found = seen((edge, 0 * edge), (10 * edge[:1], 0 * edge[:1]), keep=0).metrics()
    assert found.p50 == 1 + PERCENTILE_ERROR


@pytest.mark.parametrize("keep", [0, 1000])
def test_merging_with_itself_is_seeing_it_twice(keep: int) -> None:
    output, reference = pair(100)
    comparison = seen((output, reference), keep=keep)
    twice = seen((output, reference), (output, reference), keep=keep)
    assert comparison.merge(comparison).metrics() == twice.metrics()


def test_figures_are_plain_and_survive_json() -> None:
    found = seen(pair(100)).metrics().as_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_an_empty_batch_changes_nothing() -> None:
    comparison = seen(pair(10))
    before = comparison.metrics()
    comparison.update(torch.empty(0, 3), torch.empty(0, 3))
    assert comparison.metrics() == before


ERRORS = {
    "shapes": (
        lambda: Comparison().update(torch.ones(2, 3), torch.ones(3)),
        "output has shape [2, 3] and reference [3]. They are compared element by element and never broadcast or "
        "cropped: give tensors of one shape.",
    ),
    "same size": (
        lambda: Comparison().update(torch.ones(2, 3), torch.ones(3, 2)),
        "output has shape [2, 3] and reference [3, 2]. They are compared element by element and never broadcast or "
        "cropped: give tensors of one shape.",
    ),
    "integers": (
        lambda: Comparison().update(torch.ones(2), torch.ones(2, dtype=torch.int32)),
        "reference is torch.int32. Only floats are compared. Convert first, e.g. reference.float().",
    ),
    "empty": (
        Comparison().metrics,
        "Comparison(percentiles=True, keep=4194304, count=0) has seen nothing, so it has no metrics. "
        "Call update(...) with data first.",
    ),
    "keep": (
        lambda: Comparison(keep=-1),
        "keep is -1. Give how many values to keep exactly: 0 or more, e.g. 2**22.",
    ),
    "settings": (
        lambda: Comparison().merge(Comparison(keep=5)),
        "cannot merge Comparison(percentiles=True, keep=5, count=0) into Comparison(percentiles=True, keep=4194304, "
        "count=0): what they have kept is not comparable. Make both with the same percentiles and keep.",
    ),
    "kinds": (
        lambda: LogitComparison().merge(Comparison(keep=5)),  # type: ignore[arg-type]
        "cannot merge Comparison(percentiles=True, keep=5, count=0) into LogitComparison(positions=0). "
        "Merge accumulators of one kind.",
    ),
    "empty logits": (
        LogitComparison().metrics,
        "LogitComparison(positions=0) has seen nothing, so it has no metrics. Call update(...) with data first.",
    ),
    "logit shapes": (
        lambda: LogitComparison().update(torch.ones(2, 3), torch.ones(2, 4), torch.ones(2).long()),
        "logits has shape [2, 3] and reference_logits [2, 4]. They are compared element by element and never "
        "broadcast or cropped: give tensors of one shape.",
    ),
    "target shape": (
        lambda: LogitComparison().update(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 1).long()),
        "targets have shape [2, 1] and logits [2, 3]. Give one target per position: the shape of the logits without "
        "its last axis.",
    ),
    "target dtype": (
        lambda: LogitComparison().update(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2)),
        "targets are torch.float32. Give token numbers as integers, e.g. torch.int64.",
    ),
    "target range": (
        lambda: LogitComparison().update(torch.ones(2, 3), torch.ones(2, 3), torch.tensor([-1, 3])),
        "targets run from -1 to 3, but the logits have a vocabulary of 3. Drop padded positions, and check that the "
        "tokenizer is that of the model.",
    ),
}


@pytest.mark.parametrize(("call", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_is_wrong_and_what_to_do(call: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011
        call()
    assert str(error.value) == message


def log_softmax(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def expected_logits(output: Tensor, reference: Tensor, targets: Tensor) -> dict[str, float]:
    vocabulary = output.shape[-1]
    o, r = (log_softmax(x.double().numpy().reshape(-1, vocabulary)) for x in (output, reference))
    t = targets.numpy().reshape(-1, 1)
    bits = [float(np.mean(-np.take_along_axis(x, t, 1))) / math.log(2) for x in (o, r)]
    return {
        "kl": float(np.mean((np.exp(r) * (r - o)).sum(1))),
        "top1_agreement": float((output.double().argmax(-1) == reference.double().argmax(-1)).double().mean()),
        "bits_per_token": bits[0],
        "reference_bits_per_token": bits[1],
        "change_in_bits": bits[0] - bits[1],
    }


def logits(*shape: int, seed: int = 0, noise: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    reference = 3 * torch.randn(*shape, generator=g)
    output = reference + noise * torch.randn(*shape, generator=g)
    return output, reference, torch.randint(shape[-1], shape[:-1], generator=g)


def assert_logits_agree(found: LogitMetrics, *wanted: Tensor) -> None:
    for name, want in expected_logits(*wanted).items():
        assert getattr(found, name) == pytest.approx(want, rel=1e-11, abs=1e-13), name


@pytest.mark.parametrize("shape", [(5, 11), (4, 6, 33), (11,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("chunk", [1, 50, 2**17])
def test_logit_figures_are_numpys(
    shape: tuple[int, ...], dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CHUNK", chunk)
    output, reference, targets = logits(*shape)
    comparison = LogitComparison()
    comparison.update(output.to(dtype), reference.to(dtype), targets.int())
    found = comparison.metrics()
    assert_logits_agree(found, output.to(dtype), reference.to(dtype), targets)
    assert (found.positions, found.compared, found.finite) == (targets.numel(), targets.numel(), True)


@given(st.lists(st.integers(0, 12), max_size=5), st.booleans())
def test_logit_splits_and_merges_change_nothing(cuts: list[int], merging: bool) -> None:
    batch = logits(40, 9)
    sizes = [*cuts, 40 - sum(cuts)] if sum(cuts) <= 40 else [40]
    whole = LogitComparison()
    for parts in zip(*(x.split(sizes) for x in batch), strict=True):
        part = LogitComparison() if merging else whole
        part.update(*parts)
        if merging:
            whole.merge(part)
    assert_logits_agree(whole.metrics(), *batch)
    assert whole.metrics().positions == 40


def test_the_divergence_is_of_the_output_from_the_reference() -> None:
    output, reference = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    comparison = LogitComparison()
    comparison.update(output, reference, torch.tensor([0]))
    found = comparison.metrics()
    assert found.kl == pytest.approx(0.75 * math.log(1.5) + 0.25 * math.log(0.5))
    assert found.bits_per_token == pytest.approx(1.0)
    assert found.reference_bits_per_token == pytest.approx(math.log2(4 / 3))
    assert found.change_in_bits == pytest.approx(1 - math.log2(4 / 3))


def test_the_same_logits_lose_nothing() -> None:
    _, reference, targets = logits(20, 50)
    comparison = LogitComparison()
    comparison.update(reference, reference, targets)
    found = comparison.metrics()
    assert (found.kl, found.top1_agreement, found.change_in_bits) == (0, 1, 0)


@pytest.mark.parametrize("shift", [1e-3, 0.1, 7.0])
def test_a_divergence_is_never_negative(shift: float) -> None:
    for seed in range(20):
        _, reference, targets = logits(3, 50, seed=seed)
        comparison = LogitComparison()
        comparison.update(reference.double() + shift, reference.double(), targets)
        kl = comparison.metrics().kl
        assert kl is not None
        assert 0 <= kl < 1e-14


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_huge_and_tiny_logits_are_numpys(scale: float) -> None:
    output, reference, targets = logits(20, 10)
    comparison = LogitComparison()
    comparison.update(output * scale, reference * scale, targets)
    assert_logits_agree(comparison.metrics(), output * scale, reference * scale, targets)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("rows", [1, 40])
def test_positions_with_nan_or_inf_are_counted_and_left_out(
    bad: float, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "CHUNK", rows * 9)
    output, reference, targets = logits(40, 9)
    output[5, 3] = output[17, 0] = output[17, 1] = reference[5, 2] = reference[30, 8] = bad
    comparison = LogitComparison()
    comparison.update(output, reference, targets)
    found = comparison.metrics()
    assert (found.positions, found.compared, found.finite) == (40, 37, False)
    assert (found.nonfinite_output, found.nonfinite_reference, found.first_nonfinite) == (2, 2, 17)
    good = torch.tensor([i not in (5, 17, 30) for i in range(40)])
    assert_logits_agree(found, output[good], reference[good], targets[good])
    clean = LogitComparison()
    clean.update(*logits(6, 9))
    assert clean.merge(comparison).metrics().first_nonfinite == 23
    only = LogitComparison()
    only.update(output[5:6], reference[5:6], targets[5:6])
    lost = only.metrics().as_dict()
    assert [lost[x] for x in expected_logits(*logits(1, 9))] == [None] * 5


def test_logits_beyond_float64_are_none_not_nan() -> None:
    big = torch.tensor([[1.7e308, -1.7e308]], dtype=torch.float64)
    comparison = LogitComparison()
    comparison.update(big, -big, torch.tensor([0]))
    found = comparison.metrics()
    assert (found.kl, found.change_in_bits, found.top1_agreement) == (None, None, 0)


@pytest.mark.parametrize(
    ("mse", "label"),
    [
        *((0.0, "excellent"), (9.9e-5, "excellent"), (1e-4, "good"), (9.9e-4, "good"), (1e-3, "fair")),
        *((9.9e-3, "fair"), (1e-2, "poor"), (INF, "poor"), (NAN, "poor"), (None, "undefined")),
    ],
)
def test_labels_of_mse(mse: float | None, label: str) -> None:
    assert label_mse(mse) == label


@pytest.mark.parametrize(
    ("correlation", "label"),
    [
        *((1.0, "excellent"), (0.99991, "excellent"), (0.9999, "good"), (0.9991, "good"), (0.999, "fair")),
        *((0.991, "fair"), (0.99, "poor"), (-1.0, "poor"), (NAN, "poor"), (None, "undefined")),
    ],
)
def test_labels_of_correlation(correlation: float | None, label: str) -> None:
    assert label_correlation(correlation) == label


@pytest.mark.parametrize("value", [0.1, 1e200])
def test_a_constant_of_float64_does_not_vary(value: float) -> None:
    constant = torch.full((1000,), value, dtype=torch.float64)
    found = seen((constant, constant)).metrics()
    assert (found.std_output, found.mean_output, found.correlation) == (0, value, None)


def test_a_histogram_percentile_is_never_above_the_largest() -> None:
    assert figures([1.0] * 5, [0.0] * 5, keep=0).p99 == 1.0


def test_the_largest_difference_has_no_sign() -> None:
    assert str(figures([-0.0], [0.0]).max_abs) == "0.0"
    assert str(figures([0.0], [0.0]).max_abs) == "0.0"
