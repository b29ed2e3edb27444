from pathlib import Path

import pytest

from probe.activations.run import Analysis
from probe.report.activations.files import write_analysis
from tests.report.activations.analysed import found, quiet


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Analysis, Path]:
    folder = tmp_path_factory.mktemp("run")
    analysis = found(**{"visualization.save_dir": folder, "model.name": "<script>alert(1)</script> toy"})
    write_analysis(analysis, progress=quiet)
    return analysis, folder
