"""The matrix of a model: which recipes, layers and paths have a case, on which text, and what is stored of them.

Nothing is measured here.
"""

from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path

from probe.data.calls import Call, input_fingerprint
from probe.data.samples import TextSamples, bytes_per_target
from probe.formats import FORMATS
from probe.gate.baselines.format import Entry, ModeBaselines
from probe.gate.baselines.store import Store
from probe.gate.cases import Case
from probe.gate.configuration import Settings
from probe.models.layers import select
from probe.models.loading import Loaded, load_model
from probe.models.mamba_blocks import is_all_mamba
from probe.models.offload import brought_in, is_offloaded
from probe.models.outputs import OutputKind, output_kind, target_tokens
from probe.models.outside import outside_modules
from probe.models.positions import position_limit
from probe.running.declarations import read_declarations
from probe.running.environment import FORMAT, INCLUDE, NOT_RUN, differences, is_recorded
from probe.running.inputs import Inputs, calibrating, input_batches
from probe.running.modes import GIVEN, declare_modes, expand_modes, find_mode, given_modes
from probe.running.paths import Path as PathThrough, paths_of, support
from probe.running.recipes import Recipe, check_recipes, checked_include, recipe_of, recipes_of
from probe.running.reference import running_once
from probe.words import PATHS

#: The modes of a matrix that names none.
MAMBA_MODES = ("all", "fp16", "bf16")
OTHER_MODES = ("linear_w", "linear_wa")
#: What is said of a model that a factory offloads.
BROUGHT_IN = "offloaded weights were brought in: recipes change weights in memory, so that every copy is whole there"


class Matrix:
    """A model, its text and its baselines: the cases that a run must have. Relative paths start at `root`."""

    def __init__(self, settings: Settings, *, root: Path | None = None) -> None:
        self.settings = settings
        self._root = root or Path()
        self.store = Store(self._root / settings.baselines)
        self._stored: dict[str, list[ModeBaselines]] = {}

    @property
    def loaded(self) -> Loaded:
        """The float model, or the float original of one that is quantized; benches of one model share it."""
        ours = self.settings
        return _load(ours.reference or ours.model, ours.allow_download, ours.trust_remote_code)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The layers of the matrix, in model order."""
        return tuple(select(self.loaded.model, self.settings.layers, model_name=self.settings.model))

    @cached_property
    def recipes(self) -> tuple[Recipe, ...]:
        """The recipes of the matrix."""
        declared = self._declared_modes()
        fitting = MAMBA_MODES if is_all_mamba(self.loaded.model) else OTHER_MODES
        ours = self.settings
        modes = ours.modes or (*((GIVEN,) if ours.reference else fitting), *declared)
        names = given_modes(modes, ours.model, ours.reference, narrowed=True)
        named = [mode for mode in expand_modes(names) if not mode.is_reference]
        if not named:
            raise ValueError(f"modes are {', '.join(modes)}: nothing is left beside the reference. Name another mode.")
        formats = self.settings.formats
        checked_include(self.settings.include, named)
        plain = [one for mode in named for one in recipes_of([mode.name], None if mode.formats else formats)]
        recipes = [self.recipe(one.mode, one.format) for one in plain]
        check_recipes(self.loaded, recipes)
        return tuple(recipes)

    def recipe(self, mode: str, format: str | None) -> Recipe:
        """The recipe of a mode and a format, with what the settings include."""
        return recipe_of(mode, format, self.settings.include)

    def _declared_modes(self) -> list[str]:
        """Add the modes that the settings declare to the table; their names."""
        tables = {"pyproject.toml": self.settings.declared}
        tables |= {name: read_declarations(self._root / name) for name in self.settings.modes_from}
        for where, declared in tables.items():
            declare_modes(declared, where=where)
        return list(dict.fromkeys(name for declared in tables.values() for name in declared))

    @cached_property
    def outside(self) -> dict[str, str]:
        """The modules outside the layers by label; a selected layer of the same label takes its place."""
        found = running_once(self.loaded.model, outside_modules(self.loaded.model), self.inputs.batches[0])
        apart = (*self.labels, *self.settings.without)
        return {label: name for label, name in found.items() if label not in apart}

    @cached_property
    def cases(self) -> tuple[Case, ...]:
        """The whole matrix, recipe by recipe."""
        return tuple(
            Case(find_mode(recipe.mode).id, label, device, recipe.format or "")
            for device in self.settings.devices
            for recipe in self.recipes
            for label in self.labels_on(device)
        )

    def labels_on(self, device: str) -> tuple[str, ...]:
        """The labels of the cases that every recipe has on a device; a recording has only layers and the output."""
        if is_recorded(device):
            return (*self.labels, self.output.label)
        return (*self.labels, *self.outside, *self.paths, self.output.label)

    @cached_property
    def output(self) -> OutputKind:
        """What the output of the model means."""
        return output_kind(self.loaded.model, self.inputs.batches[0])

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """The paths that the model can run on this text, and those that it no longer can, but that are stored."""
        apart = (*self.labels, *self.settings.without)
        there = {path for path, reason in self.path_support.items() if not reason or path in self._stored_labels()}
        return tuple(path for path in self.path_support if path in there and path not in apart)

    @cached_property
    def path_support(self) -> dict[str, str]:
        """By path, why there is no case of it; empty where there is one."""
        ours = self.settings
        if reason := _without_paths(self.inputs, self.output):
            return dict.fromkeys(PATHS, reason)
        found = support(self.loaded.model, ours.samples, ours.seqlen, ours.layers)
        return {path: "a layer has this name" if path in self.labels else reason for path, reason in found.items()}

    @cached_property
    def paths_not_run(self) -> str:
        """`paths not run: decode (Network.forward takes no cache)`; empty where every path has its case.

        And the cases that the settings leave out, and that the weights of an offloaded model were brought in.
        """
        without, reasons = self.settings.without, dict[str, list[str]]()
        for path, why in self._not_run.items():
            reasons.setdefault(why, []).append(path)
        left = [f"{', '.join(paths)} ({why})" for why, paths in reasons.items()]
        said = list(self.inputs.notes)
        said += [BROUGHT_IN] if BROUGHT_IN in self.loaded.notes else []
        said += [f"paths not run: {', '.join(left)}"] if left else []
        return "; ".join(said + ([f"left out by the settings: {', '.join(without)}"] if without else []))

    @property
    def _not_run(self) -> dict[str, str]:
        """The paths that have no case and were not left out by the settings, with the reasons."""
        apart = (*self.paths, *self.settings.without)
        return {path: reason for path, reason in self.path_support.items() if reason and path not in apart}

    def _stored_labels(self) -> set[str]:
        """The labels of which there is a stored case; none of damaged baselines, which fail every case when judged."""
        try:
            modes = [mode for device in self.settings.devices for mode in self.stored(device)]
        except ValueError:
            return set()
        return {case.layer for mode in modes for case in mode.entries}

    def _paths(self, recipe: Recipe) -> list[PathThrough]:
        """The paths as a recipe runs them: batch_1 has a whole row where its tokens share a scale."""
        ours, limit = self.settings, position_limit(self.loaded.model)
        shares = find_mode(recipe.mode).conv_input == "dynamic"
        found = paths_of(ours.samples, ours.seqlen, limit=limit, whole_rows=shares)
        return [found[path] for path in self.paths if not self.path_support[path]]

    def check(self) -> None:
        """Refuse what cannot be measured: a layer, mode or text that is not there, or too little text."""
        _ = self.cases, self.input_facts

    @property
    def _evaluated(self) -> TextSamples:
        ours = self.settings
        return TextSamples(ours.inputs or ours.data, ours.samples, ours.seqlen, ours.batch_size)

    @property
    def calibrated(self) -> TextSamples:
        """What scales are taken from."""
        ours = self.settings.calibration
        return calibrating(self._evaluated, TextSamples(ours.inputs or ours.data, ours.samples, ours.seqlen))

    @cached_property
    def inputs(self) -> Inputs:
        """What the model is given."""
        return input_batches(self.loaded, self._evaluated)

    @cached_property
    def bytes_per_token(self) -> float | None:
        """The mean length of a predicted token in bytes of text; None where there is none, or no text of it."""
        tokens = [target_tokens(batch) for batch in self.inputs.batches] if self.output.has_next_token else []
        try:
            return bytes_per_target([one for one in tokens if one is not None], self.loaded.tokenizer)
        except (
            ValueError,
            OverflowError,
            LookupError,
            TypeError,
        ):  # ids that are no text, such as of a user's function
            return None

    @cached_property
    def input_facts(self) -> dict[str, str]:
        """The input that figures depend on: baselines that were made with another input cannot be compared."""
        sampled = input_batches(self.loaded, self.calibrated)
        return {
            "input.model": self.loaded.fingerprint,
            "input.tokens": f"{input_fingerprint(self.inputs.batches)} ({self.inputs.size})",
            "input.calibration": f"{input_fingerprint(sampled.batches)} ({sampled.size})",
            "input.percentile": f"{self.settings.calibration.percentile:g}",
            **({INCLUDE: ", ".join(self.settings.include)} if self.settings.include else {}),
        }

    @property
    def facts(self) -> dict[str, str]:
        """What is stored with baselines: the input, the rows of the formats, and why paths have no case."""
        names = sorted({recipe.format for recipe in self.recipes if recipe.format})
        rows = {f"{FORMAT}{name}": FORMATS[name].in_words for name in names}
        return {**self.input_facts, **rows, **{f"{NOT_RUN}{path}": reason for path, reason in self._not_run.items()}}

    def stored(self, device: str) -> list[ModeBaselines]:
        """The baselines of the model on a device, read once; a defect in them is a BaselineError."""
        if device not in self._stored:
            self._stored[device] = self.store.modes(self.settings.model, device)
        return self._stored[device]

    def entry(self, case: Case) -> Entry | None:
        """The baseline of a case."""
        return next((mode.entries[case] for mode in self.stored(case.device) if case in mode.entries), None)

    def environment(self, case: Case) -> dict[str, str]:
        """The environment in which the baselines of a case's mode were made; empty where there are none."""
        return next((mode.environment for mode in self.stored(case.device) if mode.mode == case.mode), {})

    def other_input(self, case: Case) -> str:
        """How the input of the baselines of a case's mode differs from this one; empty if it does not."""
        stored, now = self.environment(case), dict(self.input_facts)
        if find_mode(case.mode).kind == "linear":  # no other mode depends on it
            now.setdefault(INCLUDE, "none")
        else:
            now.pop(INCLUDE, None)
        then = {name: stored.get(name, "none") for name in now}
        return "; ".join(differences(then, now)) if stored else ""


def _without_paths(inputs: Inputs, output: OutputKind) -> str:
    """Why no path is run on these inputs; empty if they are."""
    if any(isinstance(batch, Call) for batch in inputs.batches):
        return "the model reads more than token ids, or none"
    return "" if output.has_next_token else "its output is not of the next token, so part of a text is another input"


@lru_cache(maxsize=4)
def _load(model: str, allow_download: bool, trust_remote_code: bool) -> Loaded:
    found = load_model(model, allow_download=allow_download, trust_remote_code=trust_remote_code)
    if not is_offloaded(found.model):
        return found
    return replace(found, model=brought_in(found.model), notes=(*found.notes, BROUGHT_IN))
