"""Options, [tool.probe] and the marker: what they select, and that what cannot be is refused in one message."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from probe.words import LOGITS, OUTSIDE, PATHS
from tests.plugin.conftest import Run
from tests.plugin.project import BESIDE

ROOT = Path(__file__).parents[2]
COLLECT = ("--collect-only", "-q")
TWICE = """
import probe
from modes import coarse

probe.register_mode("coarse", coarse)
probe.register_mode("coarse", coarse)
"""
FACTORIES = """
def fails():
    raise RuntimeError("no weights here")


def empty():
    return None


def small():
    from network import Network
    return Network(depth=1)
"""


@pytest.fixture
def without() -> None:
    """Every case that the model has."""


def ids(result: pytest.RunResult, test: str = "test_matches_baseline") -> list[str]:
    """The cases that were collected of a test."""
    assert result.ret in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), result.stdout.str()
    found = (re.fullmatch(rf"\S+\.py::{test}\[(.*)\]", line) for line in result.outlines)
    return [match[1] for match in found if match]


def refused(result: pytest.RunResult, *words: str) -> None:
    """Not a test ran, and one line says why."""
    text = result.stdout.str() + "\n" + result.stderr.str()
    assert result.ret in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED), text
    assert "Traceback" not in text, text
    told = [line for line in text.splitlines() if "probe: " in line]
    assert len(told) == 1, text
    for word in words:
        assert word in told[0], f"{word} is not told: {told[0]}"


def write_marked(pytester: pytest.Pytester, arguments: str) -> None:
    (pytester.path / "test_marked.py").write_text(
        f"import pytest\n\n\n@pytest.mark.probe({arguments})\ndef test_marked(probe_case):\n    probe_case.check()\n"
    )


# ------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("format", '["int8"]', ["unknown key 'format'", "Did you mean 'formats'?"]),
        ("batchsize", "2", ["unknown key 'batchsize'", "Did you mean 'batch_size'?"]),
        ("zzz", "2", ["unknown key 'zzz'. Known: model, reference, modes"]),
        ("model", "3", ["model is 3; expected a text that is not empty"]),
        ("model", '""', ["model is ''; expected a text that is not empty"]),
        ("modes", "true", ["modes is True; expected a list of names"]),
        ("modes", "[]", ["modes is []; expected a list of names"]),
        ("modes", '["coarse", ""]', ["modes is ['coarse', '']; expected a list of names"]),
        ("modes", '["coars"]', ["unknown mode 'coars'", "Did you mean 'coarse'?"]),
        ("modes", '["fp32"]', ["nothing is left beside the reference"]),
        ("modes", '["2-1"]', ["mode_2_1-int8 quantizes Mamba blocks and network:make has none"]),
        ("layers", "{}", ["layers is {}; expected a list of names"]),
        ("layers", '["layers.9"]', ["layer 'layers.9' matches none of the 12 modules", "Nearest: layers.2"]),
        ("layers", "[7]", ["layer '7' matches none of the 12 modules", "Give 0 to 2, first, last, all"]),
        ("layers", '["["]', ["layer '[' is not a regular expression"]),
        ("devices", "[1.5]", ["devices is [1.5]; expected a list of names"]),
        ("devices", '["cup"]', ["unknown device 'cup'", "Did you mean 'cpu'?"]),
        ("devices", '["recorded:nowhere"]', ["'recorded:nowhere': there is no folder"]),
        ("formats", '["int9"]', ["unknown format 'int9'", "Did you mean 'int8'?"]),
        ("baselines", "7", ["baselines is 7; expected a text that is not empty"]),
        ("data", '"evaluatio"', ["unknown text 'evaluatio'", "Did you mean 'evaluation'?"]),
        ("data", '"no.txt"', ["text file 'no.txt' does not exist"]),
        ("samples", '"2"', ["samples is '2'; expected a whole number, 1 or more"]),
        ("samples", "true", ["samples is True; expected a whole number, 1 or more"]),
        ("samples", "100000", ["samples of 16 need 1600000", "fit at this seqlen"]),
        ("seqlen", "0", ["seqlen is 0; expected a whole number, 1 or more"]),
        ("batch_size", "1.0", ["batch_size is 1.0; expected a whole number, 1 or more"]),
        ("calibration", "16", ["calibration is 16; expected a table of data, inputs, samples, seqlen, percentile"]),
        ("calibration", "{ sample = 2 }", ["unknown key 'calibration.sample'", "Did you mean 'calibration.samples'?"]),
        ("calibration", "{ seqlen = -1 }", ["calibration.seqlen is -1; expected a whole number, 1 or more"]),
        ("calibration", "{ percentile = 1.5 }", ["percentile is 1.5; expected a share above 0, at most 1"]),
        ("calibration", '{ data = "calibratio" }', ["unknown text 'calibratio'", "Did you mean 'calibration'?"]),
        ("limits", "1e-3", ["limits is 0.001; expected a table by a recipe of tables by a figure"]),
        ("limits", '{ "coarse-*" = 1e-3 }', ["expected a table by a recipe of tables by a figure"]),
        (
            "limits",
            '{ "coarse-*" = { msd = 1 } }',
            ["unknown figure 'propagated.msd'", "Did you mean 'propagated.mse'?"],
        ),
        ("limits", '{ "coarse-*" = { mse = "low" } }', ["coarse-*.mse is 'low'; expected a number"]),
        ("limits", '{ "coarse-*" = { mse = nan } }', ["coarse-*.mse is nan; expected a number"]),
        ("limits", '{ "coarse-*" = { "injected.mean_output" = 1 } }', ["is neither better nor worse, so has no limit"]),
        ("tolerances", '["mse"]', ["expected a table by a figure of tables by a part of its tolerance"]),
        ("tolerances", "{ msd = { relative = 1 } }", ["unknown figure 'propagated.msd'", "'propagated.mse'?"]),
        ("tolerances", "{ mse = { relativ = 1 } }", ["unknown part of a tolerance 'relativ'", "mean 'relative'?"]),
        ("tolerances", "{ mse = { relative = -1 } }", ["mse.relative is -1; expected 0 or more"]),
        ("allow_download", "1", ["allow_download is 1; expected true or false"]),
        ("trust_remote_code", '"yes"', ["trust_remote_code is 'yes'; expected true or false"]),
    ],
)
def test_a_key_that_cannot_be_is_refused_and_the_nearest_is_named(
    project: Run, key: str, value: str, words: list[str]
) -> None:
    refused(project(**{key: value}), *words)


def test_settings_that_cannot_be_read_are_refused_but_only_where_there_are_some(pytester: pytest.Pytester) -> None:
    (pytester.path / "test_plain.py").write_text("def test_plain(): pass\n")
    (pytester.path / "other.ini").write_text("[pytest]\n")
    file = pytester.path / "pyproject.toml"

    def run(text: str) -> pytest.RunResult:
        file.write_text(text)
        return pytester.runpytest_inprocess("-c", "other.ini", "--rootdir=.", "-p", "no:cacheprovider")

    refused(run("[tool]\nprobe = 3\n"), f"[tool.probe] of {file} is 3; expected a table of model, reference, modes")
    refused(run("[tool.prob]\nmodel = 'x'\n"), f"{file} has a [tool.prob] and no [tool.probe]. Did you mean")
    refused(run("[tool.probe]\nmodel = \n"), f"{file} cannot be read", "Correct it and run again")
    both = "[tool.probe]\nmodes = ['0']\n[tool.probe.modes.mixed]\nbase = '0'\nkeep_float = ['layers.0']\n"
    refused(run(both), "TOML allows no table [tool.probe.modes.NAME] beside it", "the key matrix of [tool.probe.modes]")
    assert run("[project\nname = ").ret == 0, "the file of a project that does not use probe is none of its business"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--probe-modes", "coars"], ["unknown mode 'coars'", "Did you mean 'coarse'?"]),
        (["--probe-modes", " , "], ["--probe-modes names nothing. Expected modes separated by commas"]),
        (["--probe-formats", "fp8"], ["the options: formats: unknown format 'fp8'", "Did you mean 'fp8_e"]),
        (["--probe-devices", "gpu"], ["unknown device 'gpu'", "Did you mean 'xpu'?"]),
        (["--probe-devices", "recorded:x"], ["device 'recorded:x': there is no folder"]),
        (["--probe-layers", "blocks.0"], ["matches none of the 12 modules of Network", "Nearest: "]),
        (["--probe-layers", "3"], ["layer '3' matches none of the 12 modules of Network", "Give 0 to 2, first"]),
        (["--probe-layers", "("], ["layer '(' is not a regular expression"]),
        (["--probe-model", "tiny-mambo"], ["unknown model 'tiny-mambo'. Did you mean 'tiny-mamba'?"]),
        (["--probe-model", "./nowhere"], ["model folder './nowhere' does not exist"]),
        (["--probe-model", "nowhere:make"], ["module 'nowhere' cannot be imported: ModuleNotFoundError"]),
        (["--probe-model", "network:mak"], ["module 'network' has no 'mak'", "Did you mean 'network:make'?"]),
        (["--probe-model", "factories:fails"], ["the factory failed: RuntimeError: no weights here"]),
        (["--probe-model", "factories:empty"], ["the factory returned a NoneType; expected a torch.nn.Module"]),
        (["--probe-model", ""], ["--probe-model is empty, perhaps an unset variable"]),
        (["--baselines-dir", " "], ["--baselines-dir is empty, perhaps an unset variable"]),
        (["--update-baselines-in-ci"], ["--update-baselines-in-ci does nothing without --update-baselines"]),
        (["--allow-worse", "we changed it"], ["--allow-worse does nothing without --update-baselines"]),
        (["--update-baselines", "--allow-worse", ""], ["expected a reason of 8 to 120 characters"]),
        (["--update-baselines", "--allow-worse", "  short  "], ["expected a reason of 8 to 120 characters"]),
        (["--update-baselines", "--allow-worse", "long " * 30], ["expected a reason of 8 to 120 characters"]),
        (["--update-baselines", "--allow-worse", "two lines\nof reason"], ["that a reviewer can read, on one line"]),
    ],
)
def test_an_option_that_cannot_be_is_refused_and_the_nearest_is_named(
    project: Run, pytester: pytest.Pytester, arguments: list[str], words: list[str]
) -> None:
    (pytester.path / "factories.py").write_text(FACTORIES)
    refused(project(*arguments), *words)
    assert not (pytester.path / "baselines").exists()


def test_an_update_is_refused_while_ci_is_set_unless_it_is_said_twice(
    project: Run, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", "true")
    refused(project("--update-baselines"), "--update-baselines while CI is set", "--update-baselines-in-ci")
    assert not (pytester.path / "baselines").exists()
    assert project("--update-baselines", "--update-baselines-in-ci").ret == 0
    assert project().ret == 0


def test_a_mode_registered_twice_is_refused(project: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "twice").mkdir()
    (pytester.path / "twice" / "conftest.py").write_text(TWICE)
    result = project("twice")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    text = result.stdout.str() + result.stderr.str()
    assert text.count("there is a mode 'coarse' already. Choose another name") == 1
    assert "Traceback" not in text


# ------------------------------------------------------------------------------------------------ what is selected


def test_the_id_of_a_case_is_mode_layer_device_format(project: Run) -> None:
    result = project(*COLLECT)
    result.stdout.fnmatch_lines(["test_gate.py::test_matches_baseline[[]coarse-layer_0-cpu-int8[]]"])
    layers = ("layer_0", "layer_1", "layer_2", *BESIDE)
    assert ids(result) == [f"coarse-{layer}-cpu-{format}" for format in ("int8", "fp8_e4m3") for layer in layers]


def test_modes_are_named_in_either_spelling_in_lists_and_in_groups(project: Run) -> None:
    def modes(*arguments: str) -> list[str]:
        found = ids(project(*COLLECT, *arguments, "--probe-layers", "first", model='"tiny-mamba"', formats='["int8"]'))
        return [name.partition("-")[0] for name in found if "-layer_0-" in name]

    assert modes("--probe-modes", "2-1") == modes("--probe-modes", "mode_2_1") == ["mode_2_1"]
    both = ["mode_2_1", "fp16"]
    assert modes("--probe-modes", "2-1,fp16") == modes("--probe-modes", "2-1 fp16") == both
    assert modes("--probe-modes", "2-1, mode_2_1", "--probe-modes", "fp16") == both, "each mode once"
    assert modes("--probe-modes", "essential") == ["mode_0", "mode_2_1", "mode_2_2", "mode_2_4"]
    assert modes("--probe-modes", "fp_only,bf16") == ["bf16"], "the reference is not held against itself"
    seven = ["mode_0", "mode_2_0", "mode_2_1", "mode_2_2", "mode_2_3", "mode_2_4", "mode_3"]
    assert modes("--probe-modes", "all") == modes("--probe-modes", "quant_only") == seven


def test_layers_are_first_last_indices_or_patterns(project: Run) -> None:
    def layers(*given: str) -> list[str]:
        found = ids(project(*COLLECT, "--probe-formats", "int8", *(f"--probe-layers={one}" for one in given)))
        return [name.removeprefix("coarse-").removesuffix("-cpu-int8") for name in found]

    assert layers("first") == ["layer_0", *BESIDE]
    assert layers("last") == ["layer_2", *BESIDE]
    assert layers("2,0") == layers("0", "2") == layers("layer_0 layer_2") == ["layer_0", "layer_2", *BESIDE]
    assert layers(r"layers\.[12]$") == ["layer_1", "layer_2", *BESIDE]
    assert layers(r"up$") == ["layers.0.up", "layers.1.up", "layers.2.up", *BESIDE]
    assert layers("all") == ["layer_0", "layer_1", "layer_2", *BESIDE]


def test_devices_and_formats_are_named_in_lists_each_once(project: Run) -> None:
    found = ids(project(*COLLECT, "--probe-devices", "cpu,xla cpu", "--probe-formats", "int8,int8", "-k", "layer_0"))
    assert found == ["coarse-layer_0-cpu-int8", "coarse-layer_0-xla-int8"]
    assert ids(project(*COLLECT, devices='["cpu", "cpu"]', formats='["int8", "int8"]', layers="[0, 0]")) == [
        f"coarse-{layer}-cpu-int8" for layer in ("layer_0", *BESIDE)
    ]


def test_k_takes_a_slice_of_the_matrix(project: Run) -> None:
    assert ids(project(*COLLECT, "-k", "layer_0 and int8")) == ["coarse-layer_0-cpu-int8"]
    assert ids(project(*COLLECT, "-k", "coarse and not layer")) == [
        f"coarse-{label}-cpu-{format}" for format in ("int8", "fp8_e4m3") for label in BESIDE
    ]


def test_another_model_and_another_folder_have_baselines_of_their_own(project: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "factories.py").write_text(FACTORIES)
    small = ("--probe-model", "factories:small", "--baselines-dir", "elsewhere/there", "--probe-formats", "int8")
    assert ids(project(*COLLECT, *small)) == [f"coarse-{layer}-cpu-int8" for layer in ("layer_0", *BESIDE)]
    assert project(*small, "--update-baselines").ret == 0
    assert not (pytester.path / "baselines").exists()
    assert (pytester.path / "elsewhere" / "there" / "factories_small" / "cpu" / "coarse.json").exists()
    assert project(*small).ret == 0
    result = project("--probe-formats", "int8")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*coarse-layer_0-cpu-int8 has no baseline*"])


# ---------------------------------------------------------------------------------------------------- the marker


def test_the_marker_overrides_the_settings_and_options_narrow_it(project: Run, pytester: pytest.Pytester) -> None:
    (pytester.path / "factories.py").write_text(FACTORIES)
    write_marked(pytester, 'model="factories:small", modes=["linear_w", "fp16"], formats=["int8", "nvfp4"]')

    def marked(*arguments: str) -> list[str]:
        return ids(project(*COLLECT, *arguments, "test_marked.py"), "test_marked")

    both = ["layer_0", *BESIDE]
    count = len(both)
    whole = [
        *(f"linear_w-{layer}-cpu-{format}" for format in ("int8", "nvfp4") for layer in both),
        *(f"fp16-{layer}-cpu" for layer in both),
    ]
    assert marked() == whole
    assert marked("--probe-modes", "fp16,coarse") == whole[2 * count :], "coarse is not added"
    assert marked("--probe-formats", "int8") == [*whole[:count], *whole[2 * count :]], (
        "a float mode has no format to leave out"
    )
    assert marked("--probe-layers", "first") == whole
    assert (
        marked("--probe-layers", "layer_0", "--probe-modes", "linear_w", "--probe-formats", "nvfp4")
        == whole[count : 2 * count]
    )
    assert marked("--probe-model", "network:make") == whole, "the marker names the model"


def test_a_marked_test_of_which_the_options_leave_nothing_is_deselected(
    project: Run, pytester: pytest.Pytester
) -> None:
    (pytester.path / "factories.py").write_text(FACTORIES)
    write_marked(pytester, 'model="factories:small", modes=["linear_w"], formats=["int8"]')
    narrowing = ["--probe-modes=coarse", "--probe-formats=nvfp4", "--probe-devices=xla", "--probe-layers=2"]
    for option in narrowing:
        result = project(option, "test_marked.py")
        assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED, "nothing was measured, which is no success"
        result.assert_outcomes(deselected=1)
        found = project(*COLLECT, option)
        assert ids(found), "the other test of the project has cases"
        assert not ids(found, "test_marked")
    assert project("--update-baselines", "--probe-modes=coarse").ret == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ('"network:make"', ["the marker of test_marked takes keywords only"]),
        ('mode=["coarse"]', ["the probe marker of test_marked: unknown key 'mode'", "Did you mean 'modes'?"]),
        ('modes=["coars"]', ["unknown mode 'coars'", "Did you mean 'coarse'?"]),
        ("modes=[None]", ["the probe marker of test_marked: modes is [None]; expected a list of names"]),
        ('formats=["int9"]', ["the probe marker of test_marked: formats: unknown format 'int9'", "'int8'?"]),
        ('devices=["gpu"]', ["unknown device 'gpu'"]),
        ('layers=["blok"]', ["layer 'blok' matches none of the 12 modules"]),
        ('model="network:mak"', ["Did you mean 'network:make'?"]),
        ("samples=3", ["two tests measure network:make with different samples: 2 and 3"]),
        ('baselines="other"', ["two tests measure network:make with different baselines: 'baselines' and 'other'"]),
    ],
)
def test_a_marker_that_cannot_be_is_refused(
    project: Run, pytester: pytest.Pytester, arguments: str, words: list[str]
) -> None:
    write_marked(pytester, arguments)
    refused(project(), *words)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--probe-modes=coars", ["unknown mode 'coars'", "Did you mean 'coarse'?"]),
        ("--probe-formats=int9", ["unknown format 'int9'", "Did you mean 'int8'?"]),
        ("--probe-devices=gpu", ["unknown device 'gpu'", "Did you mean 'xpu'?"]),
        ("--probe-layers=blok", ["layer 'blok' matches none of the 12 modules of Network"]),
    ],
)
def test_options_that_cannot_be_are_refused_by_marked_tests_too(
    project: Run, pytester: pytest.Pytester, option: str, words: list[str]
) -> None:
    write_marked(pytester, 'modes=["coarse"]')
    refused(project(option, "test_marked.py"), *words)


# ----------------------------------------------------------------------------------- several tests of one model


def test_cases_of_another_test_are_not_obsolete_when_files_are_named(project: Run, pytester: pytest.Pytester) -> None:
    write_marked(pytester, 'modes=["linear_w"], formats=["int8"]')
    assert project("--update-baselines").ret == 0
    files = sorted(path.name for path in pytester.path.glob("baselines/*/cpu/*"))
    for file in ("test_gate.py", "test_marked.py::test_marked"):
        assert project(file).ret == 0
    assert project("test_marked.py", "--update-baselines").ret == 0
    assert sorted(path.name for path in pytester.path.glob("baselines/*/cpu/*")) == files
    (pytester.path / "test_marked.py").unlink()
    for arguments in ((), (".",)):
        result = project(*arguments)
        assert result.ret == pytest.ExitCode.TESTS_FAILED
        gone = "not compared: 8 cases of network:make, linear_w-batch_1-cpu-int8 first: its test was in test_marked.py*"
        result.stdout.fnmatch_lines([gone])


# --------------------------------------------------------------------------------------- the project's own matrix


def test_the_default_matrix_is_every_mode_layer_and_format_on_the_cpu_and_two_float_modes() -> None:
    command = [sys.executable, "-m", "pytest", *COLLECT, "-p", "no:cacheprovider", "tests/regression"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    start = "tests/regression/test_gate.py::test_matches_baseline"
    found = [line for line in done.stdout.splitlines() if line.startswith(f"{start}[")]
    modes = ("mode_0", "mode_2_0", "mode_2_1", "mode_2_2", "mode_2_3", "mode_2_4", "mode_3")
    layers = ("layer_0", "layer_1", "layer_2", "layer_3", *OUTSIDE, *PATHS, LOGITS)
    formats = ("int8", "fp8_e4m3", "fp8_e5m2", "fp6_e3m2", "fp6_e2m3", "fp4_e2m1", "mxint8", "nvfp4")
    assert f"{start}[mode_2_1-layer_0-cpu-fp8_e4m3]" in found
    assert f"{start}[fp16-layer_0-cpu]" in found
    assert found == [
        *(f"{start}[{mode}-{layer}-cpu-{format}]" for mode in modes for format in formats for layer in layers),
        *(f"{start}[{mode}-{layer}-cpu]" for mode in ("fp16", "bf16") for layer in layers),
    ]


def test_cases_beside_the_layers_can_be_left_out_by_name(project: Run) -> None:
    assert ids(project(*COLLECT, "-k", "int8", without='["head", "ragged"]')) == [
        f"coarse-{label}-cpu-int8" for label in ("layer_0", "layer_1", "layer_2", "embedding", "batch_1", "logits")
    ]
    wrong = project(*COLLECT, without='["heads"]')
    assert wrong.ret == pytest.ExitCode.USAGE_ERROR
    assert "without: unknown case beside the layers 'heads'" in "\n".join([*wrong.outlines, *wrong.errlines])
