"""Damages that show on one path only: in decode, beyond a length, at padding, at another batch size."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from probe.models.mamba import CHUNK, Grid
from probe.numerics.grids import SequenceGrid
from tests.faults.breaking import Damage, Patient, grid, scanning


def decoding(change: Callable[[Any, Callable[..., Any]], Callable[..., Any]], method: str = "forward") -> Damage:
    """Another method of the mixer, made from the real one: `change(mixer, real)`."""

    def damage(patient: Patient) -> None:
        mixer: Any = patient.mixer
        setattr(mixer, method, change(mixer, getattr(mixer, method)))

    return damage


def taps_flipped(mixer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    def convolve(x: Tensor, conv_state: Tensor | None, cache_params: Any) -> Tensor:
        if conv_state is None or x.shape[1] > 1:
            return real(x, conv_state, cache_params)
        weight = mixer.conv1d.weight
        kept = weight.clone()
        weight.copy_(weight.flip(-1))
        try:
            return real(x, conv_state, cache_params)
        finally:
            weight.copy_(kept)

    return convolve


def conv_state_shifted(mixer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    """The cache of the convolution is one token late."""

    def convolve(x: Tensor, conv_state: Tensor | None, cache_params: Any) -> Tensor:
        out = real(x, conv_state, cache_params)
        if conv_state is None and cache_params is not None:
            state = cache_params.get_conv_state(mixer.layer_idx, state_idx=0)
            state.copy_(state.roll(1, -1))
        return out

    return convolve


def state_kept(mixer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    """Decode does not update the state."""

    def forward(hidden_states: Tensor, cache_params: Any = None, **rest: Any) -> Tensor:
        if cache_params is None or hidden_states.shape[1] > 1:
            return real(hidden_states, cache_params=cache_params, **rest)
        state = cache_params.get_recurrent_state(mixer.layer_idx, state_idx=0)
        kept = state.clone()
        out = real(hidden_states, cache_params=cache_params, **rest)
        state.copy_(kept)
        return out

    return forward


def without_mask(mixer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    return lambda hidden_states, attention_mask=None, **rest: real(hidden_states, **rest)


def by_batch_size(mixer: Any, real: Callable[..., Any]) -> Callable[..., Any]:
    """One part in a hundred more for a row alone."""
    return lambda hidden_states, **rest: real(hidden_states, **rest) * (1.01 if len(hidden_states) == 1 else 1.0)


def reset_at(token: int) -> Damage:
    def scan(real: Any, u: Tensor, delta: Tensor, A: Tensor, B: Tensor, C: Tensor, state: Any) -> Any:
        if u.shape[1] <= token:
            return real(u, delta, A, B, C, state)
        first, _ = real(u[:, :token], delta[:, :token], A, B[:, :token], C[:, :token], state)
        then, last = real(u[:, token:], delta[:, token:], A, B[:, token:], C[:, token:], None)
        return torch.cat([first, then], 1), last

    return scanning(scan)


def partial_chunk_skipped(real: Any, *tensors: Any) -> Any:
    y, last = real(*tensors)
    rest = y.shape[1] % CHUNK if y.shape[1] > CHUNK else 0
    if rest:
        y[:, -rest:] = 0
    return y, last


def bf16_state(real: Any, *tensors: Any) -> Any:
    y, last = real(*tensors)
    return y, last.bfloat16().float() if y.shape[1] == 1 else last


def not_in_decode(real: Grid) -> Grid:
    return lambda x: x if x.shape[1] == 1 else real(x)


def per_batch(real: Any) -> Grid:
    assert isinstance(real, SequenceGrid)
    return lambda x: real(x.reshape(1, -1, x.shape[-1])).reshape(x.shape)


def attention(change: Callable[[dict[str, Any], Tensor], dict[str, Any]]) -> Damage:
    """Other arguments for the attention of the layer: `change(arguments, hidden_states)`."""

    def damage(patient: Patient) -> None:
        module: Any = patient.block.self_attn
        real = module.forward

        def forward(hidden_states: Tensor, **rest: Any) -> Any:
            return real(hidden_states, **change(rest, hidden_states))

        module.forward = forward

    return damage


def unrotated_in_decode(given: dict[str, Any], x: Tensor) -> dict[str, Any]:
    cos, sin = given["position_embeddings"]
    return {**given, "position_embeddings": (torch.ones_like(cos), torch.zeros_like(sin))} if x.shape[1] == 1 else given


def late_in_decode(given: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """The rotation of decoded tokens is that of the token after."""
    if x.shape[1] > 1:
        return given
    cos, sin = given["position_embeddings"]
    half = cos.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half) / half)
    step = torch.cat([rate, rate])
    turned = cos * step.cos() - sin * step.sin(), sin * step.cos() + cos * step.sin()
    return {**given, "position_embeddings": turned}


def no_mask(given: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """Padding is attended to; later tokens are not."""
    mask = given.get("attention_mask")
    if mask is None or mask.shape[-2] == 1:
        return given
    causal = torch.ones(mask.shape[-2:], dtype=torch.bool).tril().expand(mask.shape)
    given = dict(given)
    given["attention_mask"] = causal if mask.dtype == torch.bool else torch.where(causal, 0.0, -torch.inf).to(mask.dtype)
    return given


def cache_late(given: dict[str, Any], x: Tensor) -> dict[str, Any]:
    """The keys of the prefill are one token late in the cache."""
    if x.shape[1] == 1 and given.get("past_key_values") is not None:
        for layer in given["past_key_values"].layers[1:2]:
            if layer.keys is not None and not getattr(layer, "shifted", False):
                layer.keys, layer.shifted = layer.keys.roll(1, -2), True
    return given


SSM: dict[str, tuple[Damage, str]] = {
    "taps flipped": (decoding(taps_flipped, "_convolve"), "decode"),
    "conv state late": (decoding(conv_state_shifted, "_convolve"), "decode"),
    "state kept": (decoding(state_kept), "decode"),
    "state in bf16": (scanning(bf16_state), "decode"),
    "grid not in decode": (grid("in_proj.input", not_in_decode), "decode"),
    "mask ignored": (decoding(without_mask), "padded"),
    "by batch size": (decoding(by_batch_size), "batch_1"),
    "state reset": (reset_at(64), "ragged"),
    "partial chunk skipped": (scanning(partial_chunk_skipped), "ragged"),
    "scale per batch": (grid("conv1d.input", per_batch), "batch_1"),
}
ATTENTION: dict[str, tuple[Damage, str]] = {
    "unrotated in decode": (attention(unrotated_in_decode), "decode"),
    "rotation late": (attention(late_in_decode), "decode"),
    "cache late": (attention(cache_late), "decode"),
    "mask ignored": (attention(no_mask), "padded"),
}
