"""Floats as integers inside of kernels: bit patterns, and the two 16-bit dtypes, which numba does not have."""

from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from probe.numerics.machine_code import kernel

_building: Any = import_module("numba.core.cgutils")  # without types

Bits = npt.NDArray[np.signedinteger]

#: Which bits an int16 array holds; wider arrays hold float32 or float64 by their width.
BFLOAT16, FLOAT16 = 0, 1

_FLOATS = {types.int32: (types.float32, ir.FloatType()), types.int64: (types.float64, ir.DoubleType())}
_WHOLE = {types.float32: (types.int32, ir.IntType(32)), types.float64: (types.int64, ir.IntType(64))}


def _reinterpret(kinds: dict[Any, Any], given: Any) -> Any:
    target, machine = kinds[given]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], machine)

    return target(given), generate


def _as_float(context: Any, bits: Any) -> Any:
    return _reinterpret(_FLOATS, bits)


def _as_bits(context: Any, value: Any) -> Any:
    return _reinterpret(_WHOLE, value)


#: The float32 of an int32, the float64 of an int64.
as_float: Any = intrinsic(_as_float)
#: The bits of a float32 or float64.
as_bits: Any = intrinsic(_as_bits)


def _fetch(context: Any, array: Any, index: Any) -> Any:
    signature = types.void(array, types.intp)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        place = builder.bitcast(builder.gep(data, [arguments[1]]), ir.IntType(8).as_pointer())
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        hint = _building.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(hint, [place, number(0), number(3), number(1)])  # to be read, into all caches, as data
        return context.get_dummy_value()

    return signature, generate


#: Have the processor fetch the line of an element, which may lie beyond the end of the array.
fetch: Any = intrinsic(_fetch)


@kernel
def widen(x: Bits, wide: Bits, kind: int) -> None:
    """The bits of float32 numbers from those of bfloat16 or float16."""
    if kind == BFLOAT16:
        for i in range(x.size):
            wide[i] = np.int32(np.int32(x[i]) << np.int32(16))
        return
    shift, infinite, subnormal = np.int32(112 << 23), np.int32(31 << 23), np.float32(2.0**-14)
    for i in range(x.size):
        size = np.int32((np.int32(x[i]) & np.int32(0x7FFF)) << np.int32(13))
        field = np.int32(size & infinite)
        normal = np.int32(size + shift)
        found = as_bits(as_float(np.int32(normal + np.int32(1 << 23))) - subnormal) if field == 0 else normal
        found = np.int32(normal + shift) if field == infinite else found
        wide[i] = np.int32(found | (np.int32(x[i]) & np.int32(-0x8000)) << np.int32(16))


@kernel
def shorten(wide: Bits, x: Bits, kind: int) -> None:
    """The bits of the nearest bfloat16 or float16, ties to even, from float32 numbers in its range, or NaN."""
    size_mask, infinite = np.int32(0x7FFFFFFF), np.int32(0x7F800000)
    if kind == BFLOAT16:
        for i in range(x.size):
            bits = wide[i]
            near = np.int32(bits + np.int32(0x7FFF) + (np.int32(bits >> np.int32(16)) & np.int32(1)))
            near = np.int32(bits | np.int32(0x400000)) if np.int32(bits & size_mask) > infinite else near
            x[i] = np.int16(near >> np.int32(16))
        return
    half, least, shift = np.float32(0.5), np.int32(113 << 23), np.int32((112 << 23) - 0xFFF)
    for i in range(x.size):
        bits = wide[i]
        size = np.int32(bits & size_mask)
        near = np.int32(np.int32(size - shift + (np.int32(size >> np.int32(13)) & np.int32(1))) >> np.int32(13))
        near = np.int32(as_bits(as_float(size) + half) - as_bits(half)) if size < least else near
        near = np.int32(0x7E00) if size > infinite else near
        x[i] = np.int16(near | np.int32(np.int32(bits >> np.int32(16)) & np.int32(-0x8000)))


def narrow(like: Bits, value: float, limit: float, odd: bool) -> int:
    """The bits, of the width of `like`, of a float64: clipped to the limit, then rounded to float32 for int32.

    With `odd`, float32 is only on the way to 16 bits: it is rounded toward zero, and its last bit is set where anything
    was cut off, as `rounding.narrow` does.
    """
    raise NotImplementedError("for kernels")


@overload(narrow)
def _narrow(like: Any, value: Any, limit: Any, odd: Any) -> Any:
    def double(like: Any, value: Any, limit: Any, odd: Any) -> Any:
        return as_bits(value)

    def single(like: Any, value: Any, limit: Any, odd: Any) -> Any:
        value = limit if value > limit else value
        value = -limit if value < -limit else value
        near = np.float32(value)
        bits = as_bits(near)
        if odd:
            bits = np.int32(bits - np.int32(1)) if abs(np.float64(near)) > abs(value) else bits
            bits = np.int32(bits | np.int32(1)) if np.float64(as_float(bits)) != value else bits
        return bits

    return double if like.dtype == types.int64 else single
