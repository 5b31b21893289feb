"""Mixtral (8x7B, 8x22B): every layer is a mixture of experts; attention has no biases."""

from __future__ import annotations

from hybridrl.models.families.decoder import decoder_family, decoder_shape
from hybridrl.models.families.experts import EXPERT_KEYS, ExpertNames, read_moe, renormalized_config
from hybridrl.models.families.reading import require
from hybridrl.models.family import HfConfig, ModelShape

EXPERT = "block_sparse_moe.experts.{E}."
NAMES = ExpertNames("block_sparse_moe.gate", f"{EXPERT}w1", f"{EXPERT}w3", f"{EXPERT}w2")


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes; `intermediate_size` is the width of an expert."""
    require(hf_config, "router_jitter_noise", 0.0, (0.0, 0))
    # This family does not have `use_sliding_window`, so a window takes effect whenever it is set.
    require(hf_config, "sliding_window", None, (None,))
    moe = read_moe(hf_config, 8, 2, None, "num_local_experts", "intermediate_size")
    return decoder_shape(hf_config, default_kv_heads=8, moe=moe)


FAMILY = decoder_family(
    "mixtral",
    "MixtralForCausalLM",
    shape,
    EXPERT_KEYS | {"router_jitter_noise", "sliding_window"},
    experts=NAMES,
    keywords=renormalized_config,
    defaults={"rms_norm_eps": 1e-5, "rope_theta": 1e6},  # transformers' MixtralConfig
)
