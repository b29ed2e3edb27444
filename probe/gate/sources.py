"""What a failure may come from beside the code of its layer: everything a run reads, against what is stored of it."""

import ast
from collections.abc import Mapping

from probe.formats import FORMATS
from probe.gate.bench import Bench
from probe.gate.cases import Case
from probe.models.loading import configuration_of
from probe.running.environment import FORMAT, INCLUDE
from probe.running.noise import SAME_SCALE
from probe.running.recipes import Recipe

#: The facts of the input, in words. Every sentence begins with its subject.
INPUTS = {
    "input.model": "weights of the float model",
    "input.tokens": "tokens of the text",
    "input.calibration": "calibration text",
    "input.percentile": "calibration percentile",
    INCLUDE: "include",
}


def differing(bench: Bench, recipe: Recipe, case: Case) -> list[str]:
    """A sentence for each source of the case that is not the stored one; empty where all agree or nothing is stored.

    reference, weights, tokens, configuration, the format's row, and the scales of the calibration; the last only where
    the reference did not move, which moves them too.
    """
    stored = bench.environment(case)
    if not stored:
        return []
    found = [f"reference moved, {bench.moved}"] if bench.moved else []
    for name, words in INPUTS.items():
        found += _changed(words, {"": stored.get(name)}, {"": bench.input_facts.get(name)})
    if bench.anchors is not None:
        then, now = _flat(bench.anchors.config), _flat(configuration_of(bench.loaded.model))
        found += _changed("configuration", then, now)
    if recipe.format and (row := stored.get(f"{FORMAT}{recipe.format}")):
        found += _changed(f"format {recipe.format}", _parts(row), _parts(FORMATS[recipe.format].in_words))
    if bench.anchors is not None and recipe.needs_calibration and not bench.moved:
        found += _changed_scales(bench.calibration().amax, bench.anchors.amax)
    return found


def _changed(subject: str, then: Mapping[str, str | None], now: Mapping[str, str | None]) -> list[str]:
    """format int8 changed: max 127 -> 126."""
    keys = [key for key in dict.fromkeys([*then, *now]) if then.get(key) != now.get(key)]
    listed = [f"{key} {then.get(key) or 'default'} -> {now.get(key) or 'default'}".lstrip() for key in keys]
    return [f"{subject} changed: {'; '.join(listed)}"] if keys else []


def _flat(config: Mapping[str, str]) -> dict[str, str]:
    """The configuration, with a key for each entry of a table in it: rope_parameters.rope_theta."""
    found: dict[str, str] = {}
    for key, text in config.items():
        try:
            table = ast.literal_eval(text) if text.startswith("{") else None
        except (SyntaxError, ValueError):  # not plain values
            table = None
        found |= {key: text} if not isinstance(table, dict) else {f"{key}.{name}": str(x) for name, x in table.items()}
    return found


def _parts(row: str) -> dict[str, str]:
    """The parts of a format's row in words, each by its name."""
    return {name: text for name, _, text in (part.partition(" ") for part in row.split(", "))}


def _changed_scales(found: Mapping[str, float], golden: Mapping[str, float]) -> list[str]:
    """The scales of the calibration that are further from their golden values than noise."""
    every = [site for site in found if site in golden]
    moved = [site for site in every if not abs(found[site] - golden[site]) <= SAME_SCALE * abs(golden[site])]
    if not moved:
        return []
    worst = max(moved, key=lambda site: abs(found[site] / golden[site] - 1) if golden[site] else float("inf"))
    change = f"{golden[worst]:.4g} -> {found[worst]:.4g} at {worst}"
    return [f"calibration changed: {len(moved)} of {len(every)} scales, most {change}"]
