"""`probe modes`, `probe layers` and `probe errors`: what there is to choose, and what every choice costs."""

import argparse
import json
import sys

from probe.cli.options import add_calibration, add_model
from probe.cli.tables import table


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The parsers of the three commands."""
    modes = commands.add_parser("modes", help="the modes, as a table")
    modes.add_argument("--json", action="store_true", help="machine-readable")
    modes.set_defaults(run=_modes)

    layers = commands.add_parser("layers", help="the modules of a model: names, types, shapes")
    add_model(layers)
    layers.add_argument(
        "pattern", nargs="*", help="index, first, last, all or a regular expression (default: all modules)"
    )
    layers.add_argument("--sites", action="store_true", help="with the sites inside Mamba blocks")
    layers.add_argument("--json", action="store_true", help="machine-readable")
    layers.set_defaults(run=_layers)

    errors = commands.add_parser(
        "errors", help="every mode and format against fp32: error by layer, KL, bits per token"
    )
    add_model(errors)
    errors.add_argument("--modes", nargs="+", metavar="MODE", help="modes, or groups: all essential quant_only fp_only")
    errors.add_argument("--formats", nargs="+", metavar="FORMAT", help="default: int8, the MX formats and nvfp4")
    errors.add_argument("--layers", nargs="+", default=["all"], metavar="LAYER", help="default: all")
    errors.add_argument("--samples", type=int, default=8, metavar="N", help="default: 8")
    errors.add_argument("--seqlen", type=int, default=256, metavar="N", help="default: 256")
    errors.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: 8")
    errors.add_argument("--data", default="evaluation", metavar="TEXT", help="evaluation, calibration or a .txt file")
    add_calibration(errors)
    errors.add_argument("--injected", action="store_true", help="feed every layer the reference's input")
    errors.add_argument("--json", action="store_true", help="machine-readable, all figures")
    errors.set_defaults(run=_errors)


def _modes(options: argparse.Namespace) -> int:
    from probe.overview import mode_rows

    rows = mode_rows()
    print(json.dumps(rows, indent=2) if options.json else table(rows))
    return 0


def _layers(options: argparse.Namespace) -> int:
    from probe.models.load import load_model
    from probe.overview import layer_rows

    loaded = load_model(
        options.model, allow_download=options.allow_download, trust_remote_code=options.trust_remote_code
    )
    rows = layer_rows(loaded, options.pattern, sites=options.sites)
    print(json.dumps(rows, indent=2) if options.json else table(rows))
    return 0


def _errors(options: argparse.Namespace) -> int:
    from probe.overview import measure_all, measured_rows

    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    measured = measure_all(
        options.model,
        modes=options.modes,
        formats=options.formats,
        layers=options.layers,
        data=(options.data, options.samples, options.seqlen, options.batch_size),
        calibration_data=(options.calib_data, options.calib_data_num, options.calib_seqlen),
        percentile=options.percentile,
        injected=options.injected,
        allow_download=options.allow_download,
        trust_remote_code=options.trust_remote_code,
        progress=progress,
    )
    if options.json:
        print(json.dumps([one.as_dict() for one in measured], indent=2))
    else:
        print(table(measured_rows(measured)))
        print("\nmse by layer; kl in nats; top-1: share of positions with the same most likely token; bits per token.")
    return 0
