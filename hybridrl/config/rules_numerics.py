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
# Values of `model_type` for which tests compare all bits. Other models have operations that engine
# and trainer compute in their own ways, such as soft caps, multipliers and experts.
MODEL_TYPES = ("gemma3_text", "llama", "mistral", "qwen2", "qwen3")


def gpu_refusal() -> UserError:
    """Returns the error for exact mode on GPUs."""
    allowed = "close on GPUs, whose kernels are not compared bit by bit; exact runs on CPU"
    return UserError(KEY, "exact", allowed, CLOSE)


def numerics_rules(config: Config, shape: Mapping[str, Any]) -> Iterator[UserError]:
    """Yields the reasons why engine and trainer cannot compute the same bits.

    A caller that knows the host raises `gpu_refusal`.
    """
    if not config.numerics.is_exact:
        return
    needs, engine = config.algorithm.needs, config.rollout.engine
    if needs is not None and not needs.rollouts:
        allowed = f"close with algorithm {config.algorithm.name}, which samples no responses"
        yield UserError(KEY, "exact", allowed, CLOSE)
        return
    if not ENGINES[engine].matches_exactly:
        able = " or ".join(name for name in offered_engines() if ENGINES[name].matches_exactly)
        yield UserError(
            "rollout.engine",
            engine,
            f"{able} with {KEY}=exact, because {engine} computes with its own kernels",
            f"Set rollout.engine={able}, or {KEY}=close.",
        )
    if shape and (has_images(shape) or shape.get("model_type") not in MODEL_TYPES):
        yield UserError(
            KEY,
            "exact",
            f"close with model_type {shape.get('model_type')}; exact supports text models of the "
            f"types {', '.join(MODEL_TYPES)}",
            CLOSE,
        )
    if config.lora.is_on:
        allowed = "close with lora, because engines and trainer add adapters in different ways"
        yield UserError(KEY, "exact", allowed, CLOSE)
    yield from _knob_rules(config)


def _knob_rules(config: Config) -> Iterator[UserError]:
    train, rollout = config.train, config.rollout
    one_rank = "because sums over several ranks are rounded in another order"
    for key, value, usual, reason in (
        ("train.tp", train.tp, 1, one_rank),
        ("train.cp", train.cp, 1, one_rank),
        ("rollout.tp", rollout.tp, 1, one_rank),
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
            yield UserError(
                key,
                value,
                f"{shown} with {KEY}=exact, {reason}",
                f"Set {key}={shown}, or {KEY}=close.",
            )
