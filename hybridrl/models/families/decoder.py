"""The parts that families of llama-shaped decoders share: sizes, Megatron keywords, weight rows.

A llama-shaped decoder: RMSNorm before attention and before the feed-forward layer, rotary
positions, grouped-query attention, SwiGLU. A family's own file says which options it has; what a
config asks for beyond them is refused by name. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.models.families.reading import flag, not_a, number, refusal, require, size
from hybridrl.models.families.rotary import read_rotary
from hybridrl.models.family import (
    EMBEDDING,
    OUTPUT_LAYER,
    HfConfig,
    LatentShape,
    ModelShape,
    MoeShape,
    Rotary,
    Row,
)
from hybridrl.models.hf.config_keys import WINDOW_KEYS


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
    window: int | None = None,
    kinds: Collection[str] = ("full_attention",),
) -> ModelShape:
    """Reads the sizes of a llama-shaped decoder.

    Args:
        hf_config: the content of config.json.
        qkv_bias, qk_norm, linear_bias: what the family has.
        default_head_dim: head size where the config names none; None: hidden size / heads.
        default_kv_heads: key-value heads where the config has no such key; None: as many as heads.
        moe: sizes of the experts; None: all layers are dense.
        latent: sizes of latent attention; None: attention is grouped-query.
        window: how many positions a query of a windowed layer attends to, its own with them.
        kinds: that `layer_types` may name.

    Raises:
        ModelError: a size is no positive integer, or the config asks for what is not supported.
    """
    require(hf_config, "hidden_act", "silu", ("silu", "swish"))
    _check_windows(hf_config, kinds)
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
        window=window,
    )


def decoder_config(
    hf_config: HfConfig,
    shape: ModelShape,
    scale: float | None = None,
    rotary: Rotary | None = None,
) -> dict[str, Any]:
    """Returns the keywords of Megatron's TransformerConfig that the model fixes.

    Args:
        hf_config: the content of config.json.
        shape: its sizes; of windows all layers have one, unless the family says otherwise.
        scale: of products of queries and keys; None: 1 / the root of the head's size.
        rotary: how positions turn; None: read from the config.
    """
    rotary = rotary or read_rotary(hf_config)
    own: dict[str, Any] = {} if scale is None else {"softmax_scale": scale}
    if rotary.magnitude != 1 and rotary.share < 1:
        own["apply_rope_fusion"] = False  # its kernel has no magnitude, which set_rotary gives
    elif rotary.magnitude != 1:
        # Queries and keys have it both: it is one of their products.
        own["softmax_scale"] = rotary.magnitude**2 * (scale or shape.head_dim**-0.5)
    if shape.window is not None:  # Megatron counts the positions before the query's own
        own["window_size"] = (shape.window - 1, 0)
    return {
        **own,
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
        "qk_layernorm": shape.qk_norm or shape.whole_qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _check_windows(hf_config: HfConfig, known: Collection[str]) -> None:
    require(hf_config, "use_sliding_window", False, (False,))
    for key in WINDOW_KEYS:  # without effect, but engines read them
        value = hf_config.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise not_a(key, value, "an integer from 0 on, or null")
    kinds, allowed = hf_config.get("layer_types"), " or ".join(sorted(known))
    if kinds is None:
        return
    if not isinstance(kinds, list | tuple):
        raise refusal("layer_types", kinds, f"a list with {allowed} for each layer")
    for kind in kinds:
        if kind not in tuple(known):
            raise refusal("layer_types", kind, allowed)


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
