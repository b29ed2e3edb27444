"""docs/activations.md is true: its keys, their defaults, its commands."""

import re
import shlex
from pathlib import Path

import yaml

from probe.activations.settings import Settings, full_key
from probe.commands.analyze import overrides
from probe.data.sources import HUB
from probe.plugin.golden_figures import ACTIVATIONS_FIGURES, ACTIVATIONS_RULES
from probe.settings import keys_of

TEXT = (Path(__file__).parents[2] / "docs" / "activations.md").read_text()


def test_the_table_of_keys_is_complete_and_its_defaults_are_true() -> None:
    rows = dict(re.findall(r"^\| `([a-z_0-9.]+)` \| (.*?) \|", TEXT, re.M))
    keys = dict(keys_of(Settings()))
    assert {name for name in rows if "." in name and not name.endswith(".csv")} >= set(keys)
    for name, value in keys.items():
        if rows[name].startswith("`"):
            given = yaml.safe_load(rows[name].strip("`"))
            assert (tuple(given) if isinstance(given, list) else given) == value, name
        else:
            assert name.endswith(("patterns", "pattern")), "in words"


def test_the_keys_of_its_commands_exist() -> None:
    commands = [line.partition("  #")[0] for line in TEXT.splitlines() if line.startswith("probe analyze")]
    assert len(commands) >= 6
    known = ("--config", "--dry-run", "--compare", "--keys", "--output")
    for command in commands:
        words = shlex.split(command)[2:]
        while words and words[0] in known:
            words = words[{"--config": 2, "--compare": 3, "--output": 2}.get(words[0], 1) :]
        for name, _ in overrides([word for word in words if word not in known]):
            full_key(name)


def test_the_datasets_it_names_are_those_of_the_table() -> None:
    for row in HUB.values():
        assert f"| `{row.name}` | {row.hub_id}" in TEXT


def test_the_figures_of_the_gate() -> None:
    assert f"figures={list(ACTIVATIONS_FIGURES)}".replace("'", '"') in TEXT
    assert all(name in TEXT for name in ACTIVATIONS_RULES)
