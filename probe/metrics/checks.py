"""What an accumulator is given: pairs of one shape, others of its kind, and something at all."""

from torch import Tensor


def check_pair(output: Tensor, reference: Tensor, *, names: tuple[str, str]) -> None:
    """Floats of one shape."""
    for name, x in zip(names, (output, reference), strict=True):
        if not x.is_floating_point():
            raise ValueError(f"{name} is {x.dtype}. Only floats are compared. Convert first, e.g. {name}.float().")
    if output.shape != reference.shape:
        raise ValueError(
            f"{names[0]} has shape {list(output.shape)} and {names[1]} {list(reference.shape)}. "
            "They are compared element by element and never broadcast or cropped: give tensors of one shape."
        )


def check_kind(into: object, other: object) -> None:
    """Accumulators of one kind."""
    if type(other) is not type(into):
        raise ValueError(f"cannot merge {other!r} into {into!r}. Merge accumulators of one kind.")


def check_seen(accumulator: object, seen: int) -> None:
    """Something was seen."""
    if not seen:
        raise ValueError(f"{accumulator!r} has seen nothing, so it has no metrics. Call update(...) with data first.")
