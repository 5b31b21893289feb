"""Estimates the memory for replayed experts: a byte per index, two above 256 experts. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np

from hybridrl.config.rules_experts import replays
from hybridrl.config.schema import Config
from hybridrl.contracts.routed_experts import ONE_BYTE, experts_dtype
from hybridrl.models.family import ModelShape
from hybridrl.rollout.registry import ENGINES


@dataclass(frozen=True)
class ReplayBytes:
    """Sizes of recorded experts: of a `token`, of a `step` in host memory, on devices in `train`.

    `rollout`: the engine's buffer; 0 unless its KV cache is allocated at the start.
    """

    token: int
    step: int
    train: int
    rollout: int

    def as_json(self) -> dict[str, int]:
        """Returns the sizes by their keys in the report."""
        return {f"{name}_bytes": value for name, value in asdict(self).items()}


def replay_bytes(config: Config, shape: ModelShape, num_requests: int) -> ReplayBytes | None:
    """Returns the memory of replay with a KV cache for `num_requests`; None without replay."""
    if not replays(config) or shape.moe is None:
        return None
    num_layers = sum(map(shape.has_experts, range(shape.num_layers)))
    choices, num_experts = num_layers * shape.moe.experts_per_token, shape.moe.num_experts
    token = choices * np.dtype(experts_dtype(num_experts)).itemsize
    longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    samples = config.steps.prompts_per_step * config.steps.samples_per_prompt
    kept = 0
    if ENGINES[config.rollout.engine].has_fixed_kv_cache:
        # One value is reserved for "no expert" (rollout/common/experts_by_slot.py).
        entry = choices * (1 if num_experts < ONE_BYTE else 2)
        kept = entry * config.longest_request() * num_requests
    micro_batch = token * config.train.micro_batch_tokens // config.train.cp
    return ReplayBytes(token, token * longest * samples, micro_batch, kept)
