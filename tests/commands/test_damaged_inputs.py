"""Damaged and hostile files: each command ends with one message that names the file, exit code 2, within seconds."""

import itertools
import json
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from probe.commands import main
from probe.files.defects import LARGEST
from probe.models.loading import EMBEDDED
from tests.recordings.examples import write_small

DEEP = 100_000
DIGITS = "7" * 10_000
#: Claims 4 TB and holds 4 bytes.
HUGE = torch.zeros(1).as_strided((1 << 20, 1 << 20), (0, 0))


def model_folder(folder: Path, **config: object) -> str:
    source = EMBEDDED["tiny-llama"].folder
    assert source is not None
    shutil.copytree(source, folder / "model")
    file = folder / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))
    return "model"


def sharded(folder: Path) -> list[str]:
    model_folder(folder)
    (folder / "model" / "model.safetensors").unlink()
    (folder / "model" / "model.safetensors.index.json").write_text('{"weight_map": {"a": null, "b": "x"}}')
    return ["layers", "--model", "model"]


def config_text(text: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        model_folder(folder)
        (folder / "model" / "config.json").write_text(text)
        return ["layers", "--model", "model"]

    return make


def yaml(text: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / "a.yaml").write_text(text)
        return ["analyze", "--config", "a.yaml"]

    return make


def data(name: str, text: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / name).write_text(text)
        return ["analyze", "--data.source", f"custom:{name}"]

    return make


def toml(text: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        (folder / "m.toml").write_text(text)
        return ["errors", "--modes-from", "m.toml"]

    return make


def strided(*command: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        for name in ("r", "s"):
            (folder / name).mkdir()
            torch.save(HUGE, folder / name / "layer_0_output.pt")
        return list(command)

    return make


def manifest(text: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        write_small(folder / "r")
        (folder / "r" / "manifest.json").write_text(text)
        return ["check", "r"]

    return make


def large(name: str, *command: str) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        if name.startswith("model"):
            model_folder(folder)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
        os.truncate(folder / name, LARGEST + 1)
        return list(command)

    return make


def metadata(folder: Path) -> list[str]:
    (folder / "r").mkdir()
    torch.save(torch.zeros(1, 4, 8), folder / "r" / "layer_0_output.pt")
    ids = torch.zeros(1, dtype=torch.int64).as_strided((1 << 20, 1 << 20), (0, 0))
    torch.save({"input_ids": ids}, folder / "r" / "metadata.pt")
    return ["check", "r"]


def nested(folder: Path) -> list[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        torch.save(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), folder / "x.pt")
    return ["scaling", "x.pt"]


def long_text(folder: Path) -> list[str]:
    np.save(folder / "x.npy", np.ones(4, dtype=np.float32))
    (folder / "x.npy").write_bytes((folder / "x.npy").read_bytes().replace(b"(4,)", b"(" + b"9" * 90 + b",)"))
    return ["scaling", "x.npy"]


#: Lists of lists, each twice in the next: written out, 2^25 items.
NAMES = "abcdefghijklmnopqrstuvwxyz"
BOMB = ["&a [1, 1]", *(f"&{below} [*{above}, *{above}]" for above, below in itertools.pairwise(NAMES))]


TOO_LARGE = r"has 64 MB; expected at most 64 MB"
CASES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "strided, check": (strided("check", "r"), "r/layer_0_output.pt: claims a tensor of float32 [1048576, 1048576]"),
    "strided, diff": (strided("diff", "r", "s"), "layer_0_output.pt: claims a tensor"),
    "strided, scaling": (strided("scaling", "r/layer_0_output.pt"), "r/layer_0_output.pt: claims a tensor"),
    "strided tokens": (metadata, "r/metadata.pt: claims a tensor of int64"),
    "nested": (nested, "x.pt: holds a tensor that is nested on cpu. Expected a dense one"),
    "npy header": (long_text, "x.npy: is not an .npy array that can be read"),
    "manifest, deep": (manifest("[" * DEEP), "r/manifest.json: is not JSON that can be read"),
    "manifest, digits": (manifest(f'{{"version": {DIGITS}}}'), "r/manifest.json: is not JSON that can be read"),
    "manifest, surrogate": (manifest('{"version": 1, "\\ud800": 1}'), "r/manifest.json: "),
    "manifest, large": (large("r/manifest.json", "check", "r"), f"r/manifest.json: {TOO_LARGE}"),
    "config, deep": (config_text("[" * DEEP), "model/config.json: is not JSON that can be read"),
    "config, digits": (config_text(f'{{"model_type": {DIGITS}}}'), "model/config.json: is not JSON that can be read"),
    "config, large": (large("model/config.json", "layers", "--model", "model"), f"model/config.json: {TOO_LARGE}"),
    "architectures": (
        lambda folder: ["layers", "--model", model_folder(folder, architectures=5)],
        "'model/config.json': architectures is 5; expected a list of names.",
    ),
    "auto_map": (
        lambda folder: ["layers", "--model", model_folder(folder, auto_map=[1])],
        "'model/config.json': auto_map is [1]; expected an object.",
    ),
    "weight_map": (sharded, "model.safetensors.index.json' lists shards that are not in its folder: None, x"),
    "yaml, deep": (yaml("[" * DEEP), "a.yaml: is not YAML that can be read"),
    "yaml, digits": (yaml(f"data: {{num_samples: {DIGITS}}}"), "a.yaml: is not YAML that can be read"),
    "yaml, surrogate": (yaml('model: {path: "\\ud800"}'), "\\ud800"),
    "yaml, large": (large("a.yaml", "analyze", "--config", "a.yaml"), f"a.yaml: {TOO_LARGE}"),
    "yaml, aliases": (
        yaml("".join(f"{name}: {some}\n" for name, some in zip(NAMES, BOMB, strict=True))),
        "a.yaml: unknown key 'a'",
    ),
    "yaml, value of aliases": (yaml(f"output: {{formats: [{', '.join(BOMB)}]}}"), "a.yaml: output.formats is ["),
    "toml, deep": (toml("a = " + "[" * DEEP), "m.toml cannot be read as TOML"),
    "toml, digits": (toml(f"a = {DIGITS}"), "m.toml cannot be read as TOML"),
    "toml, large": (large("m.toml", "errors", "--modes-from", "m.toml"), f"m.toml cannot be read as TOML ({TOO_LARGE}"),
    "json text, deep": (data("t.json", "[" * DEEP), "data file 't.json' is not JSON"),
    "json text, digits": (data("t.json", f"[{DIGITS}]"), "data file 't.json' is not JSON"),
    "jsonl text, deep": (data("t.jsonl", "[" * DEEP), "data file 't.jsonl', line 1 is not JSON"),
    "json text, surrogate": (
        data("t.json", '["a", "\\ud800"]'),
        "data file 't.json', row 2: holds half of a surrogate",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_message_with_the_name_of_the_file(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make, message = CASES[case]
    monkeypatch.chdir(tmp_path)
    arguments = make(tmp_path)
    begin = time.monotonic()
    code = main(arguments)
    taken = time.monotonic() - begin
    captured = capsys.readouterr()
    assert message in captured.err + captured.out
    assert code == 2
    assert len([line for line in captured.err.splitlines() if "error" in line]) <= 1
    assert taken < 20


def test_a_factory_of_a_file_is_called_only_from_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    called = tmp_path / "called"
    source = f"from pathlib import Path\ndef make():\n    Path({str(called)!r}).touch()\n    raise ValueError('made')\n"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "project").mkdir()
    (tmp_path / "elsewhere" / "foreign_factory.py").write_text(source)
    (tmp_path / "project" / "own_factory.py").write_text(source)
    for name in ("os:getpid", "foreign_factory:make", "own_factory:make"):
        (tmp_path / f"{name.partition(':')[0]}.yaml").write_text(f"model: {{path: '{name}'}}")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setattr(sys, "path", ["", str(tmp_path / "elsewhere"), *sys.path])
    for name in ("os", "foreign_factory"):
        assert main(["analyze", "--config", f"../{name}.yaml"]) == 2
        shown = capsys.readouterr().err
        assert f"../{name}.yaml: model.path is '{name}:" in shown
        assert "allow it with --allow-factory" in shown
        assert not called.exists()
    for arguments in (
        ["--config", "../own_factory.yaml"],
        ["--config", "../foreign_factory.yaml", "--allow-factory"],
        ["--config", "../os.yaml", "--model.path", "foreign_factory:make"],
    ):
        assert main(["analyze", *arguments]) == 2
        assert "the factory failed: ValueError: made" in capsys.readouterr().err
        assert called.exists()
        called.unlink()
