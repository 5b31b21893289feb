"""Records the experts that vLLM's routers choose, indexed by slot in the KV cache.

Only newer vLLM versions can record experts, and their CPU runner cannot. Here each router writes
its choices to the slot of the token's keys (common/experts_by_slot.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.models.family import ModelShape
from hybridrl.rollout.common.experts_by_slot import LAYER, ExpertsBySlot, unfit
from hybridrl.rollout.engine import RunningRequest
from hybridrl.rollout.vllm.decoding import cache_fits


class RecordedExperts:
    """Records the experts of all requests in one engine; created before graphs are captured.

    Raises ModelError if a layer with experts has no observable router, or if vLLM may free KV cache
    slots before a request ends. `cache` is vLLM's `KVCacheConfig` on this rank.
    """

    def __init__(
        self, model: torch.nn.Module, cache: Any, shape: ModelShape, device: torch.device
    ) -> None:
        found, groups = _routers(model), cache.kv_cache_groups
        if len(groups) != 1:
            raise _no_fixed_slots()
        self._block_size = groups[0].kv_cache_spec.block_size
        # The last row is for padding tokens, whose slot is -1.
        num_slots = cache.num_blocks * self._block_size + 1
        self._experts = ExpertsBySlot("vllm", shape, num_slots, device, found)
        for index, layer in enumerate(self._experts.layers):
            found[layer].set_capture_fn(self._writer(index))

    def attach(self, scheduler: Any, running: Mapping[str, RunningRequest]) -> None:
        """Starts to record the experts of the requests in `running`, by vLLM's names, before their
        slots are freed. Raises ModelError if keys may lose their slots before a request ends.
        """
        self._manager, self._running = scheduler.kv_cache_manager, running
        if not cache_fits(self._manager):
            raise _no_fixed_slots()
        block_size = self._manager.coordinator.single_type_managers[0].block_size
        if block_size != self._block_size:
            sizes = f"block sizes {block_size} and {self._block_size}"
            raise unfit("vllm", sizes, "a single block size")
        self._requests = scheduler.requests
        # vLLM calls this method for requests that end, are aborted, or are preempted.
        self._free = scheduler._free_request_blocks
        scheduler._free_request_blocks = self._record_and_free

    def _writer(self, index: int) -> Callable[[Tensor], None]:
        from vllm.forward_context import get_forward_context

        def write(experts_TK: Tensor) -> None:
            slots_of_layers = get_forward_context().slot_mapping
            if not slots_of_layers:  # a warm-up run without requests
                return
            slots_T = next(iter(slots_of_layers.values()))[: len(experts_TK)]
            self._experts.write(slots_T, index, experts_TK)

        return write

    def record_running(self) -> None:
        """Records experts of running requests, which must be up to date (`DecodingSteps.write`)."""
        self._record(self._requests[name] for name in self._running if name in self._requests)

    def _record_and_free(self, request: Any) -> None:
        self._record([request])
        self._free(request)

    def _record(self, requests: Iterable[Any]) -> None:
        """Records the experts of computed tokens that were not recorded yet; a sync point if any. A
        preempted request has none until it passes the point at which it was preempted.
        """
        rows: list[RunningRequest] = []
        slots: list[Tensor] = []
        for request in requests:
            row = self._running.get(request.request_id)
            if row is not None and row.num_recorded() < request.num_computed_tokens:
                rows.append(row)
                slots.append(self._slots(request, row.num_recorded()))
        self._experts.record(rows, slots)

    def _slots(self, request: Any, start: int) -> Tensor:
        (blocks,) = self._manager.get_block_ids(request.request_id)
        size, end = self._block_size, request.num_computed_tokens
        if len(blocks) * size < end:
            slots = f"{len(blocks) * size} slots for {end} computed tokens"
            raise RuntimeError(f"vLLM has {slots} of request {request.request_id}")
        position = torch.arange(start, end)
        return torch.tensor(blocks)[position // size] * size + position % size

    def forget(self) -> None:
        self._experts.forget()


def _no_fixed_slots() -> ModelError:
    kinds = "attention that drops keys, or several kinds of attention"
    return unfit("vllm", kinds, "full attention in all layers")


def _routers(model: torch.nn.Module) -> dict[int, Any]:
    found: dict[int, Any] = {}
    for name, part in model.named_modules():
        router = getattr(part, "router", None)
        if hasattr(router, "set_capture_fn") and (match := LAYER.search(name)):
            found[int(match[1])] = router
    return found
