"""`probe diff`: two recordings of one model on two devices."""

import argparse

from probe.commands.options import Subparsers, add_option
from probe.commands.output import Progress, echo, write_json
from probe.files.paths import check_outputs


def add(commands: Subparsers) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser(
        "diff",
        help="compare two recordings, e.g. of two devices: where they first differ, and whether it is noise or a fault",
        description="Compares recording B with A layer by layer and says whether they are identical, differ by dtype "
        "noise, by a device fault, are a mismatched capture, or cannot be compared (NaN on both sides), and where it "
        "began. Exit code 0: passed; 1: a limit is exceeded, or the verdict is not identical or noise; 2: bad input.",
    )
    parser.add_argument("a", nargs="?", metavar="A", help="folder of a recording (or .npz file)")
    parser.add_argument("b", nargs="?", metavar="B", help="folder of the other")
    add_option(parser, "--gpu-path", metavar="A", help="the same as A, as in the users' script")
    add_option(parser, "--neuron-path", metavar="B", help="the same as B")
    parser.add_argument("--reference", metavar="R", help="float reference: A is then the emulated recipe, B the device")
    recipe = "recipe or mode of both, or one for A and one for B"
    parser.add_argument("--recipe", "--mode", nargs="+", metavar="M", help=recipe)
    parser.add_argument("--format", metavar="F", help="where a mode was recorded in several formats")
    parser.add_argument("--layers", "--layer-pattern", metavar="P", help="'layer_*', or a regular expression")
    parser.add_argument("--rtol", type=float, default=1e-3, help="of |A|, for the share within (default: 1e-3)")
    parser.add_argument("--atol", type=float, default=1e-3, help="default: 1e-3")
    parser.add_argument("--max-abs", type=float, default=0.01, metavar="X", help="limit (default: 0.01)")
    parser.add_argument("--mean-abs", type=float, default=0.001, metavar="X", help="limit (default: 0.001)")
    parser.add_argument("--cosine", type=float, default=0.99, metavar="X", help="limit (default: 0.99)")
    parser.add_argument("--report", "--report-path", metavar="DIR", help="write DIR/diff.html, diff.json and plots")
    parser.add_argument("--verify", action="store_true", help="check every byte against the manifests first (sha256)")
    parser.add_argument("--json", metavar="FILE", help="write all figures to FILE; - prints them and nothing else")
    parser.set_defaults(run=_run)


def _folders(options: argparse.Namespace) -> tuple[str, str]:
    """A and B, by their places or by name."""
    named = [one for one in (options.gpu_path, options.neuron_path) if one is not None]
    placed = [one for one in (options.a, options.b) if one is not None]
    if len(named) + len(placed) != 2 or len(named) == 1:
        raise ValueError(
            f"{len(named) + len(placed)} recordings are given by place or name, expected two: probe diff A B, or "
            "probe diff --gpu-path A --neuron-path B."
        )
    first, second = named or placed
    return str(first), str(second)


def _run(options: argparse.Namespace) -> int:
    from probe.comparisons.devices.diff import diff
    from probe.comparisons.devices.differences import Limits

    if options.recipe is not None and len(options.recipe) > 2:
        raise ValueError(f"--recipe has {len(options.recipe)} names. Give one for both, or one for A and one for B.")
    check_outputs(files=[options.json], folders=[options.report])
    a, b = _folders(options)
    recipe = None if options.recipe is None else (options.recipe[0], options.recipe[-1])
    with Progress() as progress:
        found = diff(
            *(a, b),
            recipe=recipe,
            limits=Limits(options.max_abs, options.mean_abs, options.cosine),
            progress=progress.status,
            **{name: getattr(options, name) for name in ("format", "reference", "rtol", "atol", "layers", "verify")},
        )
    if options.json is not None:
        write_json(options.json, found.as_dict())
    if options.json != "-":
        from probe.report.devices import device_text

        echo(device_text(found))
    if options.report:
        from probe.comparisons.samples import drawn_devices
        from probe.report.devices import write_device_page

        echo(f"report: {write_device_page(options.report, found, drawn_devices(found))}", error=True)
    return 0 if found.passed else 1
