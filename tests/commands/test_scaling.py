"""`probe scaling` from end to end: files, names, marks, exit codes, several processes."""

import csv
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from probe import ScalingResult, recommend, scaling_sweep
from probe.commands import main, scaling_batch as batch
from probe.engines.local import LocalEngine
from probe.files.atomic import remove_unfinished
from probe.recordings.tensor_sources import TensorSource
from probe.scaling.rules import compare_rules
from probe.scaling.sweep import Prepared
from tests.scaling.tensors import FORMATS_OF_THE_SPEC, normal

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    for seed, name in enumerate(("tensor1", "tensor2", "tensor3")):
        torch.save(normal(8, 64, seed=seed).bfloat16(), f"{name}.pt")

    def scaling(*arguments: str) -> tuple[int, str, str]:
        code = main(["scaling", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return scaling


def names_in(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def test_one_tensor_leaves_the_files_of_the_spec(run: Run) -> None:
    code, _, err = run("tensor1.pt", "--elem-format", "fp8_e4m3", "--num-levels", "31")
    assert (code, err) == (0, "")
    assert names_in("draw/scaling_analysis/tensor1") == {
        "mxfp_scaling_results_fp8_e4m3.txt",
        "mxfp_scaling_results_fp8_e4m3.csv",
        "mxfp_scaling_results_fp8_e4m3.json",
        "mxfp_scaling_test_fp8_e4m3.png",
        "mxfp_scaling_summary_fp8_e4m3.png",
        "mxfp_scaling_test_tensor1_fp8_e4m3.log",
    }
    folder = Path("draw/scaling_analysis/tensor1")
    stored = ScalingResult.from_json((folder / "mxfp_scaling_results_fp8_e4m3.json").read_text())
    assert stored == scaling_sweep(normal(8, 64).bfloat16(), "fp8_e4m3", num_levels=31, name="tensor1")
    document = json.loads((folder / "mxfp_scaling_results_fp8_e4m3.json").read_text())
    assert document["recommendation"]["scale_exponent"] == recommend(stored).scale_exponent
    assert [block["rule"] for block in document["blocks"]] == ["floor", "ceil", "even", "rceil", "mse"]
    rows = list(csv.DictReader((folder / "mxfp_scaling_results_fp8_e4m3.csv").read_text().splitlines()))
    assert [float(row["mse"]) for row in rows] == [level.mse for level in stored.levels]
    assert [row["recommended"] for row in rows].count("True") == 1
    text = (folder / "mxfp_scaling_results_fp8_e4m3.txt").read_text()
    assert text.count("Level ") == 31
    for figure in ("MSE", "RMSE", "MAE", "Max abs error", "Cosine", "PSNR", "Relative error", "Overflow", "Flushed"):
        assert text.count(f"{figure} ") >= 31
    for png in folder.glob("*.png"):
        assert png.read_bytes().startswith(b"\x89PNG")


def test_the_log_is_all_that_was_on_screen_with_times(run: Run) -> None:
    _, out, _ = run("tensor1.pt", "--no-plots")
    (log,) = Path("draw/scaling_analysis/tensor1").glob("*.log")
    stamp = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}")
    lines = log.read_text().splitlines()
    assert all(stamp.match(line) for line in lines)
    told = [line[24:] for line in lines]
    screen = [line.rstrip() for line in out.splitlines()]
    start = screen.index(told[1])
    assert screen[start - 1 : start - 1 + len(told)] == told
    assert told[1] == "[1/1] Processing: tensor1.pt"
    assert told[3] == "Input: tensor1.pt"
    levels = [found for line in told if (found := re.match(r"  Level (\d+)/(\d+): Scale Exp .* Overflow ", line))]
    assert [int(found[1]) for found in levels] == list(range(1, int(levels[0][2]) + 1))
    assert told[-1] == "✅ Successfully processed: tensor1.pt"


def test_a_batch_is_told_as_in_the_seed_and_goes_on_after_a_failure(run: Run) -> None:
    torch.save(torch.zeros(4), "tensor2.pt")
    code, out, err = run("tensor1.pt", "tensor2.pt", "missing.pt", "tensor3.pt", "--no-plots")
    assert (code, err) == (1, "")
    marks = [line for line in out.splitlines() if line.startswith(("[", "✅ Succ", "❌"))]
    assert marks == [
        "[1/4] Processing: tensor1.pt",
        "✅ Successfully processed: tensor1.pt",
        "[2/4] Processing: tensor2.pt",
        "❌ Failed to process: tensor2.pt: all 4 values of the tensor are zero, so that no scale matters. "
        "Give another.",
        "[3/4] Processing: missing.pt",
        "❌ Failed to process: missing.pt: there is no file missing.pt. "
        "Give a .pt, .npy, .npz or .safetensors file, or a folder of them.",
        "[4/4] Processing: tensor3.pt",
        "✅ Successfully processed: tensor3.pt",
    ]
    head = out.splitlines()
    assert head[:2] == ["Processing 4 tensor(s)...", "=" * 80]
    assert head[4] == "-" * 60
    tail = out[out.index("FINAL SUMMARY") :].splitlines()
    assert tail[1:5] == ["=" * 80, "Total tensors: 4", "Successful: 2", "Failed: 2"]
    assert names_in("draw/scaling_analysis") == {"tensor1", "tensor3", "scaling.html"}


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_what_cannot_be_read_keeps_the_page_of_the_last_run_and_is_exit_code_2(run: Run, jobs: str) -> None:
    run("tensor1.pt", "--no-plots")
    page = Path("draw/scaling_analysis/scaling.html")
    before = page.read_bytes()
    Path("broken.npy").write_bytes(b"no array")
    code, out, err = run("nope.pt", "broken.npy", "--jobs", jobs)
    assert code == 2
    assert err.startswith("probe: error: nothing was analysed. nope.pt: there is no file nope.pt. Give a .pt, ")
    assert err.endswith(" And 1 more, see above.\n")
    assert err.count("\n") == 1
    assert "Nothing was analysed, so no page is written." in out
    assert page.read_bytes() == before
    assert names_in("draw/scaling_analysis") == {"tensor1", "scaling.html"}


def test_numbers_that_cannot_be_analysed_are_exit_code_1_and_write_no_page(run: Run) -> None:
    torch.save(torch.zeros(4), "zeros.pt")
    code, out, err = run("zeros.pt", "--no-plots")
    assert (code, err) == (1, "")
    assert "Nothing was analysed, so no page is written." in out
    assert not Path("draw").exists()


def test_a_killed_process_leaves_no_half_file(tmp_path: Path) -> None:
    for name in (".x.csv.77.tmp", ".x.csv.78.tmp", "x.csv"):
        (tmp_path / "some").mkdir(exist_ok=True)
        (tmp_path / "some" / name).touch()
    (tmp_path / "empty").mkdir()
    for folder in ("some", "empty", "none"):
        remove_unfinished(tmp_path / folder, 77)
    assert names_in(str(tmp_path)) == {"some"}
    assert names_in(str(tmp_path / "some")) == {".x.csv.78.tmp", "x.csv"}


def test_a_good_batch_says_so(run: Run) -> None:
    code, out, _ = run("tensor1.pt", "tensor2.pt", "--no-plots")
    assert code == 0
    summary = ["FINAL SUMMARY", "=" * 80, "Total tensors: 2", "Successful: 2", "Failed: 0"]
    page = Path("draw/scaling_analysis/scaling.html")
    assert out.splitlines()[-7:] == [*summary, "🎉 All tests completed successfully!", f"Page of all tensors: {page}"]


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.arange(6), "the tensor is torch.int64"),
        (torch.ones(0), "is empty"),
        (torch.zeros(3, 2), "all 6 values of the tensor are zero"),
        (torch.tensor([1.0, torch.nan]), "has 1 NaN and 0 Inf among 2 values"),
        (torch.tensor([torch.inf, 1.0]), "has 0 NaN and 1 Inf among 2 values"),
        ({"a": 1}, "is not a tensor but a dict"),
        ("text", "is not a tensor but a str"),
    ],
)
def test_bad_input_fails_in_one_line_with_exit_code_1(run: Run, tensor: object, reason: str) -> None:
    torch.save(tensor, "bad.pt")
    code, out, err = run("bad.pt", "tensor1.pt", "--no-plots")
    assert (code, err) == (1, "")
    (line,) = [line for line in out.splitlines() if line.startswith("❌")]
    assert reason in line
    assert "Traceback" not in out
    assert "✅ Successfully processed: tensor1.pt" in out
    assert not Path("draw/scaling_analysis/bad").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--elem-format", "fp8"], "unknown format 'fp8'"),
        (["--granularity", "row"], "unknown granularity 'row'"),
        (["--num-levels", "0"], "num_levels is 0"),
        (["--scale-bits", "1"], "scale_bits is 1"),
        (["--max-scale-exp", "128"], "max_scale_exp is 128.0"),
        (["--block-size", "0"], "block_size is 0; expected 1 or more"),
        (["--jobs", "0"], "jobs is 0; expected 1 or more"),
        (["--output-dir", "tensor1.pt"], "cannot write to tensor1.pt: tensor1.pt is a file, not a folder. Give a"),
    ],
)
def test_a_wrong_option_is_one_line_and_exit_code_2(run: Run, arguments: list[str], message: str) -> None:
    code, _, err = run("tensor1.pt", *arguments)
    assert code == 2
    assert err.startswith("probe: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert not Path("draw").exists()


def test_two_inputs_of_one_name_never_overwrite_each_other(run: Run) -> None:
    for folder, factor in (("a", 1), ("b", 2)):
        Path(folder).mkdir()
        torch.save(factor * normal(64), f"{folder}/x.pt")
    run("a/x.pt", "b/x.pt", "--no-plots")
    assert names_in("draw/scaling_analysis") == {"x", "x_2", "scaling.html"}
    run("b/x.pt", "--no-plots")  # again, by itself: to its own place
    assert names_in("draw/scaling_analysis") == {"x", "x_2", "scaling.html"}
    amax = {
        name: json.loads(Path(f"draw/scaling_analysis/{name}/mxfp_scaling_results_fp8_e4m3.json").read_text())[
            "maximum"
        ]
        for name in ("x", "x_2")
    }
    assert amax["x_2"] == 2 * amax["x"]


def test_an_output_folder_is_used_as_it_is_for_one_tensor_and_by_name_for_several(run: Run) -> None:
    run("tensor1.pt", "--output-dir", "one", "--no-plots")
    assert "mxfp_scaling_results_fp8_e4m3.txt" in names_in("one")
    run("tensor2.pt", "--output-dir", "one", "--no-plots")  # another tensor's results are there: not over them
    assert "mxfp_scaling_results_fp8_e4m3.txt" in names_in("one/tensor2")
    assert json.loads(Path("one/mxfp_scaling_results_fp8_e4m3.json").read_text())["source"] == "tensor1.pt"
    run("tensor1.pt", "tensor2.pt", "--output-dir", "two", "--no-plots")
    assert names_in("two") == {"tensor1", "tensor2", "scaling.html"}


def test_all_formats_are_the_six_of_the_spec(run: Run) -> None:
    code, _, _ = run("tensor1.pt", "--elem-format", "all", "--num-levels", "3", "--no-plots")
    assert code == 0
    found = {path.stem.removeprefix("mxfp_scaling_results_") for path in Path("draw").rglob("*.json")}
    assert found == set(FORMATS_OF_THE_SPEC)


def test_blocks_and_every_option_have_their_effect(run: Run) -> None:
    options = ["--granularity", "block", "--block-size", "16", "--max-scale-exp", "1", "--min-scale-exp", "-1"]
    run("tensor1.pt", *options, "--scale-bits", "5", "--elem-format", "int8", "--no-plots")
    stored = ScalingResult.from_json(Path("draw/scaling_analysis/tensor1/mxfp_scaling_results_int8.json").read_text())
    assert (stored.granularity, stored.block_size, stored.scale_bits) == ("block", 16, 5)
    assert [level.scale_exponent for level in stored.levels[:3]] == [1, 0, -1]
    assert stored.rules == ("floor", "ceil", "even", "rceil", "mse")
    assert not list(Path("draw").rglob("*.png"))
    run("tensor1.pt", "--block-size", "8", "--no-plots")  # one scale for the tensor: of the block table only
    document = json.loads(Path("draw/scaling_analysis/tensor1/mxfp_scaling_results_fp8_e4m3.json").read_text())
    assert document["block_size"] is None
    assert {block["block_size"] for block in document["blocks"]} == {8}


def test_several_processes_give_the_same_files(run: Run) -> None:
    torch.save(torch.arange(3), "bad.pt")
    given = ("tensor1.pt", "bad.pt", "tensor2.pt", "--no-plots")
    code, out, _ = run(*given, "--output-dir", "serial")
    again, parallel, _ = run(*given, "--jobs", "2", "--output-dir", "parallel")
    assert (code, again) == (1, 1)
    assert parallel.replace("parallel", "serial") == out

    def files(folder: str) -> dict[str, bytes]:
        return {
            str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("mxfp_scaling_results_*")
        }

    assert files("serial") == files("parallel")
    assert len(files("serial")) == 6


def test_a_killed_worker_fails_its_own_tensor_only(run: Run, tmp_path: Path) -> None:
    """The source below kills whichever process loads it."""
    good = TensorSource("tensor1.pt", "tensor1", tmp_path / "tensor1.pt")
    deadly = Deadly("deadly.pt", "deadly", tmp_path / "deadly.pt")
    told: list[str] = []
    with LocalEngine(2) as engine:
        code = batch.run_batch([deadly, good], batch.Request(plots=False), None, engine=engine, show=told.append)
    assert code == 1
    assert "✅ Successfully processed: tensor1.pt" in told
    assert "❌ Failed to process: deadly.pt: its process was killed 3 times, perhaps because memory ran out" in told


class Deadly(TensorSource):
    def load(self) -> torch.Tensor:
        signal.raise_signal(signal.SIGKILL)
        raise AssertionError


def test_a_fault_of_ours_is_shown_and_the_others_go_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    real = compare_rules

    def broken(given: Prepared, *arguments: Any, **options: Any) -> object:
        if float(given.x.float().sum()) == float(normal(8, 64).bfloat16().float().sum()):
            raise RuntimeError("not this one")
        return real(given, *arguments, **options)

    monkeypatch.setattr(batch, "compare_rules", broken)
    code, out, _ = run("tensor1.pt", "tensor2.pt", "--no-plots")
    assert code == 1
    assert "❌ Failed to process: tensor1.pt: RuntimeError: not this one" in out
    assert "Traceback" in out
    assert "✅ Successfully processed: tensor2.pt" in out


def test_folders_and_files_mix(run: Run) -> None:
    Path("more").mkdir()
    np.save("more/array.npy", normal(64).numpy())
    code, out, _ = run("more", "tensor1.pt", "--no-plots")
    assert code == 0
    assert "[1/2] Processing: more/array.npy" in out
