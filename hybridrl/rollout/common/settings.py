"""What an engine of an installed package is started with, whichever package it is.

Owns the size that a KV cache should have. No engine and no torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridrl.errors import UserError
from hybridrl.models.family import ModelShape
from hybridrl.rollout.engine import Request

if TYPE_CHECKING:
    from hybridrl.rollout.build import EngineInputs

CPU_MAX_KV_CACHE_BYTES = 1 << 30
# Share of a GPU's memory that stays free: NCCL's buffers, and what torch's allocator cannot use of
# its own blocks.
GPU_SLACK = 0.03


@dataclass(frozen=True)
class EngineSettings:
    """What one engine is started with.

    Args:
        hf_config, architectures: Content of config.json, and what it says where it names no
            architectures.
        max_batch: Most requests decoded together.
        max_tokens: Longest prompt with its response.
        kv_cache_bytes: KV cache of this rank; None: what `max_batch` longest requests need, at most
            1 GiB on CPU and what the engine finds free on GPUs.
        reserved_bytes: Bytes that the trainer will hold during rollout beyond what it holds at the
            start.
        timeout_s: Bound of collectives inside the engine; None: the engine's own.
        eager: Whether it runs without torch.compile and CUDA graphs (on CPU always).
        ep: Parts into which a layer's whole experts are dealt; 1: every rank has a part of each
            expert.
        gpu_memory_share: Most of a GPU's memory for weights and KV cache; None: no bound.
    """

    hf_config: Mapping[str, Any]
    architectures: Sequence[str]
    dtype: str
    max_batch: int
    max_tokens: int
    kv_cache_bytes: int | None = None
    reserved_bytes: int = 0
    timeout_s: float | None = None
    eager: bool = False
    ep: int = 1
    records_experts: bool = False
    gpu_memory_share: float | None = None

    @staticmethod
    def of(inputs: EngineInputs) -> EngineSettings:
        """Returns the settings of an engine that is built from these inputs."""
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
        )

    def config_json(self) -> dict[str, Any]:
        """Returns the config.json that the engine reads."""
        return {"architectures": list(self.architectures), **self.hf_config}


def usable_bytes(settings: EngineSettings, free: int, total: int, least: int) -> int:
    """Returns what weights and KV cache may take of a GPU. Raises UserError if it is no more than
    `least`.
    """
    usable = free - settings.reserved_bytes - int(GPU_SLACK * total)
    if settings.gpu_memory_share is not None:
        usable = min(usable, int(settings.gpu_memory_share * total))
    if usable <= least:
        raise UserError(
            "free memory of the GPU",
            f"{free / 2**30:.1f} GiB, of which {settings.reserved_bytes / 2**30:.1f} GiB are for "
            "optimizer state to come",
            "room for the rollout engine",
            "Set train.offload_optimizer=true if it is not, or cut the model over more GPUs.",
        )
    return usable


def token_bytes(shape: ModelShape, tp: int, itemsize: int) -> int:
    """Returns the bytes of a token's keys and values, or latents, on a rank."""
    return shape.num_layers * shape.cached_elements(tp) * itemsize


def kv_cache_blocks(
    settings: EngineSettings, block_bytes: int, block_size: int, most: int | None = None
) -> int:
    """Returns the blocks that `max_batch` longest requests need, at most `most` bytes of them, but
    those of one such request.
    """
    per_request = -(-settings.max_tokens // block_size)
    wanted = settings.max_batch * per_request
    return wanted if most is None else min(wanted, max(most // block_bytes, per_request))


def too_long(request: Request, settings: EngineSettings) -> Iterator[ValueError]:
    """Yields the refusal of a request that is longer than the engine was started for."""
    most_new = request.sampling.max_new_tokens
    if len(request.prompt) + most_new > settings.max_tokens:
        yield ValueError(
            f"request {request.request_id} has {len(request.prompt)} prompt tokens and "
            f"max_new_tokens={most_new}, together more than {settings.max_tokens}, "
            "the longest that the engine was started for"
        )
