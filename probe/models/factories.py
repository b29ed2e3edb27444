"""Models made by a function, `package.module:factory`, and whether one that a file names may be called."""

import importlib
import importlib.machinery
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from probe.files.paths import content_digest
from probe.settings import FUNCTION
from probe.words import describe_error, near

if TYPE_CHECKING:
    from torch import nn

#: Folders of packages that are installed.
INSTALLED = {"site-packages", "dist-packages"}
#: What allows a factory outside of the project, in commands that have the option.
ALLOW = "allow it with --allow-factory (allow_factory=True in Python)"


def check_function(key: str, name: str) -> None:
    """Refuse what is not written as the name of a function."""
    if not FUNCTION.fullmatch(name):
        raise ValueError(f"{key} is {name!r}; expected package.module:function, which returns a list of batches.")


def check_factory(name: str, *, where: str, allow: str = ALLOW) -> None:
    """Refuse a factory that a file names (`where`) unless it lies in the project; what is no factory is fine.

    The project is the folder of the nearest pyproject.toml above the current folder, or the current folder, without
    packages that are installed below it. Nothing is imported to find out.
    """
    found = FUNCTION.fullmatch(name)
    if found and not _is_in_project(found[1].partition(".")[0]):
        raise ValueError(
            f"{where} is {name!r}, a function outside of this project, and files may come from anywhere. If you trust "
            f"it, {allow}."
        )


def _is_in_project(package: str) -> bool:
    here = Path.cwd()
    root = next((folder for folder in (here, *here.parents) if (folder / "pyproject.toml").is_file()), here)
    loaded = getattr(sys.modules.get(package), "__spec__", None)
    spec = loaded or importlib.machinery.PathFinder.find_spec(package)
    file = [spec.origin] if spec and spec.origin and spec.has_location else []  # frozen modules have none
    places = [*file, *(spec.submodule_search_locations or ())] if spec else []
    paths = [Path(place).resolve() for place in places]
    return bool(paths) and all(root.resolve() in path.parents and not INSTALLED & {*path.parts} for path in paths)


def loaded_code() -> dict[str, str]:
    """The files of all modules that are loaded and not installed, with the digests of their contents.

    Another machine that has the same runs the same functions of users.
    """
    own, standard = Path(__file__).parents[1], Path(sysconfig.get_path("stdlib"))
    found: dict[str, str] = {}
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        known = INSTALLED & {*file.parts} or own in file.parents or standard in file.parents
        if name != "__main__" and file.suffix == ".py" and file.is_file() and not known:
            found[os.path.abspath(file)] = content_digest(file)
    return found


def function_named(what: str, name: str, *, returns: str) -> Callable[[], Any]:
    """The function `package.module:function`, which is not called; `what` and `returns` are for the message."""
    module_name, _, attribute = name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except Exception as problem:
        raise ValueError(
            f"{what} {name!r}: module {module_name!r} cannot be imported: {describe_error(problem)} "
            "Expected package.module:function with the module installed or on PYTHONPATH."
        ) from problem
    found: Callable[[], Any] | None = getattr(module, attribute, None)
    if callable(found):
        return found
    public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    close = near(attribute, public, count=1)
    hint = f" Did you mean '{module_name}:{close[0]}'?" if close else ""
    wrong = f"{'has no' if found is None else 'has an uncallable'} {attribute!r}"
    raise ValueError(
        f"{what} {name!r}: module {module_name!r} {wrong}; expected a function that returns {returns}.{hint}"
    )


def called(what: str, name: str, function: Callable[[], Any], *, kind: str = "function") -> Any:
    """What the function of that name returns; its exception becomes one message, in which it is called a `kind`."""
    try:
        return function()
    except Exception as problem:
        module, _, attribute = name.partition(":")
        raise ValueError(
            f"{what} {name!r}: the {kind} failed: {describe_error(problem)} "
            f"It is called without arguments; try: python -c 'import {module}; {module}.{attribute}()'"
        ) from problem


def from_factory(name: str, *, quantized: bool = False) -> "nn.Module":
    """The model that a function makes; whatever is wrong with it is a ValueError.

    A model that is quantized already is refused, unless `quantized`.
    """
    from torch import nn

    from probe.models.quantized import quantized_weights

    model = called("model", name, function_named("model", name, returns="the model"), kind="factory")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model {name!r}: the factory returned a {type(model).__name__}; expected a torch.nn.Module.")
    for place, form in () if quantized else quantized_weights(model).items():
        raise ValueError(
            f"model {name!r}: the factory returned a model that is quantized already: {place} is {form}. Name its "
            'float original too, as reference = "package.module:factory" in [tool.probe] or --reference, to compare '
            "the two. Or return the float model, of which modes quantize copies."
        )
    return model
