"""The families: how a tiny random model of each is made, and what probe must find in it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from tests.models import random_models as made

ENCODER_DECODER = ("encoder.layer_0", "encoder.layer_1", "decoder.layer_0", "decoder.layer_1")
ALL_PATHS = ("decode", "batch_1", "ragged", "padded")


@dataclass(frozen=True)
class Family:
    """One row of docs/models.md."""

    name: str
    make: Callable[[], nn.Module] | None  # None: the factory below
    output: str = "next token"
    layers: tuple[str, ...] = ("layer_0", "layer_1")
    recipe: tuple[str, str] = ("linear_wa", "fp8_e4m3")
    paths: tuple[str, ...] = ()
    changed: str = "layer_1"  # the layer that is broken
    factory: str = ""
    inputs: str = ""

    @property
    def label(self) -> str:
        return "logits" if self.output in ("next token", "classes") else "output"


BERT: dict[str, Any] = {name: made.SIZES[name] for name in made.SIZES if name != "num_key_value_heads"}


def _bert(kind: str, **settings: Any) -> Callable[[], nn.Module]:
    return partial(made.built, "Bert", kind=kind, **BERT, intermediate_size=48, **settings)


SSM: dict[str, Any] = {"recipe": ("2-1", "int8")}
CAUSAL: dict[str, Any] = {"paths": ALL_PATHS}
FAMILIES = {
    row.name: row
    for row in (
        Family("Llama", partial(made.built, "Llama", **made.SIZES, intermediate_size=48), **CAUSAL),
        Family("GPT-2", made.make_gpt2, **CAUSAL),
        Family("Mixtral", made.make_mixtral, **CAUSAL),
        Family("Qwen3-Next", made.make_qwen3_next, **CAUSAL),
        Family("Mamba", made.make_mamba, **SSM, **CAUSAL),
        Family("Mamba-2", made.make_mamba2, **SSM, **CAUSAL),
        Family("FalconMamba", made.make_falcon_mamba, **SSM, **CAUSAL),
        Family("Jamba", made.make_jamba, **SSM, **CAUSAL, changed="layer_0"),
        Family("Bamba", made.make_bamba, **SSM, **CAUSAL, changed="layer_0"),
        Family("Zamba", made.make_zamba, **SSM, **CAUSAL, layers=("layer_0", "layer_1", "layer_2"), changed="layer_0"),
        Family("BERT, encoder", _bert("Model"), "embeddings"),
        Family("BERT, masked", _bert("ForMaskedLM"), "classes"),
        Family("BERT, classifier", _bert("ForSequenceClassification", num_labels=5), "classes"),
        Family("ViT", made.make_vit, "classes"),
        Family("T5", made.make_t5, layers=ENCODER_DECODER, changed="decoder.layer_1"),
        Family("Whisper", made.make_whisper, layers=ENCODER_DECODER, changed="encoder.layer_1"),
        Family(
            "nn.Module with two inputs",
            None,
            "values",
            factory="tests.families.plain:make",
            inputs="tests.families.plain:batches",
        ),
    )
}
