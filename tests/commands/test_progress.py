"""Progress: a bar on a terminal, lines in a log, and a terminal that is clean afterwards."""

import sys

import pytest

from probe.commands import main
from probe.commands.output import LOG_INTERVAL, Progress


def test_a_log_has_the_lines_the_first_update_one_every_5_s_and_the_last(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Progress() as progress:
        progress.line("note: a")
        progress.status("layer_0 (1 of 9)")
        progress.begin(9)
        progress.step("fp32", "layer_0.output")
        progress.update(0, 0, "calibration")
        for done in range(0, 101):
            progress.update(done, 100, f"unit {done}")
            now += LOG_INTERVAL / 40
        progress.update(100, 100, "written")  # once is enough
        progress.update(0, 4, "another run")
        progress.update(4, 4, "done")
    assert capsys.readouterr().err.splitlines() == [
        "note: a",
        "calibration",
        "[ 40%] unit 40, 8 s left",
        "[ 80%] unit 80, 2 s left",
        "[100%] unit 100",
        "[100%] done",
    ]
    assert progress.lines[0] == "note: a"


def test_the_time_left_is_that_of_the_work_at_hand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither that of the references before it, nor that of an earlier run."""
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    with Progress() as progress:
        progress.update(0, 2, "reference")
        now += 1000
        progress.update(2, 2, "reference")
        progress.update(6, 10, "known from the run before: 6")
        now += 10
        progress.update(7, 10, "one more")
    assert capsys.readouterr().err.splitlines()[-1] == "[ 70%] one more, 30 s left"


def test_a_terminal_has_one_line_that_goes_away_and_lines_that_stay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Progress() as progress:
        progress.bar.mininterval = 0
        progress.status("layer_0 (1 of 9)")
        progress.line("note: a")
        progress.update(0, 0, "calibration")
        progress.update(5, 10, "layer_1 alone")
    shown = capsys.readouterr().err
    assert "\rlayer_0 (1 of 9)" in shown
    assert "note: a\n" in shown
    assert "layer_1 alone:  50%" in shown
    assert "5/10 [" in shown
    assert shown.count("\n") == 1, "only the line that stays"
    assert shown.rpartition("\r")[0].rpartition("\r")[2].strip() == "", "erased"


@pytest.mark.parametrize("arguments", [["demo", "--shap3", "4"], ["formats", "stray"], ["--what=1", "formats"]])
def test_an_option_that_no_command_knows_is_an_error_of_the_parser(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "probe: error: unrecognized arguments: " in capsys.readouterr().err
