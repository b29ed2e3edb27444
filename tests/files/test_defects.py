"""A defect of a file is one message: the file, what is wrong, what to do. Files stay in their folder."""

from pathlib import Path

import pytest

from probe.files.defects import DefectError, file_inside, parsing, reading

FILE = Path("folder/x.json")


class OwnError(ValueError):
    pass


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (DefectError("is empty"), r"^folder/x\.json: is empty\. Make it again\.$"),
        (DefectError("is new", remedy="Upgrade probe."), r"^folder/x\.json: is new\. Upgrade probe\.$"),
        (DefectError("holds \x1b[2J\n"), r"^folder/x\.json: holds \\x1b\[2J\\n\. Make it again\.$"),
        (PermissionError(13, "Permission denied"), r"^folder/x\.json: cannot be read: Permission denied\. Make it"),
        (OSError("odd"), r"^folder/x\.json: cannot be read: odd\. Make it again\.$"),
    ],
)
def test_a_defect_is_an_error_of_the_caller(problem: Exception, message: str) -> None:
    with pytest.raises(OwnError, match=message), reading(FILE, OwnError, remedy="Make it again."):
        raise problem


def test_other_errors_are_not_taken_for_defects() -> None:
    with pytest.raises(KeyError), reading(FILE, OwnError, remedy=""):
        raise KeyError
    with pytest.raises(OwnError, match=r"^its own$"), reading(FILE, OwnError, remedy=""):
        raise OwnError("its own")


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        (ValueError("a\n  b"), r"^is not a picture that can be read \(a b\)$"),
        (EOFError(), r"^is not a picture that can be read \(EOFError\)$"),
        (RuntimeError("x" * 500), r"^is not a picture that can be read \(x{157}\.\.\.\)$"),
        (DefectError("is upside down"), r"^is upside down$"),
    ],
)
def test_whatever_a_parser_raises_is_a_defect(problem: Exception, message: str) -> None:
    with pytest.raises(DefectError, match=message), parsing("a picture"):
        raise problem


def test_a_refusal_of_the_system_is_no_defect_of_the_content() -> None:
    with pytest.raises(FileNotFoundError), parsing("a picture"):
        raise FileNotFoundError


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
