"""`probe scaling`: what the choice of a scale costs a tensor, and which to choose."""

import argparse
from dataclasses import fields
from functools import partial
from pathlib import Path

from probe.commands.options import Subparsers, add_engine, make_engine
from probe.commands.output import Progress


def add(commands: Subparsers) -> None:
    """Add the parser of the command."""
    scaling = commands.add_parser(
        "scaling",
        help="sweep the scale of tensors around max alignment and down to min alignment, and recommend one",
        description="Sweeps the scale of every tensor from 3 octaves beyond maximum alignment to minimum alignment, "
        "recommends one, and writes tables, plots, a log and one page over all. Exit code 1 if a tensor failed (the "
        "others are still analysed), 2 if no input could be read.",
    )
    option = scaling.add_argument
    tensors = ".pt, .npy, .npz or .safetensors file (file.safetensors:name for one tensor), folder, or recording"
    option("input_tensor", nargs="+", help=tensors)
    option("--output-dir", metavar="DIR", help="default: draw/scaling_analysis/{tensor_name}/")
    formats = "fp8_e4m3 fp8_e5m2 fp6_e3m2 fp6_e2m3 fp4_e2m1 int8 mxint8, or all (default: fp8_e4m3)"
    option("--elem-format", dest="formats", nargs="+", default=["fp8_e4m3"], metavar="FORMAT", help=formats)
    option("--scale-bits", type=int, default=8, metavar="N", help="of a scale; 8 is 2^-127 to 2^127")
    option("--max-scale-exp", type=float, metavar="E", help="first exponent (default: 3 octaves beyond max alignment)")
    option("--min-scale-exp", type=float, metavar="E", help="last exponent (default: min alignment)")
    option("--num-levels", type=int, metavar="N", help="scales that are tried (default: 21, or two in each octave)")
    option("--granularity", default="tensor", metavar="KIND", help="tensor: one scale; block: one per block (real MX)")
    option("--block-size", type=int, metavar="N", help="values that share a scale in blocks (default: 32)")
    option("--no-plots", dest="plots", action="store_false", help="write no pictures")
    add_engine(scaling)
    scaling.set_defaults(
        run=_scaling,
        interrupted="the files of tensors that are done stay, no page was written. The same command starts again.",
    )


def _scaling(options: argparse.Namespace) -> int:
    from probe.commands.scaling_batch import Request, run_batch
    from probe.recordings.tensor_sources import tensor_sources

    request = Request(**{field.name: getattr(options, field.name) for field in fields(Request)})
    output = Path(options.output_dir) if options.output_dir else None
    show = partial(print, flush=True)
    with make_engine(options) as engine, Progress() as progress:
        units = {} if engine.shares_disk else {"progress": progress.update}  # else the lines of the tensors say it
        return run_batch(tensor_sources(options.input_tensor), request, output, engine=engine, show=show, **units)
