"""Verdicts on observations made by hand: nothing undefined, missing or NaN ever passes."""

import math
from dataclasses import replace

import pytest

from probe.gate.baselines.format import Entry, Stored
from probe.gate.cases import Case, Figure
from probe.gate.golden_values import KEPT, flat
from probe.gate.measured_layers import FIGURES, Flaw, Observation
from probe.gate.tolerances import FLOAT_FACTOR, MOST, RULES, Rule, tolerance
from probe.gate.verdicts import RefusedError, Standards, judge, renewed
from probe.running.digests import VARIES
from probe.running.modes import find_mode, unregister_mode

CASE = Case("mode_2_1", "layer_0", "cpu", "int8")
VALUES = {group: tuple(float(i) for i in range(KEPT[group])) for group in ("injected", "propagated")}
DIGESTS = {"weights.in_proj.weight": "9f86d081", "weights.D": "60303ae2", "corners.scan.u": "fd61a03a"}
FOUND = Observation(
    {f"{group}.{name}": 0.5 for group in ("injected", "propagated") for name in FIGURES[group]},
    VALUES,
    dict.fromkeys(VALUES, 1000),
    digests=DIGESTS,
)
STANDARDS = Standards()


def stored(seen: Observation = FOUND) -> Entry:
    first = judge("m", CASE, seen, None, STANDARDS)
    return renewed(first, seen, [seen], None, reason="")


def changed(**figures: float | None) -> Observation:
    return replace(FOUND, figures={**FOUND.figures, **{k.replace("__", "."): v for k, v in figures.items()}})


def verdict(seen: Observation, entry: Entry | None = None, standards: Standards = STANDARDS) -> str | None:
    return judge("m", CASE, seen, entry or stored(), standards).verdict


def test_the_same_passes() -> None:
    assert verdict(FOUND) is None


def test_without_a_baseline_it_is_missing() -> None:
    assert judge("m", CASE, FOUND, None, STANDARDS).verdict == "missing"


@pytest.mark.parametrize("name", list(FOUND.figures))
def test_every_figure_drifts_in_both_directions_and_not_within_its_tolerance(name: str) -> None:
    allowed = tolerance(RULES[name], {k: v or 0.0 for k, v in FOUND.figures.items()}, name, spread=0.0)
    for sign in (1, -1):
        assert verdict(changed(**{name: 0.5 + sign * 0.9 * allowed})) is None
        assert verdict(changed(**{name: 0.5 + sign * 1.1 * allowed})) == "drift"


@pytest.mark.parametrize("name", list(FOUND.figures))
@pytest.mark.parametrize("value", [math.nan, math.inf, None], ids=str)
def test_nan_inf_and_undefined_never_pass(name: str, value: float | None) -> None:
    assert verdict(changed(**{name: value})) == "drift"


@pytest.mark.parametrize(
    ("mode", "factor"), [("fp16", FLOAT_FACTOR), ("checkpoint_q4", 1.0), ("a tool's", FLOAT_FACTOR)]
)
def test_a_mode_without_a_format_is_float_unless_it_is_a_checkpoint(mode: str, factor: float) -> None:
    find_mode("checkpoint:q4")
    try:
        found = judge("m", Case(mode, "layer_0", "cpu"), FOUND, stored(), STANDARDS).figures["injected.mse"].tolerance
        quantized = judge("m", CASE, FOUND, stored(), STANDARDS).figures["injected.mse"].tolerance
    finally:
        unregister_mode("checkpoint:q4")
    assert found is not None
    assert quantized is not None
    assert found == pytest.approx(factor * quantized, rel=0.01)  # digits that are stored are added


def test_a_figure_that_has_no_baseline_fails() -> None:
    entry = stored()
    fewer = replace(entry, figures={k: v for k, v in entry.figures.items() if k != "injected.mse"})
    assert verdict(FOUND, fewer) == "drift"


def test_a_group_of_values_that_has_no_baseline_fails() -> None:
    more = {**VALUES, "logits": tuple(float(i) for i in range(KEPT["logits"]))}
    both = replace(FOUND, values=more, counts=dict.fromkeys(more, 1000))
    assert verdict(both, stored()) == "changed values"
    assert verdict(FOUND, stored(both)) == "changed values"


def test_values_that_move_while_figures_agree_are_a_verdict_of_their_own() -> None:
    for group in VALUES:
        values = {**VALUES, group: (VALUES[group][0] + 100.0, *VALUES[group][1:])}
        assert verdict(replace(FOUND, values=values)) == "changed values"


@pytest.mark.parametrize("name", list(DIGESTS))
@pytest.mark.parametrize("digest", ["00000000", None], ids=["other", "gone"])
def test_a_tensor_that_changed_comes_or_goes_fails_whatever_the_figures_say(name: str, digest: str | None) -> None:
    others = {key: text for key, text in {**DIGESTS, name: digest}.items() if text}
    group, _, tensor = name.partition(".")
    for seen, entry in ((replace(FOUND, digests=others), stored()), (FOUND, replace(stored(), digests=others))):
        outcome = judge("m", CASE, seen, entry, STANDARDS)
        assert outcome.verdict == "changed values"
        assert outcome.figures[f"{group}.changed"] == Figure(1.0, 0.0, 0.0, True)
        assert outcome.details == (f"other {group} than stored: {tensor}",)
        assert outcome.is_own


def test_a_tensor_that_harmless_changes_alter_is_not_compared() -> None:
    other = replace(FOUND, digests={**DIGESTS, "weights.D": "00000000"})
    entry = renewed(judge("m", CASE, FOUND, None, STANDARDS), FOUND, [FOUND, other], None, reason="")
    assert entry.digests == {**DIGESTS, "weights.D": VARIES}
    assert verdict(other, entry) is verdict(FOUND, entry) is None


def test_other_digests_are_stored_when_they_are_accepted() -> None:
    seen = replace(FOUND, digests={**DIGESTS, "weights.D": "00000000"})
    assert renewed(judge("m", CASE, seen, stored(), STANDARDS), seen, [], stored(), reason="").digests == seen.digests


def test_an_update_adds_what_an_entry_lacks_and_leaves_what_agrees() -> None:
    """As when the baselines of an older version have no digests: their figures and golden values do not creep."""
    whole = stored()
    older = replace(whole, digests={}, figures={k: v for k, v in whole.figures.items() if k != "injected.mae"})
    seen = changed(injected__mse=0.5 * (1 + 1e-5))  # within its tolerance
    made = renewed(judge("m", CASE, seen, older, STANDARDS), seen, [seen], older, reason="")
    assert made.digests == DIGESTS
    assert made.figures["injected.mae"].value == 0.5
    assert {name: made.figures[name] for name in older.figures} == older.figures
    assert made.values == older.values


def test_a_wider_spread_widens_the_tolerance_by_its_multiple() -> None:
    rule = Rule(relative=0.1, multiple=4)
    assert tolerance(rule, {"injected.mse": 1.0}, "injected.mse", spread=0.0) == pytest.approx(0.1, rel=1e-4)
    assert tolerance(rule, {"injected.mse": 1.0}, "injected.mse", spread=0.1) == pytest.approx(0.4)
    float_mode = tolerance(rule, {"injected.mse": 1.0}, "injected.mse", spread=0.0, is_float_mode=True)
    assert float_mode == pytest.approx(0.1 * FLOAT_FACTOR, rel=1e-4)


def test_a_spread_that_was_edited_to_be_huge_does_not_open_the_gate() -> None:
    rule = Rule(relative=1e-3)
    assert tolerance(rule, {"injected.mse": 1.0}, "injected.mse", spread=1e9) == pytest.approx(MOST * 1e-3, rel=0.02)


def test_what_is_wrong_in_itself_comes_before_what_moved() -> None:
    seen = replace(changed(injected__mse=9.0), flaws=(Flaw("not finite", "NaN"), Flaw("uncovered", "silent")))
    outcome = judge("m", CASE, seen, stored(), STANDARDS)
    assert outcome.verdict == "uncovered"
    assert outcome.details == ("also not finite: NaN",)


def test_a_limit_holds_whatever_the_baseline_says_and_only_for_its_recipes() -> None:
    for pattern, expected in (("mode_2_1-*", "over the limit"), ("mode_2_2-*", None)):
        standards = Standards(limits={pattern: {"propagated.correlation": 0.9}})
        assert verdict(FOUND, standards=standards) == expected
    assert verdict(FOUND, standards=Standards(limits={"*": {"propagated.mse": 0.6}})) is None


def test_a_first_baseline_over_its_limit_is_refused() -> None:
    standards = Standards(limits={"*": {"propagated.correlation": 0.9}})
    outcome = judge("m", CASE, FOUND, None, standards)
    assert outcome.verdict == "over the limit"
    assert outcome.details == (f"also missing: there is no baseline for {CASE}.",)
    with pytest.raises(RefusedError, match=r"cannot be stored, it is over the limit: propagated\.correlation is 0\.5"):
        renewed(outcome, FOUND, [], None, reason="we want it")


def test_a_mode_that_equals_another_by_definition_says_so() -> None:
    named = {mode: judge("m", replace(CASE, mode=mode), FOUND, None, STANDARDS).equals for mode in EQUALS}
    assert named == EQUALS


EQUALS = {"mode_2_0": "mode_0", "mode_2_2": "mode_2_1", "mode_2_3": "mode_2_1", "mode_2_1": "", "mode_2_4": "", "x": ""}


def lossless() -> Observation:
    """A layer that is float by declaration: no error, so no unit of error either."""
    of_output = {"mean_output": 0.01, "std_output": 2.0, "min_output": -5.0, "max_output": 6.0}
    figures = dict.fromkeys(FOUND.figures, 0.0) | {f"injected.{name}": x for name, x in of_output.items()}
    figures |= {f"{group}.{name}": 1.0 for group, name in LIKENESS}
    values = {group: tuple(2.0 * math.cos(x) for x in VALUES[group]) for group in ("injected", "propagated")}
    return Observation({**figures}, values, dict.fromkeys(values, 1000))


LIKENESS = (("injected", "correlation"), ("injected", "cosine"), ("propagated", "correlation"))


def test_a_layer_without_error_is_stored_and_compared_with_the_noise_of_another_machine() -> None:
    seen = lossless()
    entry = stored(seen)
    assert all(math.isfinite(figure.value) for figure in entry.figures.values())
    assert verdict(seen, entry) is None
    noisy = {name: value * (1 + 3e-7) for name, value in seen.figures.items() if value is not None}
    values = {group: tuple(x * (1 + 3e-7) for x in row) for group, row in seen.values.items()}
    assert verdict(replace(seen, figures={**noisy, **dict.fromkeys(LIKELY, 1.0)}, values=values), entry) is None


LIKELY = tuple(f"{group}.{name}" for group, name in LIKENESS)


@pytest.mark.parametrize("name", ["injected.mse", "injected.max_abs", "injected.p50", "propagated.mse"])
def test_an_error_where_there_was_none_drifts(name: str) -> None:
    seen = lossless()
    assert verdict(replace(seen, figures={**seen.figures, name: 1e-12}), stored(seen)) == "drift"


def test_other_values_of_a_layer_without_error_are_noticed() -> None:
    seen = lossless()
    row = (seen.values["injected"][0] + 10.0, *seen.values["injected"][1:])
    changed_row = {**seen.values, "injected": row}
    assert verdict(replace(seen, values=changed_row), stored(seen)) == "changed values"


def test_spread_is_the_largest_move_under_harmless_changes() -> None:
    others = [changed(injected__mse=0.5 + x) for x in (0.01, -0.03, 0.02)]
    entry = renewed(judge("m", CASE, FOUND, None, STANDARDS), FOUND, others, None, reason="")
    assert entry.figures["injected.mse"].spread == pytest.approx(0.03)
    assert entry.values == flat(VALUES)


def test_a_case_that_agrees_keeps_its_entry_and_one_that_is_worse_needs_a_reason() -> None:
    entry = replace(stored(), figures={**stored().figures, "injected.mse": Stored(0.5, 1e-9, "as agreed")})
    assert renewed(judge("m", CASE, FOUND, entry, STANDARDS), FOUND, [], entry, reason="") is entry
    worse = changed(injected__mse=0.7)
    outcome = judge("m", CASE, worse, entry, STANDARDS)
    with pytest.raises(RefusedError, match=r"got worse: injected\.mse 0\.5 -> 0\.7"):
        renewed(outcome, worse, [], entry, reason="")
    accepted = renewed(outcome, worse, [], entry, reason="a trial of ours")
    assert accepted.figures["injected.mse"] == Stored(0.7, 0.0, "a trial of ours")
    assert accepted.figures["injected.mae"].reason == ""


@pytest.mark.parametrize("kind", ["uncovered", "not finite", "not applied", "not float"])
def test_flaws_are_never_stored(kind: str) -> None:
    seen = replace(FOUND, flaws=(Flaw(kind, "so it is"),))  # type: ignore[arg-type]
    with pytest.raises(RefusedError, match=f"it is {kind}"):
        renewed(judge("m", CASE, seen, None, STANDARDS), seen, [], None, reason="we want it")
