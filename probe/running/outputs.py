"""The output of a whole model against that of the reference, with the figures that fit its kind."""

from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from probe.data.calls import Batch
from probe.metrics import (
    Comparison,
    EmbeddingComparison,
    EmbeddingMetrics,
    LogitComparison,
    LogitMetrics,
    Metrics,
)
from probe.metrics.comparison import check_kind
from probe.models.outputs import OutputKind, real_tokens, target_tokens


@dataclass(frozen=True, eq=True)
class OutputMetrics:
    """The figures of an output: always those of its values, the others where its kind has them."""

    kind: OutputKind
    values: Metrics
    classes: LogitMetrics | None = None
    embeddings: EmbeddingMetrics | None = None

    def as_dict(self) -> dict[str, Any]:
        """All figures by name; of two with one name, that of the kind."""
        more = [part.as_dict() for part in (self.classes, self.embeddings) if part is not None]
        return {"kind": self.kind.name, **self.values.as_dict(), **{k: v for part in more for k, v in part.items()}}


class OutputComparison:
    """Gathers the `OutputMetrics` of a model, batch by batch."""

    def __init__(self, kind: OutputKind, *, percentiles: bool = False) -> None:
        self.kind = kind
        self.values = Comparison(percentiles=percentiles)
        self.classes = LogitComparison() if kind.has_classes else None
        self.embeddings = EmbeddingComparison() if kind.has_embeddings else None

    def update(self, output: Tensor, expected: Tensor, batch: Batch) -> None:
        """Append a batch, with what the model was given."""
        self.values.update(output, expected)
        self.update_kind(output, expected, batch)

    def update_kind(self, output: Tensor, expected: Tensor, batch: Batch) -> None:
        """Append a batch to the figures of the kind alone."""
        if self.classes is not None:
            (found, targets), (wanted, _) = (self.predictions(one, batch) for one in (output, expected))
            self.classes.update(found, wanted, targets)
        if self.embeddings is not None:
            self.embeddings.update(*(sample_vectors(one, batch) for one in (output, expected)))

    def merge(self, other: "OutputComparison") -> Self:
        """Append the whole stream of `other`, which stays as it is; returns itself."""
        check_kind(self, other)
        self.values.merge(other.values)
        if self.classes is not None and other.classes is not None:
            self.classes.merge(other.classes)
        if self.embeddings is not None and other.embeddings is not None:
            self.embeddings.merge(other.embeddings)
        return self

    def predictions(self, output: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Those scores that a next token follows, and that token; of other kinds everything, and None."""
        if not self.kind.has_next_token:
            return output, None
        tokens = target_tokens(batch)
        assert tokens is not None
        return output[:, :-1], tokens[:, 1:].cpu()

    def metrics(self) -> OutputMetrics:
        """The figures so far."""
        classes, embeddings = self.classes, self.embeddings
        return OutputMetrics(
            self.kind,
            self.values.metrics(),
            None if classes is None else classes.metrics(),
            None if embeddings is None else embeddings.metrics(),
        )


def sample_vectors(output: Tensor, batch: Batch) -> Tensor:
    """One vector for every sample: [samples, channels] itself; of [samples, tokens, channels], the mean of the tokens
    that are no padding."""
    if output.dim() == 2:
        return output
    real = real_tokens(batch)
    if real is None or real.shape != output.shape[:2]:
        return output.double().mean(1)
    weight = real.to(output.device).double()[:, :, None]
    return (output.double() * weight).sum(1) / weight.sum(1).clamp(min=1)
