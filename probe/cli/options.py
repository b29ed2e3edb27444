"""Options that several commands share."""

import argparse


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which model, and what loading it may do."""
    parser.add_argument(
        "--model",
        default="tiny-mamba",
        help="embedded name, folder, hub id or package.module:factory (default: tiny-mamba)",
    )
    parser.add_argument("--allow-download", action="store_true", help="let a hub id be fetched")
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
