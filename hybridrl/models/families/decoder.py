"""The parts that families of llama-shaped decoders share: sizes, Megatron keywords, weight rows.

A llama-shaped decoder: RMSNorm before attention and before the feed-forward layer, rotary
positions, grouped-query attention, SwiGLU. A family's own file says which options it has; what a
config asks for beyond them is refused by name. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any

from hybridrl.config.files import plain, shown
from hybridrl.errors import ModelError
from hybridrl.models.config_keys import WINDOW_KEYS
from hybridrl.models.family import (
    EMBEDDING,
    OUTPUT_LAYER,
    HfConfig,
    LatentShape,
    ModelShape,
    MoeShape,
    Row,
)

# Fixed in Megatron-Core 0.16.1's RotaryEmbedding._apply_scaling; only the factor can be chosen.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEFAULT_ROPE_THETA = 10000.0
ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
# The parameters that each kind of scaling has besides; other kinds are refused.
ROPE_PARAMETERS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset({"factor", *LLAMA3_ROPE}),
}
# No decoder is larger. A size beyond them would be found out by memory or time that it takes.
LARGEST = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 40,
    "moe_intermediate_size": 1 << 22,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "decoder_sparse_step": 1 << 12,
    "first_k_dense_replace": 1 << 12,
    "kv_lora_rank": 1 << 20,
    "n_group": 1 << 14,
    "n_routed_experts": 1 << 14,
    "n_shared_experts": 1 << 14,
    "q_lora_rank": 1 << 20,
    "qk_nope_head_dim": 1 << 14,
    "qk_rope_head_dim": 1 << 14,
    "topk_group": 1 << 14,
    "v_head_dim": 1 << 14,
}


def decoder_shape(
    hf_config: HfConfig,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    linear_bias: bool = False,
    default_head_dim: int | None = None,
    default_kv_heads: int | None = None,
    moe: MoeShape | None = None,
    latent: LatentShape | None = None,
) -> ModelShape:
    """Reads the sizes of a llama-shaped decoder.

    Args:
        hf_config: the content of config.json.
        qkv_bias, qk_norm, linear_bias: what the family has.
        default_head_dim: head size where the config names none; None: hidden size / heads.
        default_kv_heads: key-value heads where the config has no such key; None: as many as heads.
        moe: sizes of the experts; None: all layers are dense.
        latent: sizes of latent attention; None: attention is grouped-query.

    Raises:
        ModelError: a size is no positive integer, or the config asks for what is not supported.
    """
    require(hf_config, "hidden_act", "silu", ("silu", "swish"))
    require(hf_config, "use_sliding_window", False, (False,))
    for key in WINDOW_KEYS:  # without effect, but engines read them
        value = hf_config.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise _not_a(key, value, "an integer from 0 on, or null")
    _check_layer_types(hf_config)
    num_heads = size(hf_config, "num_attention_heads")
    hidden_size = size(hf_config, "hidden_size")
    kv_default = num_heads if "num_key_value_heads" in hf_config else default_kv_heads or num_heads
    num_kv_heads = size(hf_config, "num_key_value_heads", kv_default)
    if num_heads % num_kv_heads:
        raise refusal(
            "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}"
        )
    if default_head_dim is None and hf_config.get("head_dim") is None and hidden_size % num_heads:
        raise refusal("num_attention_heads", num_heads, f"a divisor of hidden_size = {hidden_size}")
    head_dim = size(hf_config, "head_dim", default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise refusal("head_dim", head_dim, "an even number, which rotary positions need")
    return ModelShape(
        num_layers=size(hf_config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        ffn_size=size(hf_config, "intermediate_size"),
        vocab_size=size(hf_config, "vocab_size"),
        tied_embeddings=flag(hf_config, "tie_word_embeddings"),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        linear_bias=linear_bias,
        moe=moe,
        latent=latent,
    )


def decoder_config(hf_config: HfConfig, shape: ModelShape) -> dict[str, Any]:
    """Returns the keywords of Megatron's TransformerConfig that the model fixes."""
    return {
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "ffn_hidden_size": shape.ffn_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": number(hf_config, "rms_norm_eps", 1e-6, 1e-30, 1),
        "init_method_std": number(hf_config, "initializer_range", 0.02, 0, 1),
        "gated_linear_unit": True,
        "add_bias_linear": shape.linear_bias,
        "add_qkv_bias": shape.qkv_bias,
        "qk_layernorm": shape.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def rope_keywords(hf_config: HfConfig) -> dict[str, Any]:
    """Returns the keywords of Megatron's GPTModel that say how positions enter.

    Reads transformers 5's `rope_parameters` as well as the older `rope_theta` and `rope_scaling`.

    Raises:
        ModelError: a scaling, or a parameter of it, that Megatron-Core does not offer.
    """
    rope, prefix = rope_parameters(hf_config)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_PARAMETERS:
        raise refusal(f"{prefix}.rope_type", kind, ", ".join(ROPE_PARAMETERS))
    for key in rope:
        if key not in ROPE_KEYS | ROPE_PARAMETERS[kind] and rope[key] is not None:
            raise refusal(f"{prefix}.{key}", rope[key], f"nothing with rope_type {kind}")
    for holder, where in ((rope, f"{prefix}."), (hf_config, "")):
        partial = holder.get("partial_rotary_factor")
        if partial is not None and (isinstance(partial, bool) or partial != 1):
            raise refusal(f"{where}partial_rotary_factor", partial, "1.0")
    theta = number(hf_config, "rope_theta", DEFAULT_ROPE_THETA, 1, 1e15)
    keywords: dict[str, Any] = {
        "position_embedding_type": "rope",
        "max_sequence_length": size(hf_config, "max_position_embeddings"),
        "rotary_base": number(rope, "rope_theta", theta, 1, 1e15, f"{prefix}."),
        "rotary_percent": 1.0,
        "rope_scaling": kind == "llama3",
    }
    if kind == "default":
        return keywords
    if rope.get("factor") is None:
        raise refusal(f"{prefix}.factor", "nothing", "a number")
    factor = number(rope, "factor", 1, 1, 1e6, f"{prefix}.")
    if kind == "linear":
        return keywords | {"seq_len_interpolation_factor": factor}
    for key, fixed in LLAMA3_ROPE.items():
        if rope.get(key) != fixed:
            raise refusal(f"{prefix}.{key}", rope.get(key), f"{fixed} (fixed in Megatron-Core)")
    return keywords | {"rope_scaling_factor": factor}


def rope_parameters(hf_config: HfConfig) -> tuple[Mapping[str, Any], str]:
    """Returns the rotary parameters and the key that has them.

    Raises:
        ModelError: they are no object, or both keys have some and differ.
    """
    found: dict[str, Mapping[str, Any]] = {}
    for key in ("rope_parameters", "rope_scaling"):
        value = hf_config.get(key)
        if value is not None and not isinstance(value, Mapping):
            raise refusal(key, value, "an object with rope_type, or null")
        if value:
            found[key] = value
    if len(found) == 2 and found["rope_parameters"] != found["rope_scaling"]:
        raise refusal(
            "rope_scaling", found["rope_scaling"], "the same as rope_parameters, or neither"
        )
    key = "rope_scaling" if "rope_parameters" not in found and found else "rope_parameters"
    rope = found.get(key, {})
    kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
    if len(kinds) == 2 and kinds[0] != kinds[1]:
        raise refusal(f"{key}.type", kinds[1], f"the same as rope_type = {shown(kinds[0])}")
    return rope, key


def _check_layer_types(hf_config: HfConfig) -> None:
    kinds = hf_config.get("layer_types")
    if kinds is None:
        return
    if not isinstance(kinds, list | tuple):
        raise refusal("layer_types", kinds, "a list with full_attention for each layer")
    for kind in kinds:
        if kind != "full_attention":
            raise refusal("layer_types", kind, "full_attention")


def decoder_rows(
    shape: ModelShape, moe: Sequence[Row] = (), attention: Sequence[Row] | None = None
) -> tuple[Row, ...]:
    """Returns the weight table of a llama-shaped decoder with the options that `shape` names.

    Args:
        shape: sizes of the model.
        moe: the rows of its mixtures of experts.
        attention: the rows of its attention; None: of grouped-query attention.
    """
    hidden = shape.hidden_size

    embedding = Row(
        EMBEDDING, ("model.embed_tokens.weight",), ((shape.vocab_size, hidden),), "vocab", "first"
    )
    rows = [
        embedding,
        _norm("input_layernorm", "input_layernorm", hidden),
        *(_attention_rows(shape) if attention is None else attention),
        _norm("pre_mlp_layernorm", "post_attention_layernorm", hidden),
        *_mlp_rows(shape),
        *moe,
    ]
    final_norm = "decoder.final_layernorm.weight"
    rows.append(Row(final_norm, ("model.norm.weight",), ((hidden,),), "replicated", "last"))
    if not shape.tied_embeddings:
        rows.append(
            Row(OUTPUT_LAYER, ("lm_head.weight",), ((shape.vocab_size, hidden),), "vocab", "last")
        )
    return tuple(rows)


def _norm(megatron: str, hf: str, width: int) -> Row:
    parts = (f"model.layers.{{L}}.{hf}.weight",)
    return Row(f"decoder.layers.{{L}}.{megatron}.weight", parts, ((width,),), "replicated")


def _attention_rows(shape: ModelShape) -> list[Row]:
    """Returns the rows of grouped-query attention."""
    hidden = shape.hidden_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    qkv = tuple(f"model.layers.{{L}}.self_attn.{x}_proj" for x in "qkv")
    o_proj = "model.layers.{L}.self_attn.o_proj"
    qkv_name, proj_name = (
        f"decoder.layers.{{L}}.self_attention.linear_{x}" for x in ("qkv", "proj")
    )
    sizes = ((q, hidden), (kv, hidden), (kv, hidden))
    rows = [Row(f"{qkv_name}.weight", _named(qkv, "weight"), sizes, "qkv")]
    if shape.qkv_bias or shape.linear_bias:
        rows.append(Row(f"{qkv_name}.bias", _named(qkv, "bias"), ((q,), (kv,), (kv,)), "qkv"))
    if shape.qk_norm:
        rows.append(_norm("self_attention.q_layernorm", "self_attn.q_norm", shape.head_dim))
        rows.append(_norm("self_attention.k_layernorm", "self_attn.k_norm", shape.head_dim))
    rows.append(Row(f"{proj_name}.weight", _named((o_proj,), "weight"), ((hidden, q),), "row"))
    if shape.linear_bias:
        rows.append(Row(f"{proj_name}.bias", _named((o_proj,), "bias"), ((hidden,),), "replicated"))
    return rows


def _mlp_rows(shape: ModelShape) -> list[Row]:
    """Returns the rows of the plain feed-forward layers."""
    if shape.moe is not None and not shape.moe.dense_layers:
        return []
    hidden, ffn = shape.hidden_size, shape.ffn_size
    gate, up, down = (f"model.layers.{{L}}.mlp.{x}_proj" for x in ("gate", "up", "down"))
    fc1, fc2 = (f"decoder.layers.{{L}}.mlp.linear_{x}" for x in ("fc1", "fc2"))
    gate_up = (gate, up)
    rows = [Row(f"{fc1}.weight", _named(gate_up, "weight"), ((ffn, hidden),) * 2, "gate_up")]
    if shape.linear_bias:
        rows.append(Row(f"{fc1}.bias", _named(gate_up, "bias"), ((ffn,),) * 2, "gate_up"))
    rows.append(Row(f"{fc2}.weight", _named((down,), "weight"), ((hidden, ffn),), "row"))
    if shape.linear_bias:
        rows.append(Row(f"{fc2}.bias", _named((down,), "bias"), ((hidden,),), "replicated"))
    if shape.moe is None:
        return rows
    return [replace(row, layers=shape.moe.dense_layers) for row in rows]


def _named(prefixes: tuple[str, ...], suffix: str) -> tuple[str, ...]:
    return tuple(f"{prefix}.{suffix}" for prefix in prefixes)


def size(hf_config: HfConfig, key: str, default: int | None = None) -> int:
    """Returns the positive integer at `key`; `default` where the key is absent or null."""
    value = hf_config.get(key)
    if value is None:
        value = default
    largest = LARGEST.get(key, 1 << 40)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= largest:
        raise _not_a(key, value, f"a positive integer up to {largest}")
    return value


def number(
    holder: HfConfig, key: str, default: float, least: float, most: float, prefix: str = ""
) -> float:
    """Returns the number at `key`, between `least` and `most`; `default` where it is absent or
    null.
    """
    value = holder.get(key)
    if value is None:
        value = default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not isfinite(value) or not least <= value <= most:
        raise _not_a(f"{prefix}{key}", value, f"a number from {least:g} to {most:g}")
    return float(value)


def flag(hf_config: HfConfig, key: str) -> bool:
    """Returns the truth value at `key`; False where it is absent or null."""
    value = hf_config.get(key)
    if value is not None and not isinstance(value, bool):
        raise _not_a(key, value, "true or false")
    return bool(value)


def _not_a(key: str, value: object, allowed: str) -> ModelError:
    found = "nothing" if value is None else shown(value)
    return ModelError(f"config.json: {key}", found, allowed, "Mend the model's config.json.")


def require(hf_config: HfConfig, key: str, default: object, allowed: tuple[object, ...]) -> None:
    """Raises ModelError unless the value at `key`, where it is absent or null `default`, is one of
    `allowed`, of the same type.
    """
    value = hf_config.get(key)
    value = default if value is None else value
    if not any(type(value) is type(one) and value == one for one in allowed):
        raise refusal(key, value, " or ".join(str(one) for one in allowed))


def refusal(key: str, value: object, allowed: str) -> ModelError:
    """Returns the error for a config that asks for what this family does not offer."""
    remedy = "Not supported by this family; choose another model or write a family."
    return ModelError(f"config.json: {key}", plain(value), allowed, remedy)
