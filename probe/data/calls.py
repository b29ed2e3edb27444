"""Calls: what one forward of a model is given, where that is more than token ids."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

#: Arguments that are no tensors.
PLAIN = (type(None), bool, int, float, str)


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one forward: tensors and plain values, by place and by name.

    The samples are the first axis of the first tensor. A tensor of another length is not by sample: it is the same
    for all of them.
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments, those without a name by their place: "0", "1"."""
        return {**{str(place): value for place, value in enumerate(self.args)}, **self.kwargs}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors among the arguments."""
        return {name: value for name, value in self.arguments.items() if isinstance(value, Tensor)}

    @property
    def main(self) -> Tensor:
        """The first tensor."""
        return next(iter(self.tensors.values()))

    def __len__(self) -> int:
        return len(self.main)

    @property
    def shape(self) -> torch.Size:
        """That of the first tensor."""
        return self.main.shape

    @property
    def device(self) -> torch.device:
        """That of the first tensor."""
        return self.main.device

    def numel(self) -> int:
        """The size of the first tensor."""
        return self.main.numel()

    def to(self, device: Any) -> Self:
        """The call with its tensors on a device."""
        return self.each(lambda tensor: tensor.to(device))

    def each(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The call with every tensor changed."""

        def one(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        return type(self)(tuple(map(one, self.args)), {name: one(value) for name, value in self.kwargs.items()})

    def by_sample(self, change: Callable[[Tensor], Tensor]) -> Self:
        """The call with every tensor changed that has a row for each sample."""
        count = len(self)
        return self.each(lambda tensor: change(tensor) if tensor.dim() and len(tensor) == count else tensor)

    def rows(self, start: int, stop: int) -> Self:
        """The call for some of the samples."""
        return self.by_sample(lambda tensor: tensor[start:stop])

    def with_argument(self, name: str, value: Any) -> Self:
        """The call with another value of one argument, which it has."""
        if name in self.kwargs:
            return type(self)(self.args, {**self.kwargs, name: value})
        place = int(name)
        return type(self)((*self.args[:place], value, *self.args[place + 1 :]), self.kwargs)

    def __str__(self) -> str:
        shapes = {name: f"{list(one.shape)} of {one.dtype}".replace("torch.", "") for name, one in self.tensors.items()}
        return ", ".join(f"{name} {shape}" for name, shape in shapes.items())


#: What a forward is given: token ids [samples, tokens], or a call.
Batch = Tensor | Call


def as_call(batch: Batch) -> Call:
    """The call that gives a model a batch."""
    return batch if isinstance(batch, Call) else Call((batch,))


def call_of(given: Any, *, where: str) -> Call:
    """A tensor, a tuple (by place) or a mapping (by name) as a call; anything else is a ValueError."""
    call = (
        Call(kwargs=dict(given)) if isinstance(given, Mapping) else Call(tuple(given) if _is_list(given) else (given,))
    )
    for name, value in call.arguments.items():
        if not isinstance(value, (Tensor, *PLAIN)):
            raise ValueError(
                f"{where}: argument {name} is a {type(value).__name__}. Expected a tensor or a plain value (None, "
                "bool, int, float, str): one batch is a tensor, a tuple or a dict of them."
            )
    if not all(isinstance(name, str) for name in call.kwargs):
        raise ValueError(f"{where}: a dict names the arguments of the forward by text; it has {list(call.kwargs)!r}.")
    if not call.tensors or not call.main.dim() or not len(call):
        raise ValueError(f"{where} has no tensor with samples, [samples, ...]. Expected at least one sample.")
    return call


def _is_list(value: Any) -> bool:
    return isinstance(value, tuple | list)


def split_rows(batches: Sequence[Batch], size: int) -> list[Batch]:
    """The same samples in batches of at most `size`."""
    found: list[Batch] = []
    for batch in batches:
        for start in range(0, len(batch), size):
            stop = start + size
            found.append(batch.rows(start, stop) if isinstance(batch, Call) else batch[start:stop])
    return found


def shortened(batch: Batch, *, samples: int, tokens: int) -> Batch:
    """The first samples of a batch; token ids only so many of them."""
    return batch.rows(0, samples) if isinstance(batch, Call) else batch[:samples, :tokens]


def repeated(batch: Batch, times: int) -> Batch:
    """The samples of a batch, so many times."""
    if isinstance(batch, Call):
        return batch.by_sample(lambda tensor: torch.cat([tensor] * times))
    return torch.cat([batch] * times)


def input_fingerprint(batches: Iterable[Batch]) -> str:
    """The first 16 hex digits of sha256 over the samples in order, however they are batched.

    Of token ids each with its length; of calls, also their names, types and shapes, and the values that are no tensors.
    """
    digest = hashlib.sha256()
    for batch in batches:
        for row in range(len(batch)):
            if isinstance(batch, Call):
                _add_sample(digest, batch.rows(row, row + 1))
            else:
                digest.update(f"{len(batch[row])}\n".encode())
                digest.update(batch[row].cpu().numpy().astype("<i8").tobytes())
    return digest.hexdigest()[:16]


def _add_sample(digest: Any, sample: Call) -> None:
    for name, value in sorted(sample.arguments.items()):
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
            digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {value!r}\n".encode())
