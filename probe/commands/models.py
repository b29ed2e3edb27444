"""`probe modes`, `probe layers` and `probe errors`: the modes, the modules of a model, and the error of every mode."""

import argparse
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from probe.commands.options import (
    Subparsers,
    add_calibration,
    add_data,
    add_engine,
    add_include,
    add_model,
    add_modes_from,
    add_option,
    add_reference,
    data_arguments,
    declare_modes,
    make_engine,
    model_arguments,
)
from probe.commands.output import Progress, echo, print_rows
from probe.words import shared_lines

if TYPE_CHECKING:
    from probe.models.loading import Loaded
    from probe.running.measurement import Measured
    from probe.running.outputs import OutputMetrics

#: `Mode.conv_gives` and `Mode.scan_reads` in the table of modes; a scan that reads `float` reads what conv1d gives.
GIVES = {"float": "F", "codes": "q", "grid": "s*q"}
READS = {"again": "round(s*q/s)", "grid": "round(F/s)"}


def add(commands: Subparsers) -> None:
    """Add the parsers of the three commands."""
    modes = commands.add_parser("modes", help="the modes, as a table")
    modes.add_argument("--json", action="store_true", help="machine-readable")
    add_modes_from(modes)
    modes.set_defaults(run=_modes)

    layers = commands.add_parser("layers", help="the modules of a model: names, types, shapes")
    add_model(layers)
    pattern = "index, first, last, all or a regular expression (default: all modules)"
    layers.add_argument("pattern", nargs="*", help=pattern)
    layers.add_argument("--sites", action="store_true", help="with the sites inside Mamba blocks")
    layers.add_argument("--json", action="store_true", help="machine-readable")
    layers.set_defaults(run=_layers)

    shown = "every mode and format against fp32: error by layer, KL, bits per token"
    errors = commands.add_parser("errors", help=shown)
    add_model(errors)
    add_reference(errors)
    errors.add_argument("--modes", nargs="+", metavar="MODE", help="modes, or groups: all essential quant_only fp_only")
    add_modes_from(errors)
    errors.add_argument("--formats", nargs="+", metavar="FORMAT", help="default: int8, the MX formats and nvfp4")
    add_include(errors)
    errors.add_argument("--layers", nargs="+", default=["all"], metavar="LAYER", help="default: all")
    add_data(errors, samples=8, seqlen=256, batch_size=8)
    add_calibration(errors)
    shards = "samples of a unit of work (default: all); the figures differ by the order of sums only"
    add_option(errors, "--shard-size", type=int, metavar="N", help=shards)
    add_engine(errors)
    errors.add_argument("--injected", action="store_true", help="feed every layer the reference's input")
    errors.add_argument("--json", action="store_true", help="machine-readable, all figures")
    errors.set_defaults(run=_errors)


def _layers(options: argparse.Namespace) -> int:
    from probe.models.loading import load_model

    loaded = load_model(options.model, **model_arguments(options))
    print_rows(_layer_rows(loaded, options.pattern, sites=options.sites), as_json=options.json)
    return 0


def _errors(options: argparse.Namespace) -> int:
    from probe.running.measurement import equal_groups
    from probe.running.measurement_job import measure_all
    from probe.running.modes import find_mode

    declare_modes(options)
    with make_engine(options) as engine, Progress() as progress:
        measured = measure_all(
            options.model,
            reference=options.reference,
            modes=options.modes,
            formats=options.formats,
            include=options.include,
            layers=options.layers,
            injected=options.injected,
            progress=progress.line,
            engine=engine,
            shard_size=options.shard_size,
            units=progress.units(engine),
            **data_arguments(options),
            **model_arguments(options),
        )
    groups, problems = equal_groups(measured)
    if options.json:
        print(json.dumps([one.as_dict() for one in measured], indent=2))
    else:
        print_rows(_measured_rows(groups))
        shown = _output_columns(measured[0].output)
        print(f"\nmse by layer; {'; '.join(what for name, what in COLUMNS.items() if name in shown)}.")
        quantized = [one for one in measured if find_mode(one.recipe.mode).is_quantized]
        for line in shared_lines((str(one.recipe), one.weights.line) for one in quantized):
            print(line)
    for problem in problems:
        echo(f"probe: error: {problem}", error=True)
    return 1 if problems else 0


def _modes(options: argparse.Namespace) -> int:
    from probe.running.modes import MODES

    declare_modes(options)
    rows: list[dict[str, object]] = [
        {
            "mode": mode.name,
            "id": mode.id,
            "kind": mode.kind,
            "conv1d input": mode.conv_input if mode.kind == "ssm" else "-",
            "conv1d gives": GIVES[mode.conv_gives] if mode.kind == "ssm" else "-",
            "scan reads": READS.get(mode.scan_reads, GIVES[mode.conv_gives]) if mode.kind == "ssm" else "-",
            "scan": mode.scan if mode.kind in ("ssm", "float") else "-",
            "equals": mode.equals or "-",
            "what it is": mode.what,
        }
        for mode in MODES.values()
    ]
    print_rows(rows, as_json=options.json)
    return 0


def _layer_rows(loaded: "Loaded", patterns: Sequence[str], *, sites: bool) -> list[dict[str, object]]:
    """Name, label, type and parameters of the modules that match, all of them without a pattern."""
    from probe.models.layers import labelled_blocks, select
    from probe.models.mamba_blocks import with_sites

    model = with_sites(loaded.model) if sites else loaded.model
    names = set(select(model, patterns, model_name=loaded.name).values()) if patterns else None
    labels = {name: label for label, name in labelled_blocks(model).items()}
    return [
        {
            "name": name,
            "layer": labels.get(name, "-"),
            "type": type(module).__name__,
            "parameters": sum(p.numel() for p in module.parameters()),
            "weight": " x ".join(map(str, getattr(getattr(module, "weight", None), "shape", ()))) or "-",
        }
        for name, module in model.named_modules()
        if name and (names is None or name in names)
    ]


def _measured_rows(groups: "Sequence[Sequence[Measured]]") -> list[dict[str, object]]:
    """One row a recipe, or several that are equal: mse of every layer, then the whole model."""
    rows = []
    for group in groups:
        one = group[0]
        row: dict[str, object] = {"recipe": " = ".join(str(same.recipe) for same in group)}
        for label, metrics in one.layers.items():
            row[label] = f"{metrics.mse:.3e}" if metrics.mse is not None else "not finite"
        rows.append(row | _output_columns(one.output))
    return rows


def _output_columns(output: "OutputMetrics") -> dict[str, str]:
    """The figures of the whole model that its kind of output has."""
    found: dict[str, str] = {}
    if output.classes is not None:
        found |= {"kl": _scientific(output.classes.kl), "top-1": _rounded(output.classes.top1_agreement)}
    if output.classes is not None and output.kind.has_next_token:
        found |= {"bits": _rounded(output.classes.bits_per_token), "change": _rounded(output.classes.change_in_bits)}
    if output.classes is None:
        found |= {"output": _scientific(output.values.mse), "cosine": _rounded(output.values.cosine)}
    if output.embeddings is not None:
        known = output.embeddings
        found |= {"by sample": _rounded(known.sample_cosine), "neighbours": _rounded(known.neighbour_agreement)}
    return found


#: What the columns of `_output_columns` are.
COLUMNS = {
    "kl": "kl in nats",
    "top-1": "top-1: share of positions with the same highest score",
    "bits": "bits per token",
    "output": "output: mse of the whole model's output",
    "cosine": "cosine: of all of it",
    "by sample": "by sample: mean cosine of the samples' embeddings",
    "neighbours": "neighbours: share of samples with the same nearest other one",
}


def _scientific(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.3e}"


def _rounded(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{round(value, 4) + 0.0:.4f}"  # no -0.0000
