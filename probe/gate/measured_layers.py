"""A layer from its measurements: the figures and golden values of it, and the flaws that no baseline excuses."""

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import Tensor

from probe.gate.cases import Points, Verdict
from probe.gate.golden_values import Golden
from probe.gate.path_figures import PathFigures
from probe.gate.tolerances import OF_VALUES, RULES
from probe.metrics import Comparison, Metrics
from probe.running.coverage import rounding_bound
from probe.running.measurement import application_problem
from probe.running.modes import find_mode
from probe.running.outputs import OutputComparison
from probe.running.recipes import Recipe
from probe.running.reference import Reference
from probe.words import OUTPUT

#: The stored figures of each group: those with a rule, except the comparisons of golden values. Rmse, psnr, sqnr and
#: the relative errors follow from mse, mae and the reference, so they have no rule.
FIGURES = {
    group: [name.partition(".")[2] for name in RULES if name.startswith(f"{group}.") and not name.endswith(OF_VALUES)]
    for group in ("injected", "propagated", "logits", "output", "outside")
}


@dataclass(frozen=True)
class Flaw:
    """Something that is wrong whatever the baseline says."""

    verdict: Verdict
    message: str
    details: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Observation:
    """One layer of a recipe: figures by name, golden values by group, and how many elements they stand for."""

    figures: dict[str, float | None]
    values: dict[str, tuple[float, ...]]
    counts: dict[str, int]
    points: Points = field(default_factory=Points)
    flaws: tuple[Flaw, ...] = ()
    weights: str = ""  # how much of the whole model is on a grid, in a line
    digests: dict[str, str] = field(default_factory=dict)  # of exact tensors: corners.NAME, weights.NAME
    units: dict[str, float] = field(default_factory=dict)  # of distances, by group, where the figures do not tell it
    path: PathFigures | None = None  # of the case of a path: more about it, for the cause


class Stream:
    """The accumulators of one layer in one measurement."""

    def __init__(self, count: int, *, percentiles: bool = True) -> None:
        self.comparison = Comparison(percentiles=percentiles)
        self.golden = Golden(count)

    def take(self, output: Tensor, expected: Tensor) -> None:
        """Append a batch."""
        self.comparison.update(output, expected)
        self.golden.update(output, expected)


#: The figures of the next token, by that of the same bits for every token.
IN_BYTES = {"bits_per_byte": "bits_per_token", "change_in_bits_per_byte": "change_in_bits"}


class OutputStream(Stream):
    """The accumulators of the whole model's output, which has the figures of its kind."""

    def __init__(self, reference: Reference) -> None:
        super().__init__(sum(batch.numel() for batch in reference.outputs), percentiles=False)
        self.of_kind = OutputComparison(reference.kind)
        self.comparison = self.of_kind.values
        self._given = iter(reference.batches)

    def take(self, output: Tensor, expected: Tensor) -> None:
        """Append a batch."""
        super().take(output, expected)
        self.of_kind.update_kind(output, expected, next(self._given))

    def observation(self, bytes_per_token: float | None, *, missing: str) -> Observation:
        """The figures of the whole model; `missing` says why there are none."""
        kind, golden = self.of_kind.kind, self.golden
        if not golden.seen:
            what = "is no output" if kind.label == OUTPUT else "are no logits"
            return Observation({}, {}, {}, flaws=(Flaw("uncovered", f"there {what}: {missing}"),))
        metrics = self.of_kind.metrics()
        known = metrics.as_dict()
        if kind.has_next_token:
            for name, bits in IN_BYTES.items():
                known[name] = None if known[bits] is None or not bytes_per_token else known[bits] / bytes_per_token
        figures = {f"{kind.label}.{name}": known[name] for name in FIGURES[kind.label] if name in known}
        flaws = tuple(not_finite(kind.label, kind.label, metrics.values))
        return Observation(figures, {kind.label: golden.values()}, {kind.label: golden.count}, golden.points(), flaws)


def layer_observation(
    label: str,
    recipe: Recipe,
    reference: Reference,
    streams: dict[str, Stream],
    strays: dict[str, str],
    declared: Collection[str],
    *,
    missing: str,
) -> Observation:
    """A layer from its measurements; the injected one, if there is one, shows whether the recipe was applied."""
    judged = "injected" if "injected" in streams else "propagated"
    figures: dict[str, float | None] = {}
    values: dict[str, tuple[float, ...]] = {}
    counts: dict[str, int] = {}
    flaws: list[Flaw] = []
    for kind, stream in streams.items():
        if not stream.golden.seen:
            flaws.append(Flaw("uncovered", f"{label} gave nothing in the {kind} run: {missing}"))
            continue
        metrics = stream.comparison.metrics()
        figures |= {f"{kind}.{name}": getattr(metrics, name) for name in FIGURES[kind]}
        values[kind], counts[kind] = stream.golden.values(), stream.golden.count
        flaws += not_finite(label, kind, metrics)
        if kind == judged:
            flaws += _not_applied(label, recipe, reference, metrics, strays, declared, is_injected=kind == "injected")
    return Observation(figures, values, counts, streams[judged].golden.points(), tuple(flaws))


def not_finite(label: str, kind: str, metrics: Metrics) -> list[Flaw]:
    """A flaw if there are NaN or Inf that the reference has not."""
    if metrics.first_nonfinite is None:
        return []
    bad = metrics.nan_output + metrics.inf_output - metrics.nan_reference - metrics.inf_reference
    return [
        Flaw(
            "not finite",
            f"{kind}: {metrics.nan_output} NaN and {metrics.inf_output} Inf among the {metrics.count} values of "
            f"{label}, where the reference has {metrics.nan_reference + metrics.inf_reference}; "
            f"the first at index {metrics.first_nonfinite}.",
            (f"{bad} values are not finite though the reference is",),
        )
    ]


def _not_applied(
    label: str,
    recipe: Recipe,
    reference: Reference,
    metrics: Metrics,
    strays: dict[str, str],
    declared: Collection[str],
    *,
    is_injected: bool,
) -> list[Flaw]:
    """A layer that the recipe left as it was; of a layer that is declared float, whether it changed.

    A recording has no injected run, so a layer that is declared float shows the errors of the layers before it.
    """
    is_declared = label in declared
    if find_mode(recipe.mode).is_reference or (is_declared and not is_injected):
        return []
    module = reference.modules[label]
    inside = [text for name, text in strays.items() if name.startswith(f"{module}.")]
    if problem := application_problem(metrics, is_declared_float=is_declared):
        if is_declared:
            return [Flaw("not float", f"{label} of {recipe} is {problem}.")]
        return [Flaw("not applied", f"{recipe} left {label} as it was: {problem}.")]
    if is_declared:
        return []
    if inside:
        return [Flaw("not applied", f"{recipe} was not applied to all of {label}: {inside[0]}.", tuple(inside[1:4]))]
    bound = rounding_bound(recipe, _change(reference, label))
    if metrics.mse is not None and metrics.mse < bound:
        return [
            Flaw(
                "not applied",
                f"the error of {label} is below what rounding to {recipe.format or recipe.mode} must cause: "
                f"mse {metrics.mse:.3g}, at least {bound:.3g}.",
            )
        ]
    return []


def _change(reference: Reference, label: str) -> float:
    """Mean square of what the float layer adds to its input; of its output where the shapes differ."""
    squares = count = 0.0
    for given, made in zip(reference.tensors[f"{label}.input"], reference.tensors[f"{label}.injected"], strict=True):
        added = made.float() - given.float() if made.shape == given.shape else made.float()
        squares += float(added.double().square().sum())
        count += added.numel()
    return squares / count
