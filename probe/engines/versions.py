"""The versions of Python, of packages and of our own sources, which all nodes must have in common."""

import hashlib
import platform
from functools import cache
from importlib import metadata
from pathlib import Path

from probe.version import VERSION

#: Where the sources of this package are.
FOLDER = str(Path(__file__).parents[1])
#: The packages whose versions the numbers depend on.
PACKAGES = ("torch", "numpy", "numba", "transformers", "safetensors")
#: Packages that some modes call: their versions count where they are installed.
OPTIONAL = ("torchao", "compressed-tensors", "optimum-quanto", "gguf", "accelerate")


@cache
def installed() -> dict[str, str]:
    """The versions of Python, of PACKAGES and of the OPTIONAL ones that are here, and a digest of our own sources."""
    found = hashlib.sha256()
    for file in sorted(Path(FOLDER).rglob("*.py")):
        found.update(str(file.relative_to(FOLDER)).encode() + b"\0" + file.read_bytes() + b"\0")
    there = [name for name in OPTIONAL if any(metadata.distributions(name=name))]
    versions = {name: metadata.version(name).partition("+")[0] for name in (*PACKAGES, *there)}
    return {"probe": f"{VERSION} ({found.hexdigest()[:12]})", "python": platform.python_version(), **versions}
