"""Outcomes as a gate would give them, without a model: the input of every test of the report."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from probe.gate.cases import Case, Figure, Outcome, Points, TokenProfile
from probe.words import LOGITS, OUTSIDE, PATHS

#: What a model or a user may call things. Nothing of it may run or break a line.
NASTY = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>|`@user\n$x^\x1b[31m"
CAUSE = "site conv1d.output; error mean is biased: rounding looks like floor, not nearest"
ENVIRONMENT = {"torch": "2.13.0", "cpu": "AVX512", "threads": "2", "python": "3.11.4"}
OLDER = {"torch": "2.12.1", "cpu": "AVX512", "threads": "2", "python": "3.11.4"}


def figure(old: float, factor: float = 1.0, *, tolerance: float | None = None) -> Figure:
    """A figure that is `factor` times its baseline; worse if it grew."""
    new = old * factor
    limit = 0.02 * abs(old) if tolerance is None else tolerance
    moved = abs(new - old) > limit
    return Figure(new, old, limit, moved, ("worse" if factor > 1 else "better") if moved else "")


def correlation(old: float, new: float, *, tolerance: float = 2e-6) -> Figure:
    moved = abs(new - old) > tolerance
    return Figure(new, old, tolerance, moved, ("worse" if new < old else "better") if moved else "")


def points(
    count: int = 256, *, noise: float = 0.02, bias: float = 0.0, seed: int = 0, moved: float | None = None
) -> Points:
    """Elements of 4 sequences of 16 tokens; with `moved`, the last 40 have golden values, that far away."""
    pick = random.Random(seed)
    reference = [pick.gauss(0, 0.6) for _ in range(count)]
    output = [x + bias + pick.gauss(0, noise) for x in reference]
    golden = [] if moved is None else [math.nan] * (count - 40) + [x + moved * pick.gauss(0, 1) for x in output[-40:]]
    places = [number * 4 * 16 * 32 // count for number in range(count)]
    return Points(reference, output, golden, places, (16, 32))


def layer(index: int, recipe: Case, *, own: float = 1.0, inherited: float = 1.0, model: str = "tiny-mamba") -> Outcome:
    """Layer `index` of a recipe, whose injected and propagated mse are `own` and `inherited` times their baselines."""
    name = f"layer_{index}"
    mse = 2.31e-4 * (1 + 0.15 * math.sin(3.0 * index))
    spread = 2.31e-4 * (1 + index) ** 0.8
    figures = {
        "injected.mse": figure(mse, own),
        "injected.relative_mse": figure(mse / 0.36, own),
        "injected.correlation": correlation(1 - mse / 0.72, 1 - own * mse / 0.72),
        "injected.max_abs": figure(0.0213, own**0.5),
        "injected.distance": Figure(max(own - 1, 0) ** 0.5, 0.0, 0.03, own > 1.01, "worse" if own > 1.01 else ""),
        "injected.moved": Figure(min(own - 1, 1.0), 0.0, 0.02, own > 1.02, ""),
        "injected.mean_difference": Figure(1e-3 * (own - 1), 0.0, 1e-4, own > 1.1, ""),
        "propagated.mse": figure(spread, inherited),
        "propagated.correlation": correlation(1 - spread / 0.72, 1 - inherited * spread / 0.72),
        "propagated.max_abs": figure(0.0413, inherited**0.5),
    }
    bad = any(f.moved for f in figures.values())
    case = replace(recipe, layer=name)
    return Outcome(
        model=model,
        case=case,
        status="failed" if bad else "passed",
        verdict="drift" if bad else None,
        message="6 figures moved by more than their tolerance." if own > 1 else "",
        details=("mean of the difference is 0.46 of its standard deviation",) if own > 1 else (),
        cause=CAUSE if own > 1 else "",
        figures=figures,
        points=points(noise=mse**0.5, bias=0.01 if own > 1 else 0.0, seed=index, moved=(own > 1) * mse**0.5),
        nodeid=f"test_gate.py::test_matches_baseline[{case}]",
        baseline_file=f"baselines/{model}/cpu/{case.mode}.json",
    )


def logits(recipe: Case, *, factor: float = 1.0, model: str = "tiny-mamba") -> Outcome:
    figures = {
        "logits.kl": figure(1.2e-3, factor),
        "logits.top1_agreement": correlation(0.981, 0.981 - 0.004 * (factor - 1), tolerance=1e-3),
        "logits.change_in_bits_per_byte": figure(0.0031, factor),
    }
    bad = any(f.moved for f in figures.values())
    case = replace(recipe, layer=LOGITS)
    return Outcome(
        model=model,
        case=case,
        status="failed" if bad else "passed",
        verdict="drift" if bad else None,
        message="The logits moved." if bad else "",
        figures=figures,
        points=points(seed=11),
        nodeid=f"test_gate.py::test_matches_baseline[{case}]",
        baseline_file=f"baselines/{model}/cpu/{case.mode}.json",
    )


def outside(label: str, recipe: Case, *, mse: float = 0.0, model: str = "tiny-mamba") -> Outcome:
    """The embedding, the norm or the head, which must be the float one."""
    case = replace(recipe, layer=label)
    return Outcome(
        model=model,
        case=case,
        status="failed" if mse else "passed",
        verdict="not float" if mse else None,
        message=f"the {label} is not the float one" if mse else "",
        figures={"outside.mse": figure(0.0, tolerance=0.0) if not mse else Figure(mse, 0.0, 0.0, True, "worse")},
        points=points(noise=mse**0.5, seed=7),
        nodeid=f"test_gate.py::test_matches_baseline[{case}]",
    )


def path(label: str, recipe: Case, *, relation: float = 0.0, model: str = "tiny-mamba") -> Outcome:
    """A path of four layers, whose layer_1 is `relation` of its own error away from the prefill."""
    case = replace(recipe, layer=label)
    figures = {
        f"relation.layer_{n}": Figure(relation if n == 1 else 0.0, 0.0, 1e-3, n == 1 and relation > 0) for n in range(4)
    }
    figures |= {
        f"distance.layer_{n}": Figure(0.7 * relation if n == 1 else 1e-6, 0.0, 0.04, n == 1 and relation > 0)
        for n in range(4)
    }
    by_token = [0.0] * 40 + [relation * (1 + 0.1 * n) for n in range(8)]
    return Outcome(
        model=model,
        case=case,
        status="failed" if relation else "passed",
        verdict="differs from prefill" if relation else None,
        message=f"{label} differs from the prefill" if relation else "",
        figures=figures,
        profile=TokenProfile(range(48), {"layer_1": by_token}) if relation else TokenProfile(),
        nodeid=f"test_gate.py::test_matches_baseline[{case}]",
    )


def beside(recipe: Case, *, head: float = 0.0, decode: float = 0.0, model: str = "tiny-mamba") -> list[Outcome]:
    """All cases beside the layers and the logits; the head and decode may be wrong."""
    return [
        *(outside(label, recipe, mse=head if label == "head" else 0.0, model=model) for label in OUTSIDE),
        *(path(label, recipe, relation=decode if label == "decode" else 0.0, model=model) for label in PATHS),
    ]


def recipe(
    mode: str = "mode_2_1",
    format: str = "fp8_e4m3",
    *,
    layers: int = 4,
    faulty: int | None = None,
    factor: float = 2.17,
    device: str = "cpu",
    whole: bool = True,
    scale: float = 1.0,
    model: str = "tiny-mamba",
) -> list[Outcome]:
    """All outcomes of a recipe. A fault in layer `faulty` is its own error there, and inherited from there on."""
    case = Case(mode, "", device, format)
    found = [
        layer(
            index,
            case,
            own=factor if index == faulty else 1.0,
            inherited=1 + (factor - 1) / (1 + (index - faulty) / 4) if faulty is not None and index >= faulty else 1.0,
            model=model,
        )
        for index in range(layers)
    ]
    if whole:
        found.append(logits(case, factor=1.0 if faulty is None else 1 + (factor - 1) / 2, model=model))
    return [scaled(outcome, scale) for outcome in found]


def scaled(outcome: Outcome, scale: float) -> Outcome:
    """The outcome of a format whose error is `scale` times as large."""

    def of(name: str, given: Figure) -> Figure:
        if given.new is None or given.old is None or given.tolerance is None:
            return given
        if name.endswith("correlation"):
            new, old = (1 - (1 - x) * min(scale, 100) for x in (given.new, given.old))
            return replace(given, new=new, old=old, tolerance=given.tolerance * scale)
        by = scale if name.endswith("mse") else scale**0.5 if name.startswith("logits.") else 1.0
        return replace(given, new=given.new * by, old=given.old * by, tolerance=given.tolerance * by)

    return replace(outcome, figures={name: of(name, given) for name, given in outcome.figures.items()})


def failing(verdict: Any, **changes: Any) -> Outcome:
    """One case of a verdict, without figures unless they are given."""
    given: dict[str, Any] = {
        "model": "tiny-mamba",
        "case": Case("mode_2_1", "layer_0", "cpu", "fp8_e4m3"),
        "status": "failed",
        "verdict": verdict,
        "message": "It failed.",
        "nodeid": "test_gate.py::test_matches_baseline[mode_2_1-layer_0-cpu-fp8_e4m3]",
        "baseline_file": "baselines/tiny-mamba/cpu/mode_2_1.json",
    }
    return Outcome(**{**given, **changes})


def nasty() -> Outcome:
    """A failing case whose every text is hostile."""
    return replace(
        layer(0, Case(f"mode{NASTY}", "", f"cpu{NASTY}", f"int8{NASTY}"), own=2.0, inherited=2.0, model=NASTY),
        case=Case(f"mode{NASTY}", f"layer{NASTY}", f"cpu{NASTY}", f"int8{NASTY}"),
        message=f"message {NASTY}",
        details=(f"details {NASTY}",),
        cause=f"cause {NASTY}",
        baseline_file=f"file{NASTY}",
        nodeid=f"test_gate.py::test_nasty[{NASTY}]",
    )


MODES = ("mode_0_0", "mode_0_1", "mode_1_0", "mode_1_1", "mode_2_0", "mode_2_1", "mode_3", "mode_4_0", "mode_4_1")
FORMATS = {"int8": 0.6, "fp8_e4m3": 1.0, "fp6_e3m2": 14.0, "fp4_e2m1": 300.0}


def gate(*, layers: int = 4, modes: Sequence[str] = MODES, faults: dict[str, int] | None = None) -> list[Outcome]:
    """A matrix of recipes and two float modes; `faults` are the faulty layers by recipe."""
    faults = {"mode_2_1-fp8_e4m3": 0, "mode_4_0-int8": 2} if faults is None else faults
    found = []
    for place, (format, scale) in enumerate(FORMATS.items()):
        for step, mode in enumerate(modes):
            own = scale * (1 + 0.4 * math.sin(2.0 * step + place))
            found += recipe(mode, format, layers=layers, faulty=faults.get(f"{mode}-{format}"), scale=own)
    for mode, scale in (("fp16", 1e-5), ("bf16", 6e-4)):
        found += recipe(mode, "", layers=layers, faulty=faults.get(mode), scale=scale)
    return found
