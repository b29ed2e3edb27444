"""Every command and the life of a baseline in the gate, on a tiny random model of each family."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

from probe.commands import main
from probe.data.library_logs import quietly
from probe.gate.baselines.store import Store
from probe.gate.cases import Outcome
from probe.gate.configuration import CalibrationSettings, Settings
from probe.gate.engine import Gate
from probe.running.calibration import Calibration
from probe.running.modes import find_mode
from probe.running.recipes import Recipe
from tests.families.table import FAMILIES, Family
from tests.faults.breaking import applying

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
SAMPLES, SEQLEN = 4, 24


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=lambda row: re.sub(r"\W+", "_", row.name))
def family(request: pytest.FixtureRequest) -> Family:
    found: Family = request.param
    return found


@pytest.fixture(scope="module")
def model(family: Family, tmp_path_factory: pytest.TempPathFactory) -> str:
    if family.make is None:
        return family.factory
    folder = tmp_path_factory.mktemp("models") / "model"
    with quietly():
        cast(Any, family.make()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    code = main(list(words))
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return shown.out


def test_every_command_runs_and_means_something(family: Family, model: str, capsys: pytest.CaptureFixture[str]) -> None:
    mode, format = family.recipe
    own = ["--inputs", family.inputs] if family.inputs else []
    sizes = [] if own else ["--samples", str(SAMPLES), "--seqlen", str(SEQLEN)]
    data = [*own, *sizes, "--calib-data-num", "2", "--calib-seqlen", str(SEQLEN)]

    layers = json.loads(run(capsys, "layers", "--model", model, "--json"))
    assert tuple(one["layer"] for one in layers if one["layer"] != "-") == family.layers

    words = ["errors", "--model", model, "--modes", mode, "--formats", format, *data, "--json"]
    (errors,) = json.loads(run(capsys, *words))
    assert tuple(errors["layers"]) == family.layers
    figures = errors[family.label]
    assert figures["kind"] == family.output
    assert {"mse", "correlation", "cosine"} <= figures.keys()
    assert (figures.get("kl") is not None) is (family.output in ("next token", "classes"))
    assert (figures.get("bits_per_token") is not None) is (family.output == "next token")
    assert (figures.get("neighbour_agreement") is not None) is (family.output == "embeddings")

    taps = ["--layers", "all", "--taps", family.label, "--out", "recorded"]
    run(capsys, "record", "--model", model, "--modes", "fp32", mode, "--formats", format, *data, *taps)
    compared = run(capsys, "compare", find_mode(mode).id, "--format", format, "--dir", "recorded", "--json", "-")
    assert all(label in compared for label in family.layers)

    ranked = ["sensitivity", "--model", model, "--mode", mode, "--format", format, *data, "--json", "-"]
    ranked += ["--batch-size", "2"]
    found = json.loads(run(capsys, *ranked))
    assert {one["name"] for one in found["effects"]} == set(family.layers)
    assert found["measure"] == ("kl" if family.label == "logits" else "mse")

    data = ["--data.inputs", family.inputs] if own else ["--data.num_samples", "2", "--data.seq_len", str(SEQLEN)]
    drawn = ["--visualization.enabled.heatmap_3d", "false", "--visualization.save_dir", "drawn"]
    patterns = ["--visualization.magnitude.patterns", "layers"] if family.factory else []
    analyzed = run(capsys, "analyze", "--model.path", model, *data, *drawn, *patterns)
    assert "wrote" in analyzed


def settings(family: Family, model: str) -> Settings:
    mode, format = family.recipe
    return Settings(
        model=model,
        modes=(mode,),
        formats=(format,),
        inputs=family.inputs,
        samples=SAMPLES,
        seqlen=SEQLEN,
        batch_size=SAMPLES,
        calibration=CalibrationSettings(samples=2, seqlen=SEQLEN),
    )


def test_the_life_of_a_baseline(family: Family, model: str, tmp_path: Path) -> None:
    """Missing, then accepted, then passing, then red in the layer whose weight was moved, and in no other."""
    wanted = settings(family, model)

    def judge(**options: Any) -> tuple[Gate, Any]:
        gate = Gate(tmp_path, **options)
        case = gate.bench(wanted).cases[0]
        return gate, gate.judge_recipe(wanted, case)

    missing = judge()[1].outcomes
    assert {one.verdict for one in missing.values()} == {"missing"}
    beside = [label for label in missing if label not in family.layers]
    assert set(family.paths) <= set(beside)
    assert family.label in beside
    with mock.patch("os.cpu_count", return_value=1):
        gate, made = judge(update=True)
    assert not made.refusals
    bench = gate.bench(wanted)
    assert bench.anchors is not None
    entries = {made.outcomes[layer].case: entry for layer, entry in made.entries.items()}
    anchors = bench.anchors.to_bytes()
    Store(tmp_path / wanted.baselines).write(model, entries, environment=bench.facts, anchors=anchors)
    passing = judge()[1].outcomes
    assert {label: one.message for label, one in passing.items() if one.status != "passed"} == {}
    assert passing.keys() == missing.keys()

    with applying(moving(bench.loaded.model, family)):
        broken = judge()[1].outcomes
    assert [label for label in family.layers if is_own(broken[label])] == [family.changed]
    assert broken[family.label].status == "failed"


def is_own(outcome: Outcome) -> bool:
    """Whether the layer is wrong given the right input, not only behind a wrong one."""
    return any(figure.moved for name, figure in outcome.figures.items() if name.startswith("injected."))


def moving(model: nn.Module, family: Family) -> Any:
    """A copy of which the largest weight of one layer has its rows moved by one."""
    from probe.models.layers import labelled_blocks

    name = labelled_blocks(model)[family.changed]

    def broken(real: Any, model: nn.Module, recipe: Recipe, calibration: Calibration | None = None) -> nn.Module:
        twin: nn.Module = real(model, recipe, calibration)
        if not find_mode(recipe.mode).is_reference:
            layer = twin.get_submodule(name)
            largest = max((one for one in layer.parameters() if one.dim() > 1), key=lambda one: one.numel())
            with torch.no_grad():
                largest.copy_(largest.roll(1, 0))
        return twin

    return broken


def test_the_page_has_a_row_for_every_family() -> None:
    table = PAGE.partition("## Families")[2].partition("\n## ")[0]
    rows = {
        cells[1]: cells
        for line in table.splitlines()
        if line.startswith("| ") and (cells := [cell.strip() for cell in line.split("|")]) and cells[1] != "family"
    }
    assert set(rows) == set(FAMILIES)
    for name, row in FAMILIES.items():
        first = ", ".join(dict.fromkeys(re.sub(r"layer_\d+", "layer_N", label) for label in row.layers))
        assert rows[name][3].replace("`", "") == first
        assert rows[name][4].startswith(f"{row.label}: {row.output}".replace("values", "any tensor"))
        assert ("all" if row.paths else "none") == rows[name][6].split(":")[0]
