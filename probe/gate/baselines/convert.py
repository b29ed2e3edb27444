"""Convert baselines of an older probe to one file for a mode: python -m probe.gate.baselines.convert [FOLDER]

Version 1 had `<mode>.json` with figures and digests, `<mode>.safetensors` with golden values, and one environment.json
for a model. Nothing is measured and nothing is rounded: every figure, spread, reason, setting, golden value, anchor and
fact of the environment is compared with the old files before these are removed. A conversion that was interrupted is
completed by running it again.
"""

import base64
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load

from probe.files import atomic
from probe.files.defects import reading
from probe.gate.baselines.format import VALUES, BaselineError, ModeBaselines, digest, json_lines
from probe.gate.baselines.store import OLD_ENVIRONMENT
from probe.running.environment import ANCHORS

Rows = dict[str, np.ndarray[Any, Any]]
VERSION = 2  # what it makes; an update brings it to the present one


def convert(root: Path) -> Iterator[str]:
    """Convert every model under `root`, and say what was compared of each mode."""
    for environment_file in sorted(root.glob(f"*/{OLD_ENVIRONMENT}")):
        with atomic.locked(environment_file.parent):
            yield from _convert_model(environment_file)


def _convert_model(environment_file: Path) -> Iterator[str]:
    folder = environment_file.parent
    environment = _read_json(environment_file)["environment"]
    for device in dict.fromkeys(file.parent for file in sorted(folder.glob("*/*.json"))):
        atomic.remove_unfinished(device)  # of a conversion that was killed
    for file in sorted(folder.glob("*/*.json")):
        if _read_json(file).get("version") == 1:
            yield _convert_mode(file, environment)
        for left in (file.with_suffix(".safetensors"), *file.parent.glob(f"{file.stem}.*.partial")):
            left.unlink(missing_ok=True)
    environment_file.unlink()
    atomic.sync(folder)
    yield f"{folder.name}: {len(environment)} facts of the environment; removed {environment_file.name}"


def _convert_mode(file: Path, environment: dict[str, str]) -> str:
    """Replace a mode by what holds both of its old files, once that is shown to say the same."""
    old, rows = _read_json(file), _read_values(file)
    new = {**old, "environment": environment, "version": VERSION}
    new["cases"] = {
        format: {layer: _with_values(f"{format}/{layer}", groups, rows) for layer, groups in layers.items()}
        for format, layers in old["cases"].items()
    }
    anchors = environment.get(ANCHORS)
    if anchors and anchors != f"anchors-{digest((file.parents[1] / anchors).read_bytes())}.safetensors":
        raise BaselineError(f"{file.parents[1] / anchors} does not hold what its name says. Restore it first.")
    data = json_lines(new)
    with reading(file, BaselineError, remedy="Restore it first, then convert."):
        ModeBaselines.from_json(data)
    figures = _compare(file, json.loads(data), old, rows, environment)
    atomic.write(file, data)
    values = sum(row.size for row in rows.values())
    return f"{file}: {figures} figures, {values} golden values of {len(rows)} cases: unchanged"


def _with_values(key: str, groups: dict[str, Any], rows: Rows) -> dict[str, Any]:
    if VALUES not in groups:
        return groups
    return {**groups, VALUES: f"{groups[VALUES]}:{base64.b64encode(rows[key].tobytes()).decode()}"}


def _compare(file: Path, new: dict[str, Any], old: dict[str, Any], rows: Rows, environment: dict[str, str]) -> int:
    """How many figures `new` has; a BaselineError unless it says in everything what the old files say."""
    figures, compared = 0, set()
    for format, layers in new["cases"].items():
        for layer, groups in layers.items():
            key, before = f"{format}/{layer}", dict(old["cases"][format][layer])
            after = dict(groups)
            if VALUES in after:
                name, text = after.pop(VALUES).split(":")
                data = base64.b64decode(text, validate=True)
                if not name == before.pop(VALUES) == digest(data) or data != rows[key].tobytes():
                    raise BaselineError(f"{file}: the golden values of {key} are not those of the old file.")
                compared.add(key)
            if json.dumps(after) != json.dumps(before):
                raise BaselineError(f"{file}: the figures of {key} are not those of the old file.")
            figures += sum(len(group) for name, group in after.items() if name != "settings")
    shapes = [{name: list(layers) for name, layers in one["cases"].items()} for one in (old, new)]
    names = [[one[key] for key in ("device", "mode", "model")] for one in (old, new)]
    if shapes[0] != shapes[1] or names[0] != names[1] or compared != set(rows) or new["environment"] != environment:
        raise BaselineError(f"{file}: its cases, names or environment are not those of the old files.")
    return figures


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as problem:
        raise BaselineError(f"{file} cannot be read ({problem}). Restore it first, then convert.") from None
    return found


def _read_values(file: Path) -> Rows:
    """The golden values of a mode; a killed write of version 1 may have left them beside their place."""
    wanted = {
        f"{format}/{layer}": groups[VALUES]
        for format, layers in _read_json(file)["cases"].items()
        for layer, groups in layers.items()
        if VALUES in groups
    }
    pending = file.with_suffix(f".{digest(file.read_bytes())}.partial")
    for candidate in (file.with_suffix(".safetensors"), pending):
        try:
            rows: Rows = load(candidate.read_bytes()) if wanted else {}
        except (OSError, SafetensorError, ValueError):
            continue
        if {key: digest(row.tobytes()) for key, row in rows.items()} == wanted:
            return rows
    raise BaselineError(f"{file}: its golden values are missing or are others. Restore both files first, then convert.")


def main(arguments: list[str]) -> int:
    """Convert a folder of baselines, `baselines` unless another is named."""
    root = Path(arguments[0] if arguments else "baselines")
    try:
        lines = list(convert(root))
    except (BaselineError, OSError) as problem:
        print(f"probe: {problem}", file=sys.stderr)
        return 2
    print("\n".join(lines or [f"{root}: nothing to convert, no model has an {OLD_ENVIRONMENT}."]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
