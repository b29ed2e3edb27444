"""Digests of tensors that must keep their bits: weights, and what grids make of corner values."""

import hashlib

import torch
from torch import Tensor, nn

from probe.models.offload import state_of
from probe.models.quantized import plain_parts

#: What stands for a tensor that harmless changes alter, or that holds no numbers: there is nothing to compare.
VARIES = "varies"


def digest_of(*tensors: Tensor) -> str:
    """The first 8 hex digits of the sha256 of one tensor or several in a row: dtypes, shapes and bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        for part in plain_parts(tensor.detach()):
            whole = part.cpu().contiguous()
            found.update(f"{whole.dtype} {list(whole.shape)}".encode())
            found.update(whole.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()[:8]


def weight_digests(module: nn.Module) -> dict[str, str]:
    """By name inside the module, the digest of each parameter and saved buffer; offloaded ones are loaded for it.

    Codes and scales of a library's own tensors (torchao) are digested as they are stored. A parameter on `meta`, which
    cannot be loaded, is VARIES: it holds no numbers. A buffer that is not saved is computed, not state.
    """
    return {name: VARIES if tensor.is_meta else digest_of(tensor) for name, tensor in state_of(module)}
