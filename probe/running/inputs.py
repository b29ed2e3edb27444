"""What a model is given: text as tokens, pictures and sounds through its processor, a user's function, or noise."""

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probe.data.calls import Batch, Call, as_call, call_of, input_fingerprint, split_rows
from probe.data.media import PICTURES, SOUNDS, is_folder, media_files, processed, processor_of
from probe.data.samples import TextSamples
from probe.data.synthetic import synthetic
from probe.data.texts import TEXTS
from probe.data.tokenizers import text_config
from probe.models.factories import called, function_named
from probe.models.loading import Loaded
from probe.models.positions import check_positions
from probe.settings import FUNCTION

#: What says how to give other inputs.
NEXT = 'Give them with a function: inputs = "package.module:function" (--inputs).'


@dataclass(frozen=True, eq=False)
class Inputs:
    """The batches of a run, and where they come from, in words. `notes` are for the user."""

    batches: list[Batch]
    about: str
    size: str  # how much, shorter: 8 x 256
    notes: tuple[str, ...] = ()

    @property
    def samples(self) -> int:
        """How many there are."""
        return sum(map(len, self.batches))


@dataclass(frozen=True)
class InputKind:
    """The main argument of a model that does not read tokens: what files it is made of, and its shape."""

    name: str  # as transformers calls it
    what: str  # pictures or sounds
    suffixes: tuple[str, ...]
    shape: Callable[[Any], tuple[int, ...] | None]  # of a sample, from the configuration


def _picture_shape(config: Any) -> tuple[int, ...] | None:
    size = getattr(config, "image_size", None)
    sides = (size, size) if isinstance(size, int) else tuple(size or ())
    return (int(getattr(config, "num_channels", 3)), *map(int, sides)) if len(sides) == 2 else None


def _spectrum_shape(config: Any) -> tuple[int, ...] | None:
    bins, positions = (getattr(config, name, None) for name in ("num_mel_bins", "max_source_positions"))
    return (bins, 2 * positions) if isinstance(bins, int) and isinstance(positions, int) else None


def _wave_shape(config: Any) -> tuple[int, ...] | None:
    """A spectrogram where the configuration states one; else a second of sound."""
    length, bins = (getattr(config, name, None) for name in ("max_length", "num_mel_bins"))
    return (length, bins) if isinstance(length, int) and isinstance(bins, int) else (16_000,)


INPUT_KINDS = {
    row.name: row
    for row in (
        InputKind("pixel_values", "pictures", PICTURES, _picture_shape),
        InputKind("input_features", "sounds", SOUNDS, _spectrum_shape),
        InputKind("input_values", "sounds", SOUNDS, _wave_shape),
    )
}


def input_kind(model: nn.Module) -> InputKind | None:
    """What the model reads; None: tokens."""
    return INPUT_KINDS.get(str(getattr(model, "main_input_name", "")))


def is_encoder_decoder(model: nn.Module) -> bool:
    """Whether the model reads its targets too, `decoder_input_ids`."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def check_samples(*requests: TextSamples) -> None:
    """Refuse what is wrong whatever the model is: sizes below 1, a text or a function that is not there."""
    for one in requests:
        if FUNCTION.fullmatch(one.source):
            _function(one.source)
        elif not is_folder(one.source):
            one.check()


def check_evaluated(wanted: TextSamples) -> None:
    """Refuse samples of a text in which no token has a next one."""
    if wanted.seqlen < 2 and not (FUNCTION.fullmatch(wanted.source) or is_folder(wanted.source)):
        raise ValueError(f"seqlen is {wanted.seqlen}; expected at least 2, a token and the next one.")


def calibrating(evaluated: TextSamples, calibrated: TextSamples) -> TextSamples:
    """What scales are taken from: where the model is given a folder or a function, that, unless another is named."""
    is_text = not (FUNCTION.fullmatch(evaluated.source) or is_folder(evaluated.source))
    is_default = calibrated.source in TEXTS
    return calibrated if is_text or not is_default else evaluated


def input_batches(loaded: Loaded, wanted: TextSamples, *, key: str = "seqlen") -> Inputs:
    """The batches that `wanted` names, for this model; everything that does not fit is a ValueError.

    `key` is what the user calls `seqlen`.
    """
    if FUNCTION.fullmatch(wanted.source):
        return _from_function(wanted)
    model, kind = loaded.model, input_kind(loaded.model)
    if kind is not None:
        return _with_targets(loaded, wanted, _from_media(loaded, wanted, kind), kind)
    if is_folder(wanted.source):
        raise ValueError(
            f"data {wanted.source!r} is a folder, and {type(model).__name__} reads tokens. Give a text: evaluation, "
            f"calibration or a .txt file. {NEXT}"
        )
    check_positions(model, wanted.seqlen, key=key)
    tokens, size = wanted.batches(loaded.tokenizer), f"{wanted.samples} x {wanted.seqlen}"
    also = ", the same as targets" if is_encoder_decoder(model) else ""
    return Inputs(with_decoder_tokens(model, tokens), f"{wanted}{also}", size)


def with_decoder_tokens(model: nn.Module, tokens: Iterable[Tensor]) -> list[Batch]:
    """The tokens; for an encoder-decoder, with the same as what its decoder is to predict."""
    if not is_encoder_decoder(model):
        return list(tokens)
    return [Call(kwargs={"input_ids": one, "decoder_input_ids": decoder_tokens(model, one)}) for one in tokens]


def decoder_tokens(model: nn.Module, tokens: Tensor) -> Tensor:
    """The tokens as the decoder reads them to predict them: behind its start token, without the last one."""
    start = getattr(text_config(model), "decoder_start_token_id", None)
    if start is None:
        start = getattr(getattr(model, "config", None), "decoder_start_token_id", None)
    return tokens if start is None else torch.cat([torch.full_like(tokens[:, :1], int(start)), tokens[:, :-1]], 1)


# ------------------------------------------------------------------------------------------- pictures and sounds


def _from_media(loaded: Loaded, wanted: TextSamples, kind: InputKind) -> Inputs:
    model = loaded.model
    if is_folder(wanted.source):
        folder = Path(os.path.expanduser(wanted.source))
        files = media_files(folder, kind.suffixes, samples=wanted.samples)
        processor = processor_of(loaded.folder, getattr(model, "processor", None), kind.what)
        made = processed(processor, files, kind.what, kind.name)
        about = f"{len(files)} {kind.what} of {wanted.source}"
        return Inputs(_split(made, kind, wanted), about, about)
    if wanted.source not in TEXTS:
        raise ValueError(
            f"data {wanted.source!r} is no folder, and {type(model).__name__} reads {kind.name}. Give a folder of "
            f"{kind.what} ({', '.join(kind.suffixes)}), or leave it out for synthetic ones. {NEXT}"
        )
    shape = kind.shape(getattr(model, "config", None))
    if shape is None:
        raise ValueError(f"the configuration of {type(model).__name__} does not state the size of {kind.name}. {NEXT}")
    made = synthetic(wanted.samples, shape, seed=list(TEXTS).index(wanted.source))
    size = " x ".join(map(str, shape))
    note = f"the input is synthetic, {kind.name} {size} of noise: it shows whether numbers moved, not how good they are"
    about = f"{wanted.samples} synthetic {kind.what}, {size}"
    return Inputs(_split(made, kind, wanted), about, about, (note,))


def _split(made: Tensor, kind: InputKind, wanted: TextSamples) -> list[Batch]:
    return split_rows([Call(kwargs={kind.name: made})], wanted.batch_size)


def _with_targets(loaded: Loaded, wanted: TextSamples, inputs: Inputs, kind: InputKind) -> Inputs:
    """With the built-in text as what the decoder reads, where there is a decoder."""
    model = loaded.model
    if not is_encoder_decoder(model):
        return inputs
    limit = min(wanted.seqlen, int(getattr(text_config(model), "max_target_positions", None) or wanted.seqlen))
    text = TextSamples("evaluation", inputs.samples, limit, wanted.batch_size)
    tokens = decoder_tokens(model, torch.cat(text.batches(loaded.tokenizer)))
    rows = iter(torch.split(tokens, [len(batch) for batch in inputs.batches]))
    batches: list[Batch] = [
        Call(kwargs={**batch.kwargs, "decoder_input_ids": next(rows)})
        for batch in inputs.batches
        if isinstance(batch, Call)
    ]
    about = f"{inputs.about}, {limit} tokens of the built-in text as targets"
    return Inputs(batches, about, f"{inputs.size}, targets of {limit}", inputs.notes)


# ------------------------------------------------------------------------------------------------- the user's own


def _function(name: str) -> Callable[[], Any]:
    return function_named("inputs", name, returns="a list of batches")


def _from_function(wanted: TextSamples) -> Inputs:
    """What a function returns, called twice: inputs that change from call to call cannot be compared."""
    name, function = wanted.source, _function(wanted.source)
    batches, again = (_returned(name, function) for _ in range(2))
    if input_fingerprint(batches) != input_fingerprint(again):
        raise ValueError(
            f"inputs {name!r} returned other values the second time, so that no two runs could be compared. Seed what "
            "is random in it."
        )
    about = f"{sum(map(len, batches))} samples of {name}"
    return Inputs(batches, about, about)


def _returned(name: str, function: Callable[[], Any]) -> list[Batch]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        given = called("inputs", name, function)
    if isinstance(given, Tensor | dict | str) or not isinstance(given, Iterable):
        raise ValueError(
            f"inputs {name!r} returned a {type(given).__name__}. Expected a list of batches: tensors, tuples or dicts."
        )
    found = [batch_of(one, where=f"inputs {name!r}, batch {index}") for index, one in enumerate(given)]
    for index, batch in enumerate(found):
        for argument, tensor in as_call(batch).tensors.items():
            if bool(tensor.isnan().any()):
                raise ValueError(
                    f"inputs {name!r}, batch {index}: argument {argument} has NaN, so nothing can be told."
                )
    if not found:
        raise ValueError(f"inputs {name!r} returned an empty list. Expected at least one batch.")
    return found


def batch_of(given: Any, *, where: str) -> Batch:
    """Token ids [samples, tokens] as they are, since text has figures and paths of its own; else a call."""
    if isinstance(given, Call):
        return given
    if isinstance(given, Tensor) and given.dim() == 2 and given.dtype in (torch.int64, torch.int32) and given.numel():
        return given.long()
    return call_of(given, where=where)
