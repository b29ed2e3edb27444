"""Deep models: the work of a comparison grows with the number of layers, not with its square."""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from probe import check, compare, diff
from tests.comparisons.recorded import noisy, plain, recorded

FEW, MANY = 150, 600


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, Path]]:
    """Two recordings of a shallow model, and two of a deep one."""
    made = {}
    for layers in (FEW, MANY):
        folder, reference = tmp_path_factory.mktemp(str(layers)), plain(layers=layers)
        modes = {"fp32": reference, "2-1-int8": noisy(reference, 0.1)}
        made[layers] = (recorded(folder / "a", modes).folder, recorded(folder / "b", modes).folder)
    return made


@pytest.mark.parametrize(
    "run",
    [
        lambda a, b: check(a, "fp32"),
        lambda a, b: compare(a, "2-1"),
        lambda a, b: diff(a, b, recipe="fp32"),
        lambda a, b: diff(a, b, recipe="2-1", reference=a),
        lambda a, b: diff(a, a, recipe=("fp32", "2-1")),
    ],
    ids=["check", "compare", "diff", "diff with a reference", "diff of a fault"],
)
def test_four_times_the_layers_make_about_four_times_as_many_calls(
    run: Callable[[Path, Path], object], folders: dict[int, tuple[Path, Path]]
) -> None:
    """Calls are counted, not seconds: a search or a sort of all layers at every layer calls a function for each."""
    run(*folders[FEW])  # numbers and modules that are loaded once
    calls = {layers: _calls(partial(run, *pair)) for layers, pair in folders.items()}
    assert calls[MANY] < 1.5 * MANY / FEW * calls[FEW]


def test_an_archive_of_many_layers_is_not_read_from_its_start_for_each(tmp_path: Path) -> None:
    files = {}
    for layers in (FEW, MANY):
        arrays = {f"mode_fp32_{name.replace('.', '_')}": x.numpy() for name, x in plain(layers=layers).items()}
        files[layers] = tmp_path / f"{layers}.npz"
        np.savez_compressed(files[layers], allow_pickle=False, **arrays)
    check(files[FEW])
    calls = {layers: _calls(partial(check, file)) for layers, file in files.items()}
    assert calls[MANY] < 1.5 * MANY / FEW * calls[FEW]


def _calls(run: Callable[[], object]) -> int:
    count = 0

    def tally(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(tally)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count
