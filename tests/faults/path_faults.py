"""Faults of ways through the model other than one prefill of whole blocks: decode, odd lengths, batch 1, padding.

Each of them leaves a prefill of full length in batches as it is, to the bit.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from probe.models import mamba
from probe.models.mamba import SiteMixer
from probe.models.scans import CHUNK
from probe.numerics.grids import BlockGrid
from probe.numerics.quantize import fake_quantize
from tests.faults.breaking import Damage, Functional, Patient, holding, scanning, submodule
from tests.faults.catalogue import FP4, FP8, INT8, NVFP4, PATH, Fault

FAST, FAST8, LLAMA_W, LLAMA_WA = "mode_0-int8", "mode_0-fp8_e4m3", "linear_w-fp8_e4m3", "linear_wa-int8"
#: The text of the small gate has this many tokens a sample; that of the real one 256.
LENGTH = 64

When = Callable[[Tensor, Any, Tensor | None], bool]


def decoding(x: Tensor, cache: Any, mask: Tensor | None) -> bool:
    return cache is not None and x.shape[1] == 1


def prefilling(x: Tensor, cache: Any, mask: Tensor | None) -> bool:
    return cache is not None and x.shape[1] > 1


def alone(x: Tensor, cache: Any, mask: Tensor | None) -> bool:
    return x.shape[0] == 1


def odd(x: Tensor, cache: Any, mask: Tensor | None) -> bool:
    """Not a multiple of a chunk of the scan, and no decode."""
    return x.shape[1] > 1 and x.shape[1] % CHUNK != 0


def padded(x: Tensor, cache: Any, mask: Tensor | None) -> bool:
    return mask is not None and not bool(mask.bool().all())


def mixing(when: When, change: Callable[..., Tensor]) -> Damage:
    """In calls of the mixer for which `when` holds it is `change(real, mixer, x, cache, mask)`."""

    def call(real: Any, mixer: Any, x: Tensor, cache_params: Any = None, attention_mask: Any = None, **_: Any) -> Any:
        def run(x: Tensor = x, cache: Any = cache_params, mask: Any = attention_mask) -> Tensor:
            made: Tensor = real(x, cache_params=cache, attention_mask=mask)
            return made

        if not when(x, cache_params, attention_mask):
            return run()
        return change(run, mixer, x, cache_params, attention_mask)

    return submodule("mixer", _hidden_first(call))


def _hidden_first(call: Callable[..., Any]) -> Callable[..., Any]:
    """With the hidden states by position, whichever way they were given."""

    def positional(real: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
        given = args or (kwargs.pop("hidden_states"),)
        return call(real, module, *given, **kwargs)

    return positional


def inside(when: When, context: Callable[[SiteMixer], AbstractContextManager[Any]]) -> Damage:
    """In calls of the mixer for which `when` holds, it runs in a context."""

    def change(run: Any, mixer: SiteMixer, *_: Any) -> Tensor:
        with context(mixer):
            made: Tensor = run()
        return made

    return mixing(when, change)


def with_weight(when: When, name: str, make: Callable[[Tensor], Tensor]) -> Damage:
    return inside(when, lambda mixer: holding(mixer.get_parameter(name), make(mixer.get_parameter(name).detach())))


def with_names(when: When, **names: Any) -> Damage:
    """Names of probe.models.mamba mean something else."""
    return inside(when, lambda mixer: mock.patch.multiple(mamba, **names))


def with_grid(when: When, site: str, make: Callable[[Any], Any]) -> Damage:
    return inside(when, lambda mixer: mock.patch.object(mixer.site(site), "grid", make(mixer.site(site).grid)))


def states(cache: Any, mixer: Any, *, shift: int = 0) -> Tensor:
    """The carried state of a layer, [sequence, channel, state]; `shift` names another layer."""
    found: Tensor = cache.layers[mixer.layer_idx + shift].recurrent_states[0]
    return found


def window(cache: Any, mixer: Any) -> Tensor:
    """The last inputs of the convolution, [sequence, channel, tap]."""
    found: Tensor = cache.layers[mixer.layer_idx].conv_states[0]
    return found


def carried(change: Callable[[Tensor], Tensor]) -> Damage:
    """The state is changed before every step of decode."""

    def step(run: Any, mixer: Any, x: Tensor, cache: Any, mask: Any) -> Tensor:
        held = states(cache, mixer)
        held.copy_(change(held.clone()))
        made: Tensor = run()
        return made

    return mixing(decoding, step)


def neighbours_state(run: Any, mixer: Any, x: Tensor, cache: Any, mask: Any) -> Tensor:
    """The layer reads the state of the layer before it."""
    states(cache, mixer).copy_(states(cache, mixer, shift=-1))
    made: Tensor = run()
    return made


def stale_window(run: Any, mixer: Any, x: Tensor, cache: Any, mask: Any) -> Tensor:
    """The inputs of the convolution are not moved on."""
    before = window(cache, mixer).clone()
    made: Tensor = run()
    window(cache, mixer).copy_(before)
    return made


def lost_window(run: Any, mixer: Any, x: Tensor, cache: Any, mask: Any) -> Tensor:
    """Prefill leaves decode an empty window."""
    made: Tensor = run()
    window(cache, mixer).zero_()
    return made


def narrow_window(run: Any, mixer: Any, x: Tensor, cache: Any, mask: Any) -> Tensor:
    held = window(cache, mixer)
    held.copy_(held.bfloat16().float())
    made: Tensor = run()
    return made


def one_sequence_stuck(run: Any, mixer: Any, x: Tensor, cache: Any, mask: Any) -> Tensor:
    """The state of the last sequence is never written back."""
    before = states(cache, mixer)[-1].clone()
    made: Tensor = run()
    states(cache, mixer)[-1] = before
    return made


def forgetting_a_step(every: int) -> Damage:
    """The state is cleared at one step of decode in so many, as by a ring buffer that wraps around."""

    def damage(patient: Patient) -> None:
        count = [0]

        def step(run: Any, mixer: Any, x: Tensor, cache: Any, mask: Any) -> Tensor:
            count[0] += 1
            if count[0] % every == 0:
                states(cache, mixer).zero_()
            made: Tensor = run()
            return made

        mixing(decoding, step)(patient)

    return damage


def a_token_short(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    """The state that is handed on is that before the last token."""
    y, last = real(u, delta, A, B, C, state)
    if u.shape[1] == 1:
        return y, last
    return y, real(u[:, :-1], delta[:, :-1], A, B[:, :-1], C[:, :-1], state)[1]


def without_decay(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    """In decode the state does not decay."""
    return real(u, delta, A if u.shape[1] > 1 else torch.zeros_like(A), B, C, state)


def without_delta(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    """In decode the drive lacks delta: B u, not delta B u."""
    return real(u if u.shape[1] > 1 else u / delta, delta, A, B, C, state)


def tail_skipped(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    """A last chunk that is not whole is left zero."""
    whole = u.shape[1] // CHUNK * CHUNK
    if u.shape[1] == whole or u.shape[1] < CHUNK:
        return real(u, delta, A, B, C, state)
    y, last = real(u[:, :whole], delta[:, :whole], A, B[:, :whole], C[:, :whole], state)
    return functional.pad(y, (0, 0, 0, u.shape[1] - whole)), last


def tail_forgets(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
    """A last chunk that is not whole starts from a state of zero."""
    whole = u.shape[1] // CHUNK * CHUNK
    if u.shape[1] == whole or u.shape[1] < CHUNK:
        return real(u, delta, A, B, C, state)
    parts = [
        real(u[:, piece], delta[:, piece], A, B[:, piece], C[:, piece], carry)
        for piece, carry in ((slice(whole), state), (slice(whole, None), None))
    ]
    return torch.cat([y for y, _ in parts], 1), parts[-1][1]


def reset_at(length: int) -> Callable[..., Any]:
    """The state is cleared after so many tokens, whichever way they came."""

    def damage(patient: Patient) -> None:
        seen = [0]

        def scan(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
            start = seen[0] if state is not None else 0
            seen[0] = start + u.shape[1]
            cut = length - start
            if not 0 <= cut < u.shape[1]:
                return real(u, delta, A, B, C, state)
            parts, carry = [], state
            for piece in (slice(cut), slice(cut, None)):
                if u[:, piece].shape[1]:
                    y, carry = real(u[:, piece], delta[:, piece], A, B[:, piece], C[:, piece], carry)
                    parts.append(y)
                carry = None if piece.stop is not None else carry
            return torch.cat(parts, 1), carry

        scanning(scan)(patient)

    return damage


def in_bf16(name: str) -> Callable[[SiteMixer], AbstractContextManager[Any]]:
    """A linear of the mixer multiplies in bfloat16."""

    def context(mixer: SiteMixer) -> AbstractContextManager[Any]:
        linear: Any = mixer.get_submodule(name)
        bias = None if linear.bias is None else linear.bias.bfloat16()
        return mock.patch.object(
            linear, "forward", lambda x: functional.linear(x.bfloat16(), linear.weight.bfloat16(), bias).float()
        )

    return context


def tail_in_zeros(run: Any, mixer: Any, x: Tensor, cache: Any, mask: Any) -> Tensor:
    """The last tokens, which fill no tile of 8, are not computed."""
    made: Tensor = run()
    made[:, made.shape[1] // 8 * 8 :] = 0
    return made


def unmasked(run: Any, mixer: Any, x: Tensor, cache: Any, mask: Any) -> Tensor:
    made: Tensor = run(mask=None)
    return made


def late_mask(run: Any, mixer: Any, x: Tensor, cache: Any, mask: Any) -> Tensor:
    """The mask is that of the tokens one further on."""
    made: Tensor = run(mask=mask.roll(1, -1))
    return made


def first_mask(run: Any, mixer: Any, x: Tensor, cache: Any, mask: Any) -> Tensor:
    """Every sequence is given the mask of the first one."""
    made: Tensor = run(mask=mask[:1].expand_as(mask))
    return made


def masked_once(patient: Patient) -> None:
    """Padding is masked before in_proj, and not after the convolution, whose bias fills it again."""

    def context(mixer: SiteMixer) -> AbstractContextManager[Any]:
        real, count = mamba._masked, [0]

        def masked(x: Tensor, mask: Tensor | None) -> Tensor:
            count[0] += 1
            return real(x, mask) if count[0] % 2 else x

        return mock.patch.object(mamba, "_masked", masked)

    inside(padded, context)(patient)


def per_token(grid: Any) -> Callable[[Tensor], Tensor]:
    """Mode 3: one dynamic scale a token instead of one a sequence."""
    return lambda x: fake_quantize(x, grid.format, block_size=x.shape[-1])


def floored(grid: Any) -> Callable[[Tensor], Tensor]:
    """The kernel of one sequence rounds down."""
    return lambda x: torch.floor(x / grid.parameters.scale).clamp(-128, 127) * grid.parameters.scale


def blocks_of_64(grid: BlockGrid) -> Callable[[Tensor], Tensor]:
    return lambda x: fake_quantize(x, grid.format, block_size=64)


def float_weight(name: str) -> Damage:
    """Decode reads the weight as it was before it was put on the grid."""

    def damage(patient: Patient) -> None:
        healthy = SiteMixer(patient.stock.mixer)
        healthy.fold(patient.stock.norm.weight, rotate=True)
        with_weight(decoding, name, lambda w: healthy.get_parameter(name).detach())(patient)

    return damage


# ------------------------------------------------------------------------------------------------ attention


def attending(when: When, change: Callable[..., Any]) -> Damage:
    """In calls of the attention for which `when` holds it is `change(run, attention, x, cache, mask, kwargs)`."""

    def call(real: Any, attention: Any, x: Tensor, **kwargs: Any) -> Any:
        cache, mask = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        if not when(x, cache, mask):
            return real(x, **kwargs)
        return change(lambda **other: real(x, **{**kwargs, **other}), attention, x, cache, mask, kwargs)

    return submodule("self_attn", _hidden_first(call))


def caching(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], *, of: When = decoding) -> Damage:
    """What is in the cache is changed before a step: `change(keys, values)`, [sequence, head, token, channel]."""

    def step(run: Any, attention: Any, x: Tensor, cache: Any, mask: Any, kwargs: Any) -> Any:
        held = cache.layers[attention.layer_idx]
        held.keys, held.values = change(held.keys, held.values)
        return run()

    return attending(of, step)


def one_position_on(run: Any, attention: Any, x: Tensor, cache: Any, mask: Any, kwargs: Any) -> Any:
    """The rotary embedding of a decoded token is that of the next position."""
    cos, sin = kwargs["position_embeddings"]
    angle = 1.0 / 10000.0 ** (torch.arange(0, cos.shape[-1], 2).float() / cos.shape[-1])
    angle = torch.cat([angle, angle])
    moved = cos * angle.cos() - sin * angle.sin(), sin * angle.cos() + cos * angle.sin()
    return run(position_embeddings=moved)


def heads_swapped(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    return keys, values.flip(1)


def written_twice(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The write index is one short: a new token replaces the last one's key."""
    keys = keys.clone()
    keys[:, :, -1] = keys[:, :, -2]
    return keys, values


def oldest_lost(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    keys, values = keys.clone(), values.clone()
    keys[:, :, 0], values[:, :, 0] = 0, 0
    return keys, values


def unmasked_attention(run: Any, attention: Any, x: Tensor, cache: Any, mask: Any, kwargs: Any) -> Any:
    return run(attention_mask=None)


def uneven(x: Tensor, cache: Any, mask: Tensor | None) -> bool:
    """Some sequence has a mask of its own: padding, not only the future."""
    return mask is not None and mask.shape[0] > 1 and not bool((mask == mask[:1]).all())


def grid_off(when: When, name: str) -> Damage:
    """An input of a linear is left float in some calls."""

    def call(real: Any, module: Any, x: Tensor) -> Any:
        if not when(x, None, None):
            return real(x)
        with mock.patch.object(module.input, "grid", None):
            return real(x)

    return submodule(name, call)


def single_token(x: Tensor, cache: Any, mask: Tensor | None) -> bool:
    return x.shape[1] == 1


def rounded_rows(real: Any, module: Any, x: Tensor) -> Tensor:
    """A matrix-vector kernel, for one token, that accumulates in bfloat16."""
    made: Tensor = real(x)
    return made.bfloat16().float() if x.shape[1] == 1 else made


def path(name: str, recipe: str, case: str, damage: Damage, cause: str = "", **rest: Any) -> Fault:
    said = f"{case}, layer_{rest.get('layer', 1)}: {cause}"
    return Fault(name, recipe, damage, said, **{"verdicts": PATH, "case": case, **rest})


def _flip(w: Tensor) -> Tensor:
    return w.flip(-1)


def _zeroed(index: int, axis: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.index_fill(axis, torch.tensor([index]), 0.0)


sigmoid_gate = Functional(silu=torch.sigmoid)
no_softplus = Functional(softplus=lambda x: x.clamp(min=1e-4))

DECODE = (
    path(
        "decode: conv taps flipped",
        INT8,
        "decode",
        with_weight(decoding, "conv1d.weight", _flip),
        "conv1d and SiLU; only tokens 32 to 39: its taps are reversed",
    ),
    path(
        "decode: conv bias dropped",
        FP8,
        "decode",
        with_weight(decoding, "conv1d.bias", torch.zeros_like),
        "conv1d and SiLU; only tokens 32 to 39: the bias is left out",
    ),
    path(
        "decode: conv window not moved on",
        INT8,
        "decode",
        mixing(decoding, stale_window),
        "conv1d and SiLU; the window is not moved on",
        layer=2,
    ),
    path(
        "decode: conv window empty at first",
        FP8,
        "decode",
        mixing(prefilling, lost_window),
        "conv1d and SiLU; the window is empty after the prefill",
        layer=0,
    ),
    path(
        "decode: conv window in bf16",
        INT8,
        "decode",
        mixing(decoding, narrow_window),
        "conv1d and SiLU; the window is rounded to bfloat16",
    ),
    path(
        "decode: state not carried", INT8, "decode", carried(torch.zeros_like), "the scan; the state is not carried on"
    ),
    path(
        "decode: state in bf16",
        FP8,
        "decode",
        carried(lambda h: h.bfloat16().float()),
        "the scan; the carried state is rounded to bfloat16",
    ),
    path(
        "decode: state in fp16, fast scan",
        FAST8,
        "decode",
        carried(lambda h: h.half().float()),
        "the scan; the carried state is rounded to float16",
        layer=3,
    ),
    path(
        "decode: state of sequence 0 for all",
        INT8,
        "decode",
        carried(lambda h: h[:1].expand_as(h)),
        "the scan; every sequence is given the state of sequence 0",
    ),
    path(
        "decode: sequences of the state rolled",
        FAST,
        "decode",
        carried(lambda h: h.roll(1, 0)),
        "the scan; the states of the sequences are shifted by 1",
        layer=2,
    ),
    path(
        "decode: state of the layer before",
        INT8,
        "decode",
        mixing(decoding, neighbours_state),
        "the scan; only tokens 32 to 39: no known cause: #% of the values differ, by # of t...",
        layer=2,
    ),
    path(
        "decode: state one token short",
        FP8,
        "decode",
        scanning(a_token_short),
        "the carried state; after the prefill it is that before its last token",
    ),
    path(
        "decode: state does not decay",
        INT8,
        "decode",
        scanning(without_decay),
        "the scan; the state does not decay",
        layer=0,
    ),
    path(
        "decode: drive without delta",
        FAST,
        "decode",
        scanning(without_delta),
        "the scan; only tokens 32 to 39: delta is left out of the drive",
    ),
    path(
        "decode: one channel of the state lost",
        FP4,
        "decode",
        carried(_zeroed(17, 1)),
        "the scan; only channel 17 of tokens 32 to 39: the state is not carried on",
    ),
    path(
        "decode: one of 16 states lost",
        NVFP4,
        "decode",
        carried(_zeroed(3, 2)),
        "the scan; state 3 of 16 is not carried on",
    ),
    path(
        "decode: one sequence stuck",
        INT8,
        "decode",
        mixing(decoding, one_sequence_stuck),
        "the scan; only tokens 33 to 39 of sequence 1: the carried state is not written back",
    ),
    path(
        "decode: state lost every 8 steps",
        FAST,
        "decode",
        forgetting_a_step(8),
        "the scan; the state is lost at token 39",
    ),
    path(
        "decode: D u left out",
        INT8,
        "decode",
        with_weight(decoding, "D", torch.zeros_like),
        "D u, gate and rotation; only tokens 32 to 39: D u is left out",
        layer=3,
    ),
    path(
        "decode: dt bias twice",
        FP8,
        "decode",
        with_weight(decoding, "dt_proj.bias", lambda b: 2 * b),
        "the scan; only tokens 32 to 39: the bias of dt_proj is added twice",
    ),
    path(
        "decode: softplus left out",
        INT8,
        "decode",
        with_names(decoding, functional=no_softplus),
        "the scan; only tokens 32 to 39: softplus is replaced by ReLU",
    ),
    path(
        "decode: gate without z",
        FAST,
        "decode",
        with_names(decoding, functional=sigmoid_gate),
        "D u, gate and rotation; only tokens 32 to 39: the gate is sigmoid(z), not SiLU(z)",
    ),
    path(
        "decode: in_proj in bf16",
        FP8,
        "decode",
        inside(decoding, in_bf16("in_proj")),
        "in_proj; only tokens 32 to 39: computed in bfloat16, or its result is rounded to bfloat16",
    ),
    path(
        "decode: out_proj not quantized",
        INT8,
        "decode",
        float_weight("out_proj.weight"),
        "out_proj; only tokens 32 to 39: its weight is not quantized",
    ),
    path(
        "decode: site left float",
        INT8,
        "decode",
        with_grid(decoding, "out_proj.input", lambda grid: None),
        "site out_proj.input; only tokens 32 to 39: not quantized",
    ),
    path(
        "decode: blocks of 64",
        FP8,
        "decode",
        with_grid(decoding, "in_proj.input", blocks_of_64),
        "site in_proj.input; only token 38: blocks of 64 instead of 32",
    ),
    path(
        "decode: Hadamard left out",
        FP4,
        "decode",
        with_names(decoding, hadamard_transform=lambda x: x),
        "rotation before in_proj; only tokens 32 to 39: the Hadamard rotation is left out",
    ),
    path(
        "decode: out_proj scale + 1 %",
        INT8,
        "decode",
        with_weight(decoding, "out_proj.weight", lambda w: 1.01 * w),
        "out_proj; only tokens 32 to 39: the scale is off by +1.00%",
    ),
    path(
        "decode: rotary one position on",
        LLAMA_W,
        "decode",
        attending(decoding, one_position_on),
        "between self_attn.v_proj, as in the prefill, and self_attn.o_proj",
        model="tiny-llama",
    ),
    path(
        "decode: cache in bf16",
        LLAMA_W,
        "decode",
        caching(lambda k, v: (k.bfloat16().float(), v.bfloat16().float())),
        "between self_attn.v_proj, as in the prefill, and self_attn.o_proj",
        model="tiny-llama",
    ),
    path(
        "decode: heads of the cache swapped",
        LLAMA_WA,
        "decode",
        caching(heads_swapped),
        "between self_attn.v_proj, as in the prefill, and self_attn.o_proj",
        model="tiny-llama",
    ),
    path(
        "decode: key written one short",
        LLAMA_WA,
        "decode",
        caching(written_twice),
        "between self_attn.v_proj, as in the prefill, and self_attn.o_proj",
        model="tiny-llama",
        layer=2,
    ),
    path(
        "decode: oldest token lost",
        LLAMA_W,
        "decode",
        caching(oldest_lost),
        "between self_attn.v_proj, as in the prefill, and self_attn.o_proj",
        model="tiny-llama",
        layer=3,
    ),
    path(
        "decode: cache of sequence 0 for all",
        LLAMA_WA,
        "decode",
        caching(lambda k, v: (k, v[:1].expand_as(v).clone())),
        "between self_attn.v_proj, as in the prefill, and self_attn.o_proj; only sequence 1",
        model="tiny-llama",
    ),
    path(
        "decode: input left float",
        LLAMA_WA,
        "decode",
        grid_off(single_token, "mlp.down_proj"),
        "site mlp.down_proj.input; only tokens 32 to 39: not quantized",
        model="tiny-llama",
    ),
    path(
        "decode: matrix-vector sums in bf16",
        LLAMA_W,
        "decode",
        submodule("mlp.up_proj", rounded_rows),
        "mlp.up_proj; only tokens 32 to 39: its result is rounded to bfloat16",
        model="tiny-llama",
        layer=0,
    ),
)
SHAPES = (
    path("ragged: last partial chunk skipped", FAST, "ragged", scanning(tail_skipped), "the scan; it ends at token 64"),
    path(
        "ragged: last chunk forgets the state",
        FAST8,
        "ragged",
        scanning(tail_forgets),
        "the scan; the state is lost every 64 tokens, or at token 64",
        layer=2,
    ),
    path(
        "ragged: last tile not computed",
        FP8,
        "ragged",
        mixing(odd, tail_in_zeros),
        "out_proj; only tokens 88 to 92: gives only zeros",
    ),
    path("ragged: x_proj in bf16", INT8, "ragged", inside(odd, in_bf16("x_proj")), "x_proj; computed in bfloat16"),
    path(
        "ragged: dynamic scale per token",
        "mode_3-fp8_e4m3",
        "ragged",
        with_grid(odd, "conv1d.input", per_token),
        "site conv1d.input; one scale for each token",
    ),
    path(
        "ragged: conv bias dropped",
        FP4,
        "ragged",
        with_weight(odd, "conv1d.bias", torch.zeros_like),
        "conv1d and SiLU; the bias is left out",
        layer=3,
    ),
    path(
        "state reset at the length of the text",
        INT8,
        "ragged",
        reset_at(LENGTH),
        "the scan; the state is lost every 64 tokens, or at token 64",
    ),
    path(
        "batch 1: dynamic scale per token",
        "mode_3-int8",
        "batch_1",
        with_grid(alone, "conv1d.input", per_token),
        "site conv1d.input; one scale for each token",
    ),
    path(
        "batch 1: rounds down",
        INT8,
        "batch_1",
        with_grid(alone, "in_proj.output", floored),
        "site in_proj.output; rounding looks like floor, not nearest (mean error # steps)",
    ),
    path(
        "batch 1: in_proj in bf16",
        FP8,
        "batch_1",
        inside(alone, in_bf16("in_proj")),
        "in_proj; computed in bfloat16, or its result is rounded to bfloat16",
        layer=2,
    ),
    path(
        "batch 1: D u left out",
        FAST,
        "batch_1",
        with_weight(alone, "D", torch.zeros_like),
        "D u, gate and rotation; D u is left out",
    ),
    path(
        "batch 1: input left float",
        LLAMA_WA,
        "batch_1",
        grid_off(alone, "self_attn.o_proj"),
        "site self_attn.o_proj.input; not quantized",
        model="tiny-llama",
    ),
    path("padded: mask ignored", INT8, "padded", mixing(padded, unmasked), "conv1d and SiLU; it reads the padding"),
    path(
        "padded: mask ignored, fast scan",
        FAST8,
        "padded",
        mixing(padded, unmasked),
        "conv1d and SiLU; it reads the padding",
        layer=3,
    ),
    path("padded: masked before in_proj only", FP8, "padded", masked_once, "the scan; it reads the padding"),
    path(
        "padded: mask one token late",
        INT8,
        "padded",
        mixing(padded, late_mask),
        "rotation before in_proj; only token 0: masked, as padding is",
        layer=2,
    ),
    path(
        "padded: mask of the first sequence for all",
        FAST,
        "padded",
        mixing(padded, first_mask),
        "rotation before in_proj; only tokens 0 to 4 of sequence 1: masked, as padding is",
    ),
    path(
        "padded: mask ignored, attention",
        LLAMA_W,
        "padded",
        attending(uneven, unmasked_attention),
        "between self_attn.v_proj, as in the prefill, and self_attn.o_proj; only sequence 0",
        model="tiny-llama",
    ),
    path(
        "padded: mask ignored, attention, last layer",
        LLAMA_WA,
        "padded",
        attending(uneven, unmasked_attention),
        "between self_attn.v_proj, as in the prefill, and self_attn.o_proj; only sequence 0",
        model="tiny-llama",
        layer=3,
    ),
)
