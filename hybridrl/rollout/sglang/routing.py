"""Records the experts that SGLang's routers choose, indexed by slot in the KV cache.

SGLang's own recorder copies each step's experts to pinned host memory, which hosts without GPUs do
not have. Here they stay on the device (common/experts_by_slot.py) until a request loses its slots
or the weights change.
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
    """Records the experts of all requests in one engine, as SGLang's recorder in its turns.

    During a forward pass, each layer's router writes to one row per token, at addresses that CUDA
    graphs capture. After the pass, the rows are copied to the slots of the tokens' keys.
    `num_slots` and `max_tokens` include padding. Raises ModelError if a layer with experts has no
    such router.
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
        assert shape.moe is not None  # ExpertsBySlot has checked this
        size = max_tokens, len(by_slot.layers), shape.moe.experts_per_token
        self._of_pass = torch.zeros(size, dtype=by_slot.dtype, device=device)

    def capture(self, layer_id: int, topk_indices: Tensor) -> None:
        """Called by a layer's router with its choices for the tokens of a pass, (T, K)."""
        self._of_pass[: len(topk_indices), self._index[layer_id]] = topk_indices.to(
            self._of_pass.dtype
        )

    def on_forward_end(self, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
        """Called by SGLang at the end of a pass, on the pass's stream."""
        slots_T = forward_batch.out_cache_loc
        self._by_slot.write_all(slots_T, self._of_pass[: len(slots_T)])

    def get_topk(
        self, req_pool_idx: int, seqlen: int, req_to_token_pool: Any, start_len: int = 0
    ) -> Array:
        """Called by SGLang to read a finished request's experts, of all but the last token."""
        del start_len
        return self._by_slot.read(req_to_token_pool.req_to_token[req_pool_idx, : seqlen - 1])

    def record(self, rows: Iterable[tuple[Any, RunningRequest, int]], pool: Any) -> None:
        """Records new experts of unfinished requests, before their slots are freed. A sync point if
        there are any.

        A retracted request that is computed again has slots only for its recomputed tokens; the
        experts of its other tokens were recorded when it was retracted.

        Args:
            rows: SGLang's request, its row, and its number of prompt and response tokens. No
                finished pass has processed the last of these tokens.
            pool: SGLang's `req_to_token_pool`.
        """
        found: list[RunningRequest] = []
        slots: list[Tensor] = []
        for request, row, num_tokens in rows:
            cached = request if hasattr(request, "req_pool_idx") else request.kv  # from 0.5.22 on
            start, end = row.num_recorded(), min(num_tokens - 1, cached.kv_committed_len)
            if cached.req_pool_idx is not None and start < end:
                found.append(row)
                slots.append(pool.req_to_token[cached.req_pool_idx, start:end])
        self._by_slot.record(found, slots)

    def forget(self) -> None:
        self._by_slot.forget()


@contextlib.contextmanager
def recorded_by(listen: Callable[[int], RecordedExperts | None]) -> Iterator[None]:
    """Makes an engine that starts in this context create its recorder with `listen`, before graphs
    are captured. `listen` takes the number of slots in the KV cache, and returns None if experts
    are not recorded.
    """
    from sglang.srt.model_executor import model_runner

    capturer = SimpleNamespace(create=lambda num_tokens, **sizes: listen(num_tokens))
    with replaced(model_runner, "RoutedExpertsCapturer", capturer):
        yield


def make_current(recorder: RecordedExperts | None) -> None:
    """Sets SGLang's recorder, of which a process has only one, even with several engines."""
    from sglang.srt.state_capturer.routed_experts import set_global_experts_capturer

    set_global_experts_capturer(recorder)


def _routed(model: torch.nn.Module) -> list[int]:
    """Returns the layers of observable routers; sets layer numbers, which Mixtral leaves unset."""
    from sglang.srt.layers.moe.topk import TopK

    found = []
    for name, part in model.named_modules():
        if isinstance(part, TopK) and (match := LAYER.search(name)):
            part.layer_id = int(match[1])
            found.append(part.layer_id)
    return found
