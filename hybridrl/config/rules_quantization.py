"""Rules between FP8 rollouts and other knobs. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.rollout.registry import ENGINES, offered_engines

WEIGHTS, CACHE = "rollout.quantization", "rollout.kv_cache_dtype"


def quantization_rules(config: Config, default_dtype: str) -> Iterator[UserError]:
    """Yields violated rules on `rollout.quantization` and `rollout.kv_cache_dtype`.

    `default_dtype` is what model.dtype=auto selects on this host.
    """
    rollout, train = config.rollout, config.train
    able = " or ".join(name for name in offered_engines() if ENGINES[name].quantizes)
    for key, value, off in (
        (WEIGHTS, rollout.quantization, "none"),
        (CACHE, rollout.kv_cache_dtype, "auto"),
    ):
        if value != off and not ENGINES[rollout.engine].quantizes:
            yield UserError(
                key,
                value,
                f"{off} with rollout.engine={rollout.engine}",
                f"Set rollout.engine={able}, which can use FP8 on GPUs, or {key}={off}.",
            )
    if rollout.quantization == "none":
        return
    dtype = default_dtype if config.model.dtype == "auto" else config.model.dtype
    if dtype != "bfloat16":
        yield UserError(
            "model.dtype",
            config.model.dtype + (f" ({dtype} here)" if config.model.dtype == "auto" else ""),
            f"bfloat16 with {WEIGHTS}=fp8",
            f"Set model.dtype=bfloat16, or {WEIGHTS}=none.",
        )
    if config.lora.is_on:
        yield UserError(
            WEIGHTS,
            "fp8",
            "none with lora, because engines compute adapters with 16-bit weights",
            f"Set {WEIGHTS}=none, or train without lora.",
        )
    if train.fuse_param_gather:
        yield UserError(
            "train.fuse_param_gather",
            True,
            f"false with {WEIGHTS}=fp8: a rank must hold whole 128 x 128 blocks of the updated "
            "weights to quantize them, and with true it holds a flat range",
            f"Set train.fuse_param_gather=false, or {WEIGHTS}=none.",
        )
    if rollout.transport == "peer":
        yield UserError(
            "rollout.transport",
            "peer",
            f"auto or packed with {WEIGHTS}=fp8: weights are quantized as they are packed, so "
            "other ranks cannot read them in place",
            "Set rollout.transport=auto.",
        )
