"""OLMo 2: norms after attention and feed-forward; queries and keys normalised over all heads."""

from __future__ import annotations

from dataclasses import replace

from hybridrl.models.families.decoder import decoder_family, decoder_rows, decoder_shape, norm_row
from hybridrl.models.families.reading import require
from hybridrl.models.family import HfConfig, ModelShape, Row

BEFORE = tuple(f"decoder.layers.{{L}}.{name}_layernorm.weight" for name in ("input", "pre_mlp"))


def shape(hf_config: HfConfig) -> ModelShape:
    require(hf_config, "attention_bias", False, (False,))
    return replace(decoder_shape(hf_config), norms_after="only", whole_qk_norm=True)


def rows(shape: ModelShape) -> tuple[Row, ...]:
    hidden = shape.hidden_size
    return (
        *(row for row in decoder_rows(shape) if row.megatron not in BEFORE),
        norm_row("self_attention.post_layernorm", "post_attention_layernorm", hidden),
        norm_row("mlp.post_layernorm", "post_feedforward_layernorm", hidden),
    )


FAMILY = decoder_family(
    "olmo2",
    "Olmo2ForCausalLM",
    shape,
    {"attention_bias"},
    rows=rows,
    defaults={"rms_norm_eps": 1e-5},  # transformers' Olmo2Config
    is_served_fused=False,
)
