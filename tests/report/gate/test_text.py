import math
from dataclasses import replace
from typing import Any, get_args

import pytest
from hypothesis import given, strategies as st

from probe.gate.cases import HEADINGS, NEXT, Case, Figure, Outcome, Status, Verdict
from probe.report.gate.recipes import cell_text, layer_names, runs, totals
from probe.report.gate.text import (
    MOST_COLUMNS,
    MOST_LINES,
    case_selection,
    case_text,
    golden_text,
    names_in_order,
    one_line,
    story,
)
from probe.report.numbers import change, number, ranked, short
from probe.running.environment import differences
from probe.words import natural_key, short_names
from tests.report.gate.examples import failing, gate, layer, nasty, recipe

DRIFT = """\
mode_2_1-layer_1-cpu-fp8_e4m3 drifted from its baseline
  injected.mse            2.36e-04 -> 5.12e-04   (tolerance 4.7e-06)   worse
  propagated.mse          4.02e-04 -> 8.73e-04   (tolerance 8.0e-06)   worse
  injected.correlation    0.99967  -> 0.99929    (tolerance 2.0e-06)   worse
  propagated.correlation  0.99944  -> 0.99879    (tolerance 2.0e-06)   worse
  injected.distance       0        -> 1.0817     (tolerance 3.0e-02)   worse
  what                    6 figures moved by more than their tolerance.
                          mean of the difference is 0.46 of its standard deviation
  first seen              layer_1; site conv1d.output; error mean is biased: rounding looks like floor, not nearest
  mse by layer            layer_1 4.02e-04 -> 8.73e-04 .. layer_8 1.34e-03 -> 1.91e-03 ..
                          layer_16 2.23e-03 -> 2.78e-03 .. layer_23 2.94e-03 -> 3.46e-03
  failing                 23 of 24 layers; own: layer_1; inherited: layer_2 .. layer_23
  whole model             logits.kl 1.20e-03 -> 1.90e-03 (tolerance 2.4e-05) worse
  baseline                baselines/tiny-mamba/cpu/mode_2_1.json
  environment             torch 2.12.1 -> 2.13.0
  look                    report.html#mode_2_1-fp8_e4m3
  rerun                   pytest test_gate.py -k "mode_2_1 and fp8_e4m3"
  accept                  pytest test_gate.py -k "mode_2_1 and fp8_e4m3" --update-baselines --allow-worse "REASON"
"""

MISSING = """\
mode_2_1-layer_0-cpu-fp8_e4m3 has no baseline
  what           It failed.
  baseline       baselines/tiny-mamba/cpu/mode_2_1.json
  rerun          pytest test_gate.py -k "mode_2_1 and fp8_e4m3"
  create         pytest test_gate.py -k "mode_2_1 and fp8_e4m3" --update-baselines
"""

NOT_FINITE = """\
mode_2_1-layer_0-cpu-fp8_e4m3 is not finite
  injected.mse   2.00e-04 -> nan   (tolerance 1.0e-06)   worse
  what           3 of 4096 outputs are NaN, the first at 17.
  first seen     layer_0
  baseline       baselines/tiny-mamba/cpu/mode_2_1.json
  rerun          pytest test_gate.py -k "mode_2_1 and fp8_e4m3"
  next           cannot be stored as a baseline: fix the first layer that is not finite, then rerun
"""


def text(outcomes: list[Outcome], **options: Any) -> str:
    return "\n".join(story(outcomes, **{"report": None, **options})) + "\n"


def test_24_drifting_layers_are_one_story() -> None:
    found = recipe(layers=24, faulty=1)
    assert text(found, report="report.html", environment=["torch 2.12.1 -> 2.13.0"]) == DRIFT


@pytest.mark.parametrize(
    ("cause", "seen"),
    [
        ("layer_0; its output is the float layer's", "layer_0; its output is the float layer's"),
        ("layer_0 as a whole; it is negated", "layer_0 as a whole; it is negated"),
        ("layer_01; a name that begins alike", "layer_0; layer_01; a name that begins alike"),
        ("weight a; it is transposed", "layer_0; weight a; it is transposed"),
    ],
)
def test_the_first_failing_layer_is_named_once(cause: str, seen: str) -> None:
    assert f"  first seen     {seen}\n" in text([failing("not finite", cause=cause)])


def test_a_missing_baseline_says_how_to_create_it() -> None:
    assert text([failing("missing")]) == MISSING


def test_what_is_not_finite_cannot_be_accepted() -> None:
    figures = {"injected.mse": Figure(math.nan, 2e-4, 1e-6, moved=True, direction="worse")}
    found = failing("not finite", figures=figures, message="3 of 4096 outputs are NaN, the first at 17.")
    assert text([found]) == NOT_FINITE


@pytest.mark.parametrize("verdict", get_args(Verdict))
def test_every_verdict_has_its_own_words(verdict: Verdict) -> None:
    lines = story([failing(verdict)], report=None)
    assert lines[0] == f"mode_2_1-layer_0-cpu-fp8_e4m3 {HEADINGS[verdict]}"
    assert len(set(HEADINGS.values())) == len(HEADINGS) == len(get_args(Verdict))
    last = lines[-1].split()[0]
    assert last == ("next" if verdict in NEXT else "create" if verdict == "missing" else "accept")


def test_one_refused_layer_refuses_the_recipe() -> None:
    found = recipe(faulty=0)
    found[2] = replace(found[2], verdict="not finite")
    lines = story(found, report=None)
    assert "  also                    not finite: layer_2" in lines
    assert lines[-1].split()[0] == "next"


def test_a_gain_needs_no_reason() -> None:
    found = [layer(0, Case("mode_2_1", "", "cpu", "int8"), own=0.5, inherited=0.5)]
    lines = story(found, report=None)
    assert lines[-1].endswith('pytest test_gate.py -k "mode_2_1 and cpu-int8" --update-baselines')
    assert "better" in lines[1]


def test_a_float_mode_is_selected_by_its_name() -> None:
    lines = story(recipe("bf16", "", faulty=0), report=None)
    assert '  rerun                   pytest test_gate.py -k "bf16-"' in lines


def test_a_fault_of_the_logits_alone_begins_with_them() -> None:
    found = recipe()
    found[-1] = recipe(faulty=0)[-1]
    lines = story(found, report=None)
    assert lines[0] == "mode_2_1-logits-cpu-fp8_e4m3 drifted from its baseline"
    assert lines[1].split()[0] == "logits.kl"
    assert not any(line.strip().startswith(("failing", "whole model", "mse by layer")) for line in lines)


def test_without_a_failure_there_is_no_story() -> None:
    assert story(recipe(), report="report.html") == []


def test_scattered_layers_are_listed_as_far_as_there_is_room() -> None:
    order = [f"layer_{n}" for n in range(48)]
    assert names_in_order(order[3:20], order, most=50) == "layer_3 .. layer_19"
    assert names_in_order(["layer_0", "layer_1", "layer_7"], order, most=50) == "layer_0, layer_1, layer_7"
    assert names_in_order(order[::2], order, most=40) == "layer_0, layer_2, layer_4 and 21 more"
    assert names_in_order(order[::2], order, most=5) == "24 layers"


odd = st.one_of(st.none(), st.floats(), st.sampled_from([0.0, 1.0, 5e-324, 1e308]))
figures = st.builds(
    Figure, odd, odd, st.one_of(st.none(), st.floats(0, 1)), st.booleans(), st.sampled_from(["worse", ""])
)
names = st.one_of(
    st.sampled_from(["injected.mse", "propagated.mse", "injected.correlation", "logits.kl", "x"]), st.text(max_size=60)
)
texts = st.one_of(st.text(max_size=300), st.sampled_from(["", "word " * 80, "\x1b[31m\n\r\u202e"]))
outcomes = st.builds(
    Outcome,
    model=texts,
    case=st.builds(Case, texts, st.one_of(st.text(max_size=40), st.just("logits")), texts, texts),
    status=st.sampled_from(["passed", "failed", "skipped", "updated"]),
    verdict=st.sampled_from([None, *get_args(Verdict)]),
    message=texts,
    details=st.lists(texts, max_size=6).map(tuple),
    cause=texts,
    figures=st.dictionaries(names, figures, max_size=12),
    baseline_file=texts,
)


@given(st.lists(outcomes, min_size=1, max_size=8), st.one_of(st.none(), texts), st.lists(texts, max_size=5))
def test_whatever_is_in_it_it_stays_short(found: list[Outcome], report: str | None, environment: list[str]) -> None:
    lines = story(found, report=report, environment=environment)
    assert len(lines) <= MOST_LINES
    assert all(line.isprintable() for line in golden_text(found[0]))
    commands = ("  rerun ", "  create ", "  accept ", "  next ")
    for line in [*lines, *case_text(found[0]), one_line(found[0], explained_at="x")]:
        assert len(line) <= MOST_COLUMNS or line.startswith(commands)
        assert line.isprintable()
    assert len(case_text(found[0])) <= 10


@pytest.mark.parametrize(
    ("layer", "quoted"),
    [("layers.0.up_proj", "layers.0.up_proj"), ("two words", "two words"), ("a'$(b)", "a'\"'\"'$(b)")],
)
def test_the_command_of_a_case_runs_it_alone(layer: str, quoted: str) -> None:
    case = Case("activations", layer, "cpu", "input")
    nodeid = f"tests/test_x.py::test_it[{case}]"
    command = f"pytest 'tests/test_x.py::test_it[activations-{quoted}-cpu-input]'"
    assert case_selection(Outcome("m", case, "failed", nodeid=nodeid)) == command


def test_the_commands_of_a_recipe_name_the_file_of_its_test_and_are_never_cut_short() -> None:
    file = "tests/a folder with a long name/of a project with long names/test_gate.py"
    outcomes = [replace(one, nodeid=f"{file}::test_it[{one.case}]") for one in recipe(faulty=0)]
    rerun, accept = story(outcomes, report=None)[-2:]
    command = f"pytest '{file}' -k \"mode_2_1 and fp8_e4m3\""
    assert rerun.split(maxsplit=1) == ["rerun", command]
    assert accept.split(maxsplit=1) == ["accept", f'{command} --update-baselines --allow-worse "REASON"']


def test_the_command_of_a_case_is_never_cut_short() -> None:
    case = Case("activations", "model.a_long_name_of_a_module." * 8, "cpu", "input")
    figures = {"activations.outliers": Figure(5.0, 0.0, 0.5, True, "worse")}
    where: Any = {"baseline_file": "b.json", "nodeid": f"test_x.py::test_it[{case}]"}
    lines = golden_text(Outcome("m", case, "failed", "drift", "It moved.", figures=figures, **where))
    command = f"pytest 'test_x.py::test_it[{case}]'"
    assert lines[-2:] == [
        f"  rerun                 {command}",
        f'  accept                {command} --update-baselines --allow-worse "REASON"',
    ]
    assert golden_text(Outcome("m", case, "failed", "not finite", "NaN."))[-1].startswith("  next           cannot be")


def test_a_further_case_points_to_the_story() -> None:
    assert one_line(recipe(faulty=0)[1], explained_at="mode_2_1-layer_0-cpu-fp8_e4m3") == (
        "drift: propagated.mse 4.02e-04 -> 7.79e-04 (tolerance 8.0e-06); explained at mode_2_1-layer_0-cpu-fp8_e4m3"
    )
    assert one_line(failing("uncovered", message="The hook never fired.")) == "uncovered: The hook never fired"


def test_a_case_alone_is_a_short_text() -> None:
    lines = case_text(recipe(faulty=0)[0])
    assert lines[0] == "mode_2_1-layer_0-cpu-fp8_e4m3 drifted from its baseline"
    assert lines[-1].startswith("  likely cause            site conv1d.output")


def test_names_of_models_cannot_break_a_line() -> None:
    lines = story([nasty()], report="report.html")
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize(
    ("value", "expected", "brief"),
    [
        (2.31e-4, "2.31e-04", "2e-4"),
        (0.99987, "0.99987", "1e0"),
        (3.0, "3", "3e0"),
        (0.0, "0", "0"),
        (None, "none", "none"),
        (math.nan, "nan", "nan"),
        (-math.inf, "-inf", "-inf"),
        (123.456, "123.46", "1e2"),
        (1e22, "1.00e+22", "1e22"),
    ],
)
def test_numbers_are_short(value: float | None, expected: str, brief: str) -> None:
    assert number(value) == expected
    assert short(value) == brief


def test_old_and_new_are_told_apart() -> None:
    assert change(0.9999871, 0.9999843) == ("0.999987", "0.999984")
    assert change(0.99987, 0.99971) == ("0.99987", "0.99971")
    assert change(1e300, 1.7e308) == ("1.00e+300", "1.70e+308")
    assert change(2.3110e-4, 2.3111e-4) == ("2.3110e-04", "2.3111e-04")
    assert change(1.0, 0.99971) == ("1.0000", "0.99971")
    assert change(0.5, 0.5) == ("0.50000", "0.50000")


def test_figures_are_ordered_by_what_matters() -> None:
    found = {
        "propagated.mse": Figure(2.0, 1.0, 0.1, moved=True),
        "injected.mae": Figure(2.0, 1.0, 0.5, moved=True),
        "injected.p99": Figure(2.0, 1.0, 0.1, moved=True),
        "injected.moved": Figure(2.0, 1.0, 0.1, moved=True),
        "injected.mse": Figure(1.0, 1.0, 0.1),
        "injected.correlation": Figure(0.1, 1.0, 0.1, moved=True),
    }
    ordered = [name for name, _ in ranked(found, moved=True)]
    assert ordered == ["propagated.mse", "injected.correlation", "injected.moved", "injected.p99", "injected.mae"]
    assert ranked(found)[0][0] == "injected.mse"


def test_recipes_are_in_one_order_whoever_was_first() -> None:
    found = gate()
    order = [(run.case.recipe, [o.case.layer for o in run.outcomes]) for run in runs(found)]
    shuffled = sorted(found, key=lambda o: (-len(o.case.mode), o.case.layer))
    assert [(run.case.recipe, [o.case.layer for o in run.outcomes]) for run in runs(shuffled)] == order
    assert sorted(["layer_10", "layer_2", "layer_1"], key=natural_key) == ["layer_1", "layer_2", "layer_10"]


def test_layers_are_columns_in_the_order_of_the_model() -> None:
    found = runs(reversed(recipe(layers=12)))
    assert layer_names(found) == [*(f"layer_{n}" for n in range(12)), "logits"]
    named = [failing("drift", case=Case("m", name, "cpu")) for name in ("stem", "blocks.0", "neck")]
    assert layer_names(runs(named)) == ["stem", "blocks.0", "neck"]


def beside(label: str, verdict: Verdict | None, **figures: Figure) -> Outcome:
    case = Case("mode_2_1", label, "cpu", "fp8_e4m3")
    status: Status = "failed" if verdict else "passed"
    message = "it is another one." if verdict else ""
    named = {name.replace("_", "."): figure for name, figure in figures.items()}
    return Outcome("tiny-mamba", case, status, verdict, message, figures=named, nodeid=f"test_gate.py::test[{case}]")


def test_what_lies_beside_the_layers_has_columns_after_them_and_comes_in_the_order_of_the_data() -> None:
    zero = Figure(0.0, 0.0, 0.0)
    whole = recipe(faulty=1)
    outcomes = [
        *whole[:-1],
        beside("embedding", "not float", outside_mse=Figure(0.02, 0.0, 0.0, True, "worse")),
        beside("norm", None, outside_mse=zero),
        beside("head", None, outside_mse=zero),
        beside("decode", "differs from prefill", relation_layer=Figure(3.5, 0.1, 0.02, True)),
        whole[-1],
    ]
    (run,) = runs(outcomes)
    assert [one.case.layer for one in run.layers] == [f"layer_{n}" for n in range(4)]
    assert [one.case.layer for one in run.beside] == ["embedding", "norm", "head", "decode"]
    assert [one.case.layer for one in run.failing][:2] == ["embedding", "layer_1"]
    assert layer_names([run])[4:] == ["embedding", "norm", "head", "decode", "logits"]
    assert [cell_text(one) for one in run.beside] == ["2e-2", "0", "0", "4e0"]
    told = "\n".join(story(outcomes, report=None))
    assert told.startswith("mode_2_1-embedding-cpu-fp8_e4m3 is declared float, but changed")
    assert "first seen     embedding" in told
    assert "failing        3 of 4 layers; own: layer_1" in told
    assert "beside layers  decode (differs from prefill)" in told


def test_a_moved_reference_is_told_from_its_layer_on_and_accepted_by_a_full_update_only() -> None:
    message = "the float reference is not that of the baselines, from layer_1 on: its input differs by 0.03."
    cause = "reference, from layer_1 on; configuration of the model changed: eps 1e-05 -> 0.001"
    outcomes = [
        replace(one, status="failed", verdict="reference moved", message=message, cause=cause, figures={})
        for one in (*recipe()[:-1], beside("embedding", None), beside("decode", None), recipe()[-1])
    ]
    lines = story(outcomes, report=None)
    assert lines[0] == "mode_2_1-layer_1-cpu-fp8_e4m3 cannot be judged: the float reference moved"
    told = "\n".join(lines)
    assert f"first seen     {cause}" in told
    assert "accept         pytest --update-baselines   (of all cases, without -k)" in told
    assert "beside layers" not in told


@pytest.mark.parametrize(
    ("given_names", "expected"),
    [
        (["layer_0", "layer_10", "layer_11"], ["0", "10", "11"]),
        (["layer_10", "layer_11"], ["10", "11"]),
        (["model.layers.0.mixer", "model.layers.1.mixer"], ["0", "1"]),
        (["blocks.1.in_proj", "blocks.1.out_proj"], ["in_proj", "out_proj"]),
        (["embedding", "layers.0", "lm_head"], ["embedding", "layers.0", "lm_head"]),
        (["only"], ["only"]),
        ([], []),
    ],
)
def test_short_names_keep_what_differs(given_names: list[str], expected: list[str]) -> None:
    assert short_names(given_names) == expected


def test_totals_count_by_verdict() -> None:
    found = [*recipe(faulty=1), failing("missing"), failing(None), failing(None, status="skipped")]
    assert totals(found) == {"passed": 1, "skipped": 1, "missing": 1, "drift": 4, "failed": 1}


def test_the_environment_is_compared_both_ways() -> None:
    now, then = {"torch": "2.13", "cpu": "AVX2"}, {"torch": "2.12", "mkl": "1"}
    assert differences(then, now) == ["torch 2.12 -> 2.13", "mkl 1 -> none", "cpu none -> AVX2"]
    assert differences(None, now) == differences(now, now) == []


@pytest.mark.parametrize("moved", [False, True])
def test_only_what_moved_was_first_seen_somewhere(moved: bool) -> None:
    figures = {"logits.kl": Figure(0.2, 0.2, 1e-3, moved=moved)}
    lines = story([failing("over the limit", figures=figures, cause="no cause found")], report=None)
    assert any("no cause found" in line for line in lines) == moved
