"""The fast twin beside the readable one, on streams longer than its blocks and on several threads."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from probe.metrics import Comparison, fast, reference as readable
from probe.metrics.figures import QUANTILES
from probe.metrics.tally import Magnitudes, Tally
from probe.numerics import (
    native,
    selection,  # noqa: F401  # loaded, so that a test can unload it
)
from probe.numerics.native import numba_twin
from tests.metrics.oracles import assert_agrees, pair, seen

SIZES = (1, fast.BLOCK - 1, fast.BLOCK, fast.BLOCK + 1, 3 * fast.BLOCK + 17)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


def both(output: Tensor, reference: Tensor, *, keep: int = 2**22) -> list[tuple[Tally, Magnitudes]]:
    found = []
    for twin in (readable, fast):
        magnitudes = Magnitudes(keep)
        found.append((twin.measure(output, reference, magnitudes), magnitudes))
    return found


def assert_twins_agree(output: Tensor, reference: Tensor, *, keep: int = 2**22) -> None:
    """Counts, extremes and percentiles to the bit; sums to 1e-12 of what they are sums of."""
    (slow, slow_sizes), (quick, quick_sizes) = both(output, reference, keep=keep)
    assert slow_sizes.exact == quick_sizes.exact
    if slow.count:
        largest = slow.difference.largest
        assert slow_sizes.quantiles(QUANTILES, largest=largest) == quick_sizes.quantiles(QUANTILES, largest=largest)
    for name in (
        *("seen", "count", "zeroed", "at_largest", "moved", "first_nonfinite"),
        *("nan_output", "inf_output", "nan_reference", "inf_reference"),
    ):
        assert getattr(quick, name) == getattr(slow, name), name
    for name in ("output", "reference", "difference"):
        a, b = getattr(slow, name), getattr(quick, name)
        assert b.largest == a.largest, name
        if name != "difference":
            assert (b.minimum, b.maximum) == (a.minimum, a.maximum), name
        if slow.count:
            assert abs(b.moments.mean - a.moments.mean) <= 1e-12 * a.largest, name
            spread = max(a.moments.second, b.moments.second)
            assert abs(b.moments.second - a.moments.second) <= 1e-12 * (
                spread + math.sqrt(spread * slow.count) * a.largest
            ), name
    bound = math.sqrt(slow.output.moments.second * slow.reference.moments.second) + 1e-300
    rough = slow.count * slow.output.largest * slow.reference.largest if slow.count else 0.0
    assert abs(quick.product - slow.product) <= 1e-12 * bound + 1e-14 * rough
    for name in ("sum_difference", "sum_reference"):
        assert getattr(quick, name) == pytest.approx(getattr(slow, name), rel=1e-12), name


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("offset", [0.0, 100.0, 1e6])
@pytest.mark.parametrize("keep", [0, 2**22])
def test_blocks_join_without_a_seam(size: int, offset: float, keep: int) -> None:
    output, reference = pair(size, offset=offset)
    assert_twins_agree(output, reference, keep=keep)
    if keep:
        magnitudes = Comparison()
        magnitudes._tally = fast.measure(output, reference, magnitudes._magnitudes)
        assert_agrees(magnitudes.metrics(), output, reference)


@pytest.mark.parametrize("dtypes", [(a, b) for a in DTYPES for b in DTYPES], ids=str)
def test_every_pair_of_dtypes_is_read_as_it_is(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    output, reference = (x.to(dtype) for x, dtype in zip(pair(5000), dtypes, strict=True))
    assert_twins_agree(output, reference)


def test_a_stretch_of_converted_values_is_told_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "STRETCH", 700)
    output, reference = (x.bfloat16() for x in pair(5000))
    output[4321] = math.nan
    assert_twins_agree(output, reference)
    assert_twins_agree(output, reference, keep=0)


@pytest.mark.parametrize("keep", [0, 2**22])
def test_threads_share_a_batch_and_change_nothing(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "THREAD_WORK", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    output, reference = pair(4 * fast.BLOCK + 5)
    output[[fast.BLOCK + 1, 4 * fast.BLOCK]] = torch.tensor([math.inf, math.nan])
    assert_twins_agree(output, reference, keep=keep)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 3 * fast.BLOCK),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 0.001, 0.5, 0.999, 1.0]),
    st.sampled_from([1e-30, 1e-3, 1.0, 1e30]),
    st.sampled_from([0.0, 1.0, 1e4]),
    st.sampled_from([0, 1000, 2**22]),
)
def test_any_stream_is_measured_alike(
    size: int, seed: int, lost: float, scale: float, offset: float, keep: int
) -> None:
    output, reference = pair(size, seed=seed, scale=scale, offset=offset * scale)
    g = torch.Generator().manual_seed(seed)
    for x in (output, reference):
        hit = torch.rand(size, generator=g) < lost
        odd = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0])
        x[hit] = odd[torch.randint(5, (size,), generator=g)][hit]
    assert_twins_agree(output, reference, keep=keep)


def test_an_outlier_in_front_does_not_cost_the_rest_its_digits() -> None:
    output, reference = (x.double() for x in pair(fast.BLOCK))
    output[0] = reference[0] = 1e6
    assert_twins_agree(output, reference)
    block = torch.cat([torch.full((fast.BLOCK,), 1e8, dtype=torch.float64), pair(fast.BLOCK)[0].double()])
    slow, quick = (tally for tally, _ in both(block, block + 1))
    assert quick.output.moments.second == pytest.approx(slow.output.moments.second, rel=1e-13)
    assert quick.difference.moments.second == 0


def test_a_correlation_a_billionth_below_one_is_not_one() -> None:
    reference = pair(100_000)[1].double()
    noise = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for wanted in (1e-9, 1e-11):
        output = reference + math.sqrt(2 * wanted) * noise
        comparison = Comparison()
        comparison._tally = fast.measure(output, reference, comparison._magnitudes)
        correlation = comparison.metrics().correlation
        assert correlation is not None
        assert 1 - correlation == pytest.approx(wanted, rel=0.02)


def test_float64_beyond_its_squares_goes_to_the_readable_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "_measure", None)
    big = torch.full((10,), 1e150, dtype=torch.float64)
    assert fast.measure(big, big, None).count == 10


def test_nan_of_other_bits_has_moved_but_for_the_quiet_bit() -> None:
    bits = torch.tensor([0x7F800001, 0x7FC00001, 0x7FC00002, 0x7F800001], dtype=torch.int32)
    others = torch.tensor([0x7FC00001, 0x7FC00001, 0x7FC00001, 0x7F800003], dtype=torch.int32)
    slow, quick = (tally for tally, _ in both(bits.view(torch.float32), others.view(torch.float32)))
    assert quick.moved == slow.moved == 2


@pytest.mark.parametrize("size", [1, 2**12])
def test_batches_of_every_size_go_to_the_fast_twin(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readable, "measure", None)
    seen(pair(size))


def test_without_numba_all_goes_on_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("probe.metrics.fast", "probe.numerics.selection", "probe.numerics.machine_code"):
        monkeypatch.delitem(sys.modules, module)
        monkeypatch.delattr(module)
    monkeypatch.setitem(sys.modules, "numba", None)
    numba_twin.cache_clear()
    output, reference = pair(50)
    try:
        with pytest.warns(RuntimeWarning, match=r"numba cannot be loaded .*the same figures, but slower\.$"):
            compared = seen((output, reference))
        with pytest.warns(RuntimeWarning, match=r"numba cannot be loaded .*the same percentiles, but slower\.$"):
            assert_agrees(compared.metrics(), output, reference)
        assert_agrees(seen((output, reference)).metrics(), output, reference)
    finally:
        numba_twin.cache_clear()
