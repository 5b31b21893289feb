"""How SGLang's routers tell the experts that they choose, which are kept by places of the KV cache.

SGLang's recorder copies all choices of each step to pinned host memory, which CPUs do not have.
This one stands in its place, keeps them on the device (common/experts_by_slot.py), and is read
before a request loses its place and before the weights change.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hybridrl.contracts.blobs import Array
from hybridrl.models.family import ModelShape
from hybridrl.rollout.common.experts_by_slot import LAYER, ExpertsBySlot
from hybridrl.rollout.common.process_state import replaced
from hybridrl.rollout.engine import RunningRequest


class RecordedExperts:
    """Records the experts of every request of one live engine; SGLang's recorder while that engine
    takes its turn.

    The routers of each layer write into the rows of a pass's tokens, which CUDA graphs capture;
    after the pass the rows go to the slots of the tokens' keys. Slots and tokens that pad a batch
    count in `num_slots` and `max_tokens`.

    Raises:
        ModelError: The layers with experts have no routers that tell what they choose.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        shape: ModelShape,
        num_slots: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._by_slot = by_slot = ExpertsBySlot("sglang", shape, num_slots, device, _routed(model))
        self._index = {layer: index for index, layer in enumerate(by_slot.layers)}
        assert shape.moe is not None  # ExpertsBySlot has looked
        size = max_tokens, len(by_slot.layers), shape.moe.experts_per_token
        self._of_pass = torch.zeros(size, dtype=by_slot.dtype, device=device)

    def capture(self, layer_id: int, topk_indices: Tensor) -> None:
        """Is told by a layer's router what it chose for the tokens of a pass, (T, K)."""
        self._of_pass[: len(topk_indices), self._index[layer_id]] = topk_indices.to(
            self._of_pass.dtype
        )

    def on_forward_end(self, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Is told by SGLang that a pass is over, in whose stream it is called."""
        slots_T = forward_batch.out_cache_loc
        self._by_slot.write_all(slots_T, self._of_pass[: len(slots_T)])

    def get_topk(
        self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0
    ) -> Array:
        """Is asked by SGLang for the experts of a finished request, before its slots are free; its
        last token was in no pass.
        """
        del start_len
        return self._by_slot.read(req_to_token_pool.req_to_token[req_pool_idx, : seqlen - 1])

    def record(self, rows: Iterable[tuple[Any, RunningRequest, int]], pool: Any) -> None:
        """Records the experts of unfinished requests that are not recorded yet, before their slots
        are free. A sync point if there are any.

        A request that was taken back and is read in again has slots for what it has read, and none
        for the rest, of which everything was recorded when it was taken back.

        Args:
            rows: SGLang's request, where it is recorded, and its tokens of prompt and response, the
                last of which was in no finished pass.
            pool: SGLang's `req_to_token_pool`.
        """
        found: list[RunningRequest] = []
        slots: list[Tensor] = []
        for request, row, num_tokens in rows:
            start, end = row.num_recorded(), min(num_tokens - 1, request.kv_committed_len)
            if request.req_pool_idx is not None and start < end:
                found.append(row)
                slots.append(pool.req_to_token[request.req_pool_idx, start:end])
        self._by_slot.record(found, slots)

    def forget(self) -> None:
        """Forgets all: the weights change."""
        self._by_slot.forget()


@contextlib.contextmanager
def recorded_by(listen: Callable[[int], RecordedExperts | None]) -> Iterator[None]:
    """Lets an engine that starts inside make its recorder before graphs are captured: `listen`
    returns it (None: it records nothing) given the slots of the KV cache.
    """
    from sglang.srt.model_executor import model_runner

    def create(num_tokens: int, **sizes: Any) -> RecordedExperts | None:
        """Returns the recorder; the arguments are named by SGLang."""
        return listen(num_tokens)

    with replaced(model_runner, "RoutedExpertsCapturer", SimpleNamespace(create=create)):
        yield


def make_current(recorder: RecordedExperts | None) -> None:
    """Makes it SGLang's recorder, of which a process has one, be there several engines or not."""
    from sglang.srt.state_capturer.routed_experts import set_global_experts_capturer

    set_global_experts_capturer(recorder)


def _routed(model: torch.nn.Module) -> list[int]:
    """Returns the layers whose routers tell what they choose; routers that do not know their layer,
    as Mixtral's, are told.
    """
    from sglang.srt.layers.moe.topk import TopK

    found = []
    for name, part in model.named_modules():
        if isinstance(part, TopK) and (match := LAYER.search(name)):
            part.layer_id = int(match[1])
            found.append(part.layer_id)
    return found
