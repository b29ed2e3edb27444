"""Nothing passes that was not looked at: every row of the catalogue, in one process and with two workers."""

import json
import os
import shutil
from pathlib import Path

import pytest

from tests.plugin.conftest import Run
from tests.plugin.wrong_passes import CATALOGUE, WrongPass


@pytest.fixture(scope="module")
def baselines(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the first row leaves the baselines of the project, for all others."""
    return tmp_path_factory.mktemp("baselines")


def break_project(row: WrongPass, folder: Path) -> None:
    """Change the files and the stored baselines as the row says."""
    for name, text in row.files.items():
        file = folder / name
        if text is None:
            file.unlink()
        else:
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
    link = folder.with_name(f"{folder.name}-link")
    if not link.exists():
        link.symlink_to(folder)
    (model,) = (folder / "baselines").iterdir()
    for name in row.stored:
        as_device = name == "cuda"
        there, copied = (model / "cpu", model / name) if as_device else (model, model.with_name(name))
        shutil.copytree(there, copied)
        for file in copied.rglob("*.json"):
            content = json.loads(file.read_text())
            content["device" if as_device else "model"] = name
            content.pop("tests") if not as_device else None
            file.write_text(json.dumps(content) + "\n")
    for name in row.deleted:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    os.chdir(folder / row.folder)


@pytest.mark.parametrize("workers", [0, 2], ids=["alone", "two workers"])
@pytest.mark.parametrize("name", CATALOGUE)
def test_it_fails_or_is_named(
    name: str, workers: int, project: Run, pytester: pytest.Pytester, baselines: Path
) -> None:
    row = CATALOGUE[name]
    if workers and row.serial_only:
        pytest.skip("xdist does not take this way")
    stored = baselines / "baselines"
    if not stored.exists():
        assert project("--update-baselines").ret == 0
        shutil.copytree(pytester.path / "baselines", stored)
    elif not (pytester.path / "baselines").exists():
        shutil.copytree(stored, pytester.path / "baselines")
        project("--collect-only", "-q")  # writes the files
    changed = {"fault": row.fault, "hooks": row.hooks, **row.settings}
    arguments = [one.format(link=f"{pytester.path}-link") for one in row.arguments]
    result = project(*arguments, workers=workers, after=lambda: break_project(row, pytester.path), **changed)
    text = result.stdout.str()
    assert result.ret == (2 if workers and row.ends_early else row.exit_status), text
    result.stdout.fnmatch_lines(list(row.said))
    assert "stored cases compared" in text
