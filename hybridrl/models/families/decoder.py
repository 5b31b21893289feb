"""Code shared by families of llama-shaped decoders: sizes, Megatron keywords, weight rows.

A llama-shaped decoder has RMSNorm before attention and before the feed-forward layer, rotary
positions, grouped-query attention and SwiGLU. Each family's own file sets the options. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hybridrl.models.families.experts import ExpertNames, expert_rows
from hybridrl.models.families.reading import flag, not_a, number, refusal, require, size
from hybridrl.models.families.rotary import KINDS, read_rotary, rope_keywords
from hybridrl.models.family import (
    EMBEDDING,
    OUTPUT_LAYER,
    Family,
    HfConfig,
    LatentShape,
    ModelShape,
    MoeShape,
    Rotary,
    Row,
    RowKind,
)
from hybridrl.models.hf.config_keys import DECODER_KEYS, WINDOW_KEYS


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
    """Reads the sizes of a llama-shaped decoder; see ModelShape for the arguments not listed here.

    Args:
        default_head_dim: Head size if config.json does not set `head_dim`. If None, the hidden size
            divided by the number of heads.
        default_kv_heads: Number of key-value heads if config.json does not set it. If None, one per
            query head.
        kinds: Values that `layer_types` may have.

    Raises ModelError if a size is not a positive integer, or an option is not supported.
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
        raise refusal("head_dim", head_dim, "an even number, as rotary positions require")
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


def windowed_shape(hf_config: HfConfig, default_kv_heads: int | None = None) -> ModelShape:
    has_window = hf_config.get("sliding_window") is not None
    return decoder_shape(
        {key: value for key, value in hf_config.items() if key != "sliding_window"},
        default_kv_heads=default_kv_heads,
        window=size(hf_config, "sliding_window") if has_window else None,
        # transformers ignores `layer_types` here, but engines follow it.
        kinds=("sliding_attention" if has_window else "full_attention",),
    )


def decoder_config(
    hf_config: HfConfig, shape: ModelShape, scale: float | None = None, rotary: Rotary | None = None
) -> dict[str, Any]:
    """Returns the arguments of Megatron's TransformerConfig that the model determines.

    Args:
        shape: Sizes of the model. If there is a window, it applies to all layers unless the family
            overrides that.
        scale: Factor that scales products of queries and keys; by default 1 / sqrt(head size).
        rotary: Rotary positions; by default read from the config.
    """
    rotary = rotary or read_rotary(hf_config)
    rotated = int(shape.head_dim * rotary.share)
    if rotated % 2 or not rotated:
        allowed = (
            f"a share that rotates an even number (at least 2) of the head_dim = "
            f"{shape.head_dim} dimensions"
        )
        raise refusal("partial_rotary_factor", rotary.share, allowed)
    own: dict[str, Any] = {} if scale is None else {"softmax_scale": scale}
    if rotary.magnitude != 1 and rotary.share < 1:
        # The fused kernel ignores the magnitude that set_rotary sets.
        own["apply_rope_fusion"] = False
    elif rotary.magnitude != 1:
        # Queries and keys are both scaled by the magnitude, so their product is scaled by its
        # square.
        own["softmax_scale"] = rotary.magnitude**2 * (scale or shape.head_dim**-0.5)
    if shape.window is not None:  # Megatron's window does not include the query's own position
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
    for key in WINDOW_KEYS:  # without use_sliding_window, only engines read these keys
        value = hf_config.get(key)
        if value is not None and (type(value) is not int or value < 0):
            raise not_a(key, value, "an integer of at least 0, or null")
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
    hidden, vocabulary = shape.hidden_size, ((shape.vocab_size, shape.hidden_size),)
    final_norm = "decoder.final_layernorm.weight"
    rows = [
        Row(EMBEDDING, ("model.embed_tokens.weight",), vocabulary, "vocab", "first"),
        norm_row("input_layernorm", "input_layernorm", hidden),
        *(_attention_rows(shape) if attention is None else attention),
        norm_row("pre_mlp_layernorm", "post_attention_layernorm", hidden),
        *_mlp_rows(shape),
        *moe,
        Row(final_norm, ("model.norm.weight",), ((hidden,),), "replicated", "last"),
    ]
    if not shape.tied_embeddings:
        rows.append(Row(OUTPUT_LAYER, ("lm_head.weight",), vocabulary, "vocab", "last"))
    return tuple(rows)


def norm_row(megatron: str, hf: str, width: int, kind: RowKind = "replicated") -> Row:
    """Returns the weight row of a layer's norm; both names are relative to the layer."""
    parts = (f"model.layers.{{L}}.{hf}.weight",)
    return Row(f"decoder.layers.{{L}}.{megatron}.weight", parts, ((width,),), kind)


def fused(rows: Iterable[Row], tensors: Mapping[str, str]) -> tuple[Row, ...]:
    """Replaces a row's HF tensors by one, whose name in a layer `tensors` has by kind of row."""

    def fuse(row: Row) -> Row:
        name = f"model.layers.{{L}}.{tensors[row.kind]}.weight"
        return replace(row, parts=(name,) * len(row.parts))

    return tuple(fuse(row) if row.kind in tensors else row for row in rows)


def decoder_family(
    name: str,
    architecture: str,
    shape: Callable[[HfConfig], ModelShape],
    config_keys: Collection[str],
    *,
    rows: Callable[[ModelShape], tuple[Row, ...]] = decoder_rows,
    experts: ExpertNames | None = None,
    keywords: Callable[[HfConfig, ModelShape], dict[str, Any]] = lambda hf_config, shape: {},
    defaults: Mapping[str, Any] | None = None,
    ropes: tuple[str, ...] = KINDS,
    rotary_share: float | None = None,
    is_served_fused: bool = True,
    prepare: Callable[[HfConfig], HfConfig] = lambda hf_config: hf_config,
) -> Family:
    """Creates the family of a llama-shaped decoder.

    Args:
        name, architecture, shape, rows, is_served_fused: See `Family`.
        config_keys: Keys of config.json that the family handles in addition to DECODER_KEYS.
        experts: Names of the experts' tensors, whose rows `rows` does not contain; None if it does.
        keywords: Function that returns arguments of TransformerConfig in addition to those from
            `decoder_config`.
        defaults: Values for keys that config.json does not contain.
        ropes, rotary_share: Arguments `kinds` and `default_share` of `read_rotary`.
        prepare: Function that changes config.json, with its defaults, before it is read.
    """

    def whole(hf_config: HfConfig) -> HfConfig:
        return prepare({**(defaults or {}), **hf_config})

    def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
        config = whole(hf_config)
        sizes, rotary = shape(config), read_rotary(config, ropes, rotary_share)
        return decoder_config(config, sizes, rotary=rotary) | keywords(config, sizes)

    return Family(
        name,
        (architecture,),
        lambda hf_config: shape(whole(hf_config)),
        transformer_config,
        lambda hf_config: rope_keywords(whole(hf_config), ropes, rotary_share),
        rows if experts is None else lambda shape: decoder_rows(shape, expert_rows(shape, experts)),
        config_keys=DECODER_KEYS | frozenset(config_keys),
        is_served_fused=is_served_fused,
    )


def _attention_rows(shape: ModelShape) -> list[Row]:
    hidden = shape.hidden_size
    q, kv = shape.query_size, shape.num_kv_heads * shape.head_dim
    qkv, proj = (f"decoder.layers.{{L}}.self_attention.linear_{x}" for x in ("qkv", "proj"))
    sizes = ((q, hidden), (kv, hidden), (kv, hidden))
    rows = [Row(f"{qkv}.weight", _parts("self_attn", "qkv", "weight"), sizes, "qkv")]
    if shape.qkv_bias or shape.linear_bias:
        biases = ((q,), (kv,), (kv,))
        rows.append(Row(f"{qkv}.bias", _parts("self_attn", "qkv", "bias"), biases, "qkv"))
    if shape.qk_norm:
        rows.append(norm_row("self_attention.q_layernorm", "self_attn.q_norm", shape.head_dim))
        rows.append(norm_row("self_attention.k_layernorm", "self_attn.k_norm", shape.head_dim))
    if shape.whole_qk_norm:
        rows.append(norm_row("self_attention.q_layernorm", "self_attn.q_norm", q, "heads"))
        rows.append(norm_row("self_attention.k_layernorm", "self_attn.k_norm", kv, "kv_heads"))
    output = ((hidden, shape.num_heads * shape.head_dim),)
    rows.append(Row(f"{proj}.weight", _parts("self_attn", "o", "weight"), output, "row"))
    if shape.linear_bias:
        o_bias = _parts("self_attn", "o", "bias")
        rows.append(Row(f"{proj}.bias", o_bias, ((hidden,),), "replicated"))
    if shape.mixer is None:
        return rows
    return [replace(row, layers=shape.attention_layers) for row in rows]


def _mlp_rows(shape: ModelShape) -> list[Row]:
    if shape.moe is not None and not shape.moe.dense_layers:
        return []
    hidden, ffn = shape.hidden_size, shape.ffn_size
    fc1, fc2 = (f"decoder.layers.{{L}}.mlp.linear_{x}" for x in ("fc1", "fc2"))
    gate_up, down = ("gate", "up"), ("down",)
    sizes = ((ffn, hidden),) * 2
    rows = [Row(f"{fc1}.weight", _parts("mlp", gate_up, "weight"), sizes, "gate_up")]
    if shape.linear_bias:
        rows.append(Row(f"{fc1}.bias", _parts("mlp", gate_up, "bias"), ((ffn,),) * 2, "gate_up"))
    rows.append(Row(f"{fc2}.weight", _parts("mlp", down, "weight"), ((hidden, ffn),), "row"))
    if shape.linear_bias:
        rows.append(Row(f"{fc2}.bias", _parts("mlp", down, "bias"), ((hidden,),), "replicated"))
    if shape.moe is None:
        return rows
    return [replace(row, layers=shape.moe.dense_layers) for row in rows]


def _parts(module: str, projections: Iterable[str], suffix: str) -> tuple[str, ...]:
    return tuple(f"model.layers.{{L}}.{module}.{x}_proj.{suffix}" for x in projections)
