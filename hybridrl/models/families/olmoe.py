"""OLMoE (1B-7B): mixtures of experts; queries and keys are normalised over all heads together."""

from __future__ import annotations

from dataclasses import replace

from hybridrl.models.families.decoder import decoder_family, decoder_shape
from hybridrl.models.families.experts import EXPERT_KEYS, ExpertNames, expert_config, read_moe
from hybridrl.models.families.reading import require, size
from hybridrl.models.family import HfConfig, ModelShape

EPSILON = 1e-5


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; `intermediate_size` is the width of an expert."""
    require(hf_config, "attention_bias", False, (False,))
    # vLLM ignores these two values of config.json, and renormalization, in this architecture.
    require(hf_config, "rms_norm_eps", EPSILON, (EPSILON,))
    head_dim = size(hf_config, "hidden_size") // size(hf_config, "num_attention_heads")
    require(hf_config, "head_dim", head_dim, (head_dim,))
    require(hf_config, "norm_topk_prob", False, (False,))
    moe = read_moe(hf_config, 64, 8, None, width_key="intermediate_size")
    return replace(decoder_shape(hf_config, moe=moe), whole_qk_norm=True)


FAMILY = decoder_family(
    "olmoe",
    "OlmoeForCausalLM",
    shape,
    EXPERT_KEYS | {"attention_bias", "norm_topk_prob", "num_experts"},
    experts=ExpertNames(),
    keywords=lambda hf_config, shape: expert_config(shape, renormalized=False),
    defaults={"rms_norm_eps": EPSILON},  # transformers' OlmoeConfig
)
