"""Names that are safe in paths, files that stay in their folder, outputs that are checked before the work."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from probe.files.defects import DefectError
from probe.files.paths import check_outputs, file_inside, safe_name
from tests.files.accidents import read_only


@pytest.mark.parametrize(
    ("name", "safe"),
    [("a/b c", "a_b_c"), ("..", "_"), (".", "_"), ("", "_"), (".hidden", "hidden"), ("ü$", "__"), ("a-b.c", "a-b.c")],
)
def test_names_never_become_paths_unchecked(name: str, safe: str) -> None:
    assert safe_name(name) == safe


def test_a_file_stays_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "x").touch()
    (folder / "sub" / "y").touch()
    (tmp_path / "outside").touch()
    assert file_inside(folder, "x") == folder / "x"
    assert file_inside(folder, "sub/y") == folder / "sub" / "y"
    (tmp_path / "link").symlink_to("folder")
    assert file_inside(tmp_path / "link", "x").read_bytes() == b"", "the folder itself may be a link"
    (folder / "out").symlink_to("../outside")
    for name in ("out", "../outside"):
        with pytest.raises(DefectError, match=r"is a link to .*/outside, which is not in the folder"):
            file_inside(folder, name)
    for name in ("missing", "sub"):
        with pytest.raises(DefectError, match="is missing, so the folder is not whole"):
            file_inside(folder, name)


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
