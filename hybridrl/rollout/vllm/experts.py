"""vLLM's experts: the parameters that stack them, one by one, and their computation on CPU.

vLLM 0.32 on CPU packs `w13_weight` and `w2_weight` once they are loaded: what is written afterwards
is read wrongly, silently. And that kernel passes over `expert_map`. Here experts stay as they are
and each is two products. May go once vLLM has a CPU kernel for unpacked experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.rollout.common.cpu_experts import experts_forward


def deal_experts(model: torch.nn.Module, experts: Sequence[int]) -> None:
    """Makes this rank the holder of these experts (ascending) in every layer, in place of vLLM's
    own choice.

    vLLM's loader and kernels look for an expert in `expert_map`, (experts,): its place on this
    rank, or -1. It is written where it lies; of the two that exist one belongs to the layer and one
    to the manager of maps, or they are the same.

    Raises:
        ModelError: A layer, or its manager, has no such map, or one of another number of experts.
    """
    found: list[Any] = [part for part in model.modules() if hasattr(part, "w13_weight")]
    for part in found:
        manager = getattr(part, "expert_map_manager", None)
        maps: list[Any] = [getattr(holder, "expert_map", None) for holder in (part, manager)]
        if any(one is None or int((one >= 0).sum()) != len(experts) for one in maps):
            raise _no_map(type(part).__name__)
        places = torch.full_like(maps[0], -1)
        places[list(experts)] = torch.arange(len(experts), dtype=places.dtype, device=places.device)
        for one in maps:
            one.copy_(places)
    if not found:
        raise _no_map(type(model).__name__)


def _no_map(name: str) -> ModelError:
    return ModelError(
        "config.json",
        name,
        "a mixture whose layers have vLLM's expert_map, to deal experts as they lie in training",
        "Set rollout.ep=1.",
    )


def compute_with_live_experts() -> None:
    """Puts `experts_forward` in the place of vLLM's kernel and leaves the parameters unpacked."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def apply(kernel: Any, output: Tensor, hidden_states: Tensor, **given: Any) -> None:
        output.copy_(
            experts_forward(
                hidden_states,
                given["w1"],
                given["w2"],
                given["topk_weights"],
                given["topk_ids"],
                given["expert_map"],
            )
        )

    experts = cpu_moe.CPUUnquantizedExperts
    experts._supports_grouped_gemm = classmethod(lambda kernel, config: (True, None))
    experts.process_weights_after_loading = lambda kernel, layer: None
    experts.supports_expert_map = lambda kernel: True
    experts.apply = apply
