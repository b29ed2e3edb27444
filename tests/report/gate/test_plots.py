import io
import math
import struct
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image, ImageColor

from probe.gate.cases import Case, Figure, Outcome
from probe.report.gate.plots import BAND, HEIGHT, WIDTH, recipe_picture
from tests.report.gate.examples import failing, logits, nasty, points, recipe

BIG = 1e308


def only(outcome: Outcome) -> tuple[list[Outcome], Outcome]:
    return [outcome], outcome


def shown(outcomes: list[Outcome], place: int = 0) -> tuple[list[Outcome], Outcome]:
    return outcomes, outcomes[place]


def with_mse(*values: float | None) -> list[Outcome]:
    return [
        replace(o, figures={**o.figures, "injected.mse": Figure(x, 1e-4), "propagated.mse": Figure(x, None)})
        for o, x in zip(recipe(layers=len(values), whole=False), values, strict=True)
    ]


EXAMPLES = {
    "four layers": shown(recipe(faulty=1), 1),
    "one layer": shown(recipe(layers=1, faulty=0)),
    "48 layers": shown(recipe(layers=48, faulty=20), 20),
    "passing": shown(recipe()),
    "logits": shown(recipe(faulty=0), -1),
    "only logits": only(logits(Case("mode_2_1", "", "cpu", "int8"))),
    "nothing measured": only(failing("missing")),
    "zeros": shown(with_mse(0.0, 0.0)),
    "zeros and more": shown(with_mse(0.0, 1e-3, 2e-3)),
    "not finite": shown(with_mse(1e-3, math.nan, math.inf, None)),
    "sixty decades": shown(with_mse(1e-30, 1e30)),
    "denormal": shown(with_mse(5e-324, 1e-300)),
    "huge": shown(with_mse(1e300, BIG)),
    "no finite value": only(failing("not finite", points={"reference": [1.0, 2.0], "output": [math.nan, math.inf]})),
    "values not finite": only(failing("not finite", points={"reference": [1.0, 2.0], "output": [math.nan, 2.5]})),
    "huge values": only(failing("drift", points={"reference": [BIG, -BIG, 1e38], "output": [-BIG, BIG, -1e38]})),
    "equal values": only(failing("not applied", points={"reference": [1.0, 2.0], "output": [1.0, 2.0]})),
    "one value": only(failing("drift", points={"reference": [1.0], "output": [1.5]})),
    "tiny values": only(failing("drift", points={"reference": [0.0, 1e-310], "output": [1e-310, 0.0]})),
    "far from zero": only(failing("drift", points={"reference": [1e9, 1e9 + 1], "output": [1e9 + 1, 1e9 + 2]})),
    "one side only": only(failing("drift", points={"reference": [1.0, 2.0]})),
    "hostile names": only(nasty()),
    "dollars": only(failing("drift", case=Case("m", "a$b^{", "cpu"), points=points())),
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_picture_is_a_small_png_of_the_same_size(name: str) -> None:
    found, chosen = EXAMPLES[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        picture = recipe_picture(found, chosen)
    image = Image.open(io.BytesIO(picture))
    assert image.format == "PNG"
    assert image.size == (WIDTH, HEIGHT)
    assert len(picture) < 40_000
    assert no_panel_is_blank(image)


def no_panel_is_blank(image: Image.Image) -> bool:
    """Within the frame of every panel something is drawn or said."""
    insides = [image.convert("L").crop((left, 50, left + 240, 310)) for left in (130, 615, 935)]
    return all(int(np.asarray(inside).min()) < 180 for inside in insides)


def test_failing_layers_are_marked() -> None:
    band = np.array(ImageColor.getrgb(BAND))

    def pink(found: list[Outcome]) -> int:
        """Pixels of the colour of the band, which the palette of the picture may have changed a little."""
        image = Image.open(io.BytesIO(recipe_picture(found, found[0]))).convert("RGB")
        pixels = np.asarray(image.crop((70, 50, 530, 310)), int).reshape(-1, 3)
        return int((np.abs(pixels - band) <= 5).all(1).sum())

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
    picture = recipe_picture(*EXAMPLES["four layers"])
    depth, colour_type = struct.unpack(">BB", picture[24:26])
    assert (depth, colour_type) == (8, 3)
