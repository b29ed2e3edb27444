"""Valid inputs of every reader and command, as files in a folder, each with what reads it."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

import probe
from probe.activations.export import compare_runs
from probe.commands import main
from probe.gate.baselines.format import ModeBaselines
from probe.models.loading import EMBEDDED
from probe.running.calibration import load_calibration
from probe.scaling.results import ScalingResult
from probe.sensitivity.results import Sensitivity
from tests.recordings.models import Stack

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Target:
    """Files in a folder, relative to it, of which one is mutated, and what reads them in that folder."""

    name: str
    files: tuple[str, ...]
    read: Callable[[], object]


def command(*words: str) -> Callable[[], object]:
    return lambda: main(list(words))


def content(name: str) -> bytes:
    """What a caller of a reader passes to it."""
    if not Path(name).is_file():
        raise ValueError(f"there is no file {name}")
    return Path(name).read_bytes()


def _recordings(folder: Path) -> list[Target]:
    ids = [torch.arange(12).view(2, 6)]
    targets = []
    for layout in ("safetensors", "npy", "npz", "pt"):
        probe.record(
            folder / layout, model=Stack(2, 8), modes=["fp32", "bf16"], batches=ids, layout=layout, taps=["embedding"]
        )
        shutil.copytree(folder / layout, folder / f"{layout}_b")
        files = tuple(str(path.relative_to(folder)) for path in (folder / layout).rglob("*") if path.is_file())
        manifest = f"{layout}/manifest.json"
        targets += [
            Target(f"check {layout}", files, command("check", layout, "--mode", "fp32")),
            Target(f"diff {layout}", files, command("diff", layout, f"{layout}_b", "--mode", "fp32")),
            Target(f"compare {layout}", (manifest, *files), command("compare", "bf16", "--dir", layout)),
            Target(f"manifest {layout}", (manifest,), lambda layout=layout: probe.read_recording(layout)),  # type: ignore[misc]
        ]
    scripts = folder / "script"
    scripts.mkdir()
    for layer in range(2):
        torch.save(torch.randn(2, 6, 8), scripts / f"layer_{layer}_output.pt")
    torch.save({"input_ids": ids[0], "prompt": "x", "statistics": {}}, scripts / "metadata.pt")
    names = tuple(f"script/{path.name}" for path in scripts.iterdir())
    return [*targets, Target("check of a script's folder", names, command("check", "script"))]


def _tensors(folder: Path) -> list[Target]:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    torch.save(x, folder / "x.pt")
    np.save(folder / "x.npy", x.numpy())
    np.savez_compressed(folder / "x.npz", a=x.numpy(), b=x[0].numpy())
    save_file({"a": x, "b": x.bfloat16()}, folder / "x.safetensors")
    options = ("--no-plots", "--num-levels", "3", "--elem-format", "fp4_e2m1", "--output-dir", "scaled")
    kinds = ("pt", "npy", "npz", "safetensors")
    return [Target(f"scaling .{kind}", (f"x.{kind}",), command("scaling", f"x.{kind}", *options)) for kind in kinds]


def _texts(folder: Path) -> list[Target]:
    text = "The quick brown fox jumps over the lazy dog. " * 20
    (folder / "t.txt").write_text(text)
    (folder / "t.json").write_text(json.dumps([{"text": text}, {"text": text}]))
    (folder / "t.jsonl").write_text("\n".join(json.dumps({"text": text}) for _ in range(3)))
    (folder / "t.csv").write_text('text,other\n"' + text + '",1\n' * 2)
    small = ("--data.num_samples", "1", "--data.seq_len", "8", "--dry-run")
    return [
        Target(f"text .{kind}", (f"t.{kind}",), command("analyze", "--data.source", f"custom:t.{kind}", *small))
        for kind in ("txt", "json", "jsonl", "csv")
    ]


def _settings(folder: Path) -> list[Target]:
    shutil.copy(ROOT / "configs" / "default.yaml", folder / "a.yaml")
    (folder / "m.toml").write_text('[tool.probe.modes.mixed]\nbase = "linear_wa"\nkeep_float = ["layers.3", "a.*.b"]\n')
    return [
        Target("analyze, YAML", ("a.yaml",), command("analyze", "--config", "a.yaml", "--dry-run")),
        Target("YAML", ("a.yaml",), command("analyze", "--config", "a.yaml", "--keys")),
        Target("TOML", ("m.toml",), command("modes", "--modes-from", "m.toml")),
    ]


def _model(folder: Path) -> list[Target]:
    source = EMBEDDED["tiny-llama"].folder
    assert source is not None
    shutil.copytree(source, folder / "model")
    shutil.copytree(source, folder / "shards")
    (folder / "shards" / "model.safetensors").rename(folder / "shards" / "one.safetensors")
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "one.safetensors", "a": "one.safetensors"}}
    (folder / "shards" / "model.safetensors.index.json").write_text(json.dumps(index))
    return [
        Target("config.json", ("model/config.json",), command("layers", "--model", "./model")),
        Target("weights", ("model/model.safetensors",), command("layers", "--model", "./model")),
        Target("shards", ("shards/model.safetensors.index.json",), command("layers", "--model", "./shards")),
    ]


def _results(folder: Path) -> list[Target]:
    run = ("analyze", "--data.num_samples", "1", "--data.seq_len", "8", "--output.formats", "[json]")
    for name in ("run_a", "run_b"):
        assert main([*run, "--visualization.save_dir", name]) == 0
    scaled = probe.scaling_sweep(torch.randn(4, 32), "fp4_e2m1", num_levels=3)
    (folder / "scaled.json").write_text(scaled.to_json())
    small = ("--samples", "1", "--seqlen", "8", "--calib-data-num", "1", "--calib-seqlen", "8")
    assert main(["sensitivity", "--model", "tiny-llama", *small, "--json", "sensitivity.json"]) == 0
    loaded = probe.load_model("tiny-llama")
    probe.calibrate_on(loaded, "calibration", 1, 8).save(folder / "calibration")
    baseline = ROOT / "baselines" / "tiny-mamba" / "cpu" / "mode_2_1.json"
    shutil.copy(baseline, folder / "baseline.json")
    return [
        Target("analysis.json", ("run_a/analysis.json",), lambda: compare_runs("run_a", "run_b")),
        Target("scaling result", ("scaled.json",), lambda: ScalingResult.from_json(content("scaled.json").decode())),
        Target(
            "sensitivity",
            ("sensitivity.json",),
            lambda: Sensitivity.from_dict(json.loads(content("sensitivity.json"))),
        ),
        Target(
            "calibration",
            ("calibration.json", "calibration.safetensors"),
            lambda: load_calibration("calibration", model=loaded.fingerprint),
        ),
        Target("baseline", ("baseline.json",), lambda: ModeBaselines.from_json(content("baseline.json"))),
    ]


def targets_in(folder: Path) -> list[Target]:
    """All targets; the current folder must be `folder`, into which their files are written."""
    made = (_recordings, _tensors, _texts, _settings, _model, _results)
    return [target for make in made for target in make(folder)]
