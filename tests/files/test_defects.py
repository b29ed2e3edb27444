"""A defect of a file is one message: the file, what is wrong, what to do."""

from pathlib import Path

import pytest

from probe.files.defects import DefectError, parsing, reading

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
