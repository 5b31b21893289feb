"""Places vLLM's experts where they are trained, and computes experts on CPU.

vLLM 0.32 on CPU packs `w13_weight` and `w2_weight` after loading, and would silently misread
weights that are written later. Its kernel also ignores `expert_map`. This module leaves the
parameters unpacked and computes with torch, until vLLM has a CPU kernel for unpacked experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.rollout.common.cpu_experts import clamped_swiglu, experts_forward, swiglu
from hybridrl.rollout.common.process_state import replaced


def deal_experts(model: torch.nn.Module, experts: Sequence[int]) -> None:
    """Assigns these experts (ascending) to this rank in every layer, instead of vLLM's own.

    vLLM's loader and kernels look up an expert's local index, or -1, in `expert_map`, (experts,).
    The layer and its map manager each have a map or share one; both are written in place. Raises
    ModelError if one has no map, or a map for another number of experts.
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
        "a model whose expert layers have vLLM's expert_map, which rollout.ep above 1 needs",
        "Set rollout.ep=1.",
    )


@contextlib.contextmanager
def experts_without_adapters() -> Iterator[None]:
    """Makes vLLM choose kernels for experts as in an engine without adapters.

    With adapters in any layer, vLLM (0.26, 0.32) would choose kernels for adapters of experts. They
    need triton, which is absent on CPU, or pack gate and up in another order.
    """
    from vllm.model_executor.layers.fused_moe import layer

    make = layer.FusedMoEConfig

    def make_without(**keywords: Any) -> Any:
        return make(**{**keywords, "is_lora_enabled": False})

    with replaced(layer, "FusedMoEConfig", make_without):
        yield


def compute_with_live_experts() -> None:
    """Replaces vLLM's kernel by `experts_forward` and leaves the parameters unpacked."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    activations = {"silu": swiglu, "swigluoai": clamped_swiglu}

    def apply(kernel: Any, output: Tensor, hidden_states: Tensor, **inputs: Any) -> None:
        output.copy_(
            experts_forward(
                hidden_states,
                inputs["w1"],
                inputs["w2"],
                inputs["topk_weights"],
                inputs["topk_ids"],
                inputs["expert_map"],
                activation=activations[inputs["activation"].value],
                biases=None if kernel.w1_bias is None else (kernel.w1_bias, kernel.w2_bias),
            )
        )

    experts = cpu_moe.CPUUnquantizedExperts
    experts._supports_grouped_gemm = classmethod(lambda kernel, config: (True, None))
    experts.process_weights_after_loading = lambda kernel, layer: None
    experts.supports_expert_map = lambda kernel: True
    experts.apply = apply
