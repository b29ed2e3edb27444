"""Scaling results as golden values: missing -> stored -> passed -> changed -> failed, in a pytest run of its own."""

import html
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from probe import recommend, scaling_sweep
from tests.plugin.conftest import UNUSED
from tests.plugin.project import lines_of
from tests.plugin.test_lifecycle import snapshot
from tests.scaling.tensors import normal

TEST = """
import pytest

@pytest.mark.probe_scaling(tensors=["tensors"], formats=["fp8_e4m3", "fp4_e2m1"], num_levels=7)
def test_scales(probe_scaling):
    probe_scaling.check()
"""
Run = Callable[..., pytest.RunResult]


@pytest.fixture
def run(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", lambda self: None)
    (pytester.path / "tensors").mkdir()
    torch.save(normal(16, 64).bfloat16(), "tensors/a.pt")
    np.save("tensors/b.npy", normal(16, 64, seed=1).numpy())
    pytester.makepyfile(test_scales=TEST)

    def once(*arguments: str, workers: int = 0) -> pytest.RunResult:
        for name in ("test_scales", "test_blocks"):
            sys.modules.pop(name, None)
        xdist = ("-n", str(workers), *UNUSED) if workers else ("-p", "no:xdist")
        return pytester.runpytest_inprocess("-p", "no:cacheprovider", *xdist, *arguments)

    return once


def stored(folder: Path) -> dict[str, object]:
    document: dict[str, object] = json.loads((folder / "baselines" / "scaling" / "cpu" / "scaling.json").read_text())
    return document


def test_the_lifecycle_of_a_scaling_baseline(run: Run, pytester: pytest.Pytester) -> None:
    missing = run()
    missing.assert_outcomes(failed=4)
    missing.stdout.fnmatch_lines(["scaling-tensors/a.pt-cpu-fp8_e4m3 has no baseline*", "*there is no baseline for*"])

    run("--update-baselines").assert_outcomes(passed=4)
    cases = stored(pytester.path)["cases"]
    assert isinstance(cases, dict)
    result = scaling_sweep(normal(16, 64).bfloat16(), "fp4_e2m1", num_levels=7)
    found = recommend(result)
    figures = cases["fp4_e2m1"]["tensors/a.pt"]["scaling"]
    assert figures["exponent"][0] == pytest.approx(found.scale_exponent, rel=1e-5)
    assert figures["mse"][0] == pytest.approx(found.level.mse, rel=1e-5)
    assert set(cases) == {"fp8_e4m3", "fp4_e2m1"}
    assert set(cases["fp8_e4m3"]) == {"tensors/a.pt", "tensors/b.npy"}

    run().assert_outcomes(passed=4)
    run("--update-baselines").assert_outcomes(passed=4)

    torch.save(4 * normal(16, 64).bfloat16(), "tensors/a.pt")
    changed = run()
    changed.assert_outcomes(failed=2, passed=2)
    one = "pytest 'test_scales.py::test_scales[[]scaling-tensors/a.pt-cpu-fp8_e4m3]'"
    changed.stdout.fnmatch_lines(
        [
            "scaling-tensors/a.pt-cpu-fp8_e4m3 drifted from its baseline*",
            "*scaling.exponent*",
            "*likely cause*the tensor itself is another one*",
            "  baseline *baselines/scaling/cpu/scaling.json",
            f"  rerun *{one}",
            f'  accept *{one} --update-baselines --allow-worse "REASON"',
        ]
    )
    run("-k", "[scaling-tensors/a.pt-cpu-fp8_e4m3]").assert_outcomes(failed=1, deselected=3)


def test_a_changed_quantizer_fails_and_is_accepted_only_with_a_reason(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("--update-baselines").assert_outcomes(passed=4)
    from probe.scaling import fast

    right = fast.on_elements
    monkeypatch.setattr(fast, "on_elements", lambda y, fmt: right(torch.floor(y * 4) / 4, fmt))
    run("-k", "fp4_e2m1").assert_outcomes(failed=2, deselected=2)
    refused = run("--update-baselines", "-k", "fp4_e2m1")
    refused.assert_outcomes(failed=2, deselected=2)
    refused.stdout.fnmatch_lines(["*got worse: scaling.mse*", "scaling on cpu: 2 cases: 2 drift; *"])
    accepted = run("--update-baselines", "-k", "fp4_e2m1", "--allow-worse", "other rounding on purpose")
    accepted.assert_outcomes(passed=2, deselected=2)
    run("-k", "fp4_e2m1").assert_outcomes(passed=2, deselected=2)


def test_another_number_of_levels_fails_though_the_figures_may_agree(run: Run, pytester: pytest.Pytester) -> None:
    run("--update-baselines").assert_outcomes(passed=4)
    pytester.makepyfile(test_scales=TEST.replace("num_levels=7", "num_levels=13"))
    failed = run("--html=report.html", "--self-contained-html")
    failed.assert_outcomes(failed=4)
    page = html.unescape(Path("report.html").read_text())
    assert "num_levels 7 -> 13" in page
    assert 'pytest test_scales.py -k "scaling- and fp4_e2m1" --update-baselines' in page
    assert "the baseline was made with other settings" in Path("summary.md").read_text()
    lines = lines_of(failed.outlines, "scaling-tensors/a.pt-cpu-fp8_e4m3 failed")
    assert "  changed        num_levels 7 -> 13" in lines
    command = "pytest 'test_scales.py::test_scales[scaling-tensors/a.pt-cpu-fp8_e4m3]' --update-baselines"
    assert lines[-1] == f"  accept         {command}", lines
    told = run("--update-baselines")
    told.assert_outcomes(passed=4)
    told.stdout.fnmatch_lines(["scaling-tensors/a.pt-cpu-fp8_e4m3  num_levels  7 -> 13"])
    run().assert_outcomes(passed=4)


def test_figures_of_an_earlier_sweep_are_told_as_other_settings(run: Run, pytester: pytest.Pytester) -> None:
    run("--update-baselines").assert_outcomes(passed=4)
    file = pytester.path / "baselines" / "scaling" / "cpu" / "scaling.json"
    text = file.read_text()
    assert '"sweep": "2"' in text
    file.write_text(re.sub(r',\s*"sweep": "2"', "", text))  # as stored before a sweep had a version
    failed = run("-k", "a.pt and fp8")
    failed.assert_outcomes(failed=1, deselected=3)
    lines = lines_of(failed.outlines, "scaling-tensors/a.pt-cpu-fp8_e4m3 failed")
    assert "  changed        sweep none -> 2" in lines, lines
    run("--update-baselines").assert_outcomes(passed=4)
    run().assert_outcomes(passed=4)


def test_two_tests_of_one_tensor_must_agree_on_the_levels(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_blocks=TEST.replace("num_levels=7", "num_levels=3"))
    result = run()
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(
        ["*another test compares scaling-tensors/a.pt-cpu-fp8_e4m3 of scaling*{'num_levels': '3'*} there, *'7'*} here*"]
    )


def test_the_lifecycle_under_xdist_is_that_of_one_process(run: Run, pytester: pytest.Pytester) -> None:
    run(workers=2).assert_outcomes(failed=4)
    assert not (pytester.path / "baselines").exists()
    run("--update-baselines", workers=2).assert_outcomes(passed=4)
    parallel = snapshot(pytester.path / "baselines")
    assert parallel
    for name in parallel:
        Path(pytester.path / "baselines" / name).unlink()
    run("--update-baselines").assert_outcomes(passed=4)
    assert snapshot(pytester.path / "baselines") == parallel
    run(workers=2).assert_outcomes(passed=4)
    torch.save(4 * normal(16, 64).bfloat16(), "tensors/a.pt")
    changed = run(workers=2)
    changed.assert_outcomes(failed=2, passed=2)
    changed.stdout.fnmatch_lines(["scaling-tensors/a.pt-cpu-f* drifted from its baseline*"])
    pytester.makepyfile(test_scales=TEST.replace("num_levels=7", "num_levels=13"))
    other = run(workers=2)
    other.assert_outcomes(failed=4)
    other.stdout.fnmatch_lines(["  changed * num_levels 7 -> 13"])


def test_the_command_that_creates_a_baseline_runs_as_printed(run: Run) -> None:
    torch.save(normal(16, 64, seed=2), "tensors/the new one.pt")
    missing = run("-k", "new")
    missing.assert_outcomes(failed=2, deselected=4)
    command = "pytest 'test_scales.py::test_scales[scaling-tensors/the new one.pt-cpu-fp4_e2m1]' --update-baselines"
    missing.stdout.fnmatch_lines([f"  create  *{command.replace('[', '[[]')}"])
    run(*command.replace("'", "").partition(" ")[2].replace(" --", "\n--").split("\n")).assert_outcomes(passed=1)


def test_what_is_stored_and_no_longer_asked_for_is_obsolete(run: Run, pytester: pytest.Pytester) -> None:
    run("--update-baselines").assert_outcomes(passed=4)
    Path("tensors/b.npy").unlink()
    done = run()
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    done.stdout.fnmatch_lines(["obsolete: scaling-tensors/b.npy-cpu-fp4_e2m1 of scaling*"])
    run("--update-baselines")
    assert run().ret == pytest.ExitCode.OK


def test_options_narrow_the_formats_and_blocks_have_cases_of_their_own(run: Run, pytester: pytest.Pytester) -> None:
    block = TEST.replace("num_levels=7", "num_levels=3, granularity='block'").replace('"fp8_e4m3", ', '"int8", ')
    pytester.makepyfile(test_blocks=block)
    run("--update-baselines").assert_outcomes(passed=8)
    run("--probe-formats=int8").assert_outcomes(passed=2, deselected=1)
    block_cases = json.loads(Path("baselines/scaling/cpu/scaling_block.json").read_text())["cases"]
    assert block_cases["int8"]["tensors/a.pt"]["scaling"]["rule"][0] in range(5)


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ("tensors=['nowhere.pt']", "there is no file"),
        ("tensors=[]", "expected a list of names"),
        ("", "tensors is None; expected a list of names"),
        ("tensors=['tensors'], formats=['fp9']", "unknown format 'fp9'"),
        (
            "tensors=['tensors'], levels=3",
            "unknown key 'levels'. Did you mean 'num_levels'? Known: tensors",
        ),
        ("tensors=['tensors'], num_levels=0", "num_levels is 0"),
    ],
)
def test_a_wrong_marker_is_a_collection_error(run: Run, pytester: pytest.Pytester, marker: str, message: str) -> None:
    pytester.makepyfile(
        test_scales=f"import pytest\n@pytest.mark.probe_scaling({marker})\ndef test_it(probe_scaling): pass\n"
    )
    done = run()
    done.assert_outcomes(errors=1)
    assert message in done.stdout.str()


def test_a_test_that_never_asks_fails(run: Run, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_scales=TEST.replace("probe_scaling.check()", "pass"))
    done = run()
    done.assert_outcomes(failed=4)
    done.stdout.fnmatch_lines(["*never called probe_scaling.check()*"])


def test_a_tensor_that_cannot_be_swept_fails_in_one_line(run: Run) -> None:
    torch.save(torch.zeros(3), "tensors/a.pt")
    done = run("-k", "a.pt")
    done.assert_outcomes(failed=2, deselected=2)
    assert "all 3 values of the tensor are zero" in done.stdout.str()
    assert "Traceback" not in done.stdout.str()


def test_the_html_report_and_the_summary_have_them(run: Run, pytester: pytest.Pytester) -> None:
    run("--update-baselines")
    torch.save(4 * normal(16, 64).bfloat16(), "tensors/a.pt")
    run("--html=report.html", "--self-contained-html").assert_outcomes(failed=2, passed=2)
    summary = json.loads(Path("summary.json").read_text())
    assert summary["totals"] == {"passed": 2, "drift": 2}
    assert "scaling-tensors/a.pt-cpu-fp8_e4m3" in Path("report.html").read_text()
