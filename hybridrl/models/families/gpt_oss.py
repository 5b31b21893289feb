"""GPT-OSS (20B, 120B): attention with sinks, windows in every second layer, clamped experts.

Every linear layer has a bias, including the router and the experts. The weights of a token's
experts are a softmax over the chosen experts. Gate and up of an expert are one projection, whose
even rows are the gate; trainer and engines keep this order. On disk, all experts of a layer are one
tensor: in 16 bits with transposed matrices, or in MXFP4 (models/hf/mxfp4.py), which is dequantized
when it is read. Exports are never quantized.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hybridrl.errors import MISSING
from hybridrl.models.families.decoder import decoder_config, decoder_rows, decoder_shape
from hybridrl.models.families.experts import EXPERT_KEYS, expert_config, read_moe
from hybridrl.models.families.reading import refusal, require, size
from hybridrl.models.families.rotary import read_rotary, rope_parameters
from hybridrl.models.family import Family, HfConfig, ModelShape, Rotary, Row, RowKind
from hybridrl.models.hf.config_keys import DECODER_KEYS, QUANTIZATION

WINDOWED, FULL = "sliding_attention", "full_attention"
MXFP4 = "mxfp4"
LIMIT, ALPHA = 7.0, 1.702  # constants of the clamped activation in engines
EPSILON = 1e-5  # epsilon of norms; vLLM ignores the config's value
# Defaults in transformers' GptOssConfig.
DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "rms_norm_eps": EPSILON,
    "rope_theta": 150000.0,
    "sliding_window": 128,
    "max_position_embeddings": 131072,
}
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# `experts_per_token` and `initial_context_length` repeat other keys, and only OpenAI's own programs
# read them.
# fmt: off
KEYS = frozenset({
    QUANTIZATION, "attention_bias", "experts_per_token", "initial_context_length",
    "sliding_window", "swiglu_alpha", "swiglu_limit",
})
# fmt: on


def _filled(hf_config: HfConfig) -> dict[str, Any]:
    given = {key: value for key, value in hf_config.items() if value is not None}
    has_rope = given.get("rope_parameters") or given.get("rope_scaling")
    return {**DEFAULTS, **({} if has_rope else {"rope_parameters": ROPE}), **given}


def shape(hf_config: HfConfig) -> ModelShape:
    """Reads the sizes, and checks that engines compute the model as its config.json says."""
    config = _filled(hf_config)
    require(config, "attention_bias", True, (True,))
    require(config, "swiglu_limit", LIMIT, (LIMIT, int(LIMIT)))
    require(config, "swiglu_alpha", ALPHA, (ALPHA,))
    require(config, "rms_norm_eps", EPSILON, (EPSILON,))
    _check_quantization(config)
    num_layers = size(config, "num_hidden_layers")
    kinds = [FULL if layer % 2 else WINDOWED for layer in range(num_layers)]
    if list(config.get("layer_types") or kinds) != kinds:
        allowed = f"{WINDOWED} and {FULL} in turn, beginning with {WINDOWED}"
        raise refusal("layer_types", config["layer_types"], allowed)
    moe = read_moe(config, 128, 4, 2880, "num_local_experts", "intermediate_size")
    handled = ("layer_types", "sliding_window")
    plain = {key: value for key, value in config.items() if key not in handled}
    return replace(
        decoder_shape(plain, linear_bias=True, moe=moe),
        window=size(config, "sliding_window"),
        num_whole_layers=kinds.count(FULL),
        activation="clamped_swiglu",
        attention_sinks=True,
    )


def _check_quantization(config: HfConfig) -> None:
    found = config.get(QUANTIZATION) or {}
    method = found.get("quant_method") if isinstance(found, dict) else found
    if found and method != MXFP4:
        raise refusal(f"{QUANTIZATION}.quant_method", method, f"{MXFP4}, or no {QUANTIZATION}")


def _rotary(config: HfConfig) -> Rotary:
    """Reads YaRN with `truncate`; other kinds of positions are refused, as engines assume YaRN."""
    rope, key = rope_parameters(config)
    plain = {name: value for name, value in rope.items() if name != "truncate"}
    holders = {name: plain for name in ("rope_parameters", "rope_scaling") if config.get(name)}
    rotary = read_rotary({**config, **holders}, ("yarn",))
    for name in ("beta_fast", "beta_slow"):  # vLLM has no defaults for them
        if rope.get(name) is None:
            raise refusal(f"{key}.{name}", MISSING, "a number")
    require(rope, "truncate", True, (True, False))
    return replace(rotary, has_whole_bounds=rope.get("truncate") is not False)


def transformer_config(hf_config: HfConfig) -> dict[str, Any]:
    config = _filled(hf_config)
    sizes = shape(config)
    windowed = [int(layer % 2 == 0) for layer in range(sizes.num_layers)]
    return (
        decoder_config(config, sizes, rotary=_rotary(config))
        | expert_config(sizes, renormalized=True)
        | {
            "softmax_type": "learnable",
            # Despite its name, 1 means that the layer has a window.
            "window_attn_skip_freq": windowed,
            "activation_func_clamp_value": LIMIT,
            "glu_linear_offset": 1.0,
        }
    )


def model_keywords(hf_config: HfConfig) -> dict[str, Any]:
    config = _filled(hf_config)
    return {
        "position_embedding_type": "rope",
        "max_sequence_length": size(config, "max_position_embeddings"),
        "rotary_percent": 1.0,
        "rotary": _rotary(config),
    }


def rows(shape: ModelShape) -> tuple[Row, ...]:
    moe, hidden = shape.moe, shape.hidden_size
    assert moe is not None
    num_experts, width = moe.num_experts, moe.expert_ffn_size
    local, hf = "decoder.layers.{L}.mlp.", "model.layers.{L}.mlp."
    experts = f"{local}experts.local_experts.{{E}}."

    def expert(name: str, part: str, size: tuple[int, ...], kind: RowKind) -> Row:
        # A part is one expert's slice of the tensor on disk (models/hf/stored_slices.py).
        parts = (f"{hf}experts.{part}",)
        return Row(f"{experts}{name}", parts, (size,), kind, num_experts=num_experts)

    mixtures = (
        _router_row("weight", (num_experts, hidden)),
        _router_row("bias", (num_experts,)),
        expert("linear_fc1.weight", "gate_up_proj[{E}].T", (2 * width, hidden), "column"),
        expert("linear_fc1.bias", "gate_up_proj_bias[{E}]", (2 * width,), "column"),
        expert("linear_fc2.weight", "down_proj[{E}].T", (hidden, width), "row"),
        expert("linear_fc2.bias", "down_proj_bias[{E}]", (hidden,), "replicated"),
    )
    sinks = "self_attention.core_attention.softmax_offset"
    sinks_row = Row(
        f"decoder.layers.{{L}}.{sinks}",
        ("model.layers.{L}.self_attn.sinks",),
        ((shape.num_heads,),),
        "heads",
    )
    return (*decoder_rows(shape, mixtures), sinks_row)


def _router_row(suffix: str, size: tuple[int, ...]) -> Row:
    name = f"layers.{{L}}.mlp.router.{suffix}"
    return Row(f"decoder.{name}", (f"model.{name}",), (size,), "replicated")


FAMILY = Family(
    "gpt_oss",
    ("GptOssForCausalLM",),
    shape,
    transformer_config,
    model_keywords,
    rows,
    config_keys=DECODER_KEYS | EXPERT_KEYS | KEYS,
)
