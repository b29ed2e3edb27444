"""Safe names, outputs that are checked before the work, and the files of an earlier run in the same folder."""

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from probe.files.atomic import write
from probe.files.paths import LIST, check_outputs, replacing_earlier_files, safe_name
from tests.files.accidents import read_only


@pytest.mark.parametrize(
    ("name", "safe"),
    [("a/b c", "a_b_c"), ("..", "_"), (".", "_"), ("", "_"), (".hidden", "hidden"), ("ü$", "__"), ("a-b.c", "a-b.c")],
)
def test_names_never_become_paths_unchecked(name: str, safe: str) -> None:
    assert safe_name(name) == safe


def test_outputs_are_tried_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    check_outputs(files=[None, "-", tmp_path / "file", tmp_path / "a" / "x.json"], folders=[None, tmp_path / "b" / "c"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"
    with pytest.raises(ValueError, match=r"cannot write \S+: it is a folder\. Give the name of a file\."):
        check_outputs(files=[tmp_path])
    with pytest.raises(
        ValueError, match=r"cannot write to \S+/file/x: \S+/file is a file, not a folder\. Give a folder"
    ):
        check_outputs(folders=[tmp_path / "file" / "x"])
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_without_permission_is_refused() -> None:
    message = r"cannot write \S+/x: permission denied\. Give a file in a folder that can be written\."
    with TemporaryDirectory() as name, read_only(Path(name)), pytest.raises(ValueError, match=message):
        check_outputs(files=[Path(name) / "x"])


# ----------------------------------------------------------------------------------------- files of earlier runs


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {LIST}


def fill(folder: Path, **texts: str) -> None:
    with replacing_earlier_files(folder, progress=print) as written:
        written += [write(folder / name, text) for name, text in texts.items()]


def test_what_somebody_changed_stays_and_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fill(tmp_path, a="1", b="2")
    (tmp_path / "a").write_text("1, and a remark of my own")
    fill(tmp_path, c="3")
    assert names(tmp_path) == {"a", "c"}
    assert "a is of an earlier run, and stays since it was changed" in capsys.readouterr().out
    fill(tmp_path, a="4")
    assert names(tmp_path) == {"a"}


def test_a_run_that_fails_deletes_nothing_and_the_next_one_knows_of_both(tmp_path: Path) -> None:
    def fail() -> None:
        with replacing_earlier_files(tmp_path, progress=print) as written:
            written.append(write(tmp_path / "c", "3"))
            raise KeyboardInterrupt

    fill(tmp_path, a="1", b="2")
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert names(tmp_path) == {"a", "b", "c"}
    fill(tmp_path, d="4")
    assert names(tmp_path) == {"d"}


@pytest.mark.parametrize("text", ["[]", "{", '{"../outside": "MINE"}', '{"sub/inside": "MINE", "no": "MINE"}', '"x"'])
def test_a_list_that_somebody_edited_deletes_nothing(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "run"
    (folder / "sub").mkdir(parents=True)
    for path in (tmp_path / "outside", folder / "sub" / "inside", folder / "own"):
        path.write_text("mine")
    (folder / LIST).write_text(text.replace("MINE", hashlib.sha256(b"mine").hexdigest()))
    fill(folder, a="1")
    assert sorted(path.name for path in tmp_path.rglob("*")) == [LIST, "a", "inside", "outside", "own", "run", "sub"]
    assert list(json.loads((folder / LIST).read_text())) == ["a"]
