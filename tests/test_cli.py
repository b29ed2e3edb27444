import json
import subprocess
import sys

import pytest

from probe import FORMATS, __version__
from probe.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_formats_prints_every_row(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "formats")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(FORMATS)


def test_formats_as_json_is_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "formats", "--json")
    rows = {row["format"]: row for row in json.loads(out)}
    assert rows["fp8_e4m3"]["max"] == 448
    assert rows["nvfp4"]["block"] == 16
    assert rows["mxint8"]["min normal"] is None


def test_demo_ranks_formats_as_their_bits_suggest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "demo", "--json", "--shape", "64", "96")
    assert code == 0
    sqnr = {row["format"]: row["sqnr dB"] for row in json.loads(out)}
    assert list(sqnr) == list(FORMATS)
    assert sqnr["fp16"] > sqnr["bf16"] > sqnr["mxint8"] > sqnr["fp8_e4m3"] > sqnr["fp4_e2m1"]
    assert sqnr["int8"] > sqnr["int4"] > sqnr["int2"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--formats", "fp8"], "unknown format 'fp8'. Did you mean 'fp8_e4m3'?"),
        (["demo", "--shape", "1000000", "1000000"], "has 1000000000000 elements"),
        (["demo", "--seed", "99999999999999999999999"], "seed 99999999999999999999999 is out of range"),
        (["demo", "--formats", "int8", "--scale-rule", "ceil"], "none of these formats has a power-of-two scale"),
        (["demo", "--scale-rule", "cel"], "unknown scale rule 'cel'. Did you mean 'ceil'?"),
        (["demo", "--shape", "0"], "shape 0 has no elements"),
        (["demo", "--outliers", "3"], "outliers 3.0 is not a share"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("probe: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["formats"]])
def test_help_version_and_formats_do_not_import_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from probe.cli import main\n"
        f"try: main({arguments!r})\nexcept SystemExit: pass\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    if arguments == ["--version"]:
        assert done.stdout.strip() == f"probe {__version__}"


def test_demo_of_a_lossless_tensor_is_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "demo", "--json", "--shape", "1", "--formats", "int4")
    (row,) = json.loads(out, parse_constant=pytest.fail)
    assert (row["mse"], row["sqnr dB"], row["saturated %"]) == (0, None, 0)


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    for arguments in (["--debug", "demo", "--shape", "0"], ["demo", "--shape", "0", "--debug"]):
        with pytest.raises(ValueError, match="has no elements"):
            main(arguments)


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m probe.cli formats --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "0"
    assert "error" not in done.stderr


def test_every_public_name_can_be_imported() -> None:
    import probe

    assert all(getattr(probe, name) is not None for name in probe.__all__)
    assert set(probe._HOME) | {"__version__"} == set(probe.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        probe.nothing  # noqa: B018
