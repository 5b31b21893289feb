"""The `sglang` engine: SGLang's scheduler in this process, its live parameters written in place.

Owns requests on their way through SGLang's continuous batching, and the order of an update (stop,
write, forget the cache). Not owned: how SGLang is started (sglang/start.py), how its loop is driven
(sglang/scheduler.py) and who sends weights.

Who waits for whom: `submit`, `step`, `begin_update` and `finish_update` are made by all
tensor-parallel ranks of a replica alike; replicas are independent of each other. Invariant: a
request lies here with all its tokens once it ended, is asked for, or SGLang's own state is dropped,
which can be at any time between calls: it then continues from prompt and tokens, since what it
draws next depends on its seed and its position alone. In between SGLang's request has its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import ModelError, UserError
from hybridrl.hybrid_engine.memory.alias import TrainingShard
from hybridrl.hybrid_engine.memory.lending import Piece
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.weights import RankLayout, fused_layout, hf_shapes
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.build import EngineInputs
from hybridrl.rollout.common.agreement import TokenAgreement
from hybridrl.rollout.common.engine_memory import KV_CACHE, WEIGHTS, SleepingMemory
from hybridrl.rollout.common.latent_copies import LatentCopies, set_epsilon
from hybridrl.rollout.common.live_weights import (
    check_live,
    free_bytes,
    layout_bytes,
    live_tensors,
    share,
    still_shared,
    weight_holdings,
    written_parameters,
)
from hybridrl.rollout.common.sampling import no_logprob
from hybridrl.rollout.common.settings import EngineSettings, token_bytes, too_long
from hybridrl.rollout.common.stops import TokenTexts
from hybridrl.rollout.engine import Completion, Holding, Request, RunningRequest, new_rows
from hybridrl.rollout.sglang.longrope import settle_longrope
from hybridrl.rollout.sglang.memory import sleeping_memory
from hybridrl.rollout.sglang.routing import RecordedExperts
from hybridrl.rollout.sglang.sampling import request_sampling
from hybridrl.rollout.sglang.scheduler import drawn_logps, end_soon, synchronize, token_ids
from hybridrl.rollout.sglang.shared_prompts import SharedPrompts
from hybridrl.rollout.sglang.start import start, stop
from hybridrl.rollout.sglang.version import model_rules

# Turns of SGLang's loop without a batch after which it is taken to be stuck. One may pass where the
# tokens of the batch before have to be known first.
MOST_EMPTY_TURNS = 3
COPIES = LatentCopies("w_kc", "w_vc", "num_local_heads")


def build(inputs: EngineInputs) -> SglangEngine:
    """Builds this rank's part of a replica; collective over the ranks that have an engine."""
    parts = inputs.family, inputs.layout, inputs.rank, inputs.device, inputs.shard
    return SglangEngine(EngineSettings.of(inputs), *parts)


@dataclass
class _Running:
    """A request that SGLang has, and how many of the tokens that it drew were taken."""

    row: RunningRequest
    request: Any
    num_taken: int = 0


class SglangEngine:
    """Implements `RolloutEngine` and `WeightTarget` over one rank's part of an SGLang engine.

    Making one is collective over the ranks that have an engine; so is `close`.

    Args:
        settings: sizes and dtype.
        family: of the model; its weight table is checked against SGLang's own parameters.
        layout: the replicas over all ranks; ranks ascend within a replica.
        rank: this rank.
        device: where parameters and KV cache live.
        shard: the trainer's parameters on this rank; those that hold what an engine parameter holds
            become that parameter (`shared` names them). None: the engine has its own memory.

    Raises:
        UserError: SGLang is missing or does not fit; it cannot run this model here; or its
            parameters are not those of the weight table (names the first).
    """

    def __init__(
        self,
        settings: EngineSettings,
        family: Family,
        layout: RolloutLayout,
        rank: int,
        device: str | torch.device = "cpu",
        shard: TrainingShard | None = None,
    ) -> None:
        self._device = torch.device(device)
        self._settings = settings
        shape = family.shape(settings.hf_config)
        for violation in model_rules(shape, self._device.type == "cpu"):
            raise violation
        if layout.experts is not None:
            raise ValueError("this engine takes experts in order")
        _, tp_rank = layout.place(rank)
        self._layout = fused_layout(family, shape, layout.tp, tp_rank, settings.ep)
        # Every unfinished request, in order of arrival, and those that SGLang has, by number.
        self._rows: dict[int, RunningRequest] = {}
        self._running: dict[int, _Running] = {}
        self._shared_prompts = SharedPrompts()
        # Whose text is looked at, and those that it has ended and SGLang has yet.
        self._by_text: set[int] = set()
        self._leaving: set[int] = set()
        self._experts: RecordedExperts | None = None
        before = free_bytes(self._device)
        views = self._start(family, shape, layout, rank, shard)
        self._tensors = live_tensors(self._live.model, layout_name)
        self.shared = still_shared(views, self._tensors)
        group, ahead = self._live.tp_group, self._scheduler.is_overlapped and not settings.eager
        self._agreement = TokenAgreement.over(group, settings.timeout_s, ahead)
        self._scheduler.tells_drawn = layout.tp > 1
        per_token = token_bytes(shape, layout.tp, getattr(torch, settings.dtype).itemsize)
        self._cache_bytes = per_token * self._scheduler.max_total_num_tokens
        self._num_empty_turns = 0
        self._finished: list[Completion] = []
        self._version = -1
        self._is_updating = True
        self.token_texts: TokenTexts | None = None
        self._keeps_memory = False
        self._memory = None if self._device.type == "cpu" else self._sleeping_memory()
        self.sleep()  # a run begins in the training phase
        self._kept_bytes = before - free_bytes(self._device)

    def _sleeping_memory(self) -> SleepingMemory:
        written = written_parameters(self._tensors, self.shared, self._layout)
        try:
            return sleeping_memory(self._live, self._device, *written, self._cache_bytes)
        except UserError:
            self.close()
            raise

    def _start(
        self,
        family: Family,
        shape: ModelShape,
        layout: RolloutLayout,
        rank: int,
        shard: TrainingShard | None,
    ) -> dict[str, Tensor]:
        """Starts SGLang; returns the trainer's parameters that became the engine's."""
        self._has_latents = shape.latent is not None
        refusals: list[ModelError] = []
        views: dict[str, Tensor] = {}

        def prepare(model: torch.nn.Module, version: str) -> None:
            """Runs before SGLang measures memory and captures graphs."""
            try:
                check_live(model, self._layout, hf_shapes(family, shape), version, layout_name)
                if shape.latent is not None:
                    COPIES.check(model, shape.latent, shape.num_layers, version)
                settle_longrope(model, version)
            except ModelError as error:
                refusals.append(error)  # raised once SGLang has started: on all ranks alike
            else:
                set_epsilon(model)
                views.update(share(model, shard, self._layout, layout_name))

        def listen(model: torch.nn.Module, slots: int, longest: int) -> RecordedExperts | None:
            """Runs before SGLang captures graphs."""
            if self._settings.records_experts and not refusals:
                try:
                    self._experts = RecordedExperts(model, shape, slots, longest, self._device)
                except ModelError as error:
                    refusals.append(error)
            return self._experts

        weight_bytes = layout_bytes(self._layout, self._settings.dtype)
        parts = self._settings, shape, layout, rank, self._device, weight_bytes
        self._live = start(*parts, prepare, listen)
        self._scheduler = self._live.scheduler
        self._scheduler.recorder = self._experts
        self._scheduler.before_release = lambda request: self._record([request])
        if refusals:
            self.close()
            raise refusals[0]
        return views

    # WeightTarget

    def layout(self) -> RankLayout:
        """Returns what of the HF checkpoint each of this rank's fused parameters holds."""
        return self._layout

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the live parameters, which generation reads; written in place, never replaced."""
        return self._tensors

    def stale_copy(self) -> str | None:
        """Returns the first copy of a parameter that is not of its present weights, if any."""
        return COPIES.stale(self._live.model)

    def sleep(self, keeps_memory: bool = False) -> None:
        """Stops generation and gives weights and KV cache back; running requests keep their tokens.

        The addresses stay reserved, so parameters and CUDA graphs are valid again after the next
        update. What is lent stays. On CPU everything fits at once, and nothing is given back.
        """
        self._stop_generation()
        self._keeps_memory = keeps_memory
        if not keeps_memory and self._memory is not None:
            self._memory.sleep()

    def lend(self, num_bytes: int) -> list[Piece]:
        """Lends memory to training, as `lending.MemoryLender`."""
        return [] if self._memory is None else self._memory.lend(num_bytes)

    def released_bytes(self) -> int:
        """Returns what has no memory now, as `lending.MemoryLender`."""
        return 0 if self._memory is None else self._memory.released_bytes

    def begin_update(self) -> None:
        """Stops generation and maps the weights; running requests keep their tokens here."""
        self._stop_generation()
        if self._memory is not None:
            self._memory.wake_up(WEIGHTS)

    def finish_update(self, version: int) -> None:
        """Maps the KV cache and allows generation with the weights `version`."""
        if self._memory is not None:
            self._memory.wake_up(KV_CACHE)
            self._memory.clear_lent()  # training has used it, be the engine asleep or only stopped
        # Keys and values of older weights may be cached.
        self._scheduler.forget_requests()
        if self._experts is not None:
            self._experts.forget()
        if self._has_latents:  # in any other model it would look for copies in vain, each time
            COPIES.absorb(self._live.model)
        synchronize(self._device)  # the weights were written on another stream than SGLang's
        self._version = version
        self._is_updating = False

    def _stop_generation(self) -> None:
        self._agreement.settle(is_last=True)
        self._is_updating = True
        self._take_running()
        self._record([running.request for running in self._running.values()])
        self._drop_running()

    def _record(self, requests: Sequence[Any], num_tokens: int | None = None) -> None:
        """Records the experts of unfinished requests of SGLang's, while they have their places.

        Args:
            num_tokens: of prompt and response that each is left with; None: all.
        """
        if self._experts is None:
            return
        rows: list[tuple[Any, RunningRequest, int]] = []
        for request in requests:
            running = self._running.get(int(request.rid))
            # Without a token its prompt may not be computed yet.
            if running is not None and request.output_ids:
                every = len(request.origin_input_ids) + len(request.output_ids)
                rows.append((request, running.row, num_tokens or every))
        self._experts.record(rows, self._scheduler.req_to_token_pool)

    def _drop_running(self) -> None:
        """Takes everything from SGLang; the rows keep the tokens that were taken from it."""
        for ids in (self._running, self._by_text, self._leaving):
            ids.clear()
        self._shared_prompts.forget()
        if self._memory is None or not self._memory.is_asleep:
            self._scheduler.forget_requests()

    # RolloutEngine

    def memory(self) -> dict[str, Holding]:
        """Returns bytes on this rank by what they are for; what the engine keeps while it sleeps is
        measured, on GPUs.
        """
        never_sleeps = self._device.type == "cpu" or self._keeps_memory
        return weight_holdings(self._tensors, self.shared, never_sleeps) | {
            "KV cache": Holding(self._cache_bytes, never_sleeps),
            "graphs and workspace": Holding(self._kept_bytes, stays=True),
        }

    @property
    def version(self) -> int:
        """The version of the weights; -1 before the first update."""
        return self._version

    @property
    def has_unfinished(self) -> bool:
        """Whether a submitted request is not finished yet."""
        return bool(self._rows)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests.

        Raises:
            ValueError: an id is held already, or a request is longer than the engine was started
                for.
        """
        for request in requests:
            for violation in too_long(request, self._settings):
                raise violation
        rows = new_rows(self._rows.values(), requests, self.token_texts)
        self._rows.update((row.request.request_id, row) for row in rows)

    def collect(self) -> list[Completion]:
        """Returns, once, what finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def pending(self) -> list[Request]:
        """Returns the unfinished requests with the tokens they have."""
        self._take_running()
        # Other weights may compute the rest.
        self._record([running.request for running in self._running.values()])
        return [row.so_far() for row in self._rows.values()]

    def clear(self) -> None:
        """Drops all requests, and responses that were not collected."""
        self._agreement.settle(is_last=True)
        if self._running or self._leaving:
            self._drop_running()
        self._shared_prompts.forget()
        self._rows.clear()
        self._finished.clear()

    def close(self) -> None:
        """Ends the engine; collective over the ranks that have one."""
        stop(self._live)

    def step(self) -> None:
        """Hands queued requests to SGLang and lets its loop take one turn.

        Raises:
            TokensDifferError: the ranks of this replica drew different tokens in an earlier step.
        """
        if self._is_updating:
            raise RuntimeError("the sglang engine has no complete weights: finish_update() first")
        self._agreement.settle()
        if not self._rows:
            return
        scheduler = self._scheduler
        # No generator is kept: nothing here draws from one.
        with torch.no_grad():
            if len(self._running) < len(self._rows):
                self._begin_queued()
            scheduler.turn()
        ended, scheduler.ended = scheduler.ended, []
        for request in ended:
            self._end(request)
        self._end_by_text()
        if scheduler.has_wrong_logp:
            self._take_running()  # raises, unless it was of a row that nobody takes
            scheduler.has_wrong_logp = False
        is_empty = not ended and not scheduler.last_batch
        self._num_empty_turns = self._num_empty_turns + 1 if is_empty else 0
        if self._num_empty_turns >= MOST_EMPTY_TURNS:
            raise RuntimeError(f"SGLang runs none of {len(self._running)} unfinished requests")
        drawn, scheduler.drawn = scheduler.drawn, []
        self._agreement.report(drawn)
        if not self._rows:
            self._agreement.settle(is_last=True)

    def _begin_queued(self) -> None:
        """Gives SGLang the first queued requests, as many as it decodes together; of those with the
        same prompt one alone, until that is computed.
        """
        begun = self._running.keys() | self._leaving
        if (room := self._settings.max_batch - len(begun)) <= 0:
            return
        waiting = (row.request for number, row in self._rows.items() if number not in begun)
        queued = list(islice(waiting, room))
        for request in self._shared_prompts.due(queued, self._is_computing_prompt):
            self._add(request.request_id, self._rows[request.request_id])

    def _is_computing_prompt(self, request_id: int) -> bool:
        """Whether SGLang has a request and has drawn no token for it; the first one comes with its
        prompt in the cache.
        """
        running = self._running.get(request_id)
        return running is not None and not running.request.output_ids

    def _add(self, request_id: int, row: RunningRequest) -> None:
        """Gives a request to SGLang; the tokens it has so far are part of the prompt."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput

        asked = TokenizedGenerateReqInput(
            rid=str(request_id),
            input_text=None,
            input_ids=token_ids([*row.request.prompt, *row.tokens], self._scheduler),
            input_embeds=None,
            token_type_ids=None,
            mm_inputs=None,
            sampling_params=request_sampling(
                row.request.sampling, row.request.seed, len(row.tokens)
            ),
            return_logprob=True,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            return_routed_experts=self._experts is not None,
            stream=False,
        )
        if row.request.sampling.looks_back:
            self._scheduler.said.add(asked.rid, row.request)
        self._running[request_id] = _Running(row, self._scheduler.add(asked))
        if row.request.sampling.stop_strings:
            self._by_text.add(request_id)

    def _end_by_text(self) -> None:
        """Ends requests whose text has a stop string, of which SGLang knows nothing: it draws one
        more token for them, which nobody takes.
        """
        for request_id in sorted(self._by_text):
            running = self._running[request_id]
            if self._experts is not None and (end := self._text_end(running)):
                self._record([running.request], len(running.row.request.prompt) + end)
            completion = self._take(running)
            if completion is None:
                continue
            self._finished.append(completion)
            del self._rows[request_id], self._running[request_id]
            self._by_text.remove(request_id)
            self._leaving.add(request_id)
            end_soon(running.request)

    def _text_end(self, running: _Running) -> int:
        """Returns how many tokens a response has with the first that completes a stop string, of
        those that were not taken yet; 0: none does.
        """
        row, strings = running.row, running.row.request.sampling.stop_strings
        tokens = [*row.tokens, *running.request.output_ids[running.num_taken :]]
        ends = range(len(row.tokens) + 1, len(tokens) + 1)
        assert self.token_texts is not None
        found = self.token_texts.ends
        return next((end for end in ends if found(tokens[:end], strings)), 0)

    def _end(self, request: Any) -> None:
        """Takes a request that SGLang has ended, and keeps its completion."""
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
        self._finished.append(completion)
        del self._rows[request_id], self._running[request_id]

    def _take_running(self) -> None:
        """Takes the tokens of all requests that SGLang has, none of which has ended."""
        for request_id, running in self._running.items():
            if self._take(running) is not None:
                raise RuntimeError(f"SGLang did not end request {request_id}, which is at its end")

    def _take(self, running: _Running) -> Completion | None:
        """Keeps the tokens that SGLang has drawn for a request since; returns its completion if
        they end it.
        """
        request, since = running.request, running.num_taken
        tokens, logps = list(request.output_ids[since:]), drawn_logps(request)[since:]
        if not tokens:
            return None
        # The sum is finite only if all of them are.
        if not math.isfinite(sum(logps)) or max(logps) > 0:
            wrong = next(logp for logp in logps if not -float("inf") < logp <= 0)
            number = running.row.request.request_id
            raise no_logprob("sglang", wrong, number, self._version, self._tensors)
        if running.row.request.sampling.stop_strings:
            for token, logp in zip(tokens, logps, strict=True):  # any may be the last
                running.num_taken += 1
                completion = running.row.append(token, logp, self._version)
                if completion is not None:
                    return completion
            return None
        running.num_taken += len(tokens)
        return running.row.extend(tokens, logps, self._version)

    @property
    def model(self) -> torch.nn.Module:
        """This rank's live module, for those who look into it; not to be changed."""
        return self._live.model


def layout_name(name: str) -> str:
    """Returns the layout's name of an SGLang parameter."""
    name = name.replace(".fused_qkv_a_proj_with_mqa.", ".fused_qkv_a_proj.")
    return name.replace(".experts.w", ".experts.routed_experts.w")
