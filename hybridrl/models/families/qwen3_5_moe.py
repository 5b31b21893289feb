"""Qwen3.5 and 3.6 with mixtures of experts (35B-A3B and larger): Qwen3.5's layers, in which every
feed-forward layer is a mixture with a shared expert, whose output a gate multiplies.
"""

from __future__ import annotations

from hybridrl.models.families import qwen2_moe, qwen3_5
from hybridrl.models.families.decoder import decoder_family, decoder_rows
from hybridrl.models.families.experts import EXPERT_KEYS, expert_rows, read_moe, renormalized_config
from hybridrl.models.families.reading import require, size
from hybridrl.models.family import HfConfig, ModelShape, MoeShape, Row

# transformers' Qwen3_5MoeTextConfig. No layer has a dense feed-forward layer.
DEFAULTS = qwen3_5.DEFAULTS | {"intermediate_size": 1, "num_key_value_heads": 2}
KEYS = frozenset(
    {"moe_intermediate_size", "norm_topk_prob", "num_experts", "shared_expert_intermediate_size"}
)


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; the defaults come from transformers' Qwen3_5MoeTextConfig."""
    require(hf_config, "mlp_only_layers", [], ([], ()))
    require(hf_config, "norm_topk_prob", True, (True,))
    return qwen3_5.hybrid_shape(hf_config, moe=experts_of(hf_config, 256, 8))


def experts_of(
    hf_config: HfConfig, num_experts: int, chosen: int, dense_layers: tuple[int, ...] = ()
) -> MoeShape:
    """Reads the sizes of the experts; see `read_moe` for the arguments."""
    return read_moe(
        hf_config,
        num_experts,
        chosen,
        512,
        shared_ffn_size=size(hf_config, "shared_expert_intermediate_size", 512),
        has_shared_gate=True,
        dense_layers=dense_layers,
    )


def rows(shape: ModelShape) -> tuple[Row, ...]:
    experts = expert_rows(shape, qwen2_moe.NAMES)
    return (*decoder_rows(shape, experts), *qwen3_5.delta_rows(shape))


FAMILY = decoder_family(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    shape,
    qwen3_5.KEYS | EXPERT_KEYS | KEYS,
    rows=rows,
    keywords=renormalized_config,
    defaults=DEFAULTS,
    rotary_share=0.25,
    prepare=qwen3_5.plain_positions,
)
