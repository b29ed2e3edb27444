"""Options that several commands share."""

import argparse
from typing import Any

from probe.formats import PERCENTILE

CALIBRATION: dict[str, dict[str, Any]] = {
    "--calib-data": {"default": "calibration", "metavar": "TEXT", "help": "text that scales are taken from"},
    "--calib-data-num": {"type": int, "default": 16, "metavar": "N", "help": "calibration samples (default: 16)"},
    "--calib-seqlen": {"type": int, "default": 256, "metavar": "N", "help": "default: 256"},
    "--percentile": {
        "type": float,
        "default": PERCENTILE,
        "metavar": "SHARE",
        "help": f"of |conv1d.output| and |scan.state| (default: {PERCENTILE})",
    },
}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, and what loading it may do."""
    parser.add_argument(
        "--model",
        default="tiny-mamba",
        help="embedded name, folder, hub id or package.module:factory (default: tiny-mamba)",
    )
    parser.add_argument("--allow-download", action="store_true", help="let a hub id be fetched")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def add_calibration(parser: argparse.ArgumentParser) -> None:
    """What static scales are taken from."""
    for name, settings in CALIBRATION.items():
        spellings = dict.fromkeys((name, f"--{name[2:].replace('-', '_')}"))
        parser.add_argument(*spellings, **settings)
