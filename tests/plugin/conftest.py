"""A repository to run pytest in, in this process: torch is loaded already."""

import shutil
import sys
from collections.abc import Callable, Iterator

import pytest

from probe.gate import matrix
from probe.running.modes import MODES
from tests.plugin.project import LAYERS_ONLY, files
from tests.plugin.warm_workers import Nursery, warm_workers

QUIET = ("-W", "ignore::pytest.PytestAssertRewriteWarning", "-p", "no:rerunfailures", "-p", "no:pytest_forked")
Run = Callable[..., pytest.RunResult]
#: Plugins that take every worker a second to load.
UNUSED = ("-p", "no:hypothesispytest", "-p", "no:anyio")


@pytest.fixture
def without() -> str | None:
    """What the project leaves out beside its layers; None in modules that are about these cases too."""
    return LAYERS_ONLY


@pytest.fixture
def project(
    pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
    nursery: Callable[[], Nursery],
    without: str | None,
) -> Iterator[Run]:
    """`project(*arguments, fault=..., ...)` writes the repository anew and runs pytest in it.

    With `workers` xdist starts so many processes, of which this one is the controller. With `cached` pytest remembers
    what failed. `after` changes the files once more, before pytest runs.
    """
    monkeypatch.delenv("CI", raising=False)
    # pytester forgets what a run inside it loads; transformers and matplotlib, half forgotten, do not work again
    monkeypatch.setattr("_pytest.pytester.SysModulesSnapshot.restore", lambda self: None)
    pytester.syspathinsert()
    known = set(MODES)

    def run(
        *arguments: str,
        subprocess: bool = False,
        workers: int = 0,
        cached: bool = False,
        after: Callable[[], None] = lambda: None,
        **changed: object,
    ) -> pytest.RunResult:
        for name, text in files(**{"without": without, **changed}).items():  # type: ignore[arg-type]
            path = pytester.path / name
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        after()
        # Python takes a .pyc of the same second and size for current: "both" rewritten as "half" would run as "both"
        for cache in pytester.path.rglob("__pycache__"):
            shutil.rmtree(cache)
        forget()
        options = QUIET if cached else (*QUIET, "-p", "no:cacheprovider")
        if subprocess:
            return pytester.runpytest_subprocess(*options, *arguments)
        if not workers:
            return pytester.runpytest_inprocess(*options, "-p", "no:xdist", *arguments)
        with warm_workers(nursery()):
            return pytester.runpytest_inprocess(*options, "-n", str(workers), *UNUSED, *arguments)

    def forget() -> None:
        for name in set(MODES) - known:
            del MODES[name]
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(str(pytester.path)):
                del sys.modules[name]
        matrix._load.cache_clear()

    yield run
    forget()
