"""Rules on `numerics.match=exact`: what the operations with equal bits support. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hybridrl.config.schema import Config
from hybridrl.config.wrapped_models import has_images
from hybridrl.errors import UserError
from hybridrl.rollout.registry import ENGINES, offered_engines

KEY = "numerics.match"
CLOSE = f"Set {KEY}=close."
MAX_TP = 2  # the sum of two ranks has the same bits in either order
# Values for which GPUs compare all bits. Other sizes of heads have kernels whose blocks of keys
# depend on the layout of the cache; other rotary positions scale what they rotate.
GPU_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
GPU_HEAD_SIZES = (64, 128)
GPU_ROTARY_TYPES = ("default", "linear", "llama3")
# Values of `model_type` for which tests compare all bits. Other models have operations that engine
# and trainer compute in their own ways, such as soft caps, multipliers and experts.
MODEL_TYPES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
MIXTURES = ("qwen3_moe",)


def gpu_numerics_rules(config: Config, shape: Mapping[str, Any]) -> Iterator[UserError]:
    """Yields why engine and trainer cannot compute the same bits on GPUs, besides `numerics_rules`.

    docs/concepts/agreement.md says what was compared there.
    """
    engine = config.rollout.engine
    if ENGINES[engine].exact_kernels is None:
        able = " or ".join(name for name in offered_engines() if ENGINES[name].exact_kernels)
        remedy = f"Set rollout.engine={able}, or {KEY}=close."
        yield config.refused("rollout.engine", f"{able} with {KEY}=exact on GPUs", remedy)
    if config.train.tp > 1:
        allowed = f"1 with {KEY}=exact on GPUs, where sums over ranks have not been compared"
        remedy = f"Set train.tp=1 and rollout.tp=1, or {KEY}=close."
        yield config.refused("train.tp", allowed, remedy)
    if config.model.dtype not in ("auto", "bfloat16"):
        allowed = f"bfloat16 with {KEY}=exact on GPUs, as in the engine's attention"
        yield config.refused("model.dtype", allowed, f"Set model.dtype=bfloat16, or {KEY}=close.")
    if not shape:
        return
    if _has_window(shape):
        allowed = "close on GPUs with windows, whose blocks of keys depend on the other queries"
        yield UserError(KEY, "exact", allowed, CLOSE)
    kind, heads = shape.get("model_type"), shape.get("num_attention_heads")
    size = shape.get("head_dim") or (heads and shape.get("hidden_size", 0) // heads)
    rope = shape.get("rope_parameters") or shape.get("rope_scaling") or {}
    rotary = rope.get("rope_type", rope.get("type", "default"))
    for what, value, able_values in (
        ("model_type", kind, GPU_MODEL_TYPES),
        ("heads of size", size, GPU_HEAD_SIZES),
        ("rotary positions of type", rotary, GPU_ROTARY_TYPES),
    ):
        if value not in able_values:
            listed = ", ".join(map(str, able_values))
            allowed = f"close on GPUs with {what} {value}; exact supports {listed} there"
            yield UserError(KEY, "exact", allowed, CLOSE)


def _has_window(shape: Mapping[str, Any]) -> bool:
    uses = shape.get("use_sliding_window", shape.get("model_type") == "mistral")
    return shape.get("sliding_window") is not None and bool(uses)


def numerics_rules(config: Config, shape: Mapping[str, Any]) -> Iterator[UserError]:
    """Yields why engine and trainer cannot compute the same bits, on any device."""
    if not config.numerics.is_exact:
        return
    needs, engine = config.algorithm.needs, config.rollout.engine
    if needs is not None and not needs.rollouts:
        allowed = f"close with algorithm {config.algorithm.name}, which samples no responses"
        yield UserError(KEY, "exact", allowed, CLOSE)
        return
    if not ENGINES[engine].matches_exactly:
        able = " or ".join(name for name in offered_engines() if ENGINES[name].matches_exactly)
        allowed = f"{able} with {KEY}=exact, because {engine} computes with its own kernels"
        remedy = f"Set rollout.engine={able}, or {KEY}=close."
        yield config.refused("rollout.engine", allowed, remedy)
    if shape and (has_images(shape) or shape.get("model_type") not in MODEL_TYPES):
        able = f"exact supports text models of the types {', '.join(MODEL_TYPES)}"
        allowed = f"close with model_type {shape.get('model_type')}; {able}"
        yield UserError(KEY, "exact", allowed, CLOSE)
    if shape.get("model_type") in MIXTURES and not ENGINES[engine].mixes_exactly:
        able = " or ".join(name for name in offered_engines() if ENGINES[name].mixes_exactly)
        reason = f"because {engine} has its own kernels for experts"
        allowed = f"{able} with {KEY}=exact and model_type {shape['model_type']}, {reason}"
        remedy = f"Set rollout.engine={able}, or {KEY}=close."
        yield config.refused("rollout.engine", allowed, remedy)
    if config.lora.is_on:
        allowed = "close with lora, because engines and trainer add adapters in different ways"
        yield UserError(KEY, "exact", allowed, CLOSE)
    yield from _knob_rules(config)


def _knob_rules(config: Config) -> Iterator[UserError]:
    train, rollout = config.train, config.rollout
    if train.tp > MAX_TP:
        reason = "because the order of a sum over more ranks is unknown"
        remedy = f"Set train.tp={MAX_TP} and rollout.tp={MAX_TP}, or {KEY}=close."
        yield config.refused("train.tp", f"at most {MAX_TP} with {KEY}=exact, {reason}", remedy)
    for key, value, usual, reason in (
        ("train.cp", train.cp, 1, "because sums over its ranks have another order"),
        ("train.ep", train.ep, 1, "as in the engine"),
        ("rollout.tp", rollout.tp, train.tp, "as in training (train.tp)"),
        ("train.layers", train.layers, "torch", "whose operations engines can also use"),
        ("train.fp8", train.fp8, "none", "because engines compute in another type"),
        ("train.fp32_residual", train.fp32_residual, False, "as in engines"),
        ("rollout.quantization", rollout.quantization, "none", "as in the trainer"),
        ("rollout.kv_cache_dtype", rollout.kv_cache_dtype, "auto", "as in the trainer"),
        ("rollout.top_p", rollout.top_p, 1, "because the trainer does not truncate"),
        ("rollout.top_k", rollout.top_k, 0, "because the trainer does not truncate"),
    ):
        if value != usual:
            shown = str(usual).lower()
            allowed = f"{shown} with {KEY}=exact, {reason}"
            yield UserError(key, value, allowed, f"Set {key}={shown}, or {KEY}=close.")
