"""The adapter of a vLLM engine: its slots' memory, its registration, and the request that uses it.

vLLM loads adapters from files, and evicts them. Here one adapter is registered without files. It
stays in its slot, whose buffers the hybrid engine writes in place. All requests use it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from hybridrl.models.adapters.slots import SLOT_A, SLOT_B, EngineSlots
from hybridrl.models.boxes import Box
from hybridrl.models.weights import RankLayout
from hybridrl.rollout.vllm.names import hf_style

NAME, NUMBER = "policy", 1
# Projections of vLLM's fused layers. Models whose checkpoint is fused too would get one slot for
# all projections of a layer.
PROJECTIONS = {
    "qkv_proj": ["q_proj", "k_proj", "v_proj"],
    "gate_up_proj": ["gate_proj", "up_proj"],
}


def adapter_arguments(slots: EngineSlots, is_cpu: bool) -> dict[str, Any]:
    """Returns vLLM's keywords for one adapter in these layers. `lora_dtype` is the model's."""
    arguments: dict[str, Any] = {
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": slots.rank,
        "lora_dtype": "auto",
        # vLLM's default would also wrap embeddings, the head and routers.
        "lora_target_modules": list(slots.layers),
    }
    if not is_cpu:
        # All requests use the adapter, so CUDA graphs without it would never run.
        arguments["compilation_config"] = {"cudagraph_specialize_lora": False}
    return arguments


def request_of_adapter() -> Any:
    """Returns vLLM's LoRARequest for the registered adapter; its path is never read."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=NAME, lora_int_id=NUMBER, lora_path="/in-memory")


def split_projections(model: Any) -> None:
    """Gives each projection of a fused layer its own slot, before vLLM wraps the layers."""
    own = model.packed_modules_mapping
    split = {name: PROJECTIONS[name] for name in own.keys() & PROJECTIONS}
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


def slot_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns the memory of the adapter's slots by their names in `fused_layout`; A has shape
    (rank, inputs), B (outputs, rank).
    """
    found: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        for kind in (SLOT_A, SLOT_B):
            # Wrapped layers forward the attributes of the layer inside, which has no slots.
            for index, stacked in enumerate(getattr(layer, kind, None) or ()):
                found[f"{hf_style(name)}.{kind}.{index}"] = stacked[0, 0]
    return found


class LiveAdapter:
    """The adapter in a started vLLM engine.

    Args:
        runner: vLLM's model runner.
        layout: The engine's layout, with the slots.
    """

    def __init__(self, runner: Any, layout: RankLayout) -> None:
        self._manager = runner.lora_manager._adapter_manager
        self.request = request_of_adapter()
        # vLLM's start removes all adapters. The registered one has rank 1: its content is only
        # copied to the slots once, here.
        with runner.lora_manager.dummy_lora_cache():
            runner.lora_manager.add_dummy_lora(self.request, rank=1)
        self._manager.activate_adapter(NUMBER)
        self._slots = slot_tensors(runner.model)
        with torch.inference_mode():
            torch._foreach_zero_(list(self._slots.values()))
        self._unused = _parts(layout.padding, self._slots)

    def clear_unused(self) -> None:
        """Clears the parts of slots that no adapter fills. Their memory may have been released, and
        lent to training, since then.
        """
        if self._unused:
            with torch.inference_mode():
                torch._foreach_zero_(self._unused)

    def check(self) -> None:
        """Raises RuntimeError if vLLM no longer has the adapter in its slot: requests would then be
        computed without it.
        """
        if self._manager.lora_index_to_id != [NUMBER]:
            raise RuntimeError(
                f"vLLM has adapters {self._manager.lora_index_to_id} in its slots, instead of "
                f"[{NUMBER}], which the hybrid engine writes"
            )


def _parts(padding: Iterable[tuple[str, Box]], tensors: dict[str, Tensor]) -> list[Tensor]:
    return [
        tensors[name][tuple(slice(*span) for span in box)]
        for name, box in padding
        if name in tensors
    ]
