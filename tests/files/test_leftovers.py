"""A folder holds one run: what an earlier run wrote there goes, and nothing else."""

import hashlib
import json
from pathlib import Path

import pytest

from probe.files.atomic import write
from probe.files.leftovers import LIST, replacing_earlier_files


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
