"""Faults of what lies outside the layers: the embedding, the final norm and the head."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from probe.numerics.grids import weight_on_grid
from tests.faults.breaking import Damage, Patient, recalled
from tests.faults.catalogue import FP4, FP8, INT8, NOT_FLOAT, UNKNOWN, VALUES, Fault

LLAMA_W, LLAMA_WA = "linear_w-fp8_e4m3", "linear_wa-int8"


def head(change: Callable[..., Tensor]) -> Damage:
    """The head is `change(real, module, hidden)`."""
    return lambda patient: recalled(patient.twin.lm_head, change)


def head_weight(change: Callable[[Tensor], Tensor]) -> Damage:
    """The head has a weight of its own, no longer that of the embedding."""

    def damage(patient: Patient) -> None:
        tied = patient.twin.lm_head.weight
        patient.twin.lm_head.weight = torch.nn.Parameter(change(tied.detach().clone()), requires_grad=False)

    return damage


def norm(change: Callable[..., Tensor]) -> Damage:
    return lambda patient: recalled(patient.final_norm, change)


def epsilon(value: float) -> Damage:
    return lambda patient: setattr(patient.final_norm, "variance_epsilon", value)


def gamma(change: Callable[[Tensor], Tensor]) -> Damage:
    return lambda patient: patient.final_norm.weight.copy_(change(patient.final_norm.weight.clone()))


def embedding(change: Callable[..., Tensor]) -> Damage:
    return lambda patient: recalled(patient.twin.get_input_embeddings(), change)


def embedding_weight(change: Callable[[Tensor], Tensor]) -> Damage:
    """The embedding has a table of its own, no longer that of the head."""

    def damage(patient: Patient) -> None:
        table = patient.twin.get_input_embeddings()
        table.weight = torch.nn.Parameter(change(table.weight.detach().clone()), requires_grad=False)

    return damage


def head_in(dtype: torch.dtype) -> Callable[..., Tensor]:
    return lambda real, module, x: functional.linear(x.to(dtype), module.weight.to(dtype)).float()


def capped(real: Any, module: Any, x: Tensor) -> Tensor:
    """Soft-capped logits, as another family of models has them."""
    made: Tensor = 30.0 * torch.tanh(real(x) / 30.0)
    return made


def shards_swapped(real: Any, module: Any, x: Tensor) -> Tensor:
    """Two shards of the vocabulary, gathered in the wrong order."""
    made: Tensor = real(x)
    return made.roll(made.shape[-1] // 2, -1)


def last_token_late(real: Any, module: Any, x: Tensor) -> Tensor:
    """The head sees the hidden state of the token before."""
    made: Tensor = real(x.roll(1, 1))
    return made


def swapped_rows(w: Tensor) -> Tensor:
    w[[101, 116]] = w[[116, 101]]
    return w


def lost_row(w: Tensor) -> Tensor:
    w[32] = 0
    return w


def one_value(w: Tensor) -> Tensor:
    w[101, 7] *= 1.001
    return w


def norm_in_bf16(real: Any, module: Any, x: Tensor) -> Tensor:
    made: Tensor = real(x.bfloat16()).float()
    return made


def centred(real: Any, module: Any, x: Tensor) -> Tensor:
    """LayerNorm in the place of RMSNorm."""
    made: Tensor = real(x - x.mean(-1, keepdim=True))
    return made


def skipped(real: Any, module: Any, x: Tensor) -> Tensor:
    return x


def one_on(real: Any, module: Any, tokens: Tensor) -> Tensor:
    """Token ids are one too large, as with an added padding token."""
    made: Tensor = real((tokens + 1) % 256)
    return made


def first_token_lost(real: Any, module: Any, tokens: Tensor) -> Tensor:
    made: Tensor = real(tokens)
    made[:, 0] = 0
    return made


def sample_twice(real: Any, module: Any, tokens: Tensor) -> Tensor:
    """The quantized model runs on the first sample twice, and never on the second."""
    made: Tensor = real(torch.cat([tokens[:1], tokens[:1], tokens[2:]]) if tokens.shape[0] > 1 else tokens)
    return made


def outside(name: str, recipe: str, case: str, damage: Damage, cause: str = UNKNOWN) -> Fault:
    model = "tiny-llama" if recipe.startswith("linear") else "tiny-mamba"
    return Fault(name, recipe, damage, cause, (*NOT_FLOAT, *VALUES), model=model, case=case)


HEAD = (
    outside("head in bf16", INT8, "head", head(head_in(torch.bfloat16)), "head; computed in bfloat16"),
    outside("head in bf16, llama", LLAMA_WA, "head", head(head_in(torch.bfloat16)), "head; computed in bfloat16"),
    outside("head in fp16", FP8, "head", head(head_in(torch.float16)), "head; computed in float16"),
    outside("head + 1 %", FP4, "head", head_weight(lambda w: 1.01 * w), "head; weight: the scale is off by +1.00%"),
    outside(
        "head: two rows swapped",
        LLAMA_W,
        "head",
        head_weight(swapped_rows),
        "head; weight: rows 101 and 116 are swapped",
    ),
    outside("head: one row lost", INT8, "head", head_weight(lost_row), "head; weight: only row 32: gives only zeros"),
    outside(
        "head: one value + 0.1 %",
        FP8,
        "head",
        head_weight(one_value),
        "head; weight: one value, at [101, 7]: # instead of #",
    ),
    outside(
        "head on int8",
        LLAMA_WA,
        "head",
        head_weight(lambda w: weight_on_grid(w, "int8")),
        "head; weight: put on the grid of int8",
    ),
    outside(
        "head: logits capped at 30",
        INT8,
        "head",
        head(capped),
        "head; no known cause: #% of the values differ, by # of the rms",
    ),
    outside(
        "head: shards swapped", LLAMA_W, "head", head(shards_swapped), "head; channels are permuted: shifted by -128"
    ),
    outside("head one token late", FP8, "head", head(last_token_late), "head; it is one token late"),
)
NORM = (
    outside("final norm eps 1e-3", INT8, "norm", epsilon(1e-3), "norm; eps 0.001 instead of 1e-05"),
    outside("final norm eps 1e-3, llama", LLAMA_W, "norm", epsilon(1e-3), "norm; eps 0.001 instead of 1e-06"),
    outside("final norm eps 1e-6", FP8, "norm", epsilon(1e-6), "norm; variance_epsilon is 1e-06, not 1e-05"),
    outside(
        "final norm in bf16",
        LLAMA_WA,
        "norm",
        norm(norm_in_bf16),
        "norm; computed in bfloat16, gamma applied in float32",
    ),
    outside("final norm subtracts the mean", FP4, "norm", norm(centred), "norm; the mean is subtracted first"),
    outside("final norm skipped", INT8, "norm", norm(skipped), "norm; the norm is left out"),
    outside(
        "final norm: 1 + gamma",
        LLAMA_W,
        "norm",
        gamma(lambda w: 1 + w),
        "norm; weight: a constant, +1, is added to every value",
    ),
    outside(
        "final norm on a grid",
        INT8,
        "norm",
        gamma(lambda w: weight_on_grid(w, "fp4_e2m1")),
        "norm; weight: put on the grid of fp4_e2m1",
    ),
)
EMBEDDING = (
    outside(
        "embedding in bf16",
        INT8,
        "embedding",
        embedding(lambda real, module, x: real(x).bfloat16().float()),
        "embedding; rounded to bfloat16",
    ),
    outside(
        "embedding on int8",
        LLAMA_WA,
        "embedding",
        embedding_weight(lambda w: weight_on_grid(w, "int8")),
        "embedding; weight: put on the grid of int8",
    ),
    outside(
        "embedding: two rows swapped",
        FP8,
        "embedding",
        embedding_weight(swapped_rows),
        "embedding; weight: rows 101 and 116 are swapped",
    ),
    outside(
        "embedding times sqrt(d)",
        LLAMA_W,
        "embedding",
        embedding(lambda real, module, x: real(x) * 128**0.5),
        "embedding; the scale is off by a factor of 11.31",
    ),
    outside(
        "embedding: token ids one on", FP4, "embedding", embedding(one_on), "embedding; other tokens: ids are off by +1"
    ),
    outside(
        "embedding: first token lost",
        LLAMA_WA,
        "embedding",
        embedding(first_token_lost),
        "embedding; only token 0: gives only zeros",
    ),
    outside(
        "a sample evaluated twice, quantized only",
        INT8,
        "embedding",
        embedding(sample_twice),
        "embedding; other tokens: sample 1 is sample 0",
    ),
)
