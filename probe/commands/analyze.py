"""`probe analyze`: activations of chosen layers, from a YAML file and `--data.num_samples 128`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from probe.commands.options import Subparsers, add_engine, make_engine, model_arguments
from probe.commands.output import Progress
from probe.files.paths import check_outputs


def add(commands: Subparsers) -> None:
    """Add the parser of the command."""
    analyze = commands.add_parser(
        "analyze",
        help="activations of chosen layers: magnitudes, outliers, distributions",
        description="Any key of the configuration can be given as --KEY VALUE, such as --data.num_samples 128.",
        epilog="Without --config: the defaults, on the embedded model. All keys: probe analyze --keys",
        allow_abbrev=False,
    )
    analyze.add_argument("--config", metavar="FILE", help="YAML, as configs/default.yaml")
    analyze.add_argument("--keys", action="store_true", help="show every key with its value, as YAML, and stop")
    analyze.add_argument("--dry-run", action="store_true", help="show what would be analyzed and written, and stop")
    analyze.add_argument("--compare", nargs=2, metavar=("A", "B"), help="compare the folders of two runs instead")
    analyze.add_argument("--output", metavar="DIR", help="with --compare: where to write (default: B/compared)")
    analyze.add_argument("--allow-download", action="store_true", help="allow downloads from the hub")
    analyze.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    trusted = "call a package.module:factory of FILE that is not in this project"
    analyze.add_argument("--allow-factory", action="store_true", help=trusted)
    add_engine(analyze)
    analyze.set_defaults(run=_analyze, takes_unknown=True)


def overrides(given: Sequence[str]) -> list[tuple[str, str]]:
    """`--data.num_samples 128` and `--data.num_samples=128` as pairs of key and text."""
    found, rest = [], list(given)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise ValueError(f"{word!r} was not expected. Give keys as --data.num_samples 128.")
        if not equals:
            if not rest or rest[0].startswith("--"):
                raise ValueError(f"{word} needs a value, such as {word} 128.")
            value = rest.pop(0)
        found.append((name, value))
    return found


def _analyze(options: argparse.Namespace) -> int:
    if options.compare:
        return _compare(options)
    if options.output:
        raise ValueError("--output goes with --compare. The folder of a run is --visualization.save_dir DIR.")
    from probe.activations.settings import read_configuration

    settings = read_configuration(options.config, overrides(options.unknown), allow_factory=options.allow_factory)
    if options.keys:
        import yaml

        print(yaml.safe_dump(settings.as_dict(), sort_keys=False), end="")
        return 0
    check_outputs(folders=[settings.visualization.save_dir])
    from probe.activations.job import AnalysisJob
    from probe.activations.run import prepare, run
    from probe.engines.local import LocalEngine

    starts_nothing = options.dry_run and options.engine == "ray"
    with LocalEngine() if starts_nothing else make_engine(options) as engine, Progress() as progress:
        if not options.dry_run:
            AnalysisJob.prepare(engine)
        prepared = prepare(settings, progress=progress.line, **model_arguments(options))
        if options.dry_run:
            from probe.report.activations.text import dry_run_text

            print(dry_run_text(prepared))
            return 0
        from probe.report.activations.files import write_analysis
        from probe.report.activations.text import summary_text

        analysis = run(prepared, progress=progress.line, engine=engine, units=progress.units(engine))
        written = write_analysis(analysis, progress=progress.line)
    print(summary_text(analysis, written, printed=progress.lines))
    return 0


def _compare(options: argparse.Namespace) -> int:
    if options.unknown or options.config or options.dry_run or options.keys:
        given = "--config" if options.config else "--dry-run" if options.dry_run else (*options.unknown, "--keys")[0]
        raise ValueError(f"--compare reads two folders and takes no {given}. Leave it out.")
    from probe.report.activations.comparison import write_comparison

    beside = Path(options.compare[1]) / "compared" if Path(options.compare[1]).is_dir() else None
    check_outputs(folders=[options.output or beside])
    text, written = write_comparison(*options.compare, folder=options.output)
    print(text)
    print(f"\n{written[-1]}")
    return 0
