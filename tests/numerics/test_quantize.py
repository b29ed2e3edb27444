"""The two public functions: properties over generated shapes, errors word for word, which implementation runs."""

import inspect
import math
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from typing import Any, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from probe import (
    FORMATS,
    MinMaxObserver,
    UnderflowWarning,
    analyze_underflow,
    fake_quantize,
    fake_quantize_integer,
    hadamard_transform,
    quantize,
)
from probe.numerics import compiled, fast
from probe.numerics.quantize import Options, check_job
from tests.numerics.tensors import MX, RULES, adversarial_blocks, assert_same_bits

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
SIGN_SYMMETRIC = ("half_even", "half_away", "toward_zero")


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(1, 40), min_size=0, max_size=3).filter(lambda s: math.prod(s) <= 400))
    values = draw(st.lists(FINITE, min_size=math.prod(shape), max_size=math.prod(shape)))
    return torch.tensor(values, dtype=torch.float32).reshape(shape)


@st.composite
def requests(draw: st.DrawFn) -> tuple[torch.Tensor, Options]:
    x = draw(tensors())
    options: Options = {
        "axis": draw(st.integers(-max(1, x.ndim), max(1, x.ndim) - 1)),
        "block_size": draw(st.sampled_from([None, 1, 2, 5, 16, 32, 100])),
        "scale_rule": draw(st.sampled_from(RULES)),
        "rounding": draw(st.sampled_from(["half_even", "half_away", "toward_zero", "floor"])),
    }
    return x, options


@pytest.mark.parametrize("name", MX)
@given(request=requests())
def test_shapes_axes_and_block_sizes_agree_between_the_twins_and_the_codes(
    name: str, request: tuple[torch.Tensor, Options]
) -> None:
    x, options = request
    got = fake_quantize(x, name, **options)
    assert got.shape == x.shape
    slow: Options = {**options, "implementation": "reference"}
    assert_same_bits(got, fake_quantize(x, name, **slow))
    assert_same_bits(got, quantize(x, name, **options).dequantize())


@pytest.mark.parametrize("name", MX)
@given(request=requests())
def test_quantizing_twice_changes_nothing(name: str, request: tuple[torch.Tensor, Options]) -> None:
    x, options = request
    options["rounding"] = "half_even"
    once = fake_quantize(x, name, **options)
    if bool((once.abs() < torch.finfo(torch.float32).max).all()):  # saturated at the dtype it is off the grid
        assert_same_bits(fake_quantize(once, name, **options), once)


@pytest.mark.parametrize("name", MX)
@pytest.mark.parametrize("rounding", SIGN_SYMMETRIC)
@given(x=tensors())
def test_negating_the_input_negates_the_output(name: str, rounding: str, x: torch.Tensor) -> None:
    assert torch.equal(fake_quantize(-x, name, rounding=rounding), -fake_quantize(x, name, rounding=rounding))


@pytest.mark.parametrize("name", MX)
@given(values=st.lists(FINITE, min_size=2, max_size=32), rule=st.sampled_from(RULES))
def test_order_within_a_block_is_kept(name: str, values: list[float], rule: str) -> None:
    x = torch.tensor(sorted(values), dtype=torch.float32)
    got = fake_quantize(x, name, scale_rule=rule)
    assert bool((got.diff() >= 0).all())


@pytest.mark.parametrize("name", MX)
@given(
    values=st.lists(st.integers(-(2**12), 2**12), min_size=1, max_size=40),
    shift=st.integers(-60, 60),
    rule=st.sampled_from(RULES),
)
def test_scaling_by_a_power_of_two_scales_the_result(name: str, values: list[int], shift: int, rule: str) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    scaled = fake_quantize(x * 2.0**shift, name, scale_rule=rule)
    assert_same_bits(scaled, fake_quantize(x, name, scale_rule=rule) * 2.0**shift)


@pytest.mark.parametrize("name", MX)
def test_the_mse_rule_is_never_worse_than_floor_ceil_or_even(name: str) -> None:
    x = adversarial_blocks(64, seed=9)
    x = x[x.isfinite().all(-1) & (x.abs().amax(-1) < 1e30) & (x.abs().amax(-1) > 1e-30)].double()

    def error(rule: str) -> torch.Tensor:
        return (fake_quantize(x, name, scale_rule=rule) - x).square().sum(-1)

    for rule in ("floor", "ceil", "even"):
        assert bool((error("mse") <= error(rule) * (1 + 1e-12)).all())
    assert bool((error("mse") < error("floor")).any())


def test_out_receives_the_result_also_when_it_is_the_input() -> None:
    x = torch.randn(20, 70)
    expected = fake_quantize(x, "fp8_e4m3")
    for out in (torch.empty_like(x), torch.empty(70, 20).t(), x.clone()):
        assert fake_quantize(x, "fp8_e4m3", out=out) is out
        assert_same_bits(out.contiguous(), expected)
    assert fake_quantize(x, "fp8_e4m3", out=x) is x
    assert_same_bits(x, expected)


@pytest.mark.parametrize("shift", [32, 1024, 2**18])
def test_out_may_overlap_the_input(shift: int) -> None:
    memory = torch.randn(2**19 + 2**18)
    x, out = memory[: 2**19], memory[shift : shift + 2**19]
    expected = fake_quantize(x.clone(), "fp8_e4m3")
    fake_quantize(x, "fp8_e4m3", out=out)
    assert_same_bits(out, expected)


def test_the_input_is_never_changed_and_the_result_has_no_gradient() -> None:
    for name in FORMATS:
        x = torch.randn(8, 64, requires_grad=True)
        before = x.detach().clone()
        got = fake_quantize(x, name)
        assert not got.requires_grad
        assert not got.is_inference()
        assert_same_bits(x.detach(), before)
        assert got.data_ptr() != x.data_ptr()


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # torch's own
def test_it_can_be_part_of_a_compiled_model() -> None:
    x = torch.randn(16, 64)
    model = torch.compile(lambda v: fake_quantize(v * 2, "fp4_e2m1") + 1, fullgraph=True)
    assert_same_bits(model(x), fake_quantize(x * 2, "fp4_e2m1") + 1)


# errors ------------------------------------------------------------------------------------------------------

X = torch.ones(4, 32)
ERRORS: dict[str, tuple[Callable[[], object], str]] = {
    "format": (lambda: fake_quantize(X, "fp8_e4m4"), "unknown format 'fp8_e4m4'. Did you mean 'fp8_e4m3'? Known: "),
    "format_next": (lambda: fake_quantize(X, "x"), "List them with: probe formats"),
    "rule": (lambda: fake_quantize(X, "mxint8", scale_rule="flor"), "unknown scale rule 'flor'. Did you mean 'floor'?"),
    "rounding": (
        lambda: fake_quantize(X, "mxint8", rounding="half_evn"),
        "unknown rounding 'half_evn'. Did you mean 'half_even'?",
    ),
    "implementation": (
        lambda: fake_quantize(X, "mxint8", implementation=cast(Any, "tourch")),
        "unknown implementation 'tourch'. Did you mean 'torch'?",
    ),
    "integer_tensor": (
        lambda: fake_quantize(X.int(), "int8"),
        "x is torch.int32. Formats take torch.float64, torch.float32, torch.bfloat16, torch.float16. Convert first",
    ),
    "complex_tensor": (lambda: quantize(X.to(torch.complex64), "int8"), "x is torch.complex64. Formats take"),
    "float8_tensor": (lambda: quantize(X.to(torch.float8_e4m3fn), "int8"), "x is torch.float8_e4m3fn. Formats take"),
    "block_size_0": (
        lambda: fake_quantize(X, "fp4_e2m1", block_size=0),
        "block_size 0 is not a whole number of at least 1",
    ),
    "block_size_float": (
        lambda: fake_quantize(X, "fp4_e2m1", block_size=cast(Any, 2.5)),
        "block_size 2.5 is not a whole number",
    ),
    "axis": (
        lambda: fake_quantize(X, "fp4_e2m1", axis=2),
        "axis 2 is out of range for a tensor of 2 dimensions. Give one from -2 to 1.",
    ),
    "idle_axis": (lambda: fake_quantize(X, "int8", axis=0), "axis 0 was given, but int8 has no blocks here"),
    "axis_float": (lambda: fake_quantize(X, "fp4_e2m1", axis=cast(Any, 1.0)), "axis is 1.0. Give one whole number."),
    "axis_tuple": (
        lambda: fake_quantize(X, "fp4_e2m1", axis=cast(Any, (0, 1))),
        "axis is (0, 1). Give one whole number.",
    ),
    "no_generator": (
        lambda: fake_quantize(X, "mxint8", rounding="stochastic"),
        "rounding 'stochastic' draws random numbers and no generator was given",
    ),
    "idle_generator": (
        lambda: fake_quantize(X, "mxint8", generator=torch.Generator()),
        "a generator was given, but rounding 'half_even' is not random",
    ),
    "idle_rule": (
        lambda: fake_quantize(X, "int8", scale_rule="ceil"),
        "scale_rule 'ceil' was given, but int8 has no power-of-two scale to choose",
    ),
    "idle_tensor_scale": (
        lambda: fake_quantize(X, "mxint8", tensor_scale=1.0),
        "tensor_scale was given, but mxint8 has no second scale",
    ),
    "bad_tensor_scale": (lambda: fake_quantize(X, "nvfp4", tensor_scale=0.0), "nvfp4 takes one finite number above 0"),
    "idle_block_size": (lambda: fake_quantize(X, "bf16", block_size=32), "bf16 is a cast without blocks"),
    "not_compiled": (
        lambda: fake_quantize(X, "int8", implementation="compiled"),
        "there is no compiled implementation of int8",
    ),
    "not_compiled_float64": (
        lambda: fake_quantize(X.double(), "mxint8", implementation="compiled"),
        "there is no compiled implementation for float64",
    ),
    "codes_not_compiled": (
        lambda: quantize(X, "mxint8", implementation="compiled"),
        "implementation 'compiled' is for fake_quantize only",
    ),
    "out": (lambda: fake_quantize(X, "mxint8", out=torch.empty(3)), "out is torch.float32 of shape (3,)"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_mistake_gets_one_clear_message(case: str) -> None:
    act, message = ERRORS[case]
    with pytest.raises(ValueError) as caught:  # noqa: PT011 the text is compared below
        act()
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_something_that_is_no_tensor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"x is a builtins\.list, expected a torch\.Tensor\. Convert it"):
        fake_quantize(cast(Any, [1.0]), "int8")
    array: Any = X.numpy()
    acts: list[Callable[[], object]] = [
        lambda: fake_quantize_integer(array),
        lambda: hadamard_transform(array),
        lambda: MinMaxObserver().update(array),
        lambda: fake_quantize(X, "int8", out=array),
    ]
    for act in acts:
        with pytest.raises(TypeError, match=r"x is a numpy\.ndarray, expected a torch\.Tensor"):
            act()
    with pytest.raises(TypeError, match=r"generator is a int, expected a torch\.Generator"):
        fake_quantize(X, "mxint8", rounding="stochastic", generator=cast(Any, 3))
    with pytest.raises(TypeError, match="tensor_scale is a str, expected a number"):
        fake_quantize(X, "nvfp4", tensor_scale=cast(Any, "a"))
    with pytest.raises(TypeError, match="parameters is a int, expected IntegerParameters"):
        fake_quantize_integer(X, parameters=cast(Any, 3))


# which implementation runs ------------------------------------------------------------------------------------


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_kernels", {})


@pytest.mark.usefixtures("nothing_compiled")
def test_torch_compiles_nothing_on_the_cpu_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LARGE", 1)
    for implementation in ("auto", "torch"):
        fake_quantize(torch.randn(64, 64), "fp6_e3m2", implementation=implementation)
    assert compiled._kernels == {}


@pytest.mark.usefixtures("nothing_compiled")
def test_one_kernel_serves_all_shapes_and_formats_do_not_exhaust_the_recompile_limit() -> None:
    for count in (1, 2, 3, 7, 64, 1000):
        x = torch.randn(count, 32)
        assert_same_bits(fake_quantize(x, "fp4_e2m1", implementation="compiled"), fake_quantize(x, "fp4_e2m1"))
    assert len(compiled._kernels) == 1


NO_COMPILER = """
    import torch, torch._inductor.config as inductor
    inductor.cpp.cxx = ("/nonexistent/g++",)
    inductor.force_disable_caches = True
    import probe
    x = torch.randn(64, 64)
    try:
        probe.fake_quantize(x, "fp8_e5m2", implementation="compiled")
    except RuntimeError as problem:
        assert "Use implementation='torch'" in str(problem), problem
        print("said so")
"""


def test_compilation_without_a_compiler_is_an_error_that_says_what_to_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(NO_COMPILER)], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "said so", done.stderr


def test_the_documentation_lists_every_option_with_its_default() -> None:
    parameters = inspect.signature(check_job).parameters
    for name in Options.__annotations__:
        assert f" {name}={parameters[name].default!r} ".replace("'", '"') in (fake_quantize.__doc__ or "")


def test_an_unknown_option_is_refused_with_the_nearest_name() -> None:
    options: dict[str, Any] = {"scale_rul": "ceil"}
    with pytest.raises(TypeError, match=r"unexpected keyword 'scale_rul'\. Did you mean 'scale_rule'\? Known: axis, "):
        fake_quantize(torch.ones(2), "fp4_e2m1", **options)


# analyze_underflow ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int8", "int4", "int2"])
def test_the_largest_value_of_a_dynamic_integer_grid_never_counts_as_overflow(name: str) -> None:
    for seed in range(30):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)) * 0.01
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UnderflowWarning)
            assert analyze_underflow(x, name).overflow == 0


def test_chunk_size_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(100, 96)
    expected = fake_quantize(x, "fp8_e4m3")
    monkeypatch.setattr(fast, "CHUNK", 64)
    assert_same_bits(fake_quantize(x, "fp8_e4m3", implementation="torch"), expected)


@pytest.mark.usefixtures("nothing_compiled")
def test_compiled_code_that_does_not_give_the_bits_of_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is wrong in a single subnormal only; and at every use, not only at the first."""
    real = fast.mx_values

    def flushed(x: Tensor, *rest: Any) -> Tensor:
        values = real(x, *rest)
        return torch.where(values.abs() == 2.0**-3, 0.0, values)

    monkeypatch.setattr(compiled, "mx_values", flushed)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"compiled kernel of fp4_e2m1 \(floor, half_even, blocks of 32, torch.fl"
        ):
            fake_quantize(torch.ones(4, 32), "fp4_e2m1", implementation="compiled")
