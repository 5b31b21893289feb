"""Settings of a package's engine, and the size of its KV cache. No engine, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hybridrl.config.wrapped_models import has_images, without_wrapper, wrapped_for_engines
from hybridrl.errors import UserError
from hybridrl.models.family import Rotary
from hybridrl.models.quantized import BLOCK, unquantized_modules
from hybridrl.rollout.engine import Request

if TYPE_CHECKING:
    from hybridrl.rollout.build import EngineInputs

CPU_MAX_KV_CACHE_BYTES = 1 << 30
# Share of a GPU's memory that stays free, for NCCL's buffers and torch's fragmentation.
GPU_SLACK = 0.03


@dataclass(frozen=True)
class EngineSettings:
    """Settings with which an engine starts."""

    hf_config: Mapping[str, Any]  # content of config.json
    architectures: Sequence[str]  # architectures to use if config.json names none
    dtype: str
    max_batch: int  # maximum number of requests that are decoded together
    max_tokens: int  # maximum total length of a prompt and its response
    # None for the size that `max_batch` requests of maximum length need, if memory suffices (on
    # CPU, at most 1 GiB).
    kv_cache_bytes: int | None = None
    reserved_bytes: int = 0  # memory that the trainer will add during rollout
    timeout_s: float | None = None  # time limit of its collectives; None for its default
    eager: bool = False  # whether to disable torch.compile and CUDA graphs (always disabled on CPU)
    ep: int = 1  # groups among which experts are divided; 1 if every rank has a part of each
    records_experts: bool = False
    gpu_memory_share: float | None = None  # limit for weights and KV cache; None for no limit
    adapters: tuple[str, ...] = ()  # names of LoRA adapters in addition to the policy's
    directory: Path | None = None  # folder of the processor's files, for prompts with images
    quantization: Literal["none", "fp8"] = "none"  # see `rollout.quantization`
    unquantized: tuple[str, ...] = ()  # HF names of linear layers that quantization leaves out
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"  # see `rollout.kv_cache_dtype`
    is_exact: bool = False  # whether to compute the trainer's bits (`numerics.match`)
    rotary: Rotary | None = None  # the trainer's rotary positions, for exact mode on GPUs

    @staticmethod
    def of(inputs: EngineInputs) -> EngineSettings:
        rollout, unquantized, rotary = inputs.rollout, list[str](), None
        if inputs.is_exact:
            rotary = inputs.family.model_keywords(inputs.hf_config).get("rotary")
        if rollout.quantization != "none":
            unquantized = unquantized_modules(inputs.family, inputs.family.shape(inputs.hf_config))
        return EngineSettings(
            inputs.family.for_engines(inputs.hf_config),
            inputs.family.architectures,
            inputs.dtype_name,
            inputs.rollout.max_batch,
            max_tokens=inputs.max_tokens,
            reserved_bytes=inputs.reserved_bytes,
            timeout_s=inputs.timeout_s,
            eager=inputs.rollout.eager,
            ep=inputs.rollout.ep,
            records_experts=inputs.records_experts,
            gpu_memory_share=inputs.rollout.gpu_memory_share,
            adapters=inputs.adapters,
            directory=inputs.directory,
            quantization=rollout.quantization,
            unquantized=tuple(unquantized),
            kv_cache_dtype=rollout.kv_cache_dtype,
            is_exact=inputs.is_exact,
            rotary=rotary,
        )

    def config_json(self) -> dict[str, Any]:
        given = self.hf_config
        content = wrapped_for_engines(given) if has_images(given) else without_wrapper(given)
        config = {"architectures": list(self.architectures), **content}
        if self.quantization == "fp8":
            config["quantization_config"] = {
                "quant_method": "fp8",
                "weight_block_size": [BLOCK, BLOCK],
                "activation_scheme": "dynamic",
                "modules_to_not_convert": list(self.unquantized),
            }
        return config

    def kv_cache_itemsize(self, itemsize: int) -> int:
        return 1 if self.kv_cache_dtype == "fp8" else itemsize


def usable_bytes(settings: EngineSettings, free: int, total: int, least: int) -> int:
    """Returns a GPU's bytes for weights and KV cache; UserError unless they exceed `least`."""
    usable = free - settings.reserved_bytes - int(GPU_SLACK * total)
    if settings.gpu_memory_share is not None:
        usable = min(usable, int(settings.gpu_memory_share * total))
    if usable <= least:
        raise UserError(
            "free memory of the GPU",
            f"{free / 2**30:.1f} GiB, of which {settings.reserved_bytes / 2**30:.1f} GiB are "
            "reserved for optimizer state",
            "room for the rollout engine",
            "Set train.optimizer_memory=host, or split the model over more GPUs.",
        )
    return usable


def kv_cache_blocks(
    settings: EngineSettings, block_bytes: int, per_request: int, most: int | None = None
) -> int:
    """Returns the number of blocks for `max_batch` requests of maximum length, each of which needs
    `per_request` blocks. The cache is limited to `most` bytes, but suffices for one request.
    """
    wanted = settings.max_batch * per_request
    return wanted if most is None else min(wanted, max(most // block_bytes, per_request))


def too_long(request: Request, settings: EngineSettings) -> Iterator[ValueError]:
    """Yields an error if a request can exceed the engine's maximum length."""
    most_new = request.sampling.max_new_tokens
    if len(request.prompt) + most_new > settings.max_tokens:
        yield ValueError(
            f"request {request.request_id} has {len(request.prompt)} prompt tokens and "
            f"max_new_tokens={most_new}; the engine allows at most {settings.max_tokens} together"
        )
