"""Options that several commands share."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from probe.commands.output import echo_beside_progress
from probe.formats import PERCENTILE
from probe.models.factories import check_function
from probe.words import INCLUDABLE

if TYPE_CHECKING:
    from probe.engines import Engine

#: What `add_subparsers` returns, to which a command adds its parser.
Subparsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_option(parser: argparse.ArgumentParser, *names: str, **settings: Any) -> None:
    """Add an option that may also be written with underscores, as in the users' scripts."""
    parser.add_argument(*dict.fromkeys([*names, *(f"--{name[2:].replace('-', '_')}" for name in names)]), **settings)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, and what loading it may do."""
    model = "embedded name, folder, .gguf file, hub id or package.module:factory (default: tiny-mamba)"
    parser.add_argument("--model", default="tiny-mamba", help=model)
    parser.add_argument("--allow-download", action="store_true", help="allow downloads from the hub")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_reference(parser: argparse.ArgumentParser) -> None:
    """The float original of a model that is quantized already."""
    original = "the float original, named like a model, where --model is quantized already: it is then the mode given"
    parser.add_argument("--reference", metavar="MODEL", help=original)


def add_data(parser: argparse.ArgumentParser, *, samples: int, seqlen: int, batch_size: int) -> None:
    """Which text, how much of it, and how it is batched."""
    parser.add_argument("--samples", type=int, default=samples, metavar="N", help=f"default: {samples}")
    parser.add_argument("--seqlen", type=int, default=seqlen, metavar="N", help=f"default: {seqlen}")
    parser.add_argument("--batch-size", type=int, default=batch_size, metavar="N", help=f"default: {batch_size}")
    what = "evaluation (default), calibration, a .txt file, or a folder of pictures or sounds"
    parser.add_argument("--data", default=None, metavar="TEXT", help=what)
    own = "the batches that this function returns, instead of --data"
    parser.add_argument("--inputs", default=None, metavar="MODULE:FUNCTION", help=own)


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """Which text the static scales are computed from."""
    add_option(parser, "--calib-data", default="calibration", metavar="TEXT", help="text for calibration")
    add_option(parser, "--calib-data-num", type=int, default=16, metavar="N", help="calibration samples (default: 16)")
    add_option(parser, "--calib-seqlen", type=int, default=256, metavar="N", help="default: 256")
    percentile = f"of |conv1d.output| and |scan.state| (default: {PERCENTILE})"
    add_option(parser, "--percentile", type=float, default=PERCENTILE, metavar="SHARE", help=percentile)


def add_modes_from(parser: argparse.ArgumentParser) -> None:
    """Files that declare modes, beside the pyproject.toml of the current folder."""
    files = "also the modes that FILE declares in [tool.probe.modes.NAME] (always: ./pyproject.toml)"
    add_option(parser, "--modes-from", action="append", default=[], metavar="FILE", help=files)


def add_include(parser: argparse.ArgumentParser) -> None:
    """What linear modes quantize beside the layers."""
    parts = f"what linear modes leave float, put on the grid too: {', '.join(INCLUDABLE)}"
    parser.add_argument("--include", nargs="+", default=[], metavar="PART", help=parts)


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Where the units of the work run."""
    engine = "local: on this machine (default); ray: on a Ray cluster (docs/scale.md)"
    parser.add_argument("--engine", choices=("local", "ray"), default="local", help=engine)
    parser.add_argument("--jobs", type=int, metavar="N", help="worker processes of the engine local (default: 1)")
    address = "the cluster: auto, HOST:PORT or ray://HOST:PORT (default: one is started on this machine)"
    add_option(parser, "--ray-address", metavar="ADDRESS", help=address)
    cpus = "CPUs of a worker (default: all of a node, so that a node has one worker)"
    add_option(parser, "--ray-cpus", type=int, metavar="N", help=cpus)
    shared = "a folder that all nodes see, for what does not fit in the object store"
    add_option(parser, "--ray-shared", metavar="DIR", help=shared)


def make_engine(options: argparse.Namespace) -> "Engine":
    """The engine that `add_engine` describes, to be closed; an option of the other one is refused."""
    from probe.engines.local import LocalEngine

    given = {name: value for name, value in vars(options).items() if name.startswith("ray_") and value is not None}
    if options.engine == "local":
        if given:
            raise ValueError(f"--{next(iter(given)).replace('_', '-')} is for --engine ray. Add that, or leave it out.")
        return LocalEngine(1 if options.jobs is None else options.jobs)
    if options.jobs is not None:
        raise ValueError("--jobs is for the engine local; the workers of --engine ray are those of the cluster.")
    from probe.engines.cluster import RayEngine

    shared = None if options.ray_shared is None else Path(options.ray_shared)
    engine = RayEngine(options.ray_address, cpus=options.ray_cpus, shared=shared)
    options.made = engine
    engine.notice = lambda text: echo_beside_progress(f"[engine] {text}")
    engine.notice(engine.about)
    return engine


def declare_modes(options: argparse.Namespace) -> None:
    """Add the modes of ./pyproject.toml, if it declares any, and of the files of `add_modes_from`."""
    from probe.running.declarations import declares_modes, read_declarations
    from probe.running.modes import declare_modes

    project = Path("pyproject.toml")
    for file in [*([project] if declares_modes(project) else []), *map(Path, options.modes_from)]:
        declare_modes(read_declarations(file), where=str(file))


def model_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_model` added, but for the name, as keyword arguments of the library."""
    return {"allow_download": options.allow_download, "trust_remote_code": options.trust_remote_code}


def data_arguments(options: argparse.Namespace) -> dict[str, Any]:
    """What `add_data` and `add_calibration` added, as keyword arguments of the library."""
    from probe.data.samples import TextSamples

    return {
        "data": TextSamples(_source(options), options.samples, options.seqlen, options.batch_size),
        "calibration_data": TextSamples(options.calib_data, options.calib_data_num, options.calib_seqlen),
        "percentile": options.percentile,
    }


def _source(options: argparse.Namespace) -> str:
    if options.data is not None and options.inputs is not None:
        raise ValueError("--data and --inputs were both given, and a run has one input. Leave one of them out.")
    if options.inputs is not None:
        check_function("--inputs", options.inputs)
    return str(options.inputs or options.data or "evaluation")
