"""The cause of a failure on a path: the first step of the layer that disagrees there, or the first module that does."""

import torch
from torch import Tensor, nn

from probe.diagnosis.explanations import UNKNOWN, explain
from probe.diagnosis.layer_steps import layer_steps
from probe.diagnosis.linear_steps import linear_step
from probe.diagnosis.mamba_block import NeverRanError
from probe.diagnosis.signatures import Step
from probe.models.mamba import Site
from probe.running.paths import Path
from probe.running.traces import LayerTrace

#: A module departs from the prefill if half of the tokens in question differ by more than this part of their rms.
DEPARTS = 1e-5


@torch.no_grad()
def diagnose_path(trace: LayerTrace, path: Path, places: Tensor | None) -> str:
    """Why the layer gives other values on a path: the step, then its explanation; empty where nothing is found.

    `places` are the tokens of the text that differ from the prefill; None where they need not agree with it. Never
    raises.
    """
    try:
        return _wrong_step(trace, path) or ("" if places is None else _departure(trace, path, places))
    except Exception as problem:  # a diagnosis must not hide the failure it explains
        return f"{UNKNOWN}: {str(problem) or type(problem).__name__}"


def _wrong_step(trace: LayerTrace, path: Path) -> str:
    """The first step that disagrees with its definition."""
    ran = trace.on_path(path)
    try:
        for step in layer_steps(trace, ran.parts, ran):
            if explanation := explain(step):
                return f"{step.name}; {explanation}"
    except NeverRanError as problem:
        return str(problem)
    return ""


def _departure(trace: LayerTrace, path: Path, places: Tensor) -> str:
    """The first module inside that is given, or gives, other values for these tokens than in the prefill."""
    if trace.mode.kind == "float" or trace.mode.library:
        return ""  # there another order of sums makes a larger difference
    rows = max(path.rows, len(trace.reference.batches[0]))
    text = torch.arange(rows * path.seqlen).reshape(rows, path.seqlen)
    prefill = Path("prefill", path.seqlen, (text,), (torch.zeros_like(text),), ("", ""))
    ran, alone = (trace.on_path(one, modules=True) for one in (path, prefill))
    own = torch.cat(path.calls, 1)[ran.real].reshape(len(ran.real), -1)  # the places of the tokens of `ran`
    before = ""
    for name, tensors in ran.parts.items():
        wanted = {side: x.flatten(0, 1)[own] for side, x in alone.parts.get(name, {}).items()}
        module = trace.twin.get_submodule(trace.module).get_submodule(name)
        if not name or isinstance(module, Site) or not tensors or wanted.keys() != tensors.keys():
            continue
        hit = torch.isin(own, places)
        if _departs(tensors[".given"], wanted[".given"], hit):
            where = f"between {before}, as in the prefill, and {name}" if before else f"before {name}"
            return f"{where}{_sequences(hit)}"
        if _departs(tensors[".made"], wanted[".made"], hit):
            return f"{name}; {_explained(name, module, tensors, wanted['.made'])}"
        before = name
    return ""


def _sequences(hit: Tensor) -> str:
    """Which sequences have tokens that differ, if not all."""
    rows = hit.any(1).nonzero().reshape(-1).tolist()
    return f"; only sequence {rows[0]}" if len(rows) == 1 < len(hit) else ""


def _departs(actual: Tensor, expected: Tensor, hit: Tensor) -> bool:
    """Whether a typical one of the tokens in question has other values."""
    if actual.shape != expected.shape:
        return True
    off, size = ((x.double().flatten(2).square().mean(-1).sqrt()) for x in (actual - expected, expected))
    return float((off / size.clamp(min=1e-30))[hit].median()) > DEPARTS


def _explained(name: str, module: nn.Module, tensors: dict[str, Tensor], prefill: Tensor) -> str:
    if isinstance(module, nn.Linear):
        step = linear_step(name, module, tensors[".given"], tensors[".made"])
    else:
        step = Step(name, tensors[".made"], prefill)
    return explain(step) or "it gives other values than in the prefill, for the same input"
