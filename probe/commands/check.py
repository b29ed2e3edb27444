"""`probe check`: the bad layer in one recording."""

import argparse

from probe.commands.options import Subparsers, add_option
from probe.commands.output import Progress, echo, write_json
from probe.files.paths import check_outputs


def add(commands: Subparsers) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "check",
        help="find the bad layer in a recording: NaN, Inf, zeros, explosions, dead channels, odd steps",
        description="Look at every layer of a recording: NaN and Inf, zeros, constants, explosions, dead channels, and "
        "steps that are odd among the layers of the model; with --max-mean, --max-change or --factor also limits of "
        "your own. Exit 1 if a layer is suspicious.",
    )
    parser.add_argument("recording", metavar="R", help="the folder of a recording, or an .npz")
    parser.add_argument("--mode", metavar="MODE", help="only this one (default: every mode that was recorded)")
    parser.add_argument("--format", help="of a mode that was recorded in several")
    parser.add_argument("--layer", metavar="N", help="write its distribution as a picture, layer_N_analysis.png")
    factor = "largest mean change from the layer before, as a multiple of its median (default: no limit)"
    parser.add_argument("--factor", type=float, metavar="K", help=factor)
    add_option(parser, "--max-mean", type=float, metavar="X", help="largest |mean| of a layer (default: no limit)")
    change = "largest change of a value from the layer before (default: no limit)"
    add_option(parser, "--max-change", type=float, metavar="X", help=change)
    parser.add_argument("--report", metavar="DIR", help="write check.html there, and the picture of --layer")
    parser.add_argument("--json", metavar="FILE", help="all of it as JSON; - prints it, and nothing else")
    parser.add_argument("--verify", action="store_true", help="check every byte against the manifest first (sha256)")
    parser.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> int:
    from probe.comparisons.health import check
    from probe.comparisons.samples import drawn_layer
    from probe.comparisons.selection import all_sides, find_side
    from probe.recordings import read_recording
    from probe.report.health import health_text, write_health_page, write_layer_picture

    check_outputs(files=[options.json], folders=[options.report or ("." if options.layer else None)])
    recording = read_recording(options.recording, verify=options.verify)
    format = options.format
    sides = [find_side(recording, options.mode, format)] if options.mode else all_sides(recording, format)
    if options.layer and len(sides) > 1:
        names = ", ".join(side.name for side in sides)
        raise ValueError(f"--layer shows a layer of one mode, and there are {names}. Say which with --mode.")
    limits = {name: getattr(options, name) for name in ("factor", "max_mean", "max_change")}
    with Progress() as progress:
        checked = [(check(recording, side.recipe, **limits, progress=progress.status), side) for side in sides]
    quiet = options.json == "-"
    for health, _ in checked:
        if not quiet:
            echo(health_text(health) + "\n")
    for note in recording.notes:
        echo(f"note: {note}", error=True)
    if options.layer:
        health, side = checked[0]
        layer = health.layer(options.layer)
        drawn = drawn_layer(layer.name, side, layer.min, layer.max)
        picture = write_layer_picture(options.report or ".", layer, drawn)
        echo(f"picture: {picture}", error=quiet)
    if options.report:
        layers = [(health.first, side) for health, side in checked]
        firsts = [drawn_layer(one.name, side, one.min, one.max) if one else None for one, side in layers]
        page = write_health_page(options.report, [health for health, _ in checked], firsts)
        echo(f"report: {page}", error=quiet)
    if options.json:
        facts = [health.as_dict() for health, _ in checked]
        write_json(options.json, facts[0] if len(facts) == 1 else facts)
    return 1 if any(health.first for health, _ in checked) else 0
