"""Texts that come with the package, and .txt files."""

import os
from pathlib import Path

from probe.words import look_up

TEXTS = {name: Path(__file__).parent / "text" / f"{name}.txt" for name in ("calibration", "evaluation")}


def text_of(source: str) -> str:
    """The text of a builtin source (`calibration`, `evaluation`) or of a .txt file, byte for byte."""
    file = TEXTS.get(source) or Path(os.path.expanduser(source))
    if file.suffix != ".txt":
        if source and file.exists():
            raise ValueError(f"text {source!r} is not a .txt file. Expected plain text in UTF-8, named something.txt.")
        look_up("text", source, TEXTS, see="Or give the path of a .txt file.")
    if not file.is_file():
        raise ValueError(
            f"text file {source!r} does not exist (looked for {file.absolute()}). "
            f"Expected a .txt file or one of: {', '.join(TEXTS)}."
        )
    try:
        text = file.read_bytes().decode("utf-8")
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"text file {source!r} is not UTF-8: byte {problem.start} is 0x{problem.object[problem.start]:02x}. "
            f"Convert it, for example: iconv -f LATIN1 -t UTF-8 {file.name}"
        ) from problem
    if not text.strip():
        raise ValueError(f"text file {source!r} is empty. Expected text to make samples of.")
    return text
