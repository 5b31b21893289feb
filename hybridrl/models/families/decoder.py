"""The parts that families of llama-shaped decoders share: sizes, Megatron keywords, weight rows.

A llama-shaped decoder: RMSNorm before attention and before the feed-forward layer, rotary
positions, grouped-query attention, SwiGLU. A family's own file says which options it has; what a
config asks for beyond them is refused by name. No torch.
"""

from __future__ import annotations

from typing import Any

from hybridrl.errors import ModelError
from hybridrl.models.family import EMBEDDING, OUTPUT_LAYER, HfConfig, ModelShape, Row

# Fixed in Megatron-Core 0.16.1's RotaryEmbedding._apply_scaling; only the factor can be chosen.
LLAMA3_ROPE = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
DEFAULT_ROPE_THETA = 10000.0


def decoder_shape(
    hf_config: HfConfig,
    *,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    linear_bias: bool = False,
    default_head_dim: int | None = None,
) -> ModelShape:
    """Reads the sizes of a llama-shaped decoder.

    Args:
        hf_config: the content of config.json.
        qkv_bias, qk_norm, linear_bias: what the family has.
        default_head_dim: head size where the config names none; None: hidden size / heads.

    Raises:
        ModelError: a size is no positive integer, or the config asks for what is not supported.
    """
    require(hf_config, "hidden_act", "silu", ("silu", "swish"))
    require(hf_config, "use_sliding_window", False, (False,))
    for kind in hf_config.get("layer_types") or ():
        if kind != "full_attention":
            raise refusal("layer_types", kind, "full_attention")
    num_heads = size(hf_config, "num_attention_heads")
    hidden_size = size(hf_config, "hidden_size")
    num_kv_heads = size(hf_config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise refusal(
            "num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads = {num_heads}"
        )
    return ModelShape(
        num_layers=size(hf_config, "num_hidden_layers"),
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=size(hf_config, "head_dim", default_head_dim or hidden_size // num_heads),
        ffn_size=size(hf_config, "intermediate_size"),
        vocab_size=size(hf_config, "vocab_size"),
        tied_embeddings=bool(hf_config.get("tie_word_embeddings", False)),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        linear_bias=linear_bias,
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
        "layernorm_epsilon": float(hf_config.get("rms_norm_eps", 1e-6)),
        "init_method_std": float(hf_config.get("initializer_range", 0.02)),
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
    rope = dict(hf_config.get("rope_parameters") or hf_config.get("rope_scaling") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise refusal("rope_parameters.rope_type", kind, "default or llama3")
    partial = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise refusal("rope_parameters.partial_rotary_factor", partial, "1.0")
    keywords: dict[str, Any] = {
        "position_embedding_type": "rope",
        "max_sequence_length": size(hf_config, "max_position_embeddings"),
        "rotary_base": rope.get("rope_theta") or hf_config.get("rope_theta") or DEFAULT_ROPE_THETA,
        "rotary_percent": 1.0,
        "rope_scaling": kind == "llama3",
    }
    if kind == "llama3":
        for key, fixed in LLAMA3_ROPE.items():
            if rope.get(key, fixed) != fixed:
                raise refusal(
                    f"rope_parameters.{key}", rope[key], f"{fixed} (fixed in Megatron-Core)"
                )
        if "factor" not in rope:
            raise refusal("rope_parameters.factor", "nothing", "a number")
        keywords["rope_scaling_factor"] = float(rope["factor"])
    return keywords


def decoder_rows(shape: ModelShape) -> tuple[Row, ...]:
    """Returns the weight table of a llama-shaped decoder with the options that `shape` names."""
    hidden, ffn = shape.hidden_size, shape.ffn_size
    q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    layer, attention = "model.layers.{L}.", "model.layers.{L}.self_attn."
    local, qkv = "decoder.layers.{L}.", tuple(f"{attention}{x}_proj" for x in "qkv")
    o_proj, down = f"{attention}o_proj", f"{layer}mlp.down_proj"
    gate_up = (f"{layer}mlp.gate_proj", f"{layer}mlp.up_proj")

    def named(prefixes: tuple[str, ...], suffix: str) -> tuple[str, ...]:
        return tuple(f"{prefix}.{suffix}" for prefix in prefixes)

    def norm(megatron: str, hf: str, width: int) -> Row:
        return Row(f"{local}{megatron}.weight", (f"{layer}{hf}.weight",), ((width,),), "replicated")

    embedding = Row(
        EMBEDDING, ("model.embed_tokens.weight",), ((shape.vocab_size, hidden),), "vocab", "first"
    )
    qkv_name, fc1_name = f"{local}self_attention.linear_qkv", f"{local}mlp.linear_fc1"
    proj_name, fc2_name = f"{local}self_attention.linear_proj", f"{local}mlp.linear_fc2"
    rows = [
        embedding,
        norm("input_layernorm", "input_layernorm", hidden),
        Row(
            f"{qkv_name}.weight",
            named(qkv, "weight"),
            ((q, hidden), (kv, hidden), (kv, hidden)),
            "qkv",
        ),
    ]
    if shape.qkv_bias or shape.linear_bias:
        rows.append(Row(f"{qkv_name}.bias", named(qkv, "bias"), ((q,), (kv,), (kv,)), "qkv"))
    if shape.qk_norm:
        rows.append(norm("self_attention.q_layernorm", "self_attn.q_norm", shape.head_dim))
        rows.append(norm("self_attention.k_layernorm", "self_attn.k_norm", shape.head_dim))
    rows.append(Row(f"{proj_name}.weight", named((o_proj,), "weight"), ((hidden, q),), "row"))
    if shape.linear_bias:
        rows.append(Row(f"{proj_name}.bias", named((o_proj,), "bias"), ((hidden,),), "replicated"))
    rows.append(norm("pre_mlp_layernorm", "post_attention_layernorm", hidden))
    rows.append(
        Row(f"{fc1_name}.weight", named(gate_up, "weight"), ((ffn, hidden),) * 2, "gate_up")
    )
    if shape.linear_bias:
        rows.append(Row(f"{fc1_name}.bias", named(gate_up, "bias"), ((ffn,),) * 2, "gate_up"))
    rows.append(Row(f"{fc2_name}.weight", named((down,), "weight"), ((hidden, ffn),), "row"))
    if shape.linear_bias:
        rows.append(Row(f"{fc2_name}.bias", named((down,), "bias"), ((hidden,),), "replicated"))
    final_norm = "decoder.final_layernorm.weight"
    rows.append(Row(final_norm, ("model.norm.weight",), ((hidden,),), "replicated", "last"))
    if not shape.tied_embeddings:
        rows.append(
            Row(OUTPUT_LAYER, ("lm_head.weight",), ((shape.vocab_size, hidden),), "vocab", "last")
        )
    return tuple(rows)


def size(hf_config: HfConfig, key: str, default: int | None = None) -> int:
    """Returns the positive integer at `key`; `default` where the key is absent or null."""
    value = hf_config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "nothing" if value is None else value
        raise ModelError(
            f"config.json: {key}", found, "a positive integer", "Mend the model's config.json."
        )
    return value


def require(hf_config: HfConfig, key: str, default: object, allowed: tuple[object, ...]) -> None:
    """Raises ModelError unless the value at `key` is one of `allowed`."""
    value = hf_config.get(key, default)
    if value not in allowed:
        raise refusal(key, value, " or ".join(str(one) for one in allowed))


def refusal(key: str, value: object, allowed: str) -> ModelError:
    """Returns the error for a config that asks for what this family does not offer."""
    return ModelError(
        f"config.json: {key}",
        value,
        allowed,
        "Not supported by this family; choose another model or write a family.",
    )
