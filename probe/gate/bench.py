"""A bench: one model with what all its recipes share: the text, the reference, the calibration and the baselines.

One process of a run computes a reference or a calibration; the others read it from memory-mapped files.
"""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import TypeVar

from safetensors import SafetensorError
from torch import Tensor

from probe.data.samples import TextSamples, bytes_per_target, token_fingerprint
from probe.files.atomic import locked
from probe.formats import FORMATS
from probe.gate.baselines.format import BaselineError, Entry, ModeBaselines
from probe.gate.baselines.store import Store
from probe.gate.cases import Case
from probe.gate.configuration import Settings
from probe.gate.observations import Observation, observe, observe_recording, uncovered_path
from probe.models.layers import select
from probe.models.loading import Loaded, configuration_of, load_model
from probe.models.mamba import is_all_mamba
from probe.models.offload import brought_in, is_offloaded
from probe.models.outside import outside_modules
from probe.models.positions import position_limit
from probe.recordings import read_recording
from probe.running.calibration import Calibration, calibrate_on, load_calibration
from probe.running.declarations import read_declarations
from probe.running.environment import ANCHORS, FORMAT, NOT_RUN, differences, is_recorded, recorded_folder
from probe.running.golden_reference import MovedTensor, moved_tensors, reference_rows, with_spread, without_rows
from probe.running.kept_float import float_layers
from probe.running.modes import declare_modes, expand_modes, find_mode
from probe.running.noise import Anchors, Variation, anchored, under
from probe.running.paths import Path as PathThrough, paths_of, support
from probe.running.recipes import Recipe, check_recipes, recipes_of
from probe.running.reference import UNFED, Reference, load_reference, run_reference, running_once, save_reference
from probe.words import LOGITS

T = TypeVar("T")

#: The modes of a matrix that names none.
MAMBA_MODES = ("all", "fp16", "bf16")
OTHER_MODES = ("linear_w", "linear_wa")
#: What is said of a model that a factory offloads.
BROUGHT_IN = "offloaded weights were brought in: recipes change weights in memory, so that every copy is whole there"
#: Errors of a full disk: then every process computes its own reference.
NO_ROOM = (OSError, SafetensorError)


class Bench:
    """A model, its text, its baselines, and the runs that were made so far.

    Relative paths start at `root`. The processes of a run share `folder`; None for a single process.
    """

    def __init__(self, settings: Settings, *, root: Path | None = None, folder: Path | None = None) -> None:
        self.settings = settings
        self.anchors: Anchors | None = None
        self._root = root or Path()
        self.store = Store(self._root / settings.baselines)
        self._folder = folder
        self._stored: dict[str, list[ModeBaselines]] = {}
        self.moved = ""  # where the float run was found to differ from the golden reference
        self.moved_tensors: list[MovedTensor] = []
        self._references: dict[Variation | None, Reference] = {}
        self._rows: dict[Variation | None, dict[str, Tensor]] = {}
        self._recording = cache(lambda device: read_recording(recorded_folder(device, self._root)))
        self._calibrations: dict[Variation | None, Calibration] = {}

    @property
    def loaded(self) -> Loaded:
        """The float model; benches of one model share it."""
        ours = self.settings
        return _load(ours.model, ours.allow_download, ours.trust_remote_code)

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """The layers of the matrix, in model order."""
        return tuple(select(self.loaded.model, self.settings.layers, model_name=self.settings.model))

    @cached_property
    def recipes(self) -> tuple[Recipe, ...]:
        """The recipes of the matrix."""
        declared = self._declared_modes()
        fitting = MAMBA_MODES if is_all_mamba(self.loaded.model) else OTHER_MODES
        modes = self.settings.modes or (*fitting, *declared)
        named = [mode for mode in expand_modes(list(modes)) if not mode.is_reference]
        if not named:
            raise ValueError(f"modes are {', '.join(modes)}: nothing is left beside the reference. Name another mode.")
        formats = self.settings.formats
        recipes = [one for mode in named for one in recipes_of([mode.name], None if mode.formats else formats)]
        check_recipes(self.loaded, recipes)
        return tuple(recipes)

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
        found = running_once(self.loaded.model, outside_modules(self.loaded.model), self.batches()[0])
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
        """The labels of the cases that every recipe has on a device; a recording has only layers and logits."""
        if is_recorded(device):
            return (*self.labels, LOGITS)
        return (*self.labels, *self.outside, *self.paths, LOGITS)

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
        found = support(self.loaded.model, ours.samples, ours.seqlen, ours.layers)
        return {path: "a layer has this name" if path in self.labels else reason for path, reason in found.items()}

    @cached_property
    def paths_not_run(self) -> str:
        """`paths not run: decode (Network.forward takes no cache)`; empty where every path has its case.

        And the cases that the settings leave out, and that the weights of an offloaded model were brought in.
        """
        without, left = self.settings.without, [f"{path} ({why})" for path, why in self._not_run.items()]
        said = [BROUGHT_IN] if BROUGHT_IN in self.loaded.notes else []
        said += [f"paths not run: {', '.join(left)}"] if left else []
        return "; ".join(said + ([f"left out by the settings: {', '.join(without)}"] if without else []))

    @property
    def _not_run(self) -> dict[str, str]:
        """The paths that have no case and were not left out by the settings, with the reasons."""
        apart = (*self.paths, *self.settings.without)
        return {path: reason for path, reason in self.path_support.items() if reason and path not in apart}

    def _stored_labels(self) -> set[str]:
        """The labels of which there is a stored case."""
        modes = [mode for device in self.settings.devices for mode in self.stored(device)]
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

    def batches(self, batch_size: int | None = None) -> list[Tensor]:
        """The text as tokens."""
        ours = self.settings
        samples = TextSamples(ours.data, ours.samples, ours.seqlen, batch_size or ours.batch_size)
        return samples.batches(self.loaded.tokenizer)

    @cached_property
    def bytes_per_token(self) -> float:
        """The mean length of a predicted token in bytes of text."""
        return bytes_per_target(self.batches(), self.loaded.tokenizer)

    @cached_property
    def input_facts(self) -> dict[str, str]:
        """The input that figures depend on: baselines that were made with another input cannot be compared."""
        ours = self.settings.calibration
        sampled = TextSamples(ours.data, ours.samples, ours.seqlen).batches(self.loaded.tokenizer)
        return {
            "input.model": self.loaded.fingerprint,
            "input.tokens": f"{token_fingerprint(self.batches())} ({self.settings.samples} x {self.settings.seqlen})",
            "input.calibration": f"{token_fingerprint(sampled)} ({ours.samples} x {ours.seqlen})",
            "input.percentile": f"{ours.percentile:g}",
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
        stored = self.environment(case)
        then = {name: stored.get(name, "none") for name in self.input_facts}
        return "; ".join(differences(then, self.input_facts)) if stored else ""

    def use_stored_anchors(self, *, all_devices: bool) -> None:
        """Use the anchors of the baselines that have this input; with `all_devices`, also of devices not in the matrix.

        All modes name the same anchors, unless an update was killed half way or measured other layers.
        """
        if self.anchors is not None:
            return
        devices = self.store.devices(self.settings.model) if all_devices else []
        modes = [mode for device in dict.fromkeys([*self.settings.devices, *devices]) for mode in self.stored(device)]
        fitting = [mode.environment for mode in modes if self.input_facts.items() <= mode.environment.items()]
        names = dict.fromkeys(facts.get(ANCHORS, "") for facts in fitting)
        if names:
            self.anchors = Anchors.united(self._read_anchors(name) for name in sorted(names))

    def _read_anchors(self, name: str) -> Anchors:
        data = self.store.anchors(self.settings.model, name)
        try:
            return Anchors.from_bytes(data)
        except ValueError as problem:
            raise BaselineError(f"{self.store.root}: {name} {problem}. Restore it with git checkout.") from None

    def reference(self, variation: Variation | None = None) -> Reference:
        """The float run; with a variation, under that harmless change."""
        if variation not in self._references:
            name = f"{self._key('reference', variation)}.safetensors"
            make = partial(self._run_reference, variation)
            self._references[variation] = shared(self._folder, name, make, save_reference, load_reference)
        return self._references[variation]

    def calibration(self, variation: Variation | None = None) -> Calibration:
        """The scales; with anchors, a scale that differs from the golden one only by noise is the golden one."""
        if variation not in self._calibrations:
            model = self.loaded.fingerprint
            self._calibrations[variation] = shared(
                self._folder,
                f"{self._key('calibration', variation)}.json",
                partial(self._calibrate, variation),
                lambda made, file: made.save(file.with_suffix("")),
                lambda file: load_calibration(file.with_suffix(""), model=model),
            )
        found = self._calibrations[variation]
        return found if self.anchors is None else anchored(found, self.anchors.amax)

    def make_anchors(self, variation: Variation, changes: Sequence[Variation] = ()) -> None:
        """Add anchors of all layers that have none, from the run under `variation`; `changes` are harmless."""
        there = self.anchors or Anchors()
        labels, reference = {*self.labels, *self.outside} - {UNFED}, self.reference(variation)
        if not labels <= set(there.places):
            places, values = ({label: pair[side] for label, pair in reference.ties.items()} for side in (0, 1))
            there = Anchors.united([there, Anchors(places, values, self.calibration(variation).amax)])
        self.anchors = there
        rows = self.reference_rows(variation)
        if not set(rows) <= set(there.rows):
            there = Anchors.united([there, Anchors(rows=with_spread(rows, [*map(self.reference_rows, changes)]))])
        self.anchors = replace(there, config=configuration_of(self.loaded.model))

    def reference_rows(self, variation: Variation | None) -> dict[str, Tensor]:
        """What stands for the float run in the golden reference."""
        if variation not in self._rows:
            self._rows[variation] = reference_rows(self.reference(variation))
        return self._rows[variation]

    def compare_reference(self, variation: Variation | None = None) -> str:
        """Where the float run differs from the golden reference, as `from layer_1 on: ...`; empty if it does not.

        A stored layer of which the golden reference has nothing differs too.
        """
        golden = self.anchors.rows if self.anchors else {}
        stored = self._stored_labels()
        known = [label for label in (*self.labels, *self.outside, LOGITS) if label in stored]
        lacking = without_rows(known, golden) if self.anchors else []
        self.moved_tensors = moved_tensors(self.reference_rows(variation), golden)
        if lacking:
            self.moved = f"from {lacking[0]} on: the baselines have no golden reference of it"
        elif self.moved_tensors:
            self.moved = str(self.moved_tensors[0])
        return self.moved

    def discard_anchors(self) -> None:
        """Forget the stored anchors and what was run with them: the reference moved, and an update accepts it."""
        self.anchors = None
        for runs in (self._references, self._calibrations, self._rows):
            runs.clear()

    def observe(self, recipe: Recipe, device: str, variation: Variation | None = None) -> dict[str, Observation]:
        """Both measurements of every layer of a recipe, on a device or from a recording."""
        reference = self.reference(variation)
        if is_recorded(device):
            return observe_recording(
                self._recording(device),
                recipe,
                reference,
                model_fingerprint=self.loaded.fingerprint,
                data_fingerprint=token_fingerprint(self.batches()),
                declared=float_layers(self.loaded.model, find_mode(recipe.mode), reference.modules),
                bytes_per_token=self.bytes_per_token,
            )
        calibration = self.calibration(variation) if recipe.needs_calibration else None
        with self._under(variation):
            size, model = self.bytes_per_token, self.loaded.model
            paths = self._paths(recipe)
            seen = observe(model, recipe, reference, calibration, device=device, bytes_per_token=size, paths=paths)
        return seen | {path: uncovered_path(path, self.path_support[path]) for path in self.paths if path not in seen}

    def _under(self, variation: Variation | None) -> AbstractContextManager[None]:
        return nullcontext() if variation is None else under(variation, self.loaded.model)

    def _run_reference(self, variation: Variation | None) -> Reference:
        with self._under(variation):
            batches = self.batches(variation.batch_size if variation else None)
            jitter = variation.jitter if variation else 0
            wanted = self.settings.layers
            return run_reference(
                self.loaded.model, batches, wanted, outside=self.outside, anchors=self.anchors, jitter=jitter
            )

    def _calibrate(self, variation: Variation | None) -> Calibration:
        ours = self.settings.calibration
        with self._under(variation):
            return calibrate_on(self.loaded, ours.data, ours.samples, ours.seqlen, percentile=ours.percentile)

    def _key(self, kind: str, variation: Variation | None) -> str:
        name = "check" if variation is None else variation.name.replace(" ", "_").replace(",", "")
        ours = self.settings
        data = (ours.data, ours.samples, ours.seqlen, ours.batch_size, ours.calibration)
        digest = hashlib.sha256(
            repr((ours.model, ours.baselines, ours.layers, ours.without, data)).encode()
        ).hexdigest()[:16]
        return f"{kind}-{self.loaded.fingerprint}-{digest}-{name}{'-anew' if self.moved else ''}"


@lru_cache(maxsize=4)
def _load(model: str, allow_download: bool, trust_remote_code: bool) -> Loaded:
    found = load_model(model, allow_download=allow_download, trust_remote_code=trust_remote_code)
    if not is_offloaded(found.model):
        return found
    return replace(found, model=brought_in(found.model), notes=(*found.notes, BROUGHT_IN))


def shared(
    folder: Path | None, name: str, make: Callable[[], T], save: Callable[[T, Path], None], load: Callable[[Path], T]
) -> T:
    """The value that another process of this run saved as `folder / name`; else a new one, saved for the others."""
    if folder is None:
        return make()
    file, made = folder / name, None
    try:
        with locked(folder / f"{name}.lock"):
            if not file.exists():
                made = make()
                save(made, file)
    except NO_ROOM:
        return made or make()
    return load(file)
