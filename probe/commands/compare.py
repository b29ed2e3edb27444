"""`probe compare`: recorded modes against their reference, layer by layer."""

import argparse
import math
from pathlib import Path
from typing import Any

from probe.commands.options import Subparsers, add_option
from probe.commands.output import Progress, echo, write_json
from probe.files.paths import check_outputs, safe_name

#: The folders that the users' own scripts record to, and write figures to.
RECORDED, SAVED = "layer_outputs", "comparisons"
#: Lines without --verbose, at most, of the worst layers and of failures; a mode has one of each at least.
WORST, FAILURES = 14, 10
#: The limits of probe.comparisons.modes, and the figure of a layer that each bounds.
LIMITS = {
    "max_mse": "mse of a layer",
    "max_mae": "mean |difference|",
    "max_abs": "|difference|",
    "max_relative_mse": "mse / mean reference^2",
    "max_relative_mae": "mae / mean |reference|",
    "min_correlation": "correlation",
    "min_cosine": "cosine",
}


def add(commands: Subparsers) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "compare",
        help="recorded modes against their reference, layer by layer",
        description="Compare recorded modes with their reference, layer by layer. Exit 1 if a layer is not finite, "
        "identical with the reference or beyond a limit, or if modes that are equal by definition differ; 2 if there "
        "is nothing to compare.",
    )
    modes = "2-1, 2-1-fp8_e4m3 and so on, or all that were recorded"
    parser.add_argument("modes", nargs="+", metavar="MODE", help=modes)
    add_option(parser, "--reference", default="fp32", metavar="MODE", help="default: fp32")
    folder = f"the recording (default: {RECORDED})"
    add_option(parser, "--dir", "--output-dir", dest="folder", default=RECORDED, metavar="DIR", help=folder)
    add_option(parser, "--reference-dir", metavar="DIR", help="where the reference is, if elsewhere")
    parser.add_argument("--format", help="of modes that were recorded in several")
    parser.add_argument("--layers", nargs="+", metavar="LAYER", help="0, first, last, all, layer_0 or an expression")
    add_option(parser, "--save", "--save-comparison", metavar="FILE", help="the figures as JSON, of a single mode")
    save_dir = f"one JSON for each mode (default: {SAVED}, with more than one mode)"
    add_option(parser, "--save-dir", metavar="DIR", help=save_dir)
    parser.add_argument("--report", metavar="DIR", help="write compare.html there: tables and plots")
    parser.add_argument("--json", metavar="FILE", help="the figures as JSON; - prints them, and nothing else")
    parser.add_argument("--verify", action="store_true", help="check every byte against the manifest first (sha256)")
    parser.add_argument("--verbose", action="store_true", help="print the figures of every layer, and every failure")
    for name, figure in LIMITS.items():
        bound = "smallest" if name.startswith("min_") else "largest"
        add_option(parser, f"--{name.replace('_', '-')}", type=_limit, metavar="X", help=f"{bound} allowed {figure}")
    parser.set_defaults(run=_compare)


def _compare(options: argparse.Namespace) -> int:
    from probe.comparisons.modes import compare_sides, failures, merged
    from probe.comparisons.selection import all_sides, find_reference, find_side
    from probe.recordings import read_recording
    from probe.report import script_layouts

    recording = read_recording(options.folder, verify=options.verify)
    elsewhere = read_recording(options.reference_dir, verify=options.verify) if options.reference_dir else recording
    named = {mode: find_side(recording, mode, options.format) for mode in options.modes if mode != "all"}
    reference = find_reference(elsewhere, options.reference, options.format)
    others = [side for side in all_sides(recording, options.format) if side.recipe != reference.recipe]
    sides = [side for mode in options.modes for side in (others if mode == "all" else [named[mode]])]
    sides = list({side.recipe: side for side in sides}.values())
    if not sides:
        raise ValueError(
            f"{options.folder} has only the reference, {reference.name}. Record modes to compare with it: "
            f"probe record --modes quant_only --out {options.folder}"
        )
    if options.save and len(sides) > 1:
        raise ValueError(f"--save is for the figures of one mode, and {len(sides)} are compared. Give --save-dir DIR.")
    folder = options.save_dir or (SAVED if len(sides) > 1 else None)
    check_outputs(files=[options.save, options.json], folders=[folder, options.report])
    limits = {name: getattr(options, name) for name in LIMITS if getattr(options, name) is not None}
    quiet = options.json == "-"
    compared, failed = [], {}
    with Progress() as progress:
        for side in sides:
            one = compare_sides(side, reference, layers=options.layers, progress=progress.status)
            compared.append((one, side, reference))
            failed[one.compared_mode] = failures(one, limits)
    comparisons = [one for one, _, _ in compared]
    shown, unequal = merged(comparisons)
    # the documents of users have a block for the first and for the last layer of a mode
    in_full = options.verbose or (len(shown) == 1 and len(shown[0].layers) <= 2)
    for one in shown if in_full and not quiet else ():
        echo(f"{script_layouts.comparison_heading(one)}\n")
        for layer in one.layers.values():
            echo(script_layouts.layer_block(layer, one) + "\n")
    if not quiet and not in_full:
        worst = script_layouts.worst_layers(shown, most=WORST)
        echo("\n".join([script_layouts.comparison_heading(*shown), "", *worst, ""]))
    if not quiet and (len(comparisons) > 1 or not in_full):
        echo(script_layouts.summary_table(shown) + "\n")
    for one in comparisons:
        if one.is_equal and not failed[one.compared_mode] and all(x.metrics.identical for x in one.layers.values()):
            names = f"{one.compared_mode} vs {one.reference_mode}"
            echo(f"{names}: identical, as it must be ({len(one.layers)} layers)", error=quiet)
    for note in dict.fromkeys(note for one in comparisons for note in one.notes):
        echo(f"note: {note}", error=True)
    facts = [{**one.as_dict(), "failures": failed[one.compared_mode]} for one in comparisons]
    _save(options.save, folder, facts)
    if options.report:
        from probe.comparisons.samples import drawn_modes
        from probe.report.modes import write_modes_page

        sides_of = {one.compared_mode: (side, reference) for one, side, reference in compared}
        firsts = {one.compared_mode: one.compared_mode.partition(" = ")[0] for one in shown}
        with Progress() as progress:
            drawn = drawn_modes(
                [(one, *sides_of[firsts[one.compared_mode]]) for one in shown], progress=progress.status
            )
        wrong = {name: failed[first] for name, first in firsts.items()}
        page = write_modes_page(options.report, shown, wrong | ({"equal modes": unequal} if unequal else {}), drawn)
        echo(f"report: {page}", error=quiet)
    if options.json:
        write_json(options.json, facts[0] if len(facts) == 1 else facts)
    for one in comparisons:
        if failed[one.compared_mode]:
            most = len(failed[one.compared_mode]) if options.verbose else max(1, FAILURES // len(comparisons))
            echo(script_layouts.failure_lines(one, failed[one.compared_mode], most=most), error=True)
    for text in unequal:
        echo(f"❌ {text}", error=True)
    return 1 if any(failed.values()) or unequal else 0


def _save(file: str | None, folder: str | None, facts: list[dict[str, Any]]) -> None:
    """Write the figures of one mode to `file`, and those of every mode to the folder, where these are given."""
    if file:
        write_json(file, facts[0])
    for one in facts if folder else ():
        names = [safe_name(one[key]) for key in ("compared_mode", "reference_mode")]
        write_json(Path(str(folder)) / f"mode_{names[0]}_vs_{names[1]}.json", one)


def _limit(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no limit. Expected a number, such as 0.01 or 1e-6.")
    return value
