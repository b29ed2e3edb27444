"""The kill table: what became of every fault of tests/faults, and what other gates would have seen of it.

python benchmarks/kill_table.py [--write] [--json FILE]

Other gates, on the same run of the same fault, against the same baselines:

    accuracy 5 %, 8 %   as serving projects test: fails if bits per byte got worse by more than that, or top-1 agreement
                        with the float model fell by more than that; a gain passes
    MSE by layer 10 %   fails if the mse of the output of any layer in the whole model moved by more, either way

`--write` puts the table into docs/gate.md, the list of all faults into docs/faults.md and the one line into README.md,
between their markers. Exits with 1 if a fault is not told as its row says.
"""

import argparse
import json
import math
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import torch

from probe.gate.bench import Bench
from probe.gate.cases import Figure
from probe.words import LOGITS, OUTSIDE, PATHS
from tests.faults import user_faults
from tests.faults.bench import SmallGate, settings_of
from tests.faults.catalogue import AnyFault
from tests.faults.groups import FAULTS, GROUPS, RECIPES
from tests.faults.results import Result

ROOT = Path(__file__).parents[1]
COLUMNS = (
    "caught",
    "right place",
    "right cause",
    "cause not known",
    "wrong cause",
    "MSE by layer 10 %",
    "accuracy 5 %",
    "accuracy 8 %",
)


def worse(figure: Figure | None, share: float, sign: int) -> bool:
    """Whether a figure got worse by more than a share of what it was; one that is undefined did."""
    if figure is None or figure.old is None:
        return False
    if figure.new is None or not math.isfinite(figure.new):
        return True
    return sign * (figure.new - figure.old) > share * abs(figure.old)


def fails_accuracy(result: Result, share: float) -> bool:
    """Whether a one-sided accuracy gate sees the fault."""
    figures = result.outcomes[LOGITS].figures if LOGITS in result.outcomes else {}
    bits, top = (figures.get(f"logits.{name}") for name in ("bits_per_byte", "top1_agreement"))
    return worse(bits, share, 1) or worse(top, share, -1)


def fails_mse(result: Result, share: float) -> bool:
    """Whether a gate on the mse of every layer sees the fault."""
    layers = [one for label, one in result.outcomes.items() if label not in (LOGITS, *OUTSIDE, *PATHS)]
    figures = [one.figures.get("propagated.mse") for one in layers]
    return any(worse(figure, share, 1) or worse(figure, share, -1) for figure in figures)


def seen_by_others(gate: SmallGate, result: Result) -> Result:
    """The same fault for the other gates, which know neither input nor reference: they would go on and measure."""
    fault = result.fault
    if fault.kind not in ("error", "reference"):
        return result
    if fault.kind == "error" and "input." not in result.error:
        return Result(fault, result.healthy, result.healthy)  # a kernel that this text does not reach
    unaware = {"other_input": mock.Mock(return_value=""), "compare_reference": mock.Mock(return_value="")}
    with mock.patch.multiple(Bench, **unaware):
        return gate.run(fault)


def row_of(gate: SmallGate, fault: AnyFault) -> dict[str, str | bool]:
    """A fault, what became of it, and who saw it."""
    result = gate.run(fault)
    others = seen_by_others(gate, result)
    return {
        "name": fault.name,
        "model": fault.model.rpartition(":")[2],
        "recipe": fault.recipe,
        "label": fault.label,
        "verdict": result.verdict,
        "cause": result.cause,
        "problems": "; ".join(result.problems()),
        "caught": result.is_caught,
        "right place": result.is_placed,
        "right cause": result.is_caught and result.grade == "right",
        "cause not known": result.is_caught and result.grade == "not known",
        "wrong cause": result.is_caught and result.grade == "wrong",
        "MSE by layer 10 %": fails_mse(others, 0.1),
        "accuracy 5 %": fails_accuracy(others, 0.05),
        "accuracy 8 %": fails_accuracy(others, 0.08),
    }


Rows = dict[str, list[dict[str, str | bool]]]


def run() -> Rows:
    """All faults, by group."""
    torch.set_num_threads(1)
    rows: Rows = {}
    with user_faults.registered(), tempfile.TemporaryDirectory() as folder:
        gate = SmallGate(Path(folder), {model: settings_of(model, recipes) for model, recipes in RECIPES.items()})
        for model, recipes in RECIPES.items():
            gate.make_baselines(model, recipes)
        for group, faults in GROUPS.items():
            for fault in faults:
                row = row_of(gate, fault)
                rows.setdefault(group, []).append(row)
                print(f"{group}: {fault.name}: {row['verdict']}; {row['cause']} {row['problems']}", flush=True)
    return rows


def counts(rows: Sequence[dict[str, str | bool]]) -> list[int]:
    """The number of faults, and of those in every column."""
    return [len(rows), *(sum(bool(row[column]) for row in rows) for column in COLUMNS)]


def summary(rows: Rows) -> str:
    """The table by group."""
    every = [row for group in rows.values() for row in group]
    lines = [f"| faults in | number | {' | '.join(COLUMNS)} |", f"|---|{'---|' * (len(COLUMNS) + 1)}"]
    lines += [f"| {group} | {' | '.join(map(str, counts(some)))} |" for group, some in rows.items()]
    return "\n".join([*lines, f"| **all** | {' | '.join(f'**{count}**' for count in counts(every))} |"])


def sentence(rows: Rows) -> str:
    """The line of the README."""
    number, *found = counts([row for group in rows.values() for row in group])
    seen = dict(zip(COLUMNS, found, strict=True))
    return (
        f"Of {number} faults that were put into the code: probe {seen['caught']}, a gate on the MSE of each layer "
        f"{seen['MSE by layer 10 %']}, an accuracy gate at 5 % {seen['accuracy 5 %']}, at 8 % {seen['accuracy 8 %']} "
        "([which](docs/faults.md))."
    )


def listing(rows: Rows) -> str:
    """Every fault, with what the gate says of it."""
    lines = []
    for group, some in rows.items():
        lines += [f"## {group[0].upper()}{group[1:]}", ""]
        lines += ["| fault | recipe | case | verdict | cause, as told | MSE | 5 % | 8 % |", f"|{'---|' * 8}"]
        for row in some:
            others = [("seen" if row[column] else "-") for column in COLUMNS[-3:]]
            recipe = row["recipe"] if row["model"] == "tiny-mamba" else f"{row['recipe']}, {row['model']}"
            cells = [row["name"], recipe, row["label"], row["verdict"], row["cause"], *others]
            lines.append("| " + " | ".join(re.sub(r"([|<>*_])", r"\\\1", str(cell)) for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines).rstrip()


def put(file: Path, name: str, text: str) -> None:
    """Replace what is between the markers of a name in a file."""
    first, last = f"<!-- {name}: written by benchmarks/kill_table.py -->", f"<!-- end of {name} -->"
    before, found, rest = file.read_text(encoding="utf-8").partition(first)
    _, end, after = rest.partition(last)
    if not found or not end:
        raise ValueError(f"{file} has no markers of {name}: expected {first} and {last}.")
    file.write_text(f"{before}{first}\n\n{text}\n\n{last}{after}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/gate.md, docs/faults.md and README.md")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    rows = run()
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    if options.write:
        put(ROOT / "docs" / "gate.md", "kill table", summary(rows))
        put(ROOT / "docs" / "faults.md", "faults", listing(rows))
        put(ROOT / "README.md", "kill line", sentence(rows))
    print(summary(rows), sentence(rows), sep="\n\n")
    wrong = [row for group in rows.values() for row in group if row["problems"]]
    for row in wrong:
        print(f"{row['name']}: {row['problems']}")
    assert sum(map(len, rows.values())) == len(FAULTS)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
