"""Baselines to test with: entries made by hand, and two states of a store that differ in every way."""

from collections.abc import Callable
from pathlib import Path

from probe.gate.baselines.format import Entry, Stored, path_part
from probe.gate.baselines.store import Store
from probe.gate.cases import Case

MODEL = "tiny-mamba"
Entries = dict[Case, Entry]


def case(layer: str = "layer_0", mode: str = "mode_2_1", fmt: str = "fp8_e4m3", device: str = "cpu") -> Case:
    return Case(mode, layer, device, fmt)


def golden() -> Entries:
    first = {
        "propagated.mse": Stored(1),
        "injected.mse": Stored(0.00023123456, 1.234e-9, "größerer Block"),
        "injected.correlation": Stored(0.99987, 2e-7),
    }
    return {
        case("logits", fmt="int8"): Entry({"logits.top.1": Stored(0.5), "logits.kl": Stored(-1.5e-12)}),
        case("layer_2"): Entry({"injected.mse": Stored(123456789.0)}),
        case("layer_10"): Entry({"injected.mse": Stored(-0.0)}),
        case(): Entry(
            first, (1.0, -2.5, 0.1), digests={"weights.in_proj.weight": "9f86d081", "corners.scan.u": "fd61a03a"}
        ),
    }


def entry(mse: float = 0.5, *values: float) -> Entry:
    return Entry({"injected.mse": Stored(mse, 1e-9)}, values)


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def put(old: str, new: str) -> Callable[[bytes], bytes]:
    """A change of a file that has `old` once."""

    def change(data: bytes) -> bytes:
        assert data.count(old.encode()) == 1, (old, data)
        return data.replace(old.encode(), new.encode())

    return change


def two_states() -> tuple[Entries, Entries]:
    """Every way a mode can change: figures, values, values that come or go, a mode that comes or goes, none."""
    old = {
        case(mode="figures"): entry(1, 1, 2),
        case(mode="values.2"): entry(1, 1, 2),
        case(mode="values.2", layer="layer_1"): entry(1, 3),
        case(mode="gains"): entry(1),
        case(mode="loses"): entry(1, 1),
        case(mode="goes"): entry(1, 1),
        case(mode="goes_too"): entry(1),
        case(mode="same"): entry(1, 1),
    }
    new = {
        case(mode="figures"): entry(2, 1, 2),
        case(mode="values.2"): entry(1, 2, 1),
        case(mode="values.2", layer="layer_2"): entry(1, 4),
        case(mode="gains"): entry(2, 2),
        case(mode="loses"): entry(2),
        case(mode="comes"): entry(2, 2),
        case(mode="comes_too"): entry(2),
        case(mode="same"): entry(1, 1),
    }
    return old, new


def move(store: Store, old: Entries, new: Entries) -> None:
    store.write(MODEL, new, drop=old.keys() - new.keys())


def of_mode(entries: Entries, mode: str) -> Entries:
    return {case: entry for case, entry in entries.items() if case.mode == mode}


def assert_each_mode_is_whole(found: Entries, *states: Entries) -> None:
    for mode in {case.mode for state in states for case in state}:
        assert of_mode(found, mode) in [of_mode(state, mode) for state in states], mode


def many(step: int) -> Entries:
    """50 modes; those with a number that 5 divides come and go, every seventh gains and loses its values."""
    return {
        case(f"layer_{layer}", mode=f"mode_{mode}"): entry(
            step + mode, *([] if mode % 7 == step % 2 else [float(step), float(layer)])
        )
        for mode in range(50)
        for layer in range(2)
        if mode % 5 or step % 2
    }


#: What a case may take on disk.
MAX_BYTES_PER_CASE = 2048


def size_per_case(store: Store, model: str) -> dict[str, float]:
    """Bytes of the file over the number of cases, by mode."""
    modes = {mode.mode: mode.entries for mode in store.modes(model, "cpu")}
    folder = store.folder(model, "cpu")
    return {name: (folder / f"{path_part(name)}.json").stat().st_size / len(modes[name]) for name in modes}
