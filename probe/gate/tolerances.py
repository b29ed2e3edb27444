"""How far a figure may be from its baseline, as a table.

    tolerance = max(min(MULTIPLE * spread, MOST * floor), floor)
    floor     = relative * |old| + of_error * rmse + of_rest * (1 - old) + absolute + one unit of the last stored digit

`spread` is what harmless changes did to the figure when the baseline was made. The floors stand for the harmless
changes that one machine cannot try, above all another instruction set. They were taken from runs of every recipe of
tiny-mamba and tiny-llama under ATEN_CPU_CAPABILITY=default and oneDNN off: the largest move seen there was 0.6 of its
tolerance, of most figures less than a tenth; docs/gate.md has more. A spread of more than MOST floors is no harmless
change's doing (of the shipped baselines the largest is 43): one that was edited by hand does not open the gate.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from probe.words import look_up

MULTIPLE = 4.0
MOST = 100.0
#: Float modes round every sum to their own dtype, so another order of sums moves them more.
FLOAT_FACTOR = 8.0
#: Significant digits that are stored.
DIGITS = 6
#: The error that counts as the own one of a layer that is float by declaration, as a part of the rms of its output:
#: far above what the order of sums does, and as much as a fine grid would cause.
OF_FLOAT = 1e-3


@dataclass(frozen=True)
class Rule:
    """The floor of one figure, and which way is worse: +1 when larger is, -1 when smaller is, 0 when neither.

    An exact figure has no tolerance at all.
    """

    relative: float = 0.0
    of_error: float = 0.0  # of the root of the group's mse: the recipe's own error
    of_rest: float = 0.0  # of what is missing to 1
    absolute: float = 0.0
    worse: int = 0
    multiple: float = MULTIPLE
    exact: bool = False  # a count: any change fails
    float_factor: float = FLOAT_FACTOR


#: The figures that a baseline keeps and how far each may move; those of layers are fields of `probe.metrics.Metrics`.
RULES: dict[str, Rule] = {
    "injected.mse": Rule(relative=7e-4, worse=1),
    "injected.mae": Rule(relative=5e-4, worse=1),
    "injected.max_abs": Rule(relative=1e-3, worse=1),
    "injected.correlation": Rule(of_rest=7e-4, worse=-1),
    "injected.cosine": Rule(of_rest=7e-4, worse=-1),
    **{f"injected.{name}": Rule(relative=1.5e-3, worse=1) for name in ("p50", "p90", "p95", "p99")},
    "injected.mean_difference": Rule(of_error=3e-4),
    "injected.mean_output": Rule(of_error=3e-4),
    "injected.std_output": Rule(of_error=3e-4),
    "injected.min_output": Rule(of_error=0.05),
    "injected.max_output": Rule(of_error=0.05),
    "injected.zeroed": Rule(absolute=3e-5, worse=1),
    "injected.saturated": Rule(absolute=3e-5, worse=1),
    "injected.distance": Rule(absolute=0.04),
    "injected.moved": Rule(absolute=0.08),
    "propagated.mse": Rule(relative=0.03, worse=1),
    "propagated.mae": Rule(relative=0.015, worse=1),
    "propagated.max_abs": Rule(relative=0.3, worse=1),
    "propagated.correlation": Rule(of_rest=0.03, worse=-1),
    "propagated.p99": Rule(relative=0.03, worse=1),
    "propagated.mean_difference": Rule(of_error=5e-3),
    "propagated.distance": Rule(absolute=0.6),
    "logits.mse": Rule(relative=0.05, worse=1),
    "logits.correlation": Rule(of_rest=0.05, worse=-1),
    "logits.kl": Rule(relative=0.12, worse=1),
    "logits.top1_agreement": Rule(absolute=0.015, worse=-1),
    "logits.bits_per_byte": Rule(relative=0.01, worse=1),
    "logits.change_in_bits_per_byte": Rule(absolute=0.01, worse=1),
    "logits.distance": Rule(absolute=0.6),
    "output.mse": Rule(relative=0.05, worse=1),
    "output.correlation": Rule(of_rest=0.05, worse=-1),
    "output.cosine": Rule(of_rest=0.05, worse=-1),
    "output.sample_cosine": Rule(of_rest=0.05, worse=-1),
    "output.lowest_sample_cosine": Rule(of_rest=0.3, worse=-1),
    "output.neighbour_agreement": Rule(absolute=0.015, worse=-1),
    "output.distance": Rule(absolute=0.6),
    "outside.mse": Rule(relative=7e-4, worse=1),
    "outside.max_abs": Rule(relative=1e-3, worse=1),
    "outside.correlation": Rule(of_rest=7e-4, worse=-1),
    "outside.distance": Rule(absolute=0.04),
    "weights.on_grid": Rule(exact=True),  # elements of the layer's weights; of the logits: of the whole model
    "weights.float": Rule(exact=True),
    "weights.changed": Rule(exact=True),  # tensors that have other bits than the stored ones, by their digests
    "corners.changed": Rule(exact=True),
    "corners.twins": Rule(exact=True, worse=1),  # sites whose grid is not its readable definition
    "functions.error": Rule(absolute=3.0, worse=1, float_factor=1.0),  # in ulps, so of the dtype of the mode
    "functions.scan": Rule(absolute=1e-6, worse=1, float_factor=1.0),
    # of a path, a figure for every layer: relation.layer_0
    "relation.*": Rule(relative=0.1, absolute=2e-4),
    "distance.*": Rule(absolute=0.04),
}
#: The figures that compare values with golden values, not with a stored figure: their baseline is 0.
OF_VALUES = ("distance", "moved")
#: The figures whose baseline is 0 whatever was measured: nothing of them is stored.
ALWAYS_ZERO = ("corners.twins",)
#: Those of a path: one for every layer.
OF_PATHS = "distance."


def rule_of(name: str, rules: Mapping[str, Rule]) -> Rule:
    """The rule of a figure, or of its group: `relation.*`."""
    whole = f"{name.partition('.')[0]}.*"
    return look_up("figure", whole if whole in rules and name not in rules else name, rules)


def is_of_values(name: str) -> bool:
    """Whether a figure compares values with golden values."""
    return name.endswith(OF_VALUES) or name.startswith(OF_PATHS)


def tolerance(
    rule: Rule, figures: Mapping[str, float], name: str, *, spread: float, is_float_mode: bool = False
) -> float:
    """The tolerance of a figure, given all old figures of its case and the spread of this one."""
    if rule.exact:
        return 0.0
    old = figures[name]
    error = own_error(figures, name.partition(".")[0])
    floor = rule.relative * abs(old) + rule.of_error * error + rule.of_rest * abs(1 - old) + rule.absolute
    floor *= rule.float_factor if is_float_mode else 1.0
    floor += _last_digit(old)
    return max(min(rule.multiple * spread, MOST * floor) if floor else rule.multiple * spread, floor)


def own_error(figures: Mapping[str, float | None], group: str) -> float:
    """The recipe's own error in a group of figures: the root of its mse.

    Without loss, OF_FLOAT of the rms of the output, as far as the figures of the layer tell it.
    """
    mse = figures.get(f"{group}.mse")
    if mse:
        return math.sqrt(max(mse, 0.0))
    moments = [figures.get(f"injected.{name}_output") or 0.0 for name in ("mean", "std")]
    return OF_FLOAT * math.hypot(*moments) if mse == 0 else 0.0


def _last_digit(x: float) -> float:
    return 10.0 ** (math.floor(math.log10(abs(x))) - DIGITS + 1) if x else 0.0
