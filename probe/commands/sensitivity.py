"""`probe sensitivity`: what each layer, or each site, costs the whole model."""

import argparse
from pathlib import Path
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
from probe.commands.output import Progress, echo, print_rows, write_json
from probe.files.atomic import write
from probe.files.paths import check_outputs
from probe.words import require_positive

if TYPE_CHECKING:
    from probe.sensitivity.results import Advice

#: The name of the mode that the advice makes.
MIXED = "mixed"


def add(commands: Subparsers) -> None:
    """Add the parser of the command."""
    what = "quantize one layer or site at a time, and all but one: rank them by KL and mse"
    command = commands.add_parser("sensitivity", help=what)
    add_model(command)
    add_reference(command)
    command.add_argument("--mode", metavar="MODE", help="default: 2-1 for a Mamba, linear_wa for other models")
    command.add_argument("--format", metavar="FORMAT", help="default: int8")
    add_include(command)
    command.add_argument("--layers", nargs="+", default=["all"], metavar="LAYER", help="default: all")
    sites = "rank sites: each in all layers at once (across, the default), or each in each layer (within)"
    command.add_argument("--sites", nargs="?", const="across", choices=("across", "within"), help=sites)
    add_data(command, samples=8, seqlen=128, batch_size=4)
    add_calibration(command)
    command.add_argument("--device", default="cpu", help="cpu, cuda, mps, xpu or xla (default: cpu)")
    add_engine(command)
    add_modes_from(command)
    save = "write the mode that keeps the advised layers float to FILE, for --modes-from and the gate"
    add_option(command, "--save-mode", metavar="FILE", help=save)
    add_option(command, "--mode-name", default=MIXED, metavar="NAME", help=f"its name (default: {MIXED})")
    command.add_argument("--no-advice", action="store_true", help="leave out the runs that search what to keep")
    command.add_argument("--top", type=int, metavar="N", help="print the N most sensitive only")
    command.add_argument("--json", metavar="FILE", help="write all figures to FILE; - prints them and no table")
    command.add_argument("--report", metavar="DIR", help="write DIR/sensitivity.html, with the plot, and the JSON")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from probe.running.declarations import declaration_text, with_declaration
    from probe.running.modes import check_declarable, find_mode
    from probe.sensitivity.ranking import rank_model

    require_positive("--top", options.top)
    check_outputs(files=[options.json, options.save_mode], folders=[options.report])
    if options.save_mode and options.no_advice:
        raise ValueError("--save-mode writes the advice, and --no-advice leaves it out. Give one of the two.")
    declare_modes(options)
    if options.save_mode and (options.reference or (options.mode and find_mode(options.mode).source)):
        raise ValueError(
            "--save-mode writes a mode that keeps layers float, and a checkpoint is quantized already. Leave it out: "
            "the tool that makes the checkpoint can keep the advised layers float."
        )
    check_declarable(options.mode_name)
    if options.save_mode:
        with_declaration(Path(options.save_mode), options.mode_name)  # before minutes of runs
    with make_engine(options) as engine, Progress() as progress:
        found = rank_model(
            options.model,
            reference=options.reference,
            mode=options.mode,
            format=options.format,
            include=options.include,
            layers=tuple(options.layers),
            sites=options.sites,
            device=options.device,
            advice=not options.no_advice,
            progress=progress.update,
            engine=engine,
            **data_arguments(options),
            **model_arguments(options),
        )
    from probe.report.sensitivity import describe, table_rows, write_report

    if options.json is not None:
        write_json(options.json, found.as_dict())
    if options.json != "-":
        print(f"{describe(found, options.model)}\n{found.weights.line}\n")
        print_rows(table_rows(found, top=options.top))
        print(f"\n{found.advice.text}")
        if found.advice.declared:
            print(f"\nAs a mode:\n\n{declaration_text(options.mode_name, found.advice.declared)}")
        for note in found.notes:
            print(f"note: {note}")
        if options.json is not None:
            echo(f"figures: {options.json}", error=True)
    if options.report:
        echo(f"report: {write_report(found, options.report, model=options.model)}", error=True)
    return _save_mode(options, found.advice) if options.save_mode else 0


def _save_mode(options: argparse.Namespace, advice: "Advice") -> int:
    """Add the advised mode to a TOML file, whole or not at all; 1 if there is none."""
    from probe.running.declarations import with_declaration

    if advice.declared is None:
        echo(f"probe: error: no mode was written to {options.save_mode}: there is nothing to keep float.", error=True)
        return 1
    file, name = Path(options.save_mode), options.mode_name
    write(file, with_declaration(file, name, advice.declared))
    echo(f"mode {name}: {file}", error=True)
    return 0
