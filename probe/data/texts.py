"""Texts: those that come with the package, and files of the user's own (txt, json, jsonl, csv, parquet)."""

import csv
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from probe.words import did_you_mean, look_up

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


def read_texts(path: Path, *, format: str | None, text_column: str) -> tuple[list[str], bool]:
    """The documents of a file, those that are empty left out, and whether they are one running text.

        txt      one running text
        json     a list of texts or of objects, or an object of columns
        jsonl    a text or an object on every line
        csv      with a header row
        parquet  with a column of texts

    `format` None: by the name of the file.
    """
    if not path.is_file():
        what = "is a folder" if path.is_dir() else f"does not exist (looked for {path.absolute()})"
        raise ValueError(f"data file {str(path)!r} {what}. Expected custom:/path of a {', '.join(READERS)} file.")
    kind = format or path.suffix.removeprefix(".").lower()
    if kind not in READERS:
        raise ValueError(
            f"data file {str(path)!r}: its name does not say which format it has. "
            f"Say it with data.custom.format: {', '.join(READERS)}."
        )
    try:
        texts = [text for text in READERS[kind](path, text_column) if text.strip()]
    except UnicodeDecodeError as problem:
        raise ValueError(
            f"data file {str(path)!r} is not UTF-8: byte {problem.start} is 0x{problem.object[problem.start]:02x}. "
            "Convert it, for example with iconv."
        ) from None
    if not texts:
        raise ValueError(f"data file {str(path)!r} is empty: it holds no text. Expected text to make samples of.")
    return texts, kind == "txt"


def _txt(path: Path, column: str) -> Iterator[str]:
    yield path.read_bytes().decode("utf-8")


def _json(path: Path, column: str) -> Iterator[str]:
    text = path.read_bytes().decode("utf-8")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise ValueError(
            f"data file {str(path)!r} is not JSON: {problem}. With an object on every line its format is jsonl "
            "(data.custom.format)."
        ) from None
    if isinstance(found, dict):
        found = _cell(_named(path), found, column)
    if not isinstance(found, list):
        raise ValueError(f"data file {str(path)!r} holds {type(found).__name__}; expected a list of texts or objects.")
    return column_texts(_named(path), found, column)


def _jsonl(path: Path, column: str) -> Iterator[str]:
    def rows() -> Iterator[Any]:
        for number, line in enumerate(path.read_bytes().decode("utf-8").split("\n"), 1):
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError) as problem:
                    raise ValueError(f"data file {str(path)!r}, line {number} is not JSON: {problem}.") from None

    return column_texts(_named(path), rows(), column)


def _csv(path: Path, column: str) -> Iterator[str]:
    csv.field_size_limit(sys.maxsize)
    with path.open(encoding="utf-8-sig", newline="") as file:
        try:
            yield from column_texts(_named(path), csv.DictReader(file), column)
        except csv.Error as problem:
            raise ValueError(f"data file {str(path)!r} is not CSV: {problem}.") from None


def _parquet(path: Path, column: str) -> Iterator[str]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"data file {str(path)!r}: parquet needs the package pyarrow, which comes with: "
            "pip install 'quant-probe[data]'."
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            _cell(_named(path), dict.fromkeys(file.schema_arrow.names), column)
            for batch in file.iter_batches(columns=[column]):
                yield from column_texts(_named(path), batch.to_pylist(), column)
    except pyarrow.ArrowException as problem:
        raise ValueError(f"data file {str(path)!r} is not parquet: {problem}.") from None


def column_texts(where: str, rows: Iterable[Any], column: str, *, skip_null: bool = True) -> Iterator[str]:
    """The texts of a column. Errors begin with `where`; a row may also be the text itself."""
    for number, row in enumerate(rows, 1):
        text = _cell(where, row, column) if isinstance(row, Mapping) else row
        if text is None and skip_null:
            continue
        if not isinstance(text, str):
            wrong = f"column {column!r} holds {type(text).__name__}"
            raise ValueError(f"{where}, row {number}: {wrong}; expected text.")
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError:
                raise ValueError(f"{where}, row {number}: holds half of a surrogate pair; expected text.") from None
        yield text


def _named(path: Path) -> str:
    return f"data file {str(path)!r}"


def _cell(where: str, row: Mapping[Any, Any], column: str) -> Any:
    if column in row:
        return row[column]
    names = [str(name) for name in row if name is not None]
    raise ValueError(
        f"{where} has no column {column!r}.{did_you_mean(column, names)} It has: {', '.join(names) or 'none'}. "
        "Choose one with data.custom.text_column."
    )


Reader = Callable[[Path, str], Iterator[str]]
READERS: dict[str, Reader] = {"txt": _txt, "json": _json, "jsonl": _jsonl, "csv": _csv, "parquet": _parquet}
