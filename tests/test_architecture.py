"""The import rules of the design: the layers of probe/, who may load what, and who may write to disk."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "probe"
MODULES = sorted(ROOT.rglob("*.py"))

#: Every package and top-level module of probe, from the bottom up. A row imports only from the rows above it: not from
#: its own row, not from below. `probe/__init__.py` is the front door and only re-exports.
LAYERS = (
    ("version", "formats", "words", "interrupts"),
    ("files", "settings"),
    ("numerics",),  # which keeps machine code on disk
    ("metrics", "engines"),
    ("data",),
    ("models",),  # a loaded model has a tokenizer, which is data
    ("running",),
    ("diagnosis", "recordings"),
    ("scaling", "activations", "sensitivity", "comparisons", "gate"),
    ("report",),
    ("commands", "plugin"),  # the two doors
)
LEVEL = {room: level for level, row in enumerate(LAYERS) for room in row}

HEAVY = {"torch", "numpy", "numba", "transformers", "matplotlib", "pytest"}
#: Calls that create, replace or rename files. `files` has them all.
WRITERS = {
    *("write_text", "write_bytes", "touch", "rename", "symlink_to", "hardlink_to", "tofile", "memmap"),
    *(
        "save_file",
        "serialize_file",
        "savez",
        "savez_compressed",
        "savetxt",
        "copyfile",
        "copy2",
        "copytree",
        "mkstemp",
    ),
    *("NamedTemporaryFile",),
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """The package or top-level module of probe that a module lies in."""
    return [*module.split("."), ""][1]


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


def test_every_package_has_its_layer() -> None:
    rooms = {room_of(name_of(path)) for path in MODULES} - {""}
    assert rooms == set(LEVEL), "a package of probe/ and the list LAYERS differ"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if path.parent != ROOT or path.stem != "__init__"], ids=name_of
)
def test_a_package_imports_only_from_the_layers_above_it(path: Path) -> None:
    own = room_of(name_of(path))
    rooms = {room_of(name) for name in imports(path) if name.startswith("probe.")} - {own, ""}
    wrong = sorted(room for room in rooms if room in LEVEL and LEVEL[room] >= LEVEL[own])
    assert not wrong, f"{name_of(path)} (layer {LEVEL[own]}) imports {wrong}"


@pytest.mark.parametrize(
    "path", [path for path in MODULES if room_of(name_of(path)) in ("numerics", "metrics")], ids=name_of
)
def test_numerics_and_metrics_never_import_pytest_matplotlib_or_transformers(path: Path) -> None:
    assert not tops(imports(path)) & {"pytest", "matplotlib", "transformers"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_only_the_plugin_knows_pytest_and_only_the_report_draws(path: Path) -> None:
    known, room = tops(imports(path)), room_of(name_of(path))
    assert room == "plugin" or not known & {"pytest", "xdist", "pytest_html"}
    assert room == "report" or "matplotlib" not in known


def written(tree: ast.AST) -> Iterator[str]:
    """The calls of a module that write to disk."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        owner = (
            function.value.id if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name) else ""
        )
        position = 0 if isinstance(function, ast.Attribute) else 1  # path.open(mode), open(file, mode)
        modes = [*node.args[position : position + 1], *(k.value for k in node.keywords if k.arg == "mode")]
        is_open_for_writing = name == "open" and any(
            isinstance(mode, ast.Constant) and set("wax+") & set(str(mode.value)) for mode in modes
        )
        moves = (owner == "os" and name in ("replace", "rename", "link", "open")) or (
            owner in ("torch", "np", "numpy") and name == "save"
        )
        is_path_replace = name == "replace" and len(node.args) == 1 and not node.keywords and owner != "dataclasses"
        if name in WRITERS or is_open_for_writing or moves or is_path_replace:
            yield f"line {node.lineno}: {name}"


@pytest.mark.parametrize("path", [path for path in MODULES if room_of(name_of(path)) != "files"], ids=name_of)
def test_only_files_writes_to_disk(path: Path) -> None:
    assert not list(written(ast.parse(path.read_text())))


@pytest.mark.parametrize(
    "code",
    [
        'open("a", "w")',
        'open("a", mode="ab")',
        'path.open("x")',
        "os.replace(a, b)",
        "os.open(a, flags)",
        'path.write_text("")',
        "partial.replace(file)",
        "torch.save(tensor, file)",
        "np.save(file, array)",
        "save_file(tensors, file)",
    ],
)
def test_a_write_is_recognised(code: str) -> None:
    assert list(written(ast.parse(code)))


@pytest.mark.parametrize("code", ['open("a", "rb")', 'text.replace("a", "b")', "replace(value, a=1)", 'open("w")'])
def test_a_read_is_not_a_write(code: str) -> None:
    assert not list(written(ast.parse(code)))


@pytest.mark.parametrize(
    "path",
    [
        *(ROOT / f"{name}.py" for name in ("__init__", "formats", "words", "version", "interrupts")),
        *(ROOT / "commands").glob("*.py"),
    ],
    ids=name_of,
)
def test_the_way_to_help_loads_nothing_heavy(path: Path) -> None:
    assert not tops(imports(path, top_only=True)) & HEAVY


def test_the_reference_does_not_lean_on_its_fast_twin() -> None:
    for name in ("reference", "rounding", "blocks"):
        assert not any("fast" in found or "compiled" in found for found in imports(ROOT / "numerics" / f"{name}.py"))


def test_no_public_name_is_also_the_name_of_a_module() -> None:
    """Importing the module would put it in the place of the function."""
    import probe

    modules = {path.stem for path in ROOT.glob("*.py")} | {path.name for path in ROOT.iterdir() if path.is_dir()}
    assert not modules & set(probe.__all__)


def test_every_public_name_can_be_imported() -> None:
    import probe

    assert len(probe.__all__) > 60
    assert all(hasattr(probe, name) for name in probe.__all__)


LIGHT = (
    *("plugin/__init__", "plugin/controller", "gate/__init__"),
    *("gate/configuration", "gate/session", "gate/cases"),
)


@pytest.mark.parametrize("name", LIGHT)
def test_a_pytest_run_without_a_case_loads_nothing_heavy(name: str) -> None:
    assert not tops(imports(ROOT / f"{name}.py", top_only=True)) & (HEAVY - {"pytest"})


def test_the_tests_are_the_same_tree() -> None:
    """A folder of tests/ is a package of probe/, or one of those that test no package."""
    folders = {path.name for path in (ROOT.parent / "tests").iterdir() if (path / "__init__.py").exists()}
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert folders - packages == {"families", "faults", "fuzz", "regression", "training"}
    assert packages - folders == set()
