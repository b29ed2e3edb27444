"""Mutated inputs through every reader and command: `python -m tests.fuzz.run --count 5000 --seed 0`.

Each must end in a result or in one message (exit code 0, 1 or 2, or a ValueError of a reader) within a time and a
memory limit. Everything else is counted and shown with its seed: `--only SEED` runs that one, with its traceback.
"""

import argparse
import contextlib
import io
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.inputs import Target, targets_in
from tests.fuzz.mutations import NASTY, mutate_file

SECONDS = 30
MEMORY = 8 << 30
#: One in so many inputs is a command line instead of a file.
LINES = 6
NAMES = (
    *("formats", "modes", "layers", "errors", "record", "compare", "diff", "check", "scaling", "sensitivity"),
    "analyze",
)


class HangError(BaseException):
    """An input that took longer than SECONDS; no `except Exception` swallows it."""


@dataclass
class Tally:
    """What became of the inputs."""

    outcomes: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """A HangError after SECONDS of computing, or ten times as long asleep; at most MEMORY more of address space."""

    def alarm(*_: object) -> None:
        raise HangError

    pages = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    old = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, alarm) for number in (signal.SIGALRM, signal.SIGPROF)}
    resource.setrlimit(resource.RLIMIT_AS, (pages + MEMORY, old[1]))
    signal.alarm(10 * SECONDS)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, old)


def outcome(read: Any) -> tuple[str, str]:
    """exit 0, exit 2, refused, ... or traceback, hang, unexpected exit; and the details of the last three."""
    shown = io.StringIO()
    try:
        with limits(), warnings.catch_warnings(), contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
            warnings.simplefilter("ignore")
            code = read()
    except SystemExit as problem:
        code = problem.code
    except (ValueError, OSError) as problem:
        return ("refused", "") if str(problem) else ("traceback", traceback.format_exc())
    except HangError:
        return "hang", traceback.format_exc()
    except BaseException as problem:
        if type(problem).__name__ == "DefectError":  # of a reader whose caller adds the name of the file
            return "refused", ""
        return "traceback", traceback.format_exc()
    if isinstance(code, int) and code not in (0, 1, 2):
        return "unexpected exit", f"exit {code}: {shown.getvalue()[-500:]}"
    if "Traceback (most recent call last)" in shown.getvalue():
        return "traceback", shown.getvalue()[-2000:]
    return (f"exit {code}" if isinstance(code, int) else "read"), ""


def words(rng: random.Random) -> list[str]:
    """A command line of real commands and options with values that fit or do not."""
    name = rng.choice(NAMES)
    options = ("--model", "--modes", "--mode", "--formats", "--format", "--layers", "--samples", "--seqlen", "--data",
               "--batch-size", "--calib-data-num", "--calib-seqlen", "--percentile", "--layout", "--out", "--json",
               "--dir", "--reference", "--taps", "--device", "--elem-format", "--num-levels", "--scale-bits",
               "--max-scale-exp", "--min-scale-exp", "--block-size", "--granularity", "--rtol", "--atol", "--layer",
               "--factor", "--report", "--config", "--data.num_samples", "--memory.max_memory", "--modes-from",
               "--output-file", "--prompt", "--calib-data", "--save", "--pattern", "--max-mean")  # fmt: skip
    fitting = ("tiny-mamba", "tiny-llama", "fp32", "2-1", "int8", "fp4_e2m1", "1", "2", "0", "-1", "0.5", "1e9", "nan",
               "inf", "all", "first", "layer_0", "npy", "pt", "safetensors/", "x.pt", "x.npz", "npz", "a.yaml",
               "m.toml", "model", "evaluation", "t.txt", "out", "cpu", "cuda", "meta", "-", "[", "(",
               "x.safetensors:a")  # fmt: skip
    small = {
        "errors": ["--samples", "1", "--seqlen", "8", "--modes", "2-1", "--formats", "int8"],
        "sensitivity": ["--model", "tiny-llama", "--samples", "1", "--seqlen", "8", "--format", "fp8_e4m3"],
        "record": ["--samples", "1", "--seqlen", "8", "--modes", "fp32", "--calib-data-num", "1"],
        "analyze": ["--dry-run", "--data.num_samples", "1", "--data.seq_len", "8"],
        "scaling": ["--no-plots", "--output-dir", "scaled", "--num-levels", "3"],
    }
    texts = [value.replace("\x00", "") for value in NASTY if isinstance(value, str)]
    found = [name, *small.get(name, [])]  # given again, an option counts as it is given last
    for _ in range(rng.randrange(1, 5)):
        value = rng.choice(fitting) if rng.random() < 0.7 else rng.choice(texts)
        found += rng.choice(([rng.choice(options), value], [value]))
    return found


def one(seed: int, targets: list[Target], folder: Path) -> tuple[str, str, str]:
    """The name of an input, its outcome and details. The files of the folder are as before afterwards."""
    from probe.commands import main

    rng = random.Random(seed)
    if not seed % LINES:
        line = words(rng)
        kept = {path.name for path in folder.iterdir()}
        found = outcome(lambda: main(line))
        for path in [path for path in folder.iterdir() if path.name not in kept]:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        return f"probe {' '.join(line)}"[:300], *found
    target = rng.choice(targets)
    file = folder / rng.choice(target.files)
    before = file.read_bytes()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch and zipfile, about what is made on purpose
            mutate_file(file, rng)
        found = outcome(target.read)
    finally:
        if file.is_dir() and not file.is_symlink():
            shutil.rmtree(file)
        file.unlink(missing_ok=True)
        file.write_bytes(before)
    return f"{target.name}: {file.relative_to(folder)}", *found


def run(seeds: range, *, progress: bool = False) -> Tally:
    """Run the inputs of these seeds in a new folder."""
    tally, here, begin = Tally(), Path.cwd(), time.monotonic()
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(os.path.realpath(name))
        os.chdir(folder)
        stack.callback(os.chdir, here)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            targets = targets_in(folder)
        for seed in seeds:
            what, kind, details = one(seed, targets, folder)
            tally.outcomes[kind] += 1
            if details:
                tally.problems.append(f"seed {seed}, {kind}: {what}\n{details}")
            if progress and (details or not (seed + 1) % 250):
                print(f"{seed + 1 - seeds.start} {time.monotonic() - begin:.0f} s {dict(tally.outcomes)}", flush=True)
            if progress and details:
                print(tally.problems[-1], flush=True)
    return tally


def main_(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="one seed")
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + options.count)
    tally = run(range(options.only, options.only + 1) if options.only is not None else seeds, progress=True)
    print(f"{sum(tally.outcomes.values())} inputs: {dict(tally.outcomes)}")
    return 1 if tally.problems else 0


if __name__ == "__main__":
    sys.exit(main_(sys.argv[1:]))
