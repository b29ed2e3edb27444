"""The command line: a thin door into the library, a file for each family of commands.

Nothing heavy is imported before a command needs it.
"""

import argparse
import sys
from collections.abc import Sequence

from probe.commands import analyze, check, compare, diff, formats, models, record, scaling, sensitivity
from probe.version import VERSION

#: Modules with `add(commands)`, in the order of `probe --help`.
FAMILIES = (formats, models, record, compare, diff, check, scaling, sensitivity, analyze)

#: The exit code of a program that SIGINT ended, 128 + 2.
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 on a user's mistake, 130 on Ctrl-C, both told in one message."""
    if arguments is None and not sys.flags.safe_path and "" not in sys.path:
        sys.path.insert(0, "")  # the current folder, as under python -m: a model may be net:make with ./net.py
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
    except KeyboardInterrupt:
        if debug:
            raise
        over = "\r\x1b[K" if sys.stderr.isatty() else ""  # the ^C, and a line of progress
        print(f"{over}probe: interrupted; {options.interrupted}", file=sys.stderr)
        return INTERRUPTED
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
    parser.set_defaults(interrupted="what was written is whole. The same command starts again.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    for family in FAMILIES:
        family.add(commands)
    return parser
