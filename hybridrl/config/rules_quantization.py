"""Rules between FP8 rollouts and other knobs. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from hybridrl.config.schema import Config
from hybridrl.errors import UserError
from hybridrl.rollout.registry import ENGINES, offered_engines

WEIGHTS, CACHE = "rollout.quantization", "rollout.kv_cache_dtype"


def quantization_rules(config: Config, default_dtype: str) -> Iterator[UserError]:
    rollout, train = config.rollout, config.train
    able = " or ".join(name for name in offered_engines() if ENGINES[name].quantizes)
    for key, value, off in (
        (WEIGHTS, rollout.quantization, "none"),
        (CACHE, rollout.kv_cache_dtype, "auto"),
    ):
        if value != off and not ENGINES[rollout.engine].quantizes:
            remedy = f"Set rollout.engine={able}, which can use FP8 on GPUs, or {key}={off}."
            yield UserError(key, value, f"{off} with rollout.engine={rollout.engine}", remedy)
    if rollout.quantization == "none":
        return
    dtype = default_dtype if config.model.dtype == "auto" else config.model.dtype
    if dtype != "bfloat16":
        found = config.model.dtype + (f" ({dtype} here)" if config.model.dtype == "auto" else "")
        remedy = f"Set model.dtype=bfloat16, or {WEIGHTS}=none."
        yield UserError("model.dtype", found, f"bfloat16 with {WEIGHTS}=fp8", remedy)
    if config.lora.is_on:
        allowed = "none with lora, because engines compute adapters with 16-bit weights"
        yield UserError(WEIGHTS, "fp8", allowed, f"Set {WEIGHTS}=none, or train without lora.")
    if train.fuse_param_gather:
        allowed = (
            f"false with {WEIGHTS}=fp8: a rank must hold whole 128 x 128 blocks of the updated "
            "weights to quantize them, and with true it holds a flat range"
        )
        remedy = f"Set train.fuse_param_gather=false, or {WEIGHTS}=none."
        yield UserError("train.fuse_param_gather", True, allowed, remedy)
    if rollout.transport == "peer":
        reason = (
            "weights are quantized as they are packed, so other ranks cannot read them in place"
        )
        allowed = f"auto or packed with {WEIGHTS}=fp8: {reason}"
        yield UserError("rollout.transport", "peer", allowed, "Set rollout.transport=auto.")
