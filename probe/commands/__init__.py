"""The command line: a thin door into the library.

A command is an `add(commands)` that adds its parser and sets `run`, the function that does the work. One file holds a
command, or those that show the same rows: `formats` and `demo`, and `modes`, `layers` and `errors` in models.py.
Nothing heavy is imported before a command needs it.
"""

import argparse
import atexit
import gc
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from probe.commands import analyze, check, compare, diff, formats, init, models, record, scaling, sensitivity
from probe.interrupts import keep_interrupts
from probe.version import VERSION
from probe.words import printable

#: The files of the commands, in the order of `probe --help`. A new command is a file and its row here.
COMMANDS = (init, formats, models, record, compare, diff, check, scaling, sensitivity, analyze)

#: The exit code of a program that SIGINT ended, 128 + 2.
INTERRUPTED = 130

_is_interrupted = False


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 on success, 2 on a user's mistake, 130 on Ctrl-C, both with one message."""
    if arguments is None:
        keep_interrupts()
        atexit.register(_end_interrupted)  # the first to be registered, so the last to be called
        atexit.register(gc.freeze)  # the process ends: to look for garbage in all of torch would take 0.8 s more
        if not sys.flags.safe_path and "" not in sys.path:
            sys.path.insert(0, "")  # the current folder, as under python -m: a model may be net:make with ./net.py
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in given  # before or after the command
    options = parse([word for word in given if word != "--debug"])
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of a pipe has gone: there is nobody left to write to
        sys.stdout = None
        return 0
    except KeyboardInterrupt:
        if debug:
            raise
        global _is_interrupted
        _is_interrupted = arguments is None
        if _is_interrupted:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        erase = "\r\x1b[K" if sys.stderr.isatty() else ""  # the ^C, and a line of progress
        resumes = options.made is not None and options.made.resumes
        kept = "finished units are kept. The same command goes on from there." if resumes else options.interrupted
        print(f"{erase}probe: interrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    except (ValueError, OSError) as problem:
        if debug:
            raise
        return _refused(str(problem))
    except MemoryError:
        if debug:
            raise
        return _refused("the memory is not enough. Give fewer samples, layers or a smaller file; --debug shows where.")


def _end_interrupted() -> None:
    """End an interrupted process with its code, whatever came after it.

    `python -m` would end by SIGINT where Ctrl-C came inside of `exec` of a text, as dataclasses use it, though it was
    handled; and Ray's C++ code may end with 1.
    """
    if _is_interrupted:
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(INTERRUPTED)


def _refused(problem: str) -> int:
    """Print a message, whatever characters are in it; the exit code of a user's mistake."""
    sys.stderr.write(f"probe: error: {printable(problem, keep=chr(10))}\n")
    return 2


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line. What no parser knows is in `unknown`, for a command that sets `takes_unknown`."""
    parser = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown and not options.takes_unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    options.unknown = unknown
    return options


def _parser() -> argparse.ArgumentParser:
    purpose = "Numerical regression tests for quantized models, and the tools around them."
    parser = argparse.ArgumentParser(prog="probe", description=purpose)
    parser.add_argument("--version", action="version", version=f"probe {VERSION}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    interrupted = "all files that were written are whole. The same command starts again."
    parser.set_defaults(takes_unknown=False, interrupted=interrupted, made=None)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return parser
