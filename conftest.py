"""Settings for every test of the project."""

import importlib.util
import os
from collections.abc import Generator
from typing import Any

import pytest

pytest_plugins = [
    "probe.plugin",  # also works if it is not installed
    *("pytester", "tests.faults.kills", "tests.plugin.warm_workers"),
]

#: What tests may import beside the run-time packages (the extra `test`). A test file that needs one which is not
#: installed is skipped, with its name, so that the gate and `-k` run without them; in CI it is an error as ever.
EXTRAS = (
    *("hypothesis", "ml_dtypes", "gfloat", "selenium", "torchao", "datasets", "pyarrow", "zstandard"),
    *("accelerate", "onnx", "onnxruntime", "pytest_forked", "pytest_rerunfailures"),
    *("gguf", "optimum", "compressed_tensors", "ray", "psutil"),
)
#: Tests that share a Ray cluster.
ON_RAY = tuple(f"tests/engines/test_{name}.py" for name in ("cluster", "commands_on_engines", "engines", "gate_on_ray"))
MISSING = [name for name in EXTRAS if not importlib.util.find_spec(name)]

if "hypothesis" not in MISSING:
    from hypothesis import settings

    settings.register_profile("probe", deadline=None, derandomize=True, max_examples=60)
    settings.load_profile("probe")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # xdist runs one process per core already
        import torch

        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True, optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """As the plugin's own, but one worker runs all tests that share a Ray cluster: a second cluster costs a minute."""
    from probe.plugin.scheduling import RecipeScheduling

    class Scheduling(RecipeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ray" if nodeid.startswith(ON_RAY) else super()._split_scope(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_report_header() -> str | None:
    if not MISSING:
        return None
    then = "an error, since CI is set" if os.environ.get("CI") else "skipped"
    return f"not installed: {', '.join(MISSING)}; test files that import them are {then}: pip install -e '.[test]'"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    call = getattr(report, "call", None)
    cause = call.excinfo.value.__cause__ if call is not None and call.excinfo is not None else None
    name = str(cause.name).partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
    if name in MISSING and not os.environ.get("CI"):
        report.outcome = "skipped"
        report.longrepr = (str(collector.path), 1, f"Skipped: needs {name}, which is not installed")
    return report


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def torch_threads(request: pytest.FixtureRequest) -> Generator[int]:
    """The threads that torch may use, one and then two, for tests of twins that divide the work among threads."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)
