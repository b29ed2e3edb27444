"""The import rules of the design: who may know whom."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "probe"
MODULES = sorted(ROOT.rglob("*.py"))
DOORS = {"probe.commands", "probe.plugin"}
HEAVY = {"torch", "numpy", "transformers", "matplotlib", "pytest"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """What a module imports; with `top_only`, when it is loaded (not inside functions or TYPE_CHECKING)."""
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_only else list(ast.walk(tree))
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def tops(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("path", [p for p in MODULES if "quantizers" in p.parts], ids=name_of)
def test_numerics_never_import_pytest_matplotlib_or_transformers(path: Path) -> None:
    assert not tops(imports(path)) & {"pytest", "matplotlib", "transformers"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_imports_the_doors(path: Path) -> None:
    own = {door for door in DOORS if name_of(path).startswith(door)}
    assert not imports(path) & (DOORS - own)


@pytest.mark.parametrize(
    "path",
    [*(ROOT / f"{name}.py" for name in ("__init__", "formats", "names", "version")), *(ROOT / "cli").glob("*.py")],
    ids=name_of,
)
def test_the_way_to_help_loads_nothing_heavy(path: Path) -> None:
    assert not tops(imports(path, top_only=True)) & HEAVY


def test_the_reference_does_not_lean_on_its_fast_twin() -> None:
    for name in ("reference", "rounding", "blocks"):
        assert not any("fast" in found or "compiled" in found for found in imports(ROOT / "quantizers" / f"{name}.py"))


def test_no_public_name_is_also_the_name_of_a_module() -> None:
    """Importing the module would put it in the place of the function."""
    import probe

    modules = {path.stem for path in ROOT.glob("*.py")} | {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert not modules & set(probe.__all__)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_plugin_knows_pytest_and_only_the_report_draws(path: Path) -> None:
    known = tops(imports(path))
    assert "plugin" in path.parts or not known & {"pytest", "xdist", "pytest_html"}
    assert "report" in path.parts or "matplotlib" not in known


LIGHT = (
    *("plugin/__init__", "plugin/controller", "gate/__init__"),
    *("gate/configuration", "gate/session", "gate/cases", "gate/outcomes"),
)


@pytest.mark.parametrize("name", LIGHT)
def test_a_pytest_run_without_a_case_loads_nothing_heavy(name: str) -> None:
    assert not tops(imports(ROOT / f"{name}.py", top_only=True)) & (HEAVY - {"pytest"})
