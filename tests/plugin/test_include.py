"""`include` in the life of a baseline: a changed one is never compared, and never mixed with old figures."""

import json

import pytest

from tests.plugin.conftest import Run

MODES = {"modes": '["linear_w", "bf16"]', "formats": '["int8", "fp8_e4m3"]'}


def includes(pytester: pytest.Pytester) -> set[str | None]:
    files = (pytester.path / "baselines").rglob("cpu/*.json")
    return {json.loads(file.read_text())["environment"].get("input.include") for file in files}


def test_a_changed_include_asks_for_a_whole_update_both_ways(project: Run, pytester: pytest.Pytester) -> None:
    assert project("--update-baselines", **MODES).ret == 0
    assert includes(pytester) == {None}
    for include, told, stored in (('["head"]', "none -> head", "head"), (None, "head -> none", None)):
        changed = {**MODES, "include": include}
        result = project(**changed)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        result.stdout.fnmatch_lines([f"*made with another input: input.include {told}. Restore the old input*"])
        result.stdout.fnmatch_lines(["4 of 12 stored cases compared; 8 not compared*"])  # bf16 does not depend on it
        update = ("--update-baselines", "--allow-worse", "the head")
        part = project(*update, "-k", "cpu-int8", **changed)
        assert part.ret != 0
        part.stdout.fnmatch_lines(["*the input changed, so all cases must be updated*"])
        assert project(*update, **changed).ret == 0
        assert includes(pytester) == {stored}
        assert project(**changed).ret == 0
        assert project("--update-baselines", "-k", "cpu-int8", **changed).ret == 0, "the same include is no change"


def test_two_tests_of_a_model_have_one_include(project: Run, pytester: pytest.Pytester) -> None:
    def second_test() -> None:
        (pytester.path / "test_more.py").write_text(
            "import pytest\n\n\n@pytest.mark.probe(include=['head'])\n"
            "def test_head(probe_case):\n    probe_case.check()\n"
        )

    result = project(after=second_test, **MODES)
    assert result.ret != 0
    assert "with different include: () and ('head',). They share one set of baselines" in str(result.stdout)
