"""`probe sensitivity`: what each layer, or each site, costs the whole model."""

import argparse

from probe.commands.options import Subparsers, add_calibration, add_data, add_model, data_arguments, model_arguments
from probe.commands.output import Progress, echo, print_rows, write_json
from probe.files.paths import check_outputs
from probe.words import require_positive


def add(commands: Subparsers) -> None:
    """Add the parser of the command."""
    what = "quantize one layer or site at a time, and all but one: rank them by KL and mse"
    command = commands.add_parser("sensitivity", help=what)
    add_model(command)
    command.add_argument("--mode", metavar="MODE", help="default: 2-1 for a Mamba, linear_wa for other models")
    command.add_argument("--format", default="int8", metavar="FORMAT", help="default: int8")
    command.add_argument("--layers", nargs="+", default=["all"], metavar="LAYER", help="default: all")
    sites = "rank sites: each in all layers at once (across, the default), or each in each layer (within)"
    command.add_argument("--sites", nargs="?", const="across", choices=("across", "within"), help=sites)
    add_data(command, samples=8, seqlen=128, batch_size=4)
    add_calibration(command)
    command.add_argument("--device", default="cpu", help="cpu, cuda, mps, xpu or xla (default: cpu)")
    command.add_argument("--no-advice", action="store_true", help="leave out the runs that search what to keep")
    command.add_argument("--top", type=int, metavar="N", help="print the N most sensitive only")
    command.add_argument("--json", metavar="FILE", help="write all figures to FILE; - prints them and no table")
    command.add_argument("--report", metavar="DIR", help="write DIR/sensitivity.html, with the plot, and the JSON")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from probe.sensitivity.ranking import rank_model

    require_positive("--top", options.top)
    check_outputs(files=[options.json], folders=[options.report])
    with Progress() as progress:
        found = rank_model(
            options.model,
            mode=options.mode,
            format=options.format,
            layers=tuple(options.layers),
            sites=options.sites,
            device=options.device,
            advice=not options.no_advice,
            progress=progress.update,
            **data_arguments(options),
            **model_arguments(options),
        )
    from probe.report.sensitivity import describe, table_rows, write_report

    if options.json is not None:
        write_json(options.json, found.as_dict())
    if options.json != "-":
        print(describe(found, options.model) + "\n")
        print_rows(table_rows(found, top=options.top))
        print(f"\n{found.advice.text}")
        for note in found.notes:
            print(f"note: {note}")
        if options.json is not None:
            echo(f"figures: {options.json}", error=True)
    if options.report:
        echo(f"report: {write_report(found, options.report, model=options.model)}", error=True)
    return 0
