"""Which axis of a tensor is the tokens: [samples, tokens, channels] of whatever a module takes in or gives out."""

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class TokenRows:
    """A tensor as rows of channels. `are_tokens`: [samples, tokens, channels]; else what rows are is not known."""

    values: Tensor
    are_tokens: bool


def token_rows(x: Tensor, shape: tuple[int, int], module: nn.Module) -> TokenRows:
    """The rows of `x`, of a batch of `shape` samples and tokens. The first rule that fits:

        [samples, channels, tokens or more]      of a convolution; what lies behind the last token is no token
        [samples, tokens, ...]                   the rest are channels
        [samples * tokens, channels]
        [samples, heads, tokens, channels]       heads and channels are channels
        [samples, channels, tokens]

    Anything else (the tokens of one expert, a state) is rows of its last axis.
    """
    samples, tokens = shape
    if isinstance(module, nn.Conv1d) and x.dim() == 3 and x.shape[0] == samples and x.shape[2] >= tokens:
        return TokenRows(x[..., :tokens].transpose(1, 2), True)
    if x.dim() >= 3 and x.shape[:2] == shape:
        return TokenRows(x.flatten(2), True)
    if x.dim() == 2 and x.shape[0] == samples * tokens:
        return TokenRows(x.reshape(samples, tokens, -1), True)
    if x.dim() == 4 and (x.shape[0], x.shape[2]) == shape:
        return TokenRows(x.transpose(1, 2).flatten(2), True)
    if x.dim() == 3 and (x.shape[0], x.shape[2]) == shape:
        return TokenRows(x.transpose(1, 2), True)
    return TokenRows(x.reshape(1, -1, x.shape[-1]) if x.dim() else x.reshape(1, 1, 1), False)
