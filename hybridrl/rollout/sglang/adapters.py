"""Adapters in an SGLang engine: their slots' memory, their registration, and repairs for CPUs.

SGLang loads adapters from files into slots of a memory pool, and evicts them. Here they are
registered without content, and pinned to their slots, which the hybrid engine writes in place.
SGLang keeps one more slot for requests without an adapter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hybridrl.models.adapters.slots import SLOT_A, SLOT_B, EngineSlots
from hybridrl.rollout.common.process_state import replaced

# Names of layers that differ from those in the layout.
OWN_NAMES = {"fused_qkv_a_proj": "fused_qkv_a_proj_with_mqa"}


def adapter_arguments(slots: EngineSlots, is_cpu: bool) -> dict[str, Any]:
    arguments = {
        "enable_lora": True,
        "max_loras_per_batch": 1 + len(slots.adapters),
        "max_lora_rank": slots.rank,
        "lora_target_modules": [OWN_NAMES.get(name, name) for name in slots.layers],
    }
    if is_cpu:
        arguments["lora_backend"] = "torch_native"
    return arguments


@contextlib.contextmanager
def adapters_without_experts(is_cpu: bool) -> Iterator[None]:
    """Makes SGLang start with adapters on linear layers alone, and makes this work on CPUs.

    An engine with adapters on `gate_up_proj` and `down_proj` would also get slots and kernels for
    adapters of routed experts (0.5.16 to 0.5.23). On CPUs, SGLang's computation with adapters pins
    memory, which fails without an accelerator.
    """
    from sglang.srt.lora import lora_manager, mem_pool

    class NoExperts:
        """Replaces the class of experts, so that no layer is an instance of it."""

    no_experts = staticmethod(lambda model: False)
    with (
        replaced(lora_manager, "FusedMoE", NoExperts),
        replaced(mem_pool.LoRAMemoryPool, "_has_moe_module", no_experts),
        _computed_on_cpu(lora_manager) if is_cpu else contextlib.nullcontext(),
    ):
        yield


@contextlib.contextmanager
def _computed_on_cpu(lora_manager: Any) -> Iterator[None]:
    from sglang.srt.lora.backend.torch_backend import TorchNativeLoRABackend

    class Unpinned(TorchNativeLoRABackend):  # type: ignore[misc, unused-ignore]
        """SGLang's computation with torch, without pinned memory."""

        def prepare_lora_batch(self, *args: Any, **kwargs: Any) -> None:
            with _WithoutPinning():
                super().prepare_lora_batch(*args, **kwargs)

    with replaced(lora_manager, "get_backend_from_name", lambda name: Unpinned), _WithoutPinning():
        yield


class _WithoutPinning(TorchFunctionMode):
    """Mode in which torch allocates ordinary memory instead of pinned memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.pin_memory:
            return args[0]
        kwargs = kwargs or {}
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        return func(*args, **kwargs)


def slot_tensors(manager: Any, slot: int) -> dict[str, Tensor]:
    """Returns a slot's A (rank, inputs) and B (outputs, rank) by SGLang's module names."""
    from sglang.srt.lora.utils import get_target_module_name

    pool, found = manager.memory_pool, dict[str, Tensor]()
    for layer, modules in enumerate(manager.lora_modules):
        for name, module in modules.items():
            target = get_target_module_name(name, pool.target_modules)
            a, b = (buffer[target][layer][slot] for buffer in (pool.A_buffer, pool.B_buffer))
            rank = b.shape[1]
            num = a.shape[0] // rank
            for index, (start, stop) in enumerate(_outputs(module, num, b.shape[0])):
                found[f"{name}.{SLOT_A}.{index}"] = a[index * rank : (index + 1) * rank]
                found[f"{name}.{SLOT_B}.{index}"] = b[start:stop]
    return found


def _outputs(module: Any, num: int, size: int) -> Iterator[tuple[int, int]]:
    """Yields the range of outputs of each of a layer's `num` projections in SGLang."""
    offsets: list[int] = [0, size]
    if num > 1 and hasattr(module, "first_output_dim"):  # latents of queries, and of keys
        offsets = [0, module.first_output_dim, size]
    elif num > 1:
        offsets = module.output_offset_cpu.tolist()
    return zip(offsets[:-1], offsets[1:], strict=True)


class LiveAdapters:
    def __init__(self, scheduler: Any, slots: EngineSlots) -> None:
        from sglang.srt.lora.lora_registry import LoRARef

        self._manager = scheduler.tp_worker.model_runner.lora_manager
        self._pool = self._manager.memory_pool
        # An adapter's rank is that of the slots, because SGLang packs a layer's projections by the
        # adapter's rank.
        config = {
            "peft_type": "LORA",
            "target_modules": [OWN_NAMES.get(name, name) for name in slots.layers],
            "r": slots.rank,
            "lora_alpha": slots.rank,  # B contains the scale
        }
        for name in slots.adapters:
            path = f"/in-memory/{name}"
            known = LoRARef(lora_id=name, lora_name=name, lora_path=path, pinned=True)
            loaded = self._manager.load_lora_adapter_from_tensors(known, {}, config)
            if not loaded.success:
                raise RuntimeError(f"SGLang refused adapter {name}: {loaded.error_message}")
        with torch.no_grad():
            # The adapters have no weights, so this clears their slots.
            self._manager.fetch_new_loras({None, *slots.adapters})
        self._places = {name: self._pool.get_buffer_id(name) for name in slots.adapters}

    def tensors(self, name: str) -> dict[str, Tensor]:
        return slot_tensors(self._manager, self._places[name])

    def check(self) -> None:
        """Raises RuntimeError if SGLang moved an adapter: requests would use wrong weights."""
        found = self._pool.uid_to_buffer_id
        for name, place in self._places.items():
            if found.get(name) != place:
                raise RuntimeError(
                    f"SGLang has adapter {name} in slot {found.get(name)} instead of {place}, "
                    "which the hybrid engine writes"
                )
