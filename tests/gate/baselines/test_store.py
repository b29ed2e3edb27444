"""The store: what stays and what goes, whose folder it is, the environment, the anchors, and what changed."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from probe.gate.baselines.format import BaselineError, Entry, Stored, digest, rounded
from probe.gate.baselines.store import Store, changes
from probe.words import natural_key
from tests.gate.baselines.examples import MAX_BYTES_PER_CASE, MODEL, case, entry, files, golden, size_per_case


def test_other_cases_and_modes_stay(store: Store) -> None:
    before = golden() | {case(mode="mode_3"): entry(3, 3)}
    store.write(MODEL, before)
    store.write(MODEL, {case("layer_2"): entry(2, 2), case("layer_5"): entry(5)}, drop=[case("layer_10")])
    wanted = before | {case("layer_2"): entry(2, 2), case("layer_5"): entry(5)}
    del wanted[case("layer_10")]
    assert store.read(MODEL, "cpu") == {case: rounded(entry) for case, entry in wanted.items()}


def test_files_that_do_not_change_are_not_touched(store: Store) -> None:
    store.write(MODEL, golden() | {case(mode="mode_3"): entry(3, 3)})

    def stamps() -> dict[str, tuple[int, int]]:
        found = {path.name: path.stat() for path in store.folder(MODEL, "cpu").iterdir()}
        return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}

    before = stamps()
    store.write(MODEL, golden(), drop=[case("never there"), case(mode="nor this")])
    assert stamps() == before
    store.write(MODEL, {case("layer_2"): entry(0.1)})
    assert {name for name, stamp in stamps().items() if stamp != before[name]} == {"mode_2_1.json"}


def test_a_mode_without_cases_loses_its_file(store: Store) -> None:
    store.write(MODEL, golden() | {case(mode="mode_3"): entry(3, 3)})
    store.write(MODEL, {}, drop=list(golden()))
    assert list(files(store.root)) == ["tiny-mamba/cpu/mode_3.json"]
    store.write(MODEL, {}, drop=[case(mode="mode_3")])
    assert files(store.root) == {}
    assert store.models() == store.devices(MODEL) == []


def test_nothing_to_write_makes_no_folder(store: Store) -> None:
    store.write(MODEL, {}, drop=[case()])
    assert not store.root.exists()
    assert store.read(MODEL, "cpu") == {}
    assert store.models() == store.devices(MODEL) == []
    assert store.environment(MODEL) is None


def test_size_per_case_is_that_of_the_file(store: Store, small: Path) -> None:
    store.write(MODEL, {case(mode="bf16", fmt=""): entry(), case("layer_1", mode="bf16", fmt=""): entry()})
    float_mode = store.file(MODEL, case(mode="bf16")).stat().st_size
    assert size_per_case(store, MODEL) == {"bf16": float_mode / 2, "mode_2_1": small.stat().st_size}
    assert MAX_BYTES_PER_CASE == 2048


def test_devices_and_models_have_their_true_names(store: Store) -> None:
    for model, device in (("org/name", "recorded:/data/gpu"), ("org/name", "cuda:0"), (MODEL, "cpu")):
        store.write(model, {case(device=device): entry(1, 2)})
        assert store.read(model, device) == {case(device=device): entry(1, 2)}
    (store.root / "README.md").write_text("not a model")
    assert store.models() == ["org/name", MODEL]
    assert store.devices("org/name") == ["cuda:0", "recorded:/data/gpu"]
    assert "org_name/recorded_gpu/mode_2_1.json" in files(store.root)


def test_two_names_for_one_folder_are_noticed(store: Store) -> None:
    store.write("org/name", {case(device="cuda:0"): entry(1, 2)})
    before = files(store.root)
    other = r"models 'org/name' and 'org_name' would share .*, which belongs to the first\. Rename one of them, or"
    attempts: tuple[Callable[[], object], ...] = (
        lambda: store.read("org_name", "cuda:0"),
        lambda: store.devices("org_name"),
        lambda: store.write("org_name", {case(device="cuda:0"): entry(3)}),
        lambda: store.write("org_name", {case(): entry(3)}),
    )
    for attempt in attempts:
        with pytest.raises(BaselineError, match=other):
            attempt()
    device = r"devices 'cuda:0' and 'cuda_0' would share .*mode_2_1\.json"
    with pytest.raises(BaselineError, match=device):
        store.read("org/name", "cuda_0")
    with pytest.raises(BaselineError, match=device):
        store.write("org/name", {case(device="cuda_0"): entry(3)})
    with pytest.raises(BaselineError, match=r"modes 'mode_2_1' and 'mode:2_1' would share .*mode_2_1\.json"):
        store.write("org/name", {case(mode="mode:2_1", device="cuda:0"): entry(3)})
    with pytest.raises(BaselineError, match=r"modes 'a:b' and 'a;b' would share .*a_b\.json"):
        store.write("org/name", {case(mode="a:b"): entry(3), case(mode="a;b"): entry(3)})
    assert files(store.root) == before


# --------------------------------------------------------------------------------------------------- environment


def test_each_mode_keeps_the_environment_it_was_made_with(store: Store) -> None:
    store.write(MODEL, {case(mode="a"): entry(1), case(mode="b"): entry(1)}, environment={"torch": "2.12", "cpu": "x"})
    assert store.environment(MODEL) == {"torch": "2.12", "cpu": "x"}
    store.write(MODEL, {case(mode="a"): entry(2), case(mode="b"): entry(1)}, environment={"torch": "2.13", "cpu": "x"})
    assert [mode.environment["torch"] for mode in store.modes(MODEL, "cpu")] == ["2.13", "2.12"]
    assert store.environment(MODEL) == {"torch": "2.13 or 2.12", "cpu": "x"}
    assert store.environment("other") is None


def test_another_input_is_stored_though_no_figure_moved(store: Store) -> None:
    for tokens in ("1f", "2f"):
        store.write(MODEL, {case(): entry(1)}, environment={"input.tokens": tokens, "torch": tokens})
        assert store.environment(MODEL) == {"input.tokens": tokens, "torch": tokens}
    store.write(MODEL, {case(): entry(1)}, environment={"input.tokens": "2f", "torch": "newer"})
    assert store.environment(MODEL) == {"input.tokens": "2f", "torch": "2f"}, "nothing moved, so nothing is written"


@pytest.mark.parametrize("fact", [2, "", "a\nb"])
def test_a_fact_that_is_no_text_is_refused(store: Store, fact: str) -> None:
    with pytest.raises(BaselineError, match=r"environment of tiny-mamba: 'threads' is .* Expected a text"):
        store.write(MODEL, {case(): entry(1)}, environment={"threads": fact})
    assert not store.root.exists()


# ------------------------------------------------------------------------------------------------------- anchors


def name_of(data: bytes) -> str:
    return f"anchors-{digest(data)}.safetensors"


def test_anchors_are_kept_while_a_mode_names_them(store: Store) -> None:
    store.write(MODEL, {case(mode="a"): entry(1), case(mode="b"): entry(1)}, anchors=b"first")
    store.write(MODEL, {case(mode="a"): entry(1)}, anchors=b"second")
    names = {mode.mode: mode.environment["anchors"] for mode in store.modes(MODEL, "cpu")}
    assert names == {"a": name_of(b"second"), "b": name_of(b"first")}
    assert [store.anchors(MODEL, name) for name in names.values()] == [b"second", b"first"]
    store.write(MODEL, {case(mode="b"): entry(1)}, anchors=b"second")
    assert [path.name for path in (store.root / MODEL).glob("anchors-*")] == [name_of(b"second")]
    store.write(MODEL, {}, drop=[case(mode="a"), case(mode="b")])
    assert files(store.root) == {}


def test_anchors_that_are_not_what_their_name_says_are_refused(store: Store) -> None:
    store.write(MODEL, {case(): entry(1)}, anchors=b"first")
    name = name_of(b"first")
    (store.root / MODEL / name).write_bytes(b"other")
    with pytest.raises(BaselineError, match=f"{name}: does not hold what its name says: it is damaged or was edited"):
        store.anchors(MODEL, name)
    (store.root / MODEL / name).unlink()
    with pytest.raises(BaselineError, match=f"{name}: cannot be read: No such file or directory. Restore it with"):
        store.anchors(MODEL, name)
    with pytest.raises(BaselineError, match="is not a name of anchors"):
        store.anchors(MODEL, "../anchors-1.safetensors")


# ------------------------------------------------------------------------------------------------------- changes


def test_changes_are_listed_in_the_order_of_the_layers() -> None:
    old = {case(f"layer_{index}"): entry(0.000231, 1, 2) for index in (10, 2, 0, 1)} | {case("logits"): entry()}
    new = {case(f"layer_{index}"): entry(0.000502, 1, 2) for index in (0, 10, 2, 3)} | {case("logits"): entry()}
    name = "mode_2_1-layer_{}-cpu-fp8_e4m3  {}".format
    assert changes(old, new) == [
        name(0, "injected.mse  2.31e-04 -> 5.02e-04"),
        name(1, "dropped"),
        name(2, "injected.mse  2.31e-04 -> 5.02e-04"),
        name(3, "new"),
        name(10, "injected.mse  2.31e-04 -> 5.02e-04"),
    ]
    assert changes(new, new) == []


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (0.99987, 0.99971, "0.99987 -> 0.99971"),
        (0.999871, 0.999872, "0.999871 -> 0.999872"),
        (2.31111e-4, 2.31112e-4, "2.31111e-04 -> 2.31112e-04"),
        (2.31e-4, 0.0, "2.31e-04 -> 0"),
        (1e-12, -1e-12, "1.00e-12 -> -1.00e-12"),
        (5.0, 123456.0, "5 -> 1.2346e+05"),
        (0.0009999999, 0.001, None),
        (2.311111e-4, 2.311112e-4, None),
        (0.0, -0.0, None),
    ],
)
def test_a_figure_is_listed_if_its_six_digits_differ(old: float, new: float, told: str | None) -> None:
    line = [f"mode_2_1-layer_0-cpu-fp8_e4m3  injected.mse  {told}"] if told else []
    assert changes({case(): entry(old)}, {case(): entry(new)}) == line


def test_figures_that_come_and_go_and_golden_values_are_listed() -> None:
    old = {case(): Entry({"injected.mse": Stored(1), "injected.old": Stored(1)}, (1.0, 2.0, 3.0))}
    new = {case(): Entry({"injected.mse": Stored(1, 0.5, "why"), "injected.new": Stored(0.25)}, (1.0, 2.5))}
    assert [line.split("  ", 1)[1] for line in changes(old, new)] == [
        "injected.new  new 0.25",
        "injected.old  dropped",
        "golden values  2 of 3 changed",
    ]


def test_settings_are_stored_with_a_case_and_listed_where_they_change(store: Store) -> None:
    old = Entry({"a.b": Stored(1)}, (1.0,), {"outlier.threshold": "20.0", "tokens": "9f (3)"})
    new = replace(old, settings={"outlier.threshold": "64.0", "model.dtype": "float32"})
    store.write(MODEL, {case(): old})
    assert store.read(MODEL, "cpu") == {case(): old}
    assert Entry.from_dict(old.as_dict()) == old
    assert [line.split("  ", 1)[1] for line in changes({case(): old}, {case(): new})] == [
        "model.dtype  none -> float32",
        "outlier.threshold  20.0 -> 64.0",
        "tokens  9f (3) -> none",
    ]
    store.write(MODEL, {case(): new})
    assert store.read(MODEL, "cpu") == {case(): new}


def test_numbers_in_names_are_sorted_by_size() -> None:
    ordered = ["", "1", "2", "10", "layer", "layer_2", "layer_10", "layer_10.a2", "layer_10.a10", "logits"]
    mixed = ordered[::-1]
    assert sorted(mixed, key=natural_key) == ordered
    assert sorted(["layer_2", "layer_02"], key=natural_key) == sorted(["layer_02", "layer_2"], key=natural_key)
