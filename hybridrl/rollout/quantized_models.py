"""Rules on models whose weights an engine holds in FP8. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.rules_quantization import CACHE, WEIGHTS
from hybridrl.config.schema import RolloutConfig, TrainConfig
from hybridrl.errors import ModelError, UserError
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.quantized import BLOCK, engine_cut, split_blocks, trainer_cut


def quantized_model_rules(
    rollout: RolloutConfig, train: TrainConfig, family: Family, shape: ModelShape
) -> Iterator[UserError]:
    """Yields the reasons why engines cannot hold a model's weights or its KV cache in FP8, or why
    the trainer cannot multiply by blocks of FP8 weights. `family` has no adapters.
    """
    found = _unsupported_part(shape)
    for key, is_on, off in (
        (WEIGHTS, rollout.quantization == "fp8", "none"),
        (CACHE, rollout.kv_cache_dtype == "fp8", "auto"),
    ):
        if is_on and found is not None:
            yield UserError(key, "fp8", f"{off} with models with {found}", f"Set {key}={off}.")
    is_engine = rollout.quantization == "fp8" and found is None
    trained = trainer_cut(shape, train.tp, train.etp), train.tp * train.etp
    for knob, value, is_on, sizes, (cut, tp) in (
        (
            WEIGHTS,
            "fp8",
            is_engine,
            "rollout.tp",
            (engine_cut(shape, rollout.tp, rollout.ep), rollout.tp),
        ),
        (WEIGHTS, "fp8", is_engine, "train.tp and train.etp", trained),
        ("train.fp8", "blockwise", train.fp8 == "blockwise", "train.tp", trained),
    ):
        if not is_on:
            continue
        try:
            name, size = next(split_blocks(family, shape, cut, tp), (None, 0))
        except ModelError:
            return  # other rules report that the size does not divide a dimension
        if name is not None:
            yield UserError(
                knob,
                f"{value} ({name} has a part of {size} rows or columns)",
                f"none unless all parts of the weights are multiples of {BLOCK} with this {sizes}",
                f"Choose a smaller {sizes} (for experts, whole ones: rollout.ep and train.ep), or "
                f"set {knob}=none.",
            )


def cpu_rules(quantization: str, kv_cache_dtype: str, is_cpu: bool) -> Iterator[UserError]:
    """Yields errors if an engine on a host without GPUs should use FP8."""
    for key, value, off in ((WEIGHTS, quantization, "none"), (CACHE, kv_cache_dtype, "auto")):
        if is_cpu and value != off:
            allowed = f"{off} on a host without GPUs"
            yield UserError(key, value, allowed, f"Set {key}={off}, or use GPUs.")


def _unsupported_part(shape: ModelShape) -> str | None:
    if shape.latent is not None:
        return "latent attention, whose engines compute with 16-bit copies of weights"
    if shape.vision is not None:
        return "a vision tower"
    if shape.mixer is not None:
        return "recurrent layers"
    if shape.activation == "clamped_swiglu" or shape.attention_sinks:
        return "clamped experts or attention sinks"
    return None
