"""All faults, by the part of the system that they break."""

from tests.faults import block_faults, grid_faults, outside_faults, path_faults, source_faults, user_faults
from tests.faults.catalogue import AnyFault

GROUPS: dict[str, tuple[AnyFault, ...]] = {
    "rounding and ends of the grid": (
        *grid_faults.ROUNDING,
        *grid_faults.ENDS,
        *grid_faults.AT_CORNERS,
        *grid_faults.EXACT,
    ),
    "scales and blocks": (*grid_faults.SCALES, *grid_faults.BLOCKS, *grid_faults.LOCAL),
    "left out": block_faults.LEFT_OUT,
    "weights": (*block_faults.WEIGHTS, *block_faults.MORE_WEIGHTS),
    "arithmetic of a layer": (*block_faults.BLOCK, *block_faults.ISSUED, *block_faults.FUNCTIONS),
    "embedding, final norm, head": (*outside_faults.HEAD, *outside_faults.NORM, *outside_faults.EMBEDDING),
    "decode": path_faults.DECODE,
    "ragged, batch 1, padding": path_faults.SHAPES,
    "reference and input": (*source_faults.REFERENCES, *source_faults.KERNELS, *source_faults.ERRORS),
    "formats and calibration": (*source_faults.FORMAT_ROWS, *source_faults.CALIBRATION),
    "modes of a user": (*user_faults.USER, *user_faults.USER_PATHS),
}
FAULTS: tuple[AnyFault, ...] = tuple(fault for group in GROUPS.values() for fault in group)
RECIPES = {
    model: sorted({fault.recipe for fault in FAULTS if fault.model == model})
    for model in sorted({fault.model for fault in FAULTS})
}
