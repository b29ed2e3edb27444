"""Data sources by name, and their documents.

builtin                 the text that comes with the package
pile wikitext2 c4 ...   rows of HUB, from the local cache of the hub
hf:<dataset>[:config]   any dataset of the hub, or a folder in the hub's layout
custom:/path            a file: txt, json, jsonl, csv or parquet
"""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from probe.data.library_logs import quiet_datasets
from probe.data.texts import column_texts, read_texts, text_of
from probe.words import describe_error, did_you_mean

#: The default column of the text.
TEXT_COLUMN = "text"


@dataclass(frozen=True)
class HubText:
    """A dataset of the hub: where its text is. `files` are enough, so that no more is fetched than is read."""

    name: str
    hub_id: str
    config: str | None
    split: str
    files: tuple[str, ...]
    running: bool = False
    """Rows are lines of one long text, not documents."""


WIKITEXT = "wikitext-2-raw-v1"
HUB = {
    row.name: row
    for row in (
        HubText("pile", "mit-han-lab/pile-val-backup", None, "validation", ("val.jsonl.zst",)),
        HubText("wikitext2", "Salesforce/wikitext", WIKITEXT, "train", (f"{WIKITEXT}/train-*.parquet",), running=True),
        HubText("c4", "allenai/c4", "en", "train", ("en/c4-train.00000-of-01024.json.gz",)),
        HubText("redpajama", "togethercomputer/RedPajama-Data-1T-Sample", None, "train", ("*_sample.jsonl",)),
    )
}
NAMES = ("builtin", *HUB, "hf:<dataset>[:config]", "custom:/path")


@dataclass(frozen=True, eq=False)
class Documents:
    """Documents in order. `running`: one long text in pieces, rather than texts of their own."""

    source: str
    texts: Iterable[str]
    running: bool
    about: str
    """In words, for the report."""


def documents_of(
    source: str,
    *,
    format: str | None = None,
    text_column: str = TEXT_COLUMN,
    split: str | None = None,
    allow_download: bool = False,
) -> Documents:
    """The documents that `source` names. Files are read at once, datasets row by row.

    A setting that only another kind of source has is refused, not ignored.
    """
    kind, colon, rest = source.partition(":")
    _check_keys(source, kind, format=format, text_column=text_column, split=split)
    if source == "builtin":
        return Documents(source, [text_of("evaluation")], True, "the text that comes with probe")
    if kind == "custom" and colon:
        path = Path(os.path.expanduser(rest))
        texts, running = read_texts(path, format=format, text_column=text_column)
        return Documents(source, texts, running, str(path))
    if source in HUB:
        return _hub_text(HUB[source], split, allow_download=allow_download)
    if kind == "hf" and rest:
        return _hub_dataset(source, rest, text_column, split, allow_download=allow_download)
    known = (f"custom:{source}",) if Path(source).exists() else ("builtin", *HUB, "hf:", "custom:")
    raise ValueError(f"unknown data source {source!r}.{did_you_mean(source, known)} Known: {', '.join(NAMES)}.")


def _check_keys(source: str, kind: str, *, format: str | None, text_column: str, split: str | None) -> None:
    """Refuse a key that belongs to other kinds of sources and differs from its default."""
    hub = ", ".join(HUB)
    for key, given, fits, owners in (
        ("data.split", split is not None, kind in ("hf", *HUB), f"datasets of the hub: {hub}, hf:<dataset>"),
        ("data.custom.format", format is not None, kind == "custom", "a file, custom:/path"),
        (
            "data.custom.text_column",
            text_column != TEXT_COLUMN,
            kind == "hf" or (kind == "custom" and (format or Path(source).suffix[1:].lower()) != "txt"),
            "custom:/path of a json, jsonl, csv or parquet file, and to hf:<dataset>",
        ),
    ):
        if given and not fits and (kind in ("builtin", "custom", "hf") or source in HUB):
            wrong = f"{key} belongs to {owners}; data.source is {source!r}"
            raise ValueError(f"{wrong}. Leave it out, or change the source.")


def _hub_text(row: HubText, split: str | None, *, allow_download: bool) -> Documents:
    """From the files of the row, if the hub's cache has them; else what `datasets` itself has kept."""
    datasets = _datasets(row.name)
    wanted = split or row.split
    about = f"{row.hub_id}{f' ({row.config})' if row.config else ''}, {wanted}"
    if wanted == row.split:
        folder = _snapshot(row.hub_id, row.files, allow_download=allow_download)
        files = sorted(str(file) for pattern in row.files for file in folder.glob(pattern)) if folder else []
        if files:
            builder = "parquet" if files[0].endswith(".parquet") else "json"
            with quiet_datasets(datasets):
                rows = datasets.load_dataset(builder, data_files=files, split="train", streaming=True)
            return Documents(row.name, _documents(row.name, rows, TEXT_COLUMN), row.running, about)
    rows = _load(datasets, row.name, row.hub_id, row.config, wanted, allow_download=allow_download)
    return Documents(row.name, _documents(row.name, rows, TEXT_COLUMN), row.running, about)


def _hub_dataset(source: str, rest: str, text_column: str, split: str | None, *, allow_download: bool) -> Documents:
    name, _, config = rest.partition(":")
    datasets = _datasets(source)
    path = Path(os.path.expanduser(name))
    wanted = split or "train"
    if not path.is_dir():
        if name.startswith((".", "/", "~")):
            raise ValueError(f"data {source!r}: the folder does not exist (looked for {path.absolute()}).")
        path = (None if allow_download else _snapshot(name, None, allow_download=False)) or path
    found = str(path) if path.is_dir() else name
    rows = _load(datasets, source, found, config or None, wanted, allow_download=allow_download)
    about = f"{name}{f' ({config})' if config else ''}, {wanted}"
    return Documents(source, _documents(source, rows, text_column), False, about)


def _datasets(source: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"data {source!r} needs the package datasets, which is not installed: pip install 'quant-probe[data]'. "
            "Without it: data.source builtin, or custom:/path of a txt, json, jsonl or csv file."
        ) from None
    return datasets


def _snapshot(hub_id: str, files: tuple[str, ...] | None, *, allow_download: bool) -> Path | None:
    """The folder of a dataset in the hub's cache; None if it is not there."""
    from huggingface_hub import snapshot_download

    patterns, local = list(files) if files else None, not allow_download
    try:
        return Path(snapshot_download(hub_id, repo_type="dataset", allow_patterns=patterns, local_files_only=local))
    except Exception:  # of any kind: `_load`, which is tried next, says what is wrong
        return None


def _load(datasets: Any, source: str, path: str, config: str | None, split: str, *, allow_download: bool) -> Any:
    local = Path(path).is_dir()
    try:
        with quiet_datasets(datasets, offline=not allow_download and not local):
            return datasets.load_dataset(path, config, split=split, streaming=allow_download and not local)
    except Exception as problem:
        if local or allow_download:
            raise ValueError(
                f"data {source!r}: datasets {datasets.__version__} cannot read {path!r}: {describe_error(problem)} "
                f"Check the name, the configuration ({config or 'none'}) and data.split ({split})."
            ) from problem
        raise ValueError(
            f"data {source!r} is not in the local cache of the hub ({path}), and downloading is off. Allow it with "
            f"--allow-download, fetch it where there is a network (hf download --repo-type dataset {path}), or take "
            "data.source builtin or custom:/path."
        ) from problem


def _documents(source: str, rows: Iterable[Mapping[str, Any]], column: str) -> Iterator[str]:
    """The texts of a column, those that are empty left out."""
    return filter(str.strip, column_texts(f"data {source!r}", rows, column, skip_null=False))
