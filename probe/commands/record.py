"""`probe record`: run a model under modes and keep the outputs of its layers."""

import argparse
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING

from probe.commands.options import (
    Subparsers,
    add_calibration,
    add_engine,
    add_include,
    add_model,
    add_modes_from,
    add_option,
    add_reference,
    declare_modes,
    make_engine,
)
from probe.commands.output import Progress, write_document
from probe.files.paths import check_outputs
from probe.words import shared_lines

if TYPE_CHECKING:
    from probe.recordings.reading import Recording


def add(commands: Subparsers) -> None:
    """Add the parser of the command."""
    parser = commands.add_parser("record", help="run a model under modes and keep the outputs of its layers")
    parser.add_argument("given_model", nargs="?", metavar="MODEL", help="the same as --model, as in the users' script")
    add_model(parser)
    add_reference(parser)
    parser.set_defaults(model=None)

    option = partial(add_option, parser)
    weights = "folder of the weights; --model is then only the name in the manifest"
    option("--pretrained-dir", metavar="DIR", help=weights)
    option("--modes", "--mode", nargs="+", metavar="MODE", help="modes, or groups: essential all quant_only fp_only")
    option("--quantize", action="store_true", help="refuse modes that quantize nothing; a mode needs no --quantize")
    add_modes_from(parser)
    option("--formats", nargs="+", default=["int8"], metavar="FORMAT", help="default: int8")
    add_include(parser)
    option("--layers", nargs="+", metavar="LAYER", help="first, last, all, indices or regular expressions")
    option(
        "--taps",
        nargs="*",
        metavar="TAP",
        help="also: inputs mixer conv1d scan embedding final_norm logits (or output)",
    )
    option("--samples", type=int, metavar="N", help="windows of the text (default: 10; npz, pt: 1)")
    option("--seqlen", "--seq-len", type=int, metavar="N", help="tokens in each (default: 512; of a prompt, all)")
    option("--data", metavar="TEXT", help="evaluation (default), calibration, a .txt file or a folder")
    option("--inputs", metavar="MODULE:FUNCTION", help="what this function returns, instead of --data")
    option("--prompt", metavar="TEXT", help="this text instead of --data")
    option("--batch-size", type=int, default=1, metavar="N", help="default: 1")
    option("--device", default="cpu", help="cpu, cuda, mps, xpu, xla (default: cpu)")
    option("--compile", action="store_true", help="run it through torch.compile")
    add_calibration(parser)
    option("--layout", default="safetensors", help="safetensors (default), npy, npz or pt")
    option("--out", "--output-dir", default="layer_outputs", metavar="DIR", help="default: layer_outputs")
    option("--output-file", metavar="NAME", help="of the layout npz (default: first_layer_io_all_modes.npz)")
    option("--overwrite", action="store_true", help="replace modes that the folder has already")
    option("--restart", action="store_true", help="delete an interrupted recording instead of finishing it")
    add_engine(parser)
    option("--json", metavar="FILE", help="the manifest as JSON; - for standard output")
    parser.epilog = (
        "Defaults by layout: safetensors and npy: modes essential, layers first last; "
        "npz: all modes, first layer with its input; pt: fp32, all layers, embedding, final_norm."
    )
    parser.set_defaults(run=_record, interrupted="what is recorded is kept. The same command goes on from there.")


def _record(options: argparse.Namespace) -> int:
    from probe.recordings.manifest import manifest_to_json
    from probe.recordings.recorder import record
    from probe.recordings.request import RecordRequest

    check_outputs(files=[options.json])
    declare_modes(options)
    options.model = _model(options)
    if options.quantize:
        _check_quantizes(options)
    names = {field.name for field in fields(RecordRequest)}
    chosen = {name: value for name, value in vars(options).items() if name in names}
    with make_engine(options) as engine, Progress() as progress:
        recording = record(**chosen, progress=progress, engine=engine, units=progress.units(engine))
    document = manifest_to_json(recording.manifest).decode()
    if options.json is not None:
        write_document(options.json, document)
    if options.json != "-":
        print(_summary(recording))
    return 0


def _model(options: argparse.Namespace) -> str:
    """The model by its place or by --model; without either, the embedded Mamba."""
    from probe.running.modes import GROUPS, is_mode

    given = options.given_model
    if given is not None and options.model not in (None, given):
        raise ValueError(f"two models are given, {given} and --model {options.model}. Leave one of them out.")
    if given is not None and (given in GROUPS or is_mode(given)):
        raise ValueError(f"{given} stands in the place of the model, and it is a mode. Write: --modes {given}")
    return str(given or options.model or "tiny-mamba")


def _check_quantizes(options: argparse.Namespace) -> None:
    """Refuse `--quantize`, which the users' script needs for a quantized model, where every mode is a float one."""
    from probe.recordings.request import DEFAULTS
    from probe.running.modes import expand_modes, given_modes
    from probe.words import look_up

    usual = look_up("layout", options.layout, {str(name): row for name, row in DEFAULTS.items()})
    source = options.pretrained_dir or options.model
    modes = expand_modes(given_modes(options.modes or usual.modes, source, options.reference, narrowed=True))
    if all(mode.kind == "float" for mode in modes):
        raise ValueError(
            f"--quantize was given, and {', '.join(mode.name for mode in modes)} quantizes nothing. "
            "Add a mode that does, such as 2-1, or leave --quantize out."
        )


def _summary(recording: "Recording") -> str:
    """What the users' scripts print for their layouts, and then what was recorded and where it is."""
    from probe.recordings.script_formats import first_layer_text, key_layers_text

    manifest = recording.manifest
    blocks = []
    if manifest.layout == "npz":
        blocks.append(first_layer_text(recording))
    if manifest.layout == "pt":
        blocks += [key_layers_text(recording, recipe) for recipe in recording.recipes]
    size = sum(file.bytes for file in manifest.files.values()) / 1e6
    tokens, layers = manifest.tokens, recording.layers(recording.recipes[0])
    shown = ", ".join(layers) if len(layers) <= 4 else f"{layers[0]} to {layers[-1]}, {len(layers)} layers"
    blocks.append(f"{recording.folder}: {', '.join(recording.recipes)}; {shown}; {tokens}, {size:.1f} MB")
    recorded = manifest.recipes.items()
    blocks += shared_lines((name, one.weights.line) for name, one in recorded if one.weights is not None)
    folders = {one.file.rpartition("/")[0] for some in manifest.recipes.values() for one in some.tensors.values()}
    if folders != {""}:
        blocks.append(f"one mode in a folder: {', '.join(sorted(folders))}")
    return "\n".join(blocks)
