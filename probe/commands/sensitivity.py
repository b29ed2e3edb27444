"""`probe sensitivity`: what each layer, or each site, costs the whole model."""

import argparse
import json
import sys
import time
from typing import Any

from probe.commands.options import add_calibration, add_model
from probe.commands.tables import table
from probe.files.atomic import write
from probe.files.paths import check_outputs


def add(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The parser of the command."""
    command = commands.add_parser(
        "sensitivity", help="quantize one layer or site at a time, and all but one: rank them by KL and mse"
    )
    add_model(command)
    command.add_argument("--mode", metavar="MODE", help="default: 2-1 for a Mamba, linear_wa for other models")
    command.add_argument("--format", default="int8", metavar="FORMAT", help="default: int8")
    command.add_argument("--layers", nargs="+", default=["all"], metavar="LAYER", help="default: all")
    command.add_argument(
        "--sites",
        nargs="?",
        const="across",
        choices=("across", "within"),
        help="rank sites: each in all layers at once (across, the default), or each in each layer (within)",
    )
    command.add_argument("--samples", type=int, default=8, metavar="N", help="default: 8")
    command.add_argument("--seqlen", type=int, default=128, metavar="N", help="default: 128")
    command.add_argument("--batch-size", type=int, default=4, metavar="N", help="default: 4")
    command.add_argument("--data", default="evaluation", metavar="TEXT", help="evaluation, calibration or a .txt file")
    add_calibration(command)
    command.add_argument("--device", default="cpu", help="cpu, cuda, mps, xpu or xla (default: cpu)")
    command.add_argument("--no-advice", action="store_true", help="leave out the runs that search what to keep")
    command.add_argument("--top", type=int, metavar="N", help="print the N most sensitive only")
    command.add_argument("--json", metavar="FILE", help="write all figures to FILE; - prints them and no table")
    command.add_argument("--report", metavar="DIR", help="write DIR/sensitivity.html, with the plot, and the JSON")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from probe.sensitivity.named import rank_model

    if options.top is not None and options.top < 1:
        raise ValueError(f"--top is {options.top}; expected 1 or more.")
    check_outputs(files=[options.json], folders=[options.report])
    found = rank_model(
        options.model,
        mode=options.mode,
        format=options.format,
        layers=tuple(options.layers),
        sites=options.sites,
        data=(options.data, options.samples, options.seqlen, options.batch_size),
        calibration_data=(options.calib_data, options.calib_data_num, options.calib_seqlen),
        percentile=options.percentile,
        device=options.device,
        advice=not options.no_advice,
        allow_download=options.allow_download,
        trust_remote_code=options.trust_remote_code,
        progress=_Progress(),
    )
    from probe.report.sensitivity.page import describe, table_rows, write_report

    text = json.dumps(found.as_dict(), indent=2)
    if options.json == "-":
        print(text)
    else:
        print(describe(found, options.model) + "\n")
        print(table(table_rows(found, top=options.top)))
        print(f"\n{found.advice.text}")
        for note in found.notes:
            print(f"note: {note}")
    if options.json not in (None, "-"):
        print(f"figures: {write(options.json, text + chr(10))}", file=sys.stderr)
    if options.report:
        print(f"report: {write_report(found, options.report, model=options.model)}", file=sys.stderr)
    return 0


class _Progress:
    """What is being run and how long the rest will take, on one line of stderr; in a file, a line every 5 s."""

    def __init__(self) -> None:
        self.start = self.told = 0.0
        self.live = sys.stderr.isatty()

    def __call__(self, done: int, total: int, what: str) -> Any:
        now = time.monotonic()
        if not total or not self.start:
            self.start = now
        last = done >= total
        if self.told and now - self.told < (0.2 if self.live else 5.0) and not last:
            return
        self.told = now
        left = f", {_time((now - self.start) * (total - done) / done)} left" if done and not last else ""
        share = f"[{done / total:4.0%}] " if total else ""
        line = f"{share}{what}{left}"
        print(f"\r\x1b[K{line}" if self.live else line, file=sys.stderr, end="" if self.live else "\n", flush=True)
        if self.live and last:
            print(file=sys.stderr)


def _time(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
