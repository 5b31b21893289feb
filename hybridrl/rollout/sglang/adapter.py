"""The `sglang` engine: runs SGLang's scheduler in this process and receives weights in place.

Drawn tokens stay in SGLang's own request objects until they are needed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from hybridrl.config.wrapped_models import SHORT_VISUAL, VISUAL
from hybridrl.contracts.prompts import Content
from hybridrl.models.adapters.slots import POLICY
from hybridrl.models.weights import RankLayout
from hybridrl.rollout.common.engine_memory import SleepingMemory
from hybridrl.rollout.common.image_pixels import NUM_FOLLOWING
from hybridrl.rollout.common.packaged_engine import PackagedEngine
from hybridrl.rollout.common.settings import too_long
from hybridrl.rollout.common.weight_copies import LatentCopies
from hybridrl.rollout.engine import Completion, Request, RunningRequest
from hybridrl.rollout.sglang.adapters import LiveAdapters
from hybridrl.rollout.sglang.images import (
    ImageNumbers,
    PixelTensors,
    attend_by_image,
    set_deepstack,
    with_padded_tower,
)
from hybridrl.rollout.sglang.memory import sleeping_memory
from hybridrl.rollout.sglang.repairs import settle_longrope
from hybridrl.rollout.sglang.routing import RecordedExperts
from hybridrl.rollout.sglang.sampling import request_sampling
from hybridrl.rollout.sglang.scheduler import drawn_logps, end_soon
from hybridrl.rollout.sglang.shared_prompts import SharedPrompts
from hybridrl.rollout.sglang.start import LiveEngine, start, stop

# Number of turns without a batch after which SGLang's loop is considered stuck. A single empty turn
# is normal while SGLang waits for the previous batch's tokens.
MAX_EMPTY_TURNS = 3
COPIES = LatentCopies("w_kc", "w_vc", "num_local_heads")


@dataclass
class _Running:
    row: RunningRequest
    request: Any
    num_taken: int = 0


class SglangEngine(PackagedEngine[LiveEngine, RecordedExperts]):
    name = "sglang"
    copies = COPIES

    @staticmethod
    def _layout_name(name: str) -> str:
        if name.startswith(SHORT_VISUAL):
            name = name.replace(".attn.qkv_proj.", ".attn.qkv.")
            return f"{VISUAL}{name.removeprefix(SHORT_VISUAL)}"
        name = name.replace(".fused_qkv_a_proj_with_mqa.", ".fused_qkv_a_proj.")
        return name.replace(".experts.w", ".experts.routed_experts.w")

    @staticmethod
    def _padded(layout: RankLayout) -> RankLayout:
        return with_padded_tower(layout)

    def _start(self) -> None:
        layout = self._placement
        self._running: dict[int, _Running] = {}  # by request id
        self._shared_prompts = SharedPrompts()
        self._image_numbers = ImageNumbers()
        # `_by_text`: requests with stop strings. `_leaving`: requests that ended at a stop string,
        # but which SGLang has not ended yet.
        self._by_text: set[int] = set()
        self._leaving: set[int] = set()
        self._num_empty_turns = 0
        self._live = start(
            self._inputs,
            prepare=self._prepare,
            listen=lambda model, slots, longest: self._record_with(
                lambda: RecordedExperts(model, self._shape, slots, longest, self._device)
            ),
        )
        self._scheduler = self._live.scheduler
        if self._inputs.slots is not None and not self._refusals:
            self._adapters = LiveAdapters(self._scheduler, self._inputs.slots)
            self._prepare_adapter(self._live.model, self._adapters.tensors(POLICY))
        self._scheduler.recorder = self._experts
        self._scheduler.before_release = lambda request: self._record([request])
        self._scheduler.reports_drawn = layout.tp > 1
        itemsize = getattr(torch, self._settings.dtype).itemsize
        per_token = self._shape.token_bytes(layout.tp, itemsize)
        self._cache_bytes = per_token * self._scheduler.max_total_num_tokens
        self._runs_ahead = self._scheduler.is_overlapped

    @cached_property
    def _pixels(self) -> PixelTensors:
        return PixelTensors.of(self._settings, self._shape)

    def _settle(self, model: torch.nn.Module) -> None:
        settle_longrope(model, self._inputs.version)
        if self._shape.vision is not None:
            set_deepstack(model, self._shape.vision)
            if self._device.type == "cpu":
                tower: Any = model.visual
                attend_by_image(tower)

    def _own_memory(self) -> SleepingMemory:
        written = self._written_parameters()
        return sleeping_memory(self._live, self._device, *written, self._cache_bytes)

    def finish_update(self, version: int) -> None:
        super().finish_update(version)
        if self._device.type != "cpu":  # SGLang's stream differs from the update's
            torch.cuda.synchronize(self._device)

    def _forget_cache(self) -> None:
        self._scheduler.forget_requests()

    def _record_running(self) -> None:
        self._record([running.request for running in self._running.values()])

    def _record(self, requests: Sequence[Any], num_tokens: int | None = None) -> None:
        """Records experts of the first `num_tokens` tokens of requests that still have slots."""
        if self._experts is None:
            return
        rows: list[tuple[Any, RunningRequest, int]] = []
        for request in requests:
            running = self._running.get(int(request.rid))
            # Until the first token is drawn, the prompt may not be completely computed.
            if running is not None and request.output_ids:
                every = len(request.origin_input_ids) + len(request.output_ids)
                rows.append((request, running.row, num_tokens or every))
        self._experts.record(rows, self._scheduler.req_to_token_pool)

    def _drop_running(self) -> None:
        for ids in (self._running, self._by_text, self._leaving):
            ids.clear()
        self._shared_prompts.forget()
        if self._memory is None or not self._memory.is_asleep:
            self._scheduler.forget_requests()
        self._image_numbers.forget()

    def clear(self) -> None:
        super().clear()
        if self._leaving:  # requests that SGLang has not dropped yet
            self._drop_running()
        self._shared_prompts.forget()

    def close(self) -> None:
        stop(self._live)

    def _request_rules(self, request: Request) -> Iterable[ValueError]:
        return too_long(request, self._settings)

    def _decode(self) -> tuple[list[str], list[int]]:
        scheduler = self._scheduler
        # Nothing here draws from torch's random generators, so their states need not be restored.
        with torch.no_grad():
            if len(self._running) < len(self._rows):
                self._begin_queued()
            scheduler.turn()
        ended, scheduler.ended = scheduler.ended, []
        for request in ended:
            self._end(request)
        self._end_by_text()
        if scheduler.has_wrong_logp:
            self._take_drawn()  # raises unless the affected request was dropped
            scheduler.has_wrong_logp = False
        is_empty = not ended and not scheduler.last_batch
        self._num_empty_turns = self._num_empty_turns + 1 if is_empty else 0
        if self._num_empty_turns >= MAX_EMPTY_TURNS:
            raise RuntimeError(f"SGLang runs none of {len(self._running)} unfinished requests")
        drawn, scheduler.drawn = scheduler.drawn, ([], [])
        return drawn

    def _begin_queued(self) -> None:
        """Passes queued requests to SGLang in order, up to `max_batch` at a time. One of several
        requests with the same prompt starts first; the others wait until the prompt is computed.
        """
        started = self._running.keys() | self._leaving
        if (room := self._settings.max_batch - len(started)) <= 0:
            return
        waiting = (row.request for number, row in self._rows.items() if number not in started)
        queued: Sequence[Request] = list(islice(waiting, room))
        later: list[Request] = []
        if any(request.contents for request in queued):
            running = (one.row.request for one in self._running.values())
            queued = self._pixels.admitted(queued, running)
            later = list(islice(waiting, NUM_FOLLOWING))
        due = self._shared_prompts.due(queued, self._is_computing_prompt)
        for index, request in enumerate(due):
            if request.contents:
                self._pixels.decode_following([*due[index:], *later])
            self._add(request.request_id, self._rows[request.request_id])

    def _is_computing_prompt(self, request_id: int) -> bool:
        """Whether SGLang has drawn no token for a request yet, so its prompt is not cached."""
        running = self._running.get(request_id)
        return running is not None and not running.request.output_ids

    def _add(self, request_id: int, row: RunningRequest) -> None:
        """Passes a request to SGLang; tokens that it already has become part of SGLang's prompt."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

        tokens = array("q", [*row.request.prompt, *row.tokens])
        request = TokenizedGenerateReqInput(
            rid=str(request_id),
            input_text=None,
            input_ids=tokens,
            input_embeds=None,
            token_type_ids=None,
            mm_inputs=self._image_inputs(row.request.contents, tokens),
            sampling_params=request_sampling(
                row.request.sampling, row.request.seed, len(row.tokens)
            ),
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            return_routed_experts=self._experts is not None,
            lora_id=row.request.adapter if self.adapters else None,
            stream=False,
        )
        if row.request.sampling.needs_history:
            self._scheduler.token_table.add(request.rid, row.request)
        self._running[request_id] = _Running(row, self._scheduler.add(request))
        if row.request.sampling.stop_strings:
            self._by_text.add(request_id)

    def _image_inputs(self, images: Sequence[Content], tokens: array[int]) -> Any:
        return self._pixels.inputs_of(images, tokens, self._image_numbers) if images else None

    def _end_by_text(self) -> None:
        """Ends requests at stop strings, as SGLang does not; ignores SGLang's next token."""
        for request_id in sorted(self._by_text):
            running = self._running[request_id]
            if self._experts is not None and (end := self._text_end(running)):
                self._record([running.request], len(running.row.request.prompt) + end)
            completion = self._take(running)
            if completion is None:
                continue
            self._finish(completion)
            del self._running[request_id]
            self._by_text.remove(request_id)
            self._leaving.add(request_id)
            end_soon(running.request)

    def _text_end(self, running: _Running) -> int:
        """Returns a response's length up to the token that completes a stop string, or 0."""
        row, strings = running.row, running.row.request.sampling.stop_strings
        tokens = [*row.tokens, *running.request.output_ids[running.num_taken :]]
        ends = range(len(row.tokens) + 1, len(tokens) + 1)
        assert self.token_texts is not None
        found = self.token_texts.ends
        return next((end for end in ends if found(tokens[:end], strings)), 0)

    def _end(self, request: Any) -> None:
        request_id = int(request.rid)
        if request_id in self._leaving:
            self._leaving.remove(request_id)
            return
        self._by_text.discard(request_id)
        running = self._running[request_id]
        if self._experts is not None:
            running.row.record(0, request.routed_experts)
        completion = self._take(running)
        if completion is None:
            raise RuntimeError(
                f"SGLang ended request {request_id} with {request.finished_reason} "
                f"after {len(running.row.tokens)} of "
                f"{running.row.request.sampling.max_new_tokens} tokens"
            )
        self._finish(completion)
        del self._running[request_id]

    def _take_drawn(self) -> None:
        for request_id, running in self._running.items():
            if self._take(running) is not None:
                raise RuntimeError(f"SGLang did not end request {request_id} after its last token")

    def _take(self, running: _Running) -> Completion | None:
        request, since = running.request, running.num_taken
        tokens, logps = list(request.output_ids[since:]), drawn_logps(request)[since:]
        if not tokens:
            return None
        self._check_logps(logps, lambda _: running.row.request.request_id)
        if running.row.request.sampling.stop_strings:
            for token, logp in zip(tokens, logps, strict=True):  # any token may end the response
                running.num_taken += 1
                completion = running.row.append(token, logp, self._version)
                if completion is not None:
                    return completion
            return None
        running.num_taken += len(tokens)
        return running.row.extend(tokens, logps, self._version)


build = SglangEngine.build
