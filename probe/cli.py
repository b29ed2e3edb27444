"""The command line: a thin door into the library. Nothing heavy is imported before a command needs it."""

import argparse
import json
import math
import sys
from collections.abc import Sequence

from probe.formats import FORMATS, Format
from probe.version import VERSION


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 on a user's mistake, which is told in one message."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # before or after the command
    options = _parser().parse_args([one for one in given if one != "--debug"])
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of a pipe has gone; so may we
        sys.stdout = None
        return 0
    except (ValueError, OSError) as problem:
        if debug:
            raise
        print(f"probe: error: {problem}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="probe",
        description="Numerical regression tests for quantized models, and the tools around them.",
    )
    parser.add_argument("--version", action="version", version=f"probe {VERSION}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    formats = commands.add_parser("formats", help="the number formats, as a table")
    formats.add_argument("--json", action="store_true", help="machine-readable")
    formats.set_defaults(run=_formats)

    demo = commands.add_parser("demo", help="quantize a tensor to every format and show the errors")
    demo.add_argument("--shape", type=int, nargs="+", default=[512, 768], metavar="N", help="default: 512 768")
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument(
        "--outliers",
        type=float,
        default=0.001,
        metavar="SHARE",
        help="elements multiplied by 50 (default: 0.001)",
    )
    demo.add_argument("--scale-rule", default="floor", metavar="RULE", help="floor, ceil, even, rceil or mse")
    demo.add_argument("--formats", nargs="+", default=list(FORMATS), metavar="FORMAT", help="default: all")
    demo.add_argument("--json", action="store_true", help="machine-readable")
    demo.set_defaults(run=_demo)

    modes = commands.add_parser("modes", help="the modes, as a table")
    modes.add_argument("--json", action="store_true", help="machine-readable")
    modes.set_defaults(run=_modes)

    layers = commands.add_parser("layers", help="the modules of a model: names, types, shapes")
    _add_model(layers)
    layers.add_argument(
        "pattern", nargs="*", help="index, first, last, all or a regular expression (default: all modules)"
    )
    layers.add_argument("--sites", action="store_true", help="with the sites inside Mamba blocks")
    layers.add_argument("--json", action="store_true", help="machine-readable")
    layers.set_defaults(run=_layers)

    errors = commands.add_parser(
        "errors", help="every mode and format against fp32: error by layer, KL, bits per token"
    )
    _add_model(errors)
    errors.add_argument("--modes", nargs="+", metavar="MODE", help="modes, or groups: all essential quant_only fp_only")
    errors.add_argument("--formats", nargs="+", metavar="FORMAT", help="default: int8, the MX formats and nvfp4")
    errors.add_argument("--layers", nargs="+", default=["all"], metavar="LAYER", help="default: all")
    errors.add_argument("--samples", type=int, default=8, metavar="N", help="default: 8")
    errors.add_argument("--seqlen", type=int, default=256, metavar="N", help="default: 256")
    errors.add_argument("--batch-size", type=int, default=8, metavar="N", help="default: 8")
    errors.add_argument("--data", default="evaluation", metavar="TEXT", help="evaluation, calibration or a .txt file")
    errors.add_argument("--calib-data", default="calibration", metavar="TEXT", help="text that scales are taken from")
    errors.add_argument("--calib-data-num", type=int, default=16, metavar="N", help="calibration samples (default: 16)")
    errors.add_argument("--calib-seqlen", type=int, default=256, metavar="N", help="default: 256")
    errors.add_argument("--percentile", type=float, default=0.9995, help="of |conv1d.output| (default: 0.9995)")
    errors.add_argument("--injected", action="store_true", help="feed every layer the reference's input")
    errors.add_argument("--json", action="store_true", help="machine-readable, all figures")
    errors.set_defaults(run=_errors)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        default="tiny-mamba",
        help="embedded name, folder, hub id or package.module:factory (default: tiny-mamba)",
    )
    parser.add_argument("--allow-download", action="store_true", help="let a hub id be fetched")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def _modes(options: argparse.Namespace) -> int:
    from probe.overview import mode_rows

    rows = mode_rows()
    print(json.dumps(rows, indent=2) if options.json else _table(rows))
    return 0


def _layers(options: argparse.Namespace) -> int:
    from probe.models.load import load_model
    from probe.overview import layer_rows

    loaded = load_model(
        options.model, allow_download=options.allow_download, trust_remote_code=options.trust_remote_code
    )
    rows = layer_rows(loaded, options.pattern, sites=options.sites)
    print(json.dumps(rows, indent=2) if options.json else _table(rows))
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
        print(_table(measured_rows(measured)))
        print("\nmse by layer; kl in nats; top-1: share of positions with the same most likely token; bits per token.")
    return 0


def _formats(options: argparse.Namespace) -> int:
    rows = [_format_row(f) for f in FORMATS.values()]
    print(json.dumps(rows, indent=2) if options.json else _table(rows))
    return 0


def _format_row(fmt: Format) -> dict[str, object]:
    scale = {"e8m0": "E8M0, 2^(byte-127)", "e4m3": "E4M3 x float32", "float32": "float32", None: "none"}[fmt.scale]
    return {
        "format": fmt.name,
        "bits": fmt.bits,
        "exponent": fmt.exponent_bits,
        "mantissa": fmt.mantissa_bits,
        "bias": None if fmt.is_integer else fmt.bias,
        "max": fmt.max,
        "min normal": fmt.min_normal,
        "min subnormal": fmt.min_subnormal,
        "block": fmt.block_size,
        "scale": scale,
        "special codes": fmt.special_codes,
        "note": fmt.note,
    }


def _demo(options: argparse.Namespace) -> int:
    from probe.demonstration import error_table

    rows = error_table(options.shape, options.formats, options.seed, options.outliers, options.scale_rule)
    if options.json:
        print(json.dumps(rows, indent=2))
        return 0
    shape = " x ".join(map(str, options.shape))
    print(f"normal values, {shape}, {options.outliers:.2%} of them times 50, seed {options.seed}, float32\n")
    print(_table(rows))
    print("\nsqnr: signal to quantization noise, higher is better; -: lossless. saturated, flushed: of the elements.")
    return 0


def _table(rows: list[dict[str, object]]) -> str:
    """Aligned columns: numbers to the right, words to the left."""
    texts = [{key: _cell(value) for key, value in row.items()} for row in rows]
    widths = {key: max(len(key), *(len(text[key]) for text in texts)) for key in rows[0]}
    words = {key for key in rows[0] if any(isinstance(row[key], str) for row in rows)}

    def line(cells: dict[str, str]) -> str:
        parts = (cells[k].ljust(w) if k in words else cells[k].rjust(w) for k, w in widths.items())
        return "  ".join(parts).rstrip()

    return "\n".join([line({key: key for key in widths}), *(line(text) for text in texts)])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        if value == 0 or math.isinf(value):
            return f"{value:g}"
        if math.log2(abs(value)).is_integer() and abs(value) < 0.01:
            return f"2^{int(math.log2(abs(value)))}"
        return f"{value:.6g}"
    return str(value)


if __name__ == "__main__":
    sys.exit(main())
