"""Generated cases: two recordings each, and the verdict that is right."""

import copy
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from probe.comparisons.devices.diff import DeviceComparison, diff
from probe.data.calls import input_fingerprint as of_data
from probe.models.loading import weight_fingerprint as of_model
from probe.recordings import Recording, read_recording, write_recording
from probe.running.calibration import calibrate
from probe.running.recipes import Recipe, apply
from tests.comparisons.devices import engines
from tests.comparisons.devices.device_faults import FAULTS
from tests.comparisons.devices.engines import Tensors, jittered, run
from tests.comparisons.devices.models import DEPTHS, NAMES, fresh, prompt, shared

Engine = Callable[[str, Tensor], Tensors]
NOISE, FAULT, MISMATCH, IDENTICAL = "dtype noise", "device fault", "mismatched capture", "identical"


@dataclass(frozen=True, eq=False)
class Case:
    """`ids` are those of A and B; None: they were not kept."""

    name: str
    a: Callable[[], Tensors]
    b: Callable[[], Tensors]
    ids: tuple[Tensor | None, Tensor | None]
    kind: str  # of sound devices: identical, if they are
    layer: str | None  # where it began; None where that is not judged
    says: str = ""
    recipe: Recipe = Recipe("fp32")  # noqa: RUF009
    reference: Callable[[], Tensors] | None = None

    @property
    def what(self) -> str:
        """The name without model, layer and seed."""
        return re.sub(rf"^({'|'.join(NAMES)}) |^.* seed \d+: | in layer_\d+| seed \d+", "", self.name)

    def expected(self) -> str:
        if self.kind != NOISE:
            return self.kind
        a, b = self.a(), self.b()
        return IDENTICAL if all(torch.equal(a[name], b[name]) for name in a) else NOISE

    def judged(self, shelf: "Shelf") -> DeviceComparison:
        a, b = shelf.kept(self.a(), self.ids[0], self.recipe), shelf.kept(self.b(), self.ids[1], self.recipe)
        floats = None if self.reference is None else shelf.kept(self.reference(), self.ids[0], Recipe("fp32"))
        return diff(a, b, reference=floats)


class Shelf:
    """Recordings in a folder; the same tensors are written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: dict[tuple[int, bool, str], tuple[Tensors, Recording]] = {}

    def kept(self, tensors: Tensors, ids: Tensor | None, recipe: Recipe) -> Recording:
        key = (id(tensors), ids is None, str(recipe))
        if key not in self.written:
            recording = kept(self.folder / str(len(self.written)), tensors, ids, recipe)
            self.written[key] = (tensors, recording)  # held, so that no other gets its id
        return self.written[key][1]


def kept(folder: Path, tensors: Tensors, ids: Tensor | None, recipe: Recipe = Recipe("fp32")) -> Recording:  # noqa: B008
    """A recording of its own; without ids, a folder of .pt files as scripts leave it."""
    if ids is not None:
        parts = {name: [tensor] for name, tensor in tensors.items()}
        return write_recording(folder, [(recipe, parts)], model="m", batches=[ids], device=folder.name)
    folder.mkdir(parents=True)
    for name, tensor in tensors.items():
        torch.save(tensor, folder / f"{name.replace('.', '_')}.pt")
    return read_recording(folder)


def run_shared(name: str, ids: Tensor) -> Tensors:
    return run(shared(name), ids)


@cache
def plain(name: str, seed: int) -> Tensors:
    return run_shared(name, prompt(seed))


SOUND: dict[str, Engine] = {
    "one by one": engines.one_by_one,
    "without oneDNN": engines.without_onednn,
    "jitter": engines.jitter,
    "float64": engines.in_dtype(torch.float64),
    "bfloat16": engines.in_dtype(torch.bfloat16),
    "float16": engines.in_dtype(torch.float16),
    "bfloat16 kept as float32": engines.in_dtype_kept_as_float32(torch.bfloat16),
    "autocast": engines.autocast,
}


def sound_cases(seeds: list[int]) -> Iterator[Case]:
    for name in NAMES:
        for seed in seeds:
            ids = prompt(seed)
            for engine, make in SOUND.items():
                yield Case(
                    f"{name} {engine} seed {seed}",
                    partial(plain, name, seed),
                    cache(partial(make, name, ids)),
                    (ids, ids),
                    NOISE,
                    None,
                )


def faulty(name: str, fault: str, layer: int, seed: int, *, dtype: torch.dtype | None = None) -> Tensors:
    broken = fresh(name)
    row = FAULTS[fault]
    if dtype is not None:
        broken = broken.to(dtype)
    with torch.no_grad():
        row.plant(broken, layer, seed)
    return run(jittered(broken, seed), prompt(seed))


def sound_beside(name: str, fault: str, layer: int, seed: int) -> Tensors:
    both = FAULTS[fault].on_both
    if both is None:
        return plain(name, seed)
    model = fresh(name)
    both(model, layer, seed)
    return run(model, prompt(seed))


def fault_cases(seeds: list[int]) -> Iterator[Case]:
    """Every fault in every model, in a layer drawn by the seed."""
    for seed in seeds:
        for name in NAMES:
            for fault, row in FAULTS.items():
                layer = random.Random(f"{name} {fault} {seed}").randrange(DEPTHS[name])
                ids = prompt(seed)
                yield Case(
                    f"{name} {fault} in layer_{layer} seed {seed}",
                    partial(sound_beside, name, fault, layer, seed),
                    partial(faulty, name, fault, layer, seed),
                    (ids, ids),
                    FAULT,
                    f"layer_{layer}",
                    row.says,
                )


def narrow_fault_cases(seeds: list[int]) -> Iterator[Case]:
    """Large faults on a device that computes in bfloat16, beside a float32 reference."""
    large = ("permuted channels", "skipped", "transposed", "turned sign", "other weights", "one NaN", "stuck channel")
    for seed in seeds:
        for name in NAMES[1:]:
            for fault in large:
                layer = random.Random(f"narrow {name} {fault} {seed}").randrange(DEPTHS[name])
                ids = prompt(seed)
                yield Case(
                    f"{name} in bfloat16, {fault} in layer_{layer} seed {seed}",
                    partial(plain, name, seed),
                    partial(faulty, name, fault, layer, seed, dtype=torch.bfloat16),
                    (ids, ids),
                    FAULT,
                    f"layer_{layer}",
                )


RECIPES = (
    ("tiny-mamba", "2-1", "fp8_e4m3"),
    ("tiny-mamba", "3", "nvfp4"),
    ("tiny-llama", "linear_wa", "int8"),
)


@cache
def quantized(name: str, mode: str, format: str) -> nn.Module:
    model, ids = shared(name), prompt(20)
    calibration = calibrate(model, [ids], model_fingerprint=of_model(model), data_fingerprint=of_data([ids]))
    return apply(model, Recipe(mode, format), calibration)


@cache
def emulated(name: str, mode: str, format: str, seed: int) -> Tensors:
    return run(quantized(name, mode, format), prompt(seed))


def quantized_cases(seeds: list[int]) -> Iterator[Case]:
    """Emulated recipe and device, with the float model as the reference."""
    large = ("permuted channels", "skipped", "turned sign", "other weights", "one NaN", "swapped samples", "scale")
    for seed in seeds:
        for recipe in RECIPES:
            name, ids = recipe[0], prompt(seed)

            def device(recipe: tuple[str, str, str], seed: int, fault: str = "", layer: int = 0) -> Tensors:
                model = copy.deepcopy(quantized(*recipe))
                with torch.no_grad():
                    if fault:
                        FAULTS[fault].plant(model, layer, seed)
                return run(jittered(model, seed), prompt(seed))

            common: dict[str, Any] = {
                "a": partial(emulated, *recipe, seed),
                "ids": (ids, ids),
                "recipe": Recipe(*recipe[1:]),
                "reference": partial(plain, name, seed),
            }
            title = f"{'-'.join(recipe)} seed {seed}"
            sound = cache(partial(device, recipe, seed))
            yield Case(f"{title}: sound", b=sound, kind=NOISE, layer=None, **common)
            for fault in large:
                layer = random.Random(f"{recipe} {fault} {seed}").randrange(4)
                broken = partial(device, recipe, seed, fault, layer)
                where = f"layer_{layer}"
                yield Case(f"{title}: {fault} in {where}", b=broken, kind=FAULT, layer=where, **common)
            floating = partial(run_shared, name, ids)
            where, words = "layer_0", "the recipe was not applied"
            yield Case(f"{title}: not applied", b=floating, kind=FAULT, layer=where, says=words, **common)


def _shifted(make: Callable[[], Tensors], start: int) -> Tensors:
    """From `start` on, every layer holds what the one before should: `layer_0` the embedding."""
    tensors = make()
    layers = [name for name in tensors if name.startswith("layer_")]
    before = {name: (["embedding.output", *layers])[place] for place, name in enumerate(layers)}
    return {
        name: tensors[before[name]] if name in before and layers.index(name) >= start else tensor
        for name, tensor in tensors.items()
    }


def mismatch_cases(seeds: list[int]) -> Iterator[Case]:
    for seed in seeds:
        for name in NAMES:
            ids, other = prompt(seed), prompt(seed + 50)
            order = torch.tensor([1, 0, 3, 2]) if seed % 2 else torch.tensor([3, 0, 1, 2])
            a = partial(plain, name, seed)
            at = partial(partial, run_shared, name)
            start = seed % 2
            for what, b, kept_ids, layer in (
                ("other prompt", at(other), (ids, other), None),
                ("other prompt, ids unknown", at(other), (None, None), "embedding"),
                ("reordered samples", at(ids[order]), (ids, ids[order]), None),
                ("reordered samples, ids unknown", at(ids[order]), (ids, None), "embedding"),
                ("fewer samples", at(ids[:3]), (ids, ids[:3]), None),
                ("shorter", at(ids[:, :-1]), (ids, ids[:, :-1]), None),
                ("one token", at(_one_other(ids, seed)), (ids, _one_other(ids, seed)), None),
                ("shifted layers", partial(_shifted, a, start), (ids, ids), f"layer_{start}"),
            ):
                yield Case(f"{name} {what} seed {seed}", a, b, kept_ids, MISMATCH, layer)
            hidden = "embedding.output"
            yield Case(
                f"{name} other prompt, neither ids nor embedding seed {seed}",
                partial(_without, a, hidden),
                partial(_without, at(other), hidden),
                (None, None),
                MISMATCH,
                "layer_0",
            )


def _without(make: Callable[[], Tensors], gone: str) -> Tensors:
    return {key: x for key, x in make().items() if key != gone}


def _one_other(ids: Tensor, seed: int) -> Tensor:
    ids = ids.clone()
    ids[2, 5 + seed] = (ids[2, 5 + seed] + 1) % 256
    return ids


def all_cases(seeds: list[int]) -> list[Case]:
    return [
        *sound_cases(seeds),
        *fault_cases(seeds),
        *narrow_fault_cases(seeds),
        *quantized_cases(seeds),
        *mismatch_cases(seeds),
    ]
