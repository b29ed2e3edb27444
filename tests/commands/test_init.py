"""`probe init`: what it writes runs, from missing baselines to a red gate; what is there is never overwritten."""

import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file

from probe.commands import main
from probe.data.library_logs import quietly
from probe.gate import matrix
from probe.gate.configuration import read_settings
from probe.numerics.quantize import fake_quantize

QUIET = ("-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:rerunfailures", "-p", "no:pytest_forked", "-q")


def save_llama(folder: Path) -> Path:
    import transformers

    library: Any = transformers
    config = library.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=48,
    )
    return _saved(library.LlamaForCausalLM, config, folder)


def save_mamba(folder: Path) -> Path:
    import transformers

    library: Any = transformers
    config = library.MambaConfig(vocab_size=256, hidden_size=32, num_hidden_layers=2, state_size=4)
    return _saved(library.MambaForCausalLM, config, folder)


def _saved(kind: Any, config: Any, folder: Path) -> Path:
    torch.manual_seed(0)
    with quietly():
        kind(config).save_pretrained(folder)
    return folder


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty project."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CI", raising=False)
    return tmp_path


@pytest.fixture
def run_gate(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., pytest.RunResult]]:
    """pytest in the project, in this process: torch is loaded already."""
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", lambda self: None)

    def run(*arguments: str) -> pytest.RunResult:
        forget()
        return pytester.runpytest_inprocess(*QUIET, *arguments)

    def forget() -> None:
        """The test file of this project is not that of another one."""
        matrix._load.cache_clear()
        for name in ("test_gate", "conftest"):
            sys.modules.pop(name, None)

    yield run
    forget()


def shorten(folder: Path, **settings: int) -> None:
    """Less text than the settings that were written, so that the gate takes seconds."""
    file = folder / "pyproject.toml"
    lines = [f"{key} = {value}" for key, value in {"samples": 2, "calibration.samples": 2, **settings}.items()]
    file.write_text("\n".join([file.read_text().rstrip(), *lines, ""]))


def written(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in sorted(folder.rglob("*.*")) if file.is_file()}


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that must write nothing."""
    before = written(Path())
    assert main(["init", *arguments]) == 2
    assert written(Path()) == before
    return capsys.readouterr().err


def test_a_llama_from_nothing_to_a_red_gate(
    pytester: pytest.Pytester, run_gate: Callable[..., pytest.RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    save_llama(pytester.path / "ckpt")
    (pytester.path.parent / "pytest.ini").write_text("[pytest]\n")  # a project around this one
    try:
        assert main(["init", "--model", "ckpt"]) == 0
        out = capsys.readouterr().out
        assert out.startswith(
            "wrote pyproject.toml\nwrote test_gate.py\n./ckpt: 2 layers (layer_0, layer_1), modes linear_w"
        )
        assert "  pytest --update-baselines    # stores them in baselines/; commit it\n" in out
        assert "  probe errors --model ./ckpt --formats int8 fp8_e4m3 nvfp4    # " in out
        assert not (pytester.path / "conftest.py").exists()
        settings = read_settings(pytester.path)
        assert (settings.model, settings.modes, settings.layers) == ("./ckpt", ("linear_w", "linear_wa"), ("all",))
        assert (settings.seqlen, settings.calibration.seqlen) == (48, 48), "the model has no more positions"
        shorten(pytester.path)

        some = ("-k", "linear_w- and cpu-fp8_e4m3")
        assert run_gate(*some).ret == pytest.ExitCode.TESTS_FAILED
        assert not (pytester.path / "baselines").exists()
        stored = run_gate(*some, "--update-baselines")
        assert stored.ret == 0
        stored.stdout.fnmatch_lines(["10 of 10 stored cases measured for the update*"])
        passed = run_gate(*some)
        assert passed.ret == 0
        passed.stdout.fnmatch_lines(["10 of 10 stored cases compared"])
        with mock.patch("probe.models.linear.weight_on_grid", lambda x, f: fake_quantize(x, f, rounding="floor")):
            changed = run_gate(*some)
        assert changed.ret == pytest.ExitCode.TESTS_FAILED
        changed.stdout.fnmatch_lines(["*layer_0-cpu-fp8_e4m3 drifted from its baseline*"])
    finally:
        (pytester.path.parent / "pytest.ini").unlink()


def test_a_mamba_from_nothing_to_a_red_gate(
    pytester: pytest.Pytester, run_gate: Callable[..., pytest.RunResult], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_mamba(pytester.path / "ckpt")
    assert main(["init", "--model", str(folder)]) == 0
    assert "modes all, fp16, bf16, formats int8, fp8_e4m3, nvfp4" in capsys.readouterr().out
    assert read_settings(pytester.path).model == "./ckpt"
    shorten(pytester.path, seqlen=32)
    some = ("-k", "mode_2_1 and cpu-fp8_e4m3")
    assert run_gate(*some).ret == pytest.ExitCode.TESTS_FAILED
    assert run_gate(*some, "--update-baselines").ret == 0
    assert run_gate(*some).ret == 0
    weights = load_file(folder / "model.safetensors")
    name = "backbone.layers.1.mixer.in_proj.weight"
    save_file({**weights, name: weights[name] * 1.01}, folder / "model.safetensors", metadata={"format": "pt"})
    changed = run_gate(*some)
    assert changed.ret == pytest.ExitCode.TESTS_FAILED
    changed.stdout.fnmatch_lines(["*made with another input: input.model*"])


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_an_existing_pyproject_keeps_every_line(here: Path, newline: str) -> None:
    text = newline.join(
        ["[project]", 'name = "mine"  # ours', "", "[tool.pytest.ini_options]", 'testpaths = ["checks"]', ""]
    )
    (here / "pyproject.toml").write_bytes(text.encode())
    assert main(["init", "--model", "tiny-llama"]) == 0
    found = (here / "pyproject.toml").read_bytes().decode()
    assert found.startswith(text.rstrip())
    assert found.count("\n") == found.count(newline)
    tables = tomllib.loads(found)
    assert tables["project"] == {"name": "mine"}
    assert tables["tool"]["probe"]["model"] == "tiny-llama"
    assert tables["tool"]["pytest"] == {"ini_options": {"testpaths": ["checks"]}}
    assert sorted(written(here)) == ["checks/test_gate.py", "pyproject.toml"], "where pytest looks for tests"


def test_into_another_folder_the_model_is_found_from_there(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_llama(here / "models" / "mine")
    assert main(["init", "--model", "models/mine", "--into", "gate", "--trust-remote-code"]) == 0
    settings = read_settings(here / "gate")
    assert settings.model == str(here / "models" / "mine")
    assert settings.trust_remote_code
    assert "  cd gate && pytest --update-baselines " in capsys.readouterr().out


def test_where_the_plugin_is_not_installed_conftest_makes_it_known(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: ())
    (here / "conftest.py").write_text("X = 1\n")
    error = refused(capsys, "--model", "tiny-llama")
    assert (
        "conftest.py exists already, and probe is not installed as a plugin of pytest; nothing was written. " in error
    )
    assert error.rstrip().endswith('Add this line to it and run again: pytest_plugins = ["probe.plugin"]')
    (here / "conftest.py").unlink()
    assert main(["init", "--model", "tiny-llama"]) == 0
    assert 'pytest_plugins = ["probe.plugin"]' in (here / "conftest.py").read_text()


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        (
            "pyproject.toml",
            "[tool.probe]\n",
            "has a [tool.probe] already; nothing was written. Change it by hand, or guard",
        ),
        ("pyproject.toml", "[tool\n", "pyproject.toml cannot be read as TOML ("),
        (
            "pyproject.toml",
            "tool = {}\n",
            "no [tool.probe] can be added to pyproject.toml, whose `tool` is in another form",
        ),
        (
            "pyproject.toml",
            "tool = 3\n",
            "no [tool.probe] can be added to pyproject.toml, whose `tool` is in another form",
        ),
        ("test_gate.py", "", "test_gate.py exists already; nothing was written. Move it away, or add to it by hand"),
    ],
)
def test_what_is_there_is_not_overwritten(
    here: Path, capsys: pytest.CaptureFixture[str], file: str, text: str, message: str
) -> None:
    (here / file).write_text(text)
    assert message in refused(capsys, "--model", "tiny-llama")


def test_a_model_or_a_folder_that_cannot_be_is_one_message(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "file").write_text("")
    assert "model folder './no' does not exist" in refused(capsys, "--model", "./no")
    assert "cannot write to file/sub: " in refused(capsys, "--model", "tiny-llama", "--into", "file/sub")
    with pytest.raises(SystemExit):
        main(["init"])
    assert "--model" in capsys.readouterr().err


def test_a_factory_beside_the_tests_is_found_by_them(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "pytest.ini").write_text("[pytest]\ntestpaths = checks\n")
    assert main(["init", "--model", "tests.models.nets:gpt"]) == 0
    assert sorted(written(here)) == ["checks/test_gate.py", "conftest.py", "pyproject.toml", "pytest.ini"]
    assert "[tool.pytest" not in (here / "pyproject.toml").read_text(), "pytest.ini makes it the root"


def test_a_model_with_inputs_of_its_own_names_the_function(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = "tests.families.plain:batches"
    assert main(["init", "--model", "tests.families.plain:make"]) == 2
    assert 'inputs = "package.module:function"' in capsys.readouterr().err
    assert written(here) == {}
    assert main(["init", "--model", "tests.families.plain:make", "--inputs", own]) == 0
    settings = tomllib.loads((here / "pyproject.toml").read_text())["tool"]["probe"]
    assert settings["inputs"] == own
    shown = capsys.readouterr().out
    assert f"--inputs {own}" in shown
    assert "paths not run" in shown
