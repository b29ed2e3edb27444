"""Promises of the data sources: what a name means, where it is read from, what is said when it is not there."""

import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from probe.data.samples import batches_of, samples_of
from probe.data.sources import HUB, Documents, documents_of
from probe.data.texts import read_texts
from probe.data.tokenizers import ByteTokenizer

TEXTS = ["first text", "second, longer text", "third"]
ROWS = [{"text": text, "title": text.upper()} for text in TEXTS]


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    lines = [",".join(rows[0]), *(",".join(f'"{value}"' for value in row.values()) for row in rows)]
    path.write_text("\n".join(lines), encoding="utf-8-sig")


WRITERS: dict[str, Callable[[Path, list[dict[str, Any]]], Any]] = {
    "json": lambda path, rows: path.write_text(json.dumps(rows)),
    "jsonl": lambda path, rows: path.write_text("\n".join(map(json.dumps, rows)) + "\n\n"),
    "csv": write_csv,
    "parquet": write_parquet,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_format_gives_the_same_documents(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path / f"own.{kind}", ROWS)
    assert read_texts(tmp_path / f"own.{kind}", format=None, text_column="text") == (TEXTS, False)
    assert read_texts(tmp_path / f"own.{kind}", format=None, text_column="title")[0][0] == "FIRST TEXT"
    (tmp_path / f"own.{kind}").rename(tmp_path / "odd.name")
    assert read_texts(tmp_path / "odd.name", format=kind, text_column="text")[0] == TEXTS


def test_a_column_that_nothing_is_like_is_told_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("id,words\n1,two\n")
    with pytest.raises(ValueError, match=r"has no column 'body'\. It has: id, words\. Choose"):
        documents_of(f"custom:{tmp_path / 'x.csv'}", text_column="body")


@pytest.mark.parametrize(
    ("source", "given", "key"),
    [
        ("builtin", {"split": "test"}, r"data\.split belongs to datasets of the hub: pile, wikitext2"),
        ("custom:x.csv", {"split": "test"}, r"data\.split belongs to"),
        (
            "builtin",
            {"format": "csv"},
            r"data\.custom\.format belongs to a file, custom:/path; data.source is 'builtin'",
        ),
        ("hf:some/set", {"format": "csv"}, r"data\.custom\.format belongs to"),
        ("builtin", {"text_column": "zzz"}, r"data\.custom\.text_column belongs to custom:/path of a json, jsonl"),
        ("c4", {"text_column": "zzz"}, r"data\.custom\.text_column belongs to"),
        ("custom:x.txt", {"text_column": "zzz"}, r"data\.custom\.text_column belongs to"),
        ("custom:x.csv", {"format": "txt", "text_column": "zzz"}, r"data\.custom\.text_column belongs to"),
    ],
)
def test_a_key_of_another_source_is_refused_not_ignored(source: str, given: dict[str, str], key: str) -> None:
    with pytest.raises(ValueError, match=key):
        documents_of(source, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_missing_column_offers_the_nearest(tmp_path: Path, kind: str) -> None:
    WRITERS[kind](tmp_path / f"own.{kind}", ROWS)
    with pytest.raises(
        ValueError, match=r"has no column 'titel'\. Did you mean 'title'\? It has: text, title\. Choose"
    ):
        read_texts(tmp_path / f"own.{kind}", format=None, text_column="titel")


def test_txt_is_one_running_text_and_json_has_three_shapes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("été\n")
    assert read_texts(tmp_path / "a.txt", format=None, text_column="x") == (["été\n"], True)
    for shape in (TEXTS, ROWS, {"text": TEXTS, "more": 1}):
        (tmp_path / "a.json").write_text(json.dumps(shape))
        assert read_texts(tmp_path / "a.json", format=None, text_column="text")[0] == TEXTS
    (tmp_path / "a.jsonl").write_text('"one"\n"two"')
    assert read_texts(tmp_path / "a.jsonl", format=None, text_column="text")[0] == ["one", "two"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", "[", r"a\.json' is not JSON: .* its format is jsonl"),
        ("a.json", "3", r"a\.json' holds int; expected a list of texts or objects"),
        ("a.json", "[3]", r"a\.json', row 1: column 'text' holds int; expected text"),
        ("a.jsonl", '"good"\n{', r"a\.jsonl', line 2 is not JSON"),
        ("a.txt", "  \n", r"a\.txt' is empty: it holds no text"),
        ("a.jsonl", "", r"a\.jsonl' is empty: it holds no text"),
        ("a.csv", "text\n", r"a\.csv' is empty: it holds no text"),
        ("a.csv", "", r"a\.csv' is empty: it holds no text"),
        ("a.parquet", "no", r"a\.parquet' is not parquet"),
        (
            "a.html",
            "x",
            r"its name does not say which format it has\. Say it with data\.custom\.format: txt, json, jsonl",
        ),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        read_texts(tmp_path / name, format=None, text_column="text")


def test_files_that_are_not_there_or_not_text(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"no\.txt' does not exist \(looked for /.*\)\. Expected custom:/path of a txt"
    ):
        documents_of(f"custom:{tmp_path}/no.txt")
    with pytest.raises(ValueError, match="is a folder"):
        documents_of(f"custom:{tmp_path}")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 ")
    with pytest.raises(ValueError, match=r"latin.txt' is not UTF-8: byte 3 is 0xe9"):
        documents_of(f"custom:{tmp_path}/latin.txt")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.parquet").write_text("x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        ValueError, match=r"needs the package pyarrow, which comes with: pip install 'quant-probe\[data\]'"
    ):
        read_texts(tmp_path / "a.parquet", format=None, text_column="text")


def test_unknown_sources() -> None:
    with pytest.raises(
        ValueError, match=r"unknown data source 'wikitext'\. Did you mean 'wikitext2'\? Known: builtin, pile"
    ):
        documents_of("wikitext")
    with pytest.raises(ValueError, match=r"unknown data source 'hf:'"):
        documents_of("hf:")
    with pytest.raises(ValueError, match=r"Did you mean 'custom:.*test_sources\.py'\?"):
        documents_of(__file__)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and of datasets; no network."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "arrow")
    (tmp_path / "hub").mkdir()
    return tmp_path / "hub"


def snapshot(hub: Path, hub_id: str) -> Path:
    """A folder in the layout of the hub's cache."""
    repository = hub / f"datasets--{hub_id.replace('/', '--')}"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    (repository / "snapshots" / revision).mkdir(parents=True)
    return repository / "snapshots" / revision


def put(folder: Path, name: str) -> None:
    lines = "\n".join(map(json.dumps, ROWS)).encode()
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    if name.endswith(".zst"):
        target.write_bytes(zstandard.compress(lines))
    elif name.endswith(".gz"):
        target.write_bytes(gzip.compress(lines))
    elif name.endswith(".parquet"):
        write_parquet(target, [{"text": f" = {text} = \n"} for text in TEXTS] + [{"text": ""}])
    else:
        target.write_bytes(lines)


FILES = {
    "pile": "val.jsonl.zst",
    "wikitext2": "wikitext-2-raw-v1/train-00000-of-00001.parquet",
    "c4": "en/c4-train.00000-of-01024.json.gz",
    "redpajama": "arxiv_sample.jsonl",
}


@pytest.mark.parametrize("name", HUB)
def test_a_builtin_name_is_read_from_the_cache_of_the_hub(name: str, hub: Path) -> None:
    put(snapshot(hub, HUB[name].hub_id), FILES[name])
    documents = documents_of(name)
    found = list(documents.texts)
    assert found == ([f" = {text} = \n" for text in TEXTS] if name == "wikitext2" else TEXTS)
    assert documents.running == (name == "wikitext2"), "lines of one text, or documents"
    assert HUB[name].hub_id in documents.about


@pytest.mark.parametrize("name", [*HUB, "hf:someone/something"])
def test_a_hub_name_without_a_network_is_one_clear_message(name: str, hub: Path) -> None:
    with pytest.raises(
        ValueError, match=rf"data '{name}' is not in the local cache of the hub \(.*/.*\), and downloading"
    ) as caught:
        documents_of(name)
    for way in ("--allow-download", "hf download --repo-type dataset", "data.source builtin or custom:/path"):
        assert way in str(caught.value)


def test_a_cached_dataset_of_the_hub_by_its_id(hub: Path) -> None:
    put(snapshot(hub, "someone/something"), "en/train.jsonl")
    (snapshot_of := next(hub.rglob("snapshots/*"))).joinpath("README.md").write_text(
        "---\nconfigs:\n- config_name: english\n  data_files: en/train.jsonl\n---\n"
    )
    assert list(documents_of("hf:someone/something:english").texts) == TEXTS
    assert snapshot_of.is_dir()


@pytest.mark.parametrize("layout", ["data/train-00000-of-00001.parquet", "train.jsonl"])
def test_a_folder_in_the_layout_of_the_hub(tmp_path: Path, hub: Path, layout: str) -> None:
    put(tmp_path / "mine", layout)
    found = list(documents_of(f"hf:{tmp_path}/mine").texts)
    assert len(found) == 3
    assert "first text" in found[0]
    with pytest.raises(ValueError, match=r"cannot read '.*/mine': .* data\.split \(test\)"):
        documents_of(f"hf:{tmp_path}/mine", split="test")
    with pytest.raises(ValueError, match=r"has no column 'tekst'\. Did you mean 'text'\?"):
        list(documents_of(f"hf:{tmp_path}/mine", text_column="tekst").texts)
    with pytest.raises(ValueError, match=r"the folder does not exist \(looked for"):
        documents_of(f"hf:{tmp_path}/nowhere")


def test_a_null_in_a_dataset_of_the_hub_is_refused(tmp_path: Path, hub: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": null}\n')
    with pytest.raises(ValueError, match=r"^data 'hf:.*', row 2: column 'text' holds NoneType; expected text\.$"):
        list(documents_of(f"hf:{tmp_path}").texts)


def test_without_datasets_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(
        ValueError, match=r"'pile' needs the package datasets, .*: pip install 'quant-probe\[data\]'\. "
    ):
        documents_of("pile")


BYTES = ByteTokenizer()


def some(*texts: str, running: bool = False) -> Documents:
    return Documents("custom:x", texts, running, "x")


def decoded(documents: Documents, **sizes: int) -> list[str]:
    return [BYTES.decode(ids) for ids in samples_of(documents, BYTES, **sizes)]


def test_a_running_text_is_cut_into_windows_that_the_seed_chooses() -> None:
    text = some("abcdefghij", "klm", running=True)
    assert sorted(decoded(text, count=4, length=4, seed=0)) == ["abcd", "efgh", "ijkl", "m"]
    chosen = [tuple(decoded(text, count=2, length=4, seed=seed)) for seed in range(20)]
    assert len(set(chosen)) > 5
    assert chosen[3] == tuple(decoded(text, count=2, length=4, seed=3)), "the same seed, the same samples"


def test_of_documents_each_gives_one_sample() -> None:
    texts = some("abcdefghij", "XY", "0123456789")
    found = decoded(texts, count=3, length=4, seed=1)
    assert sorted(map(len, found)) == [2, 4, 4]
    assert all(any(sample in text for text in texts.texts) for sample in found)
    starts = {next(s for s in decoded(texts, count=3, length=4, seed=seed) if s[0].islower()) for seed in range(30)}
    assert len(starts) == 7, "a window may begin anywhere that leaves room"


def test_too_little_text_says_how_much_there_is() -> None:
    with pytest.raises(
        ValueError, match=r"too small for data\.num_samples 9: its 10 tokens make 3 samples of 4\. Give data"
    ):
        decoded(some("abcdefghij", running=True), count=9, length=4, seed=0)
    with pytest.raises(ValueError, match=r"data\.num_samples 9: it has 2 documents\. Give data\.num_samples 2 or less"):
        decoded(some("abc", "def"), count=9, length=4, seed=0)
    with pytest.raises(ValueError, match=r"data 'custom:x' is empty"):
        decoded(some(), count=1, length=4, seed=0)


def test_short_samples_are_padded_on_the_right_and_marked() -> None:
    first, second = batches_of([[1, 2, 3], [4], [5, 6]], batch_size=2, pad=True)
    assert first.tokens.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert first.mask.tolist() == [[True, True, True], [True, False, False]]
    assert (first.padded, second.padded, first.first, second.first) == (True, False, 0, 2)


def test_without_padding_a_batch_has_samples_of_one_length() -> None:
    batches = batches_of([[1, 2], [3, 4], [5], [6, 7], [8, 9], [1, 1]], batch_size=2, pad=False)
    assert [batch.tokens.tolist() for batch in batches] == [[[1, 2], [3, 4]], [[5]], [[6, 7], [8, 9]], [[1, 1]]]
    assert [batch.first for batch in batches] == [0, 2, 3, 5]
    assert not any(batch.padded for batch in batches)
