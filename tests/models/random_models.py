"""Tiny models of random weights from transformers' configurations: experts, Conv1D, convolutions, tied tables."""

from typing import Any

import torch
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def built(family: str, *, kind: str = "", **settings: Any) -> nn.Module:
    """A model of a family: the causal one, or that of a `kind`, such as ForImageClassification."""
    import transformers

    from probe.data.library_logs import quietly

    torch.manual_seed(0)
    library: Any = transformers
    with quietly():
        config = getattr(library, f"{family}Config")(**settings)
        causal = library.AutoModelForCausalLM.from_config
        model: nn.Module = (getattr(library, f"{family}{kind}") if kind else causal)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.2)
    return model


def make_mixtral() -> nn.Module:
    """Experts [expert, out, in] in both layers."""
    return built("Mixtral", **SIZES, intermediate_size=48, num_local_experts=3, num_experts_per_tok=2)


def make_jamba() -> nn.Module:
    """A Mamba layer with experts, and an attention layer without."""
    return built(
        "Jamba",
        **SIZES,
        intermediate_size=48,
        num_experts=3,
        num_experts_per_tok=2,
        expert_layer_period=2,
        expert_layer_offset=0,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=4,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    )


def make_mamba() -> nn.Module:
    """Mamba-1 as it is."""
    sizes: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 4}
    return spread_steps(built("Mamba", vocab_size=256, **sizes))


def make_falcon_mamba() -> nn.Module:
    """Mamba-1 with norms, without gains, of dt, B and C."""
    return built("FalconMamba", vocab_size=256, hidden_size=32, num_hidden_layers=2, state_size=4, time_step_rank=4)


def make_mamba2(**settings: Any) -> nn.Module:
    """Mamba-2 with two groups of two heads, and chunks that the text is no multiple of."""
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 1}
    heads = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 16}
    return spread_steps(built("Mamba2", **{**sizes, **heads, "pad_token_id": 2, **settings}))


def make_bamba() -> nn.Module:
    """A Mamba-2 layer and an attention layer, each with a feed-forward part."""
    heads: dict[str, Any] = {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 8,
        "mamba_chunk_size": 16,
    }
    return spread_steps(built("Bamba", **SIZES, intermediate_size=48, attn_layer_indices=[1], **heads))


def make_zamba() -> nn.Module:
    """A Mamba-1 layer with two heads, and two that share an attention before theirs."""
    return spread_steps(
        built(
            "Zamba",
            **{**SIZES, "num_hidden_layers": 3},
            intermediate_size=48,
            mamba_d_state=4,
            mamba_dt_rank=4,
            n_mamba_heads=2,
            layers_block_type=["linear_attention", "hybrid", "hybrid"],
        )
    )


@torch.no_grad()
def spread_steps(model: nn.Module) -> nn.Module:
    """Biases of dt and of convolutions, A_log and D that differ from head to head, so that swapped ones show."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if name.endswith((".dt_bias", ".dt_proj_bias", ".A_log", ".D", "conv1d.bias")):
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return model


def make_qwen3_next() -> nn.Module:
    """Linear attention with a convolution, attention, and experts beside a shared one."""
    return built(
        "Qwen3Next",
        **SIZES,
        intermediate_size=48,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=3,
        num_experts_per_tok=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        layer_types=["linear_attention", "full_attention"],
    )


def make_gpt_oss() -> nn.Module:
    """Experts [expert, in, out], with biases, gate and up interleaved."""
    return built("GptOss", **SIZES, intermediate_size=48, num_local_experts=3, num_experts_per_tok=2, head_dim=16)


def make_gpt2() -> nn.Module:
    """Conv1D: weights [in, out]. The head is the embedding."""
    return built(
        "GPT2", vocab_size=256, n_positions=256, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )


def make_vit() -> nn.Module:
    """Patches by a convolution of two dimensions."""
    return built(
        "ViT",
        kind="ForImageClassification",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=16,
        patch_size=4,
        num_labels=5,
    )


def make_whisper() -> nn.Module:
    """Two convolutions of one dimension, the second with a stride, before the encoder. The head is the embedding."""
    return built(
        "Whisper",
        kind="ForConditionalGeneration",
        vocab_size=256,
        num_mel_bins=20,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_source_positions=16,
        max_target_positions=64,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        decoder_start_token_id=0,
    )


def make_t5() -> nn.Module:
    """One table of tokens for encoder, decoder and head."""
    return built(
        "T5",
        kind="ForConditionalGeneration",
        vocab_size=256,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        tie_word_embeddings=True,
        decoder_start_token_id=0,
    )


def make_phimoe() -> nn.Module:
    """Routers that are derived from nn.Linear, with a forward of their own."""
    return built("Phimoe", **SIZES, intermediate_size=48, num_local_experts=3, num_experts_per_tok=2)
