"""Where the files of a tensor go: a folder by its name, and never one that holds another tensor's results."""

import json
from pathlib import Path

from probe.files.paths import check_outputs
from probe.scaling.inputs import Source

DEFAULT = Path("draw") / "scaling_analysis"


class Places:
    """Hands out folders. By default draw/scaling_analysis/<name>; under an output folder <name>, or, for a tensor
    alone, that folder itself. Where another input's results lie already the next free of <name>_2, <name>_3 is taken.
    """

    def __init__(self, output_dir: Path | None, *, alone: bool) -> None:
        self.root = DEFAULT if output_dir is None else output_dir
        check_outputs(folders=[self.root])
        self._itself = output_dir is not None and alone
        self._taken: set[Path] = set()

    def folder_for(self, source: Source) -> Path:
        """A folder that is this input's alone."""
        if self._itself and self._is_free(self.root, source):
            return self.root
        number, folder = 1, self.root / source.name
        while folder in self._taken or not self._is_free(folder, source):
            number += 1
            folder = self.root / f"{source.name}_{number}"
        self._taken.add(folder)
        return folder

    def _is_free(self, folder: Path, source: Source) -> bool:
        if not folder.exists():
            return True
        if not folder.is_dir():
            return False
        return all(_identity_in(file) == source.identity for file in folder.glob("mxfp_scaling_results_*.json"))


def _identity_in(file: Path) -> str:
    try:
        return str(json.loads(file.read_text()).get("identity"))
    except (OSError, ValueError, AttributeError):
        return ""
