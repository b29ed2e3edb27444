"""A small repository that uses the gate: its own model, its own mode, a matrix that runs in a second."""

from collections.abc import Sequence

NETWORK = """
import torch
from torch import nn

FAULT = {fault!r}


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Network(nn.Module):
    def __init__(self, depth={depth}, width=32):
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 256)

    def get_output_embeddings(self):
        return self.head

    def forward(self, tokens):
        if FAULT == "alone" and len(tokens) == 1:
            raise RuntimeError("one row is no batch")
        x = self.embedding(tokens)
        for index, layer in enumerate(self.layers):
            x = layer(x * 1.01 if index == 1 and FAULT == "float" else x)
        return self.head(x)


def make():
    torch.manual_seed(0)
    return Network()
"""

MODES = '''
import torch
from probe.numerics.quantize import fake_quantize

FAULT = {fault!r}


def coarse(model, format, calibration):
    """Weights of the first linear of every block on the grid; a FAULT breaks layer 1."""
    for index, layer in enumerate(model.layers):
        with torch.no_grad():
            weight = fake_quantize(layer.up.weight, format)
            if index == 1 and FAULT == "scale":
                weight = weight * 1.01
            if index == 1 and FAULT == "better":
                weight = layer.up.weight + (weight - layer.up.weight) * 0.5
            if index == 1 and FAULT == "skipped":
                weight = layer.up.weight.clone()
            if index == 1 and FAULT == "nan":
                weight[0, 0] = torch.nan
            if FAULT == "everywhere":
                weight = weight * 1.05
            layer.up.weight.copy_(weight)
            if FAULT == "both" or (FAULT == "half" and index != 1) or (FAULT == "newly" and index == 1):
                layer.down.weight.copy_(fake_quantize(layer.down.weight, format))
    if FAULT == "uncovered":
        model.layers[1] = torch.nn.Sequential(model.layers[1])
        inner = model.layers[1][0]
        model.layers[1].forward = inner.forward
        model.layers[1] = type("Hollow", (torch.nn.Module,), {{"forward": lambda self, x: x}})()
        model.forward = lambda tokens: model.head(inner(model.layers[0](model.embedding(tokens))))
    return model
'''

CONFTEST = """
import probe
from modes import coarse

probe.register_mode("coarse", coarse)
"""

#: The cases of every recipe of the network beside its layers, in their order.
BESIDE = ("embedding", "head", "batch_1", "ragged", "logits")

#: A value of `without` that leaves nothing but layers and logits: 8 cases.
LAYERS_ONLY = '["embedding", "norm", "head", "decode", "batch_1", "ragged", "padded"]'

TEST = """
def test_matches_baseline(probe_case):
    probe_case.check()
"""


def settings(**changed: object) -> str:
    """A [tool.probe] table; values as TOML."""
    keys: dict[str, object] = {
        "model": '"network:make"',
        "modes": '["coarse"]',
        "formats": '["int8", "fp8_e4m3"]',
        "samples": 2,
        "seqlen": 16,
        "batch_size": 2,
        "calibration": "{ samples = 2, seqlen = 16 }",
    }
    lines = [f"{key} = {value}" for key, value in (keys | changed).items() if value is not None]
    return "\n".join(["[tool.probe]", *lines, ""])


def files(*, fault: str = "", depth: int = 3, hooks: str = "", **changed: object) -> dict[str, str]:
    """Name -> text of the whole repository; `hooks` are further ones of its conftest."""
    return {
        "pyproject.toml": settings(**changed),
        "network.py": NETWORK.format(fault=fault, depth=depth),
        "modes.py": MODES.format(fault=fault),
        "conftest.py": CONFTEST + hooks,
        "test_gate.py": TEST,
    }


def lines_of(stdout: Sequence[str], start: str) -> list[str]:
    """The lines of a failure: from the one that starts so to the next heading of pytest."""
    first = next(index for index, line in enumerate(stdout) if line.startswith(start))
    rest = stdout[first:]
    end = next((i for i, line in enumerate(rest) if line.startswith(("===", "___")) and i), len(rest))
    return list(rest[:end])
