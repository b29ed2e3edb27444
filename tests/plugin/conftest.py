"""A repository to run pytest in, in this process: torch is loaded already."""

import sys
from collections.abc import Callable, Iterator

import pytest

from probe.gate import bench
from probe.running.modes import MODES
from tests.plugin.project import files

QUIET = ("-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning")
Run = Callable[..., pytest.RunResult]
#: Plugins that take every worker a second to load.
UNUSED = ("-p", "no:hypothesispytest", "-p", "no:anyio")


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """`project(*arguments, fault=..., ...)` writes the repository anew and runs pytest in it.

    With `workers` xdist starts so many processes, of which this one is the controller.
    """
    monkeypatch.delenv("CI", raising=False)
    # pytester forgets what a run inside it loads; transformers and matplotlib, half forgotten, do not work again
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", lambda self: None)
    pytester.syspathinsert()
    known = set(MODES)

    def run(*arguments: str, subprocess: bool = False, workers: int = 0, **changed: object) -> pytest.RunResult:
        for name, text in files(**changed).items():  # type: ignore[arg-type]
            path = pytester.path / name
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        forget()
        if subprocess:
            return pytester.runpytest_subprocess(*QUIET, *arguments)
        xdist = ("-n", str(workers), *UNUSED) if workers else ("-p", "no:xdist")
        return pytester.runpytest_inprocess(*QUIET, *xdist, *arguments)

    def forget() -> None:
        for name in set(MODES) - known:
            del MODES[name]
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(pytester.path)):
                del sys.modules[name]
        bench._load.cache_clear()

    yield run
    forget()
