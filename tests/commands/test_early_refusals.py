"""What the input alone shows to be wrong is refused before a model is loaded: exit code 2, at once."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from probe.commands import main

LINES = {
    "record, mode": ["record", "--modes", "nope"],
    "record, format": ["record", "--formats", "int7"],
    "record, layout": ["record", "--layout", "csv"],
    "record, tap": ["record", "--taps", "nope"],
    "record, samples": ["record", "--samples", "0"],
    "record, seqlen": ["record", "--seqlen", "0"],
    "record, batch size": ["record", "--batch-size", "0"],
    "record, percentile": ["record", "--percentile", "2"],
    "record, data": ["record", "--data", "nowhere.txt"],
    "record, prompt": ["record", "--prompt", ""],
    "record, device": ["record", "--device", "nope"],
    "record, out": ["record", "--out", "/dev/null"],
    "record, calibration": ["record", "--modes", "0", "--calib-data", "nowhere.txt"],
    "record, calibration samples": ["record", "--modes", "0", "--calib-data-num", "0"],
    "record, include": ["record", "--modes", "linear_w", "--include", "nope"],
    "errors, include": ["errors", "--include", "nope"],
    "sensitivity, include": ["sensitivity", "--include", "nope"],
    "init": ["init", "--model", "tiny-llama", "--into", "/dev/null"],
    "errors, mode": ["errors", "--modes", "nope"],
    "errors, format": ["errors", "--formats", "int7"],
    "errors, samples": ["errors", "--samples", "0"],
    "errors, seqlen": ["errors", "--seqlen", "1"],
    "errors, data": ["errors", "--data", "nowhere.txt"],
    "errors, percentile": ["errors", "--percentile", "2"],
    "errors, calibration": ["errors", "--calib-data", "nowhere.txt"],
    "errors, modes from": ["errors", "--modes-from", "nowhere.toml"],
    "sensitivity, mode": ["sensitivity", "--mode", "nope"],
    "sensitivity, float mode": ["sensitivity", "--mode", "fp16"],
    "sensitivity, format": ["sensitivity", "--format", "int7"],
    "sensitivity, samples": ["sensitivity", "--samples", "0"],
    "sensitivity, data": ["sensitivity", "--data", "nowhere.txt"],
    "sensitivity, device": ["sensitivity", "--device", "nope"],
    "sensitivity, percentile": ["sensitivity", "--percentile", "2"],
    "analyze, key": ["analyze", "--data.nope", "1"],
    "analyze, value": ["analyze", "--data.num_samples", "many"],
    "analyze, data": ["analyze", "--data.source", "custom:nowhere.txt"],
    "analyze, source": ["analyze", "--data.source", "nope"],
    "analyze, device": ["analyze", "--memory.device", "nope"],
    "analyze, configuration": ["analyze", "--config", "nowhere.yaml"],
    "layers, model": ["layers", "--model", "nope"],
    "check": ["check", "nowhere"],
    "diff": ["diff", "nowhere", "elsewhere"],
    "compare": ["compare", "2-1", "--dir", "nowhere"],
    "scaling": ["scaling", "nowhere.pt"],
    "formats": ["formats", "nope"],
}


@pytest.mark.parametrize("line", LINES)
def test_no_model_is_loaded_for_it(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(*args: Any, **options: Any) -> Any:
        pytest.fail("a model was loaded")

    monkeypatch.setattr("probe.models.loading.from_folder", load)
    monkeypatch.chdir(tmp_path)
    try:
        code: Any = main(LINES[line])
    except SystemExit as problem:  # of argparse
        code = problem.code
    assert code == 2
    shown = capsys.readouterr()
    assert "error" in shown.err + shown.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line", ["record, mode", "errors, mode", "sensitivity, mode", "analyze, key", "check", "compare"]
)
def test_it_takes_less_than_three_seconds_of_computing(line: str, tmp_path: Path) -> None:
    script = "import sys, time; from probe.commands import main; code = main(sys.argv[1:]); print(time.process_time())"
    done = subprocess.run(
        [sys.executable, "-c", script, *LINES[line]], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert float(done.stdout.split()[-1]) < 3, done.stderr
