import io
import itertools
import math
import struct
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageColor

from probe.gate.cases import Case, Figure, Outcome, Points
from probe.report.figure import BLUE
from probe.report.gate.plots import BAND, BETWEEN, BOTTOM, FIRST, HEIGHT, OTHER, RIGHT, recipe_picture
from tests.report.gate.examples import failing, logits, nasty, outside, path, points, recipe

BIG = 1e308


def only(outcome: Outcome) -> tuple[list[Outcome], Outcome]:
    return [outcome], outcome


def shown(outcomes: list[Outcome], place: int = 0) -> tuple[list[Outcome], Outcome]:
    return outcomes, outcomes[place]


def picture_of(found: list[Outcome], chosen: Outcome) -> bytes:
    picture = recipe_picture(found, chosen)
    assert picture is not None
    return picture


def with_mse(*values: float | None) -> list[Outcome]:
    return [
        replace(o, figures={**o.figures, "injected.mse": Figure(x, 1e-4), "propagated.mse": Figure(x, None)})
        for o, x in zip(recipe(layers=len(values), whole=False), values, strict=True)
    ]


def given(reference: list[float], output: list[float]) -> Points:
    return Points(reference, output, places=range(len(output)), shape=(1, 4))


RECIPE = Case("mode_2_1", "", "cpu", "int8")
EXAMPLES = {
    "four layers": shown(recipe(faulty=1), 1),
    "one layer": shown(recipe(layers=1, faulty=0)),
    "48 layers": shown(recipe(layers=48, faulty=20), 20),
    "passing": shown(recipe()),
    "logits": shown(recipe(faulty=0), -1),
    "only logits": only(logits(RECIPE)),
    "inherited": shown(recipe(faulty=0), 1),
    "head": shown([*recipe(), outside("head", RECIPE, mse=1e-4)], -1),
    "decode": shown([*recipe(), path("decode", RECIPE, relation=0.4)], -1),
    "a path as its baseline": shown([*recipe(), path("padded", RECIPE)], -1),
    "zeros": shown(with_mse(0.0, 0.0)),
    "zeros and more": shown(with_mse(0.0, 1e-3, 2e-3)),
    "not finite": shown(with_mse(1e-3, math.nan, math.inf, None)),
    "sixty decades": shown(with_mse(1e-30, 1e30)),
    "denormal": shown(with_mse(5e-324, 1e-300)),
    "huge": shown(with_mse(1e300, BIG)),
    "values not finite": only(failing("not finite", points=given([1.0, 2.0, 3.0], [math.nan, 2.5, 3.1]))),
    "huge values": only(failing("drift", points=given([BIG, -BIG, 1e38, 2.0], [-BIG, BIG, -1e38, 2.1]))),
    "tiny values": only(failing("drift", points=given([0.0, 1e-310], [1e-310, 0.0]))),
    "far from zero": only(failing("drift", points=given([1e9, 1e9 + 1], [1e9 + 1, 1e9 + 3]))),
    "hostile names": only(nasty()),
    "dollars": only(failing("drift", case=Case("m", "a$b^{", "cpu"), points=points())),
}


#: The widths of the panels of an example, where they are not these.
USUAL = (FIRST, OTHER, OTHER)
WIDTHS = {
    "decode": (FIRST, OTHER),
    "a path as its baseline": (FIRST,),
    **dict.fromkeys(
        ("only logits", "values not finite", "huge values", "tiny values", "far from zero", "dollars"), (OTHER, OTHER)
    ),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_picture_is_a_small_png_without_empty_panels(name: str) -> None:
    found, chosen = EXAMPLES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = picture_of(found, chosen)
    image = Image.open(io.BytesIO(picture))
    assert image.format == "PNG"
    widths = WIDTHS.get(name, USUAL)
    assert image.size == (sum(widths), HEIGHT)
    assert len(picture) < 40_000
    for left, right in itertools.pairwise(itertools.accumulate(widths, initial=0)):
        inside = image.convert("L").crop((left + 62, 50, right - 16, HEIGHT - 60))
        assert int(np.asarray(inside).min()) < 180, "something is drawn or said within the frame"


@pytest.mark.parametrize(
    "outcome",
    [
        failing("missing"),
        failing("reference moved", case=Case("mode_2_1", "logits", "cpu", "int8")),
        failing("uncovered", case=Case("mode_2_1", "decode", "cpu", "int8")),
        failing("not finite", points=given([1.0, 2.0], [math.nan, math.inf])),
        failing("not applied", points=given([1.0, 2.0], [1.0, 2.0])),
    ],
    ids=lambda outcome: str(outcome.verdict),
)
def test_there_is_no_picture_of_nothing(outcome: Outcome) -> None:
    assert recipe_picture([outcome], outcome) is None


def test_what_the_baseline_has_is_drawn_beside_what_is_now() -> None:
    """Drawn twice, with and without the baseline; only the panels that show it differ."""
    found = recipe(faulty=1)
    with_baseline = pixels(found, found[1])
    no_golden = replace(found[1], points=replace(found[1].points, golden=()))
    without = pixels([found[0], no_golden, *found[2:]], no_golden)
    assert with_baseline.shape == without.shape
    changed = (np.abs(with_baseline - without) > 60).any(2).any(0)  # more than the palette changes
    assert not changed[:FIRST].any(), "the layers are the same"
    assert changed[FIRST : FIRST + OTHER].any(), "the marks of the baseline's sample"
    assert changed[FIRST + OTHER :].any(), "output - golden values instead of output against reference"
    old = [replace(o, figures={n: replace(f, old=None) for n, f in o.figures.items()}) for o in found]
    assert (pixels(old, old[1])[:, :FIRST] != with_baseline[:, :FIRST]).any(), "the dashed curves of the baseline"


def blue(found: list[Outcome], chosen: Outcome, panel: int) -> int:
    """Pixels of the bars of a panel, counted from the right."""
    drawn = pixels(found, chosen)[50 : HEIGHT - 60]
    end = drawn.shape[1] - panel * OTHER
    inside = drawn[:, end - OTHER + 62 : end - 16]
    return int((np.abs(inside - np.array(ImageColor.getrgb(BLUE))) <= 12).all(2).sum())


def test_a_difference_that_all_elements_share_is_a_bar_that_can_be_seen() -> None:
    reference = [0.01 * n for n in range(60)]
    shifted = failing("not float", points=given(reference, [x + 0.001 for x in reference]))
    assert blue([shifted], shifted, 1) > 500


def test_one_golden_value_that_moved_far_is_drawn() -> None:
    """All others moved by noise, so most are nothing beside it."""
    found = recipe(faulty=1)
    moved = found[1].points
    golden = [math.nan] * (len(moved.output) - 40) + [x + 1e-7 * (n % 7 - 3) for n, x in enumerate(moved.output[-40:])]
    one_far = replace(found[1], points=replace(moved, golden=[*golden[:-1], golden[-1] + 0.1]))
    inside = pixels([one_far], one_far)[50 : HEIGHT - BOTTOM - 2, FIRST + OTHER + BETWEEN : -RIGHT]
    bars = (np.abs(inside - np.array(ImageColor.getrgb(BLUE))) <= 12).all(2).any(0)
    assert bars[: len(bars) // 4].any(), "the one at -0.1, at the left end"
    assert bars[-len(bars) // 4 :].any(), "the others, at 0"
    assert not bars[len(bars) // 3 : len(bars) // 2].any()


def pixels(found: list[Outcome], chosen: Outcome) -> Any:
    return np.asarray(Image.open(io.BytesIO(picture_of(found, chosen))).convert("RGB"), int)


def test_failing_layers_are_marked() -> None:
    band = np.array(ImageColor.getrgb(BAND))

    def pink(found: list[Outcome]) -> int:
        """Pixels of the colour of the band, which the palette of the picture may have changed a little."""
        inside = pixels(found, found[0])[50:310, 70:530].reshape(-1, 3)
        return int((np.abs(inside - band) <= 5).all(1).sum())

    assert pink(recipe()) == 0
    assert pink(recipe(faulty=0, whole=False)) > 3 * pink(recipe(faulty=3, whole=False)) > 20_000


def test_a_picture_does_not_depend_on_those_before_it() -> None:
    first = {name: recipe_picture(*given) for name, given in EXAMPLES.items()}
    for name in reversed(EXAMPLES):
        assert recipe_picture(*EXAMPLES[name]) == first[name], name


def test_settings_of_the_user_neither_matter_nor_change() -> None:
    import matplotlib

    found = recipe(faulty=1)
    expected = recipe_picture(found, found[1])
    with matplotlib.rc_context({"font.size": 30.0, "axes.facecolor": "black", "figure.dpi": 300}):
        before = dict(matplotlib.rcParams)
        assert recipe_picture(found, found[1]) == expected
        assert dict(matplotlib.rcParams) == before


def test_no_window_system_is_asked_for_and_torch_stays_out() -> None:
    script = (
        "import sys\n"
        "from tests.report.gate.examples import recipe\n"
        "import probe.report.gate.page, probe.report.gate.summary\n"
        "from probe.report.gate.plots import recipe_picture\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules and 'pytest' not in sys.modules\n"
        "recipe_picture(recipe(), recipe()[0])\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_pictures_are_quick() -> None:
    """About 60 ms alone on a core of 2026; the bound allows for a busy machine."""
    found = recipe(faulty=1)
    recipe_picture(found, found[1])
    times = []
    for _ in range(5):
        start = time.process_time()
        recipe_picture(found, found[1])
        times.append(time.process_time() - start)
    assert min(times) < 0.3


def test_the_palette_is_used() -> None:
    picture = picture_of(*EXAMPLES["four layers"])
    depth, colour_type = struct.unpack(">BB", picture[24:26])
    assert (depth, colour_type) == (8, 3)
