"""Adapters in a vLLM engine: their slots' memory, their registration, and requests that use them.

vLLM loads adapters from files, and evicts them. Here they are registered without files. Each stays
in its slot, whose buffers the hybrid engine writes in place.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hybridrl.models.adapters.slots import SLOT_A, SLOT_B, EngineSlots

# Projections of vLLM's fused layers. Models whose checkpoint is fused too would get one slot for
# all projections of a layer.
PROJECTIONS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


def adapter_arguments(slots: EngineSlots, is_cpu: bool) -> dict[str, Any]:
    """Returns vLLM's keywords for adapters in these layers. `lora_dtype` is the model's."""
    # On CPUs, vLLM computes requests without an adapter with the last slot (0.26 to 0.33), which
    # therefore stays empty there.
    num_slots = len(slots.adapters) + is_cpu
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": num_slots,
        "max_cpu_loras": num_slots,
        "max_lora_rank": slots.rank,
        "lora_dtype": "auto",
        # vLLM's default would also wrap embeddings, the head and routers.
        "lora_target_modules": list(slots.layers),
    }
    if not is_cpu:
        # Almost all requests use an adapter, so CUDA graphs without adapters would hardly ever run.
        arguments["compilation_config"] = {"cudagraph_specialize_lora": False}
    return arguments


def split_projections(model: Any) -> None:
    """Gives each projection of a fused layer its own slot, before vLLM wraps the layers."""
    own = model.packed_modules_mapping
    # Qwen3-VL with experts leaves out the fused layers of dense layers (0.32).
    names = {name.rpartition(".")[2] for name, _ in model.named_modules()}
    split = {name: PROJECTIONS[name] for name in (own.keys() | names) & PROJECTIONS.keys()}
    model.packed_modules_mapping = {**own, **split}


def forget_addresses() -> None:
    """Empties vLLM's tables of slots' addresses and strides, which outlive engines.

    A later engine's slots may have the same addresses and another rank. Open engines' CUDA graphs
    contain the tables, so this runs only after the last engine has stopped.
    """
    kernels = sys.modules.get("vllm.lora.ops.triton_ops.utils")
    if kernels is not None:
        kernels._LORA_A_PTR_DICT.clear()
        kernels._LORA_B_PTR_DICT.clear()


def slot_tensors(model: torch.nn.Module, place: int = 0) -> dict[str, Tensor]:
    """Returns slots at `place` by vLLM's module names: A (rank, inputs), B (outputs, rank)."""
    found: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        for kind in (SLOT_A, SLOT_B):
            # Wrapped layers forward the attributes of the layer inside, which has no slots.
            for index, stacked in enumerate(getattr(layer, kind, None) or ()):
                found[f"{name}.{kind}.{index}"] = stacked[place, 0]
    return found


class LiveAdapters:
    """The adapters of an engine, by slot, and their LoRARequests, whose paths are not read."""

    def __init__(self, runner: Any, names: Sequence[str]) -> None:
        from vllm.lora.request import LoRARequest

        self._model, self._names = runner.model, tuple(names)
        self._manager = runner.lora_manager._adapter_manager
        self.requests = {
            name: LoRARequest(lora_name=name, lora_int_id=number, lora_path=f"/in-memory/{name}")
            for number, name in enumerate(names, 1)
        }
        # vLLM's start removes all adapters. The registered ones have rank 1: their content is only
        # copied to the slots once, here.
        for request in self.requests.values():
            with runner.lora_manager.dummy_lora_cache():
                runner.lora_manager.add_dummy_lora(request, rank=1)
            self._manager.activate_adapter(request.lora_int_id)
        self.check()
        with torch.inference_mode():
            for place in range(len(self._manager.lora_index_to_id)):
                torch._foreach_zero_(list(slot_tensors(self._model, place).values()))

    def tensors(self, name: str) -> dict[str, Tensor]:
        return slot_tensors(self._model, self._names.index(name))

    def check(self) -> None:
        """Raises RuntimeError if vLLM has moved an adapter: requests would use other weights."""
        numbers = [request.lora_int_id for request in self.requests.values()]
        found = self._manager.lora_index_to_id
        if found[: len(numbers)] != numbers or any(found[len(numbers) :]):
            raise RuntimeError(
                f"vLLM has adapters {found} in its slots, instead of {numbers}, which the hybrid "
                "engine writes"
            )
