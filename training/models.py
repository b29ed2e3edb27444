"""The two architectures, and a training forward for each: byte ids in, logits out."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, MambaConfig, MambaForCausalLM, PreTrainedModel

from scan import Scan

BYTES = 256
CONTEXT = 256
NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


@dataclass(frozen=True)
class Architecture:
    """One trainable model: how to build it, how to run it in training, the layer whose input has outliers."""

    build: Callable[[], PreTrainedModel]
    logits: Callable[[PreTrainedModel, Tensor], Tensor]
    outlier_layer: str
    learning_rate: float


def build_mamba() -> MambaForCausalLM:
    """Mamba-1: 4 layers of 256 channels x 16 states."""
    return MambaForCausalLM(
        MambaConfig(
            vocab_size=BYTES,
            hidden_size=128,
            num_hidden_layers=4,
            state_size=16,
            expand=2,
            conv_kernel=4,
            use_cache=False,
            **NO_SPECIAL_TOKENS,
        )
    )


def build_llama() -> LlamaForCausalLM:
    """Llama: 4 layers, 4 heads over 2 key/value heads."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=BYTES,
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=256,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            use_cache=False,
            **NO_SPECIAL_TOKENS,
        )
    )


def stock_logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """The model's own forward."""
    return model(input_ids=ids).logits


def mamba_logits(model: MambaForCausalLM, ids: Tensor) -> Tensor:
    """The forward of MambaForCausalLM over the same parameters, with the scan in C.

    Activations are feature-major, (features, batch * time), so every projection is one matrix product and
    every row the scan reads is contiguous.
    """
    backbone = model.backbone
    h = backbone.embeddings(ids.flatten()).t().contiguous()
    for block in backbone.layers:
        h = h + mix(block.mixer, rms_norm(h, block.norm), batch=ids.shape[0])
    logits = rms_norm(h, backbone.norm_f).t() @ model.lm_head.weight.t()
    return logits.view(*ids.shape, -1)


def rms_norm(h: Tensor, norm: nn.Module) -> Tensor:
    """RMSNorm over the features, which are the first axis here."""
    return h * torch.rsqrt(h.square().mean(0) + norm.variance_epsilon) * norm.weight[:, None]


def mix(mixer: nn.Module, h: Tensor, *, batch: int) -> Tensor:
    """One Mamba block, from normalized input to out_proj's output."""
    rank, states, rows = mixer.time_step_rank, mixer.ssm_state_size, (mixer.intermediate_size, batch, -1)
    x, z = (mixer.in_proj.weight @ h).chunk(2)
    u = functional.silu(causal_conv(x.view(rows), mixer.conv1d))
    dt, b, c = (mixer.x_proj.weight @ u.flatten(1)).split([rank, states, states])
    dt = torch.addmm(mixer.dt_proj.bias[:, None], mixer.dt_proj.weight, dt)
    b, c = (tensor.t().reshape(batch, -1, states) for tensor in (b, c))
    y = Scan.apply(u, dt.view(rows), -mixer.A_log.exp(), b, c, mixer.D, z.view(rows))
    return mixer.out_proj.weight @ y.flatten(1)


def causal_conv(x: Tensor, conv: nn.Conv1d) -> Tensor:
    """The depthwise convolution over time of x (channels, batch, time), as a 2-d one of height 1."""
    kernel = conv.weight[:, :, None, :]
    padded = functional.pad(x, (kernel.shape[-1] - 1, 0))
    return functional.conv2d(padded[None], kernel, conv.bias, groups=len(x))[0]


ARCHITECTURES = {
    "tiny-mamba": Architecture(build_mamba, mamba_logits, "out_proj", 5e-3),
    "tiny-llama": Architecture(build_llama, stock_logits, "down_proj", 3e-3),
}
