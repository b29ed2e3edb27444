"""Deep models: the time of a comparison grows with the number of layers, not with its square."""

import time
from collections.abc import Callable
from pathlib import Path

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
def test_four_times_the_layers_take_about_four_times_as_long(
    run: Callable[[Path, Path], object], folders: dict[int, tuple[Path, Path]]
) -> None:
    seconds = {}
    for layers, pair in folders.items():
        run(*folders[FEW])  # numbers and modules that are loaded once
        start = time.process_time()
        run(*pair)
        seconds[layers] = time.process_time() - start
    assert seconds[MANY] < 2 * MANY / FEW * seconds[FEW]
