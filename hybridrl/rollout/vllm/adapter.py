"""The `vllm` engine: vLLM inside this process, its live parameters written by the hybrid engine.

Owns requests on their way through vLLM's continuous batching, and the order of an update (stop,
write, forget the cache). Not owned: how vLLM is started (vllm/start.py) and who sends weights.

Who waits for whom: `submit`, `step`, `begin_update` and `finish_update` are made by all
tensor-parallel ranks of a replica alike; replicas are independent of each other. Invariant: between
calls every unfinished request lies here with all its tokens, so that vLLM's own state can be
dropped at any time and a request continues from prompt and tokens: what it draws next depends on
its seed and its position alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import ModelError, UserError
from hybridrl.hybrid_engine.memory.alias import TrainingShard
from hybridrl.hybrid_engine.memory.lending import Piece
from hybridrl.hybrid_engine.planning.expert_maps import ExpertTensors, with_experts
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.weights import RankLayout, fused_layout, hf_shapes
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.build import EngineInputs
from hybridrl.rollout.common.agreement import TokenAgreement
from hybridrl.rollout.common.engine_memory import (
    KV_CACHE,
    WEIGHTS,
    SleepingMemory,
    check_caches,
    own_memory,
)
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
from hybridrl.rollout.common.process_state import keep_generators
from hybridrl.rollout.common.sampling import no_logprob
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.common.stops import TokenTexts
from hybridrl.rollout.engine import (
    Completion,
    Holding,
    Request,
    RunningRequest,
    new_rows,
)
from hybridrl.rollout.vllm.decoding import DecodingSteps, Drawn, DrawnSteps
from hybridrl.rollout.vllm.experts import deal_experts
from hybridrl.rollout.vllm.latent import rotate_with_torch
from hybridrl.rollout.vllm.memory import allocations
from hybridrl.rollout.vllm.requests import request_rules, sampling_params
from hybridrl.rollout.vllm.routing import RecordedExperts
from hybridrl.rollout.vllm.start import caches_of, runner_of, start, stop
from hybridrl.rollout.vllm.version import NAME, is_scheduler_known, model_rules

COPIES = LatentCopies("W_UK_T", "W_UV", "num_heads")


def build(inputs: EngineInputs) -> VllmEngine:
    """Builds this rank's part of a replica; collective over the world."""
    settings = EngineSettings.of(inputs)
    parts = inputs.family, inputs.layout, inputs.rank, inputs.device, inputs.shard
    return VllmEngine(settings, *parts)


class VllmEngine:
    """Implements `RolloutEngine` and `WeightTarget` over one rank's part of a vLLM engine.

    Making one is collective over the world; so is `close`.

    Args:
        settings: sizes and dtype.
        family: of the model; its weight table is checked against vLLM's own parameters.
        layout: the replicas over all ranks; ranks ascend within a replica.
        rank: this rank.
        device: where parameters and KV cache live.
        shard: the trainer's parameters on this rank; those that hold what an engine parameter holds
            become that parameter (`shared` names them). None: the engine has its own memory.

    Raises:
        UserError: vLLM is missing or does not fit; it cannot run this model here; or its
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
        self._layout = _part(family, shape, layout, rank, settings.ep)
        # Every unfinished request, in order of arrival, and those that vLLM has, by its name for
        # them. A name is given once: of an aborted request a token may still be under way.
        self._rows: dict[int, RunningRequest] = {}
        self._running: dict[str, RunningRequest] = {}
        self._num_named = 0
        self._experts: RecordedExperts | None = None
        before = free_bytes(self._device)
        views = self._start(family, shape, layout, rank, shard)
        self._tensors = live_tensors(self._live.model, layout_name)
        self.shared = still_shared(views, self._tensors)
        scheduler = self._live.llm.engine_core.engine_core.scheduler
        self._decoding = DecodingSteps(scheduler, is_scheduler_known(self._live.version))
        group, ahead = self._live.tp_group, int(self._decoding.is_async and not settings.eager)
        self._agreement = TokenAgreement.over(group, settings.timeout_s, ahead)
        self._finished: list[Completion] = []
        # Tokens that are not in their rows yet; those of texts that may end are put there at once.
        self._drawn, self._looks_at_texts = DrawnSteps(), False
        self._version = -1
        self._is_updating = True
        self.token_texts: TokenTexts | None = None
        self._keeps_memory = False
        self._memory = None if self._device.type == "cpu" else self._sleeping_memory()
        self.sleep()  # a run begins in the training phase
        self._kept_bytes = before - free_bytes(self._device)

    def _sleeping_memory(self) -> SleepingMemory:
        caches, pieces = caches_of(runner_of(self._live.llm)), allocations()
        try:
            check_caches(caches, self._cache_bytes(), pieces, NAME, self._live.version)
        except UserError:
            self.close()
            raise
        whole, in_part = written_parameters(self._tensors, self.shared, self._layout)
        return own_memory(self._device, pieces, [*whole, *caches], in_part)

    def _cache_bytes(self) -> int:
        config = self._live.llm.engine_core.engine_core.scheduler.kv_cache_config
        return sum(int(cache.size) for cache in config.kv_cache_tensors)

    def _start(
        self,
        family: Family,
        shape: ModelShape,
        layout: RolloutLayout,
        rank: int,
        shard: TrainingShard | None,
    ) -> dict[str, Tensor]:
        """Starts vLLM; returns the trainer's parameters that became the engine's."""
        self._has_latents = shape.latent is not None
        # Raised once vLLM has started: only then can it be stopped.
        refusals: list[ModelError] = []
        views: dict[str, Tensor] = {}

        def prepare(model: torch.nn.Module, version: str) -> None:
            """Runs before vLLM measures memory."""
            try:
                if (experts := layout.experts_of(rank)) is not None:
                    deal_experts(model, experts)
                check_live(model, self._layout, hf_shapes(family, shape), version, layout_name)
                if shape.latent is not None:
                    COPIES.check(model, shape.latent, shape.num_layers, version)
                    if self._device.type == "cpu":
                        rotate_with_torch(model, version)
            except ModelError as error:
                refusals.append(error)
            else:
                set_epsilon(model)
                views.update(share(model, shard, self._layout, layout_name))

        def listen(model: torch.nn.Module, cache: Any) -> None:
            """Runs before vLLM captures graphs."""
            if not self._settings.records_experts or refusals:
                return
            try:
                self._experts = RecordedExperts(model, cache, shape, self._device)
            except ModelError as error:
                refusals.append(error)

        weight_bytes = layout_bytes(self._layout, self._settings.dtype)
        parts = self._settings, shape, layout, rank, self._device, weight_bytes
        self._live = start(*parts, prepare, listen)
        if self._experts is not None:
            scheduler = self._live.llm.engine_core.engine_core.scheduler
            try:
                self._experts.attach(scheduler, self._running)
            except ModelError as error:
                refusals.append(error)
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
        if not self._live.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which holds keys of older weights")
        if self._experts is not None:
            self._experts.forget()
        if self._has_latents:  # in any other model it would look for copies in vain, each time
            COPIES.absorb(self._live.model)
        self._version = version
        self._is_updating = False

    def _stop_generation(self) -> None:
        self._agreement.settle(is_last=True)
        self._is_updating = True
        self._take_drawn()
        self._record_running()
        for row in self._rows.values():
            row.drop_unsettled_experts()
        self._abort_running()

    def _record_running(self) -> None:
        """Records the experts of what was computed so far: other weights may compute the rest."""
        if self._experts is not None:
            self._decoding.write()
            self._experts.record_running()

    def _abort_running(self) -> None:
        """Takes all requests from vLLM; their experts are not recorded here."""
        names = list(self._running)
        self._running.clear()
        if names:
            self._live.llm.engine_core.abort_requests(names)

    # RolloutEngine

    def memory(self) -> dict[str, Holding]:
        """Returns bytes on this rank by what they are for; what the engine keeps while it sleeps is
        measured, on GPUs.
        """
        never_sleeps = self._device.type == "cpu" or self._keeps_memory
        return weight_holdings(self._tensors, self.shared, never_sleeps) | {
            "KV cache": Holding(self._cache_bytes(), never_sleeps),
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
            ValueError: an id is held already, or vLLM cannot generate what a request asks for.
        """
        for request in requests:
            for violation in request_rules(request, self._settings):
                raise violation
        rows = new_rows(self._rows.values(), requests, self.token_texts)
        ends_by_text = any(request.sampling.stop_strings for request in requests)
        self._looks_at_texts = ends_by_text or (self._looks_at_texts and bool(self._rows))
        self._rows.update((row.request.request_id, row) for row in rows)

    def collect(self) -> list[Completion]:
        """Returns, once, what finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def pending(self) -> list[Request]:
        """Returns the unfinished requests with the tokens they have."""
        self._take_drawn()
        self._record_running()
        return [row.so_far() for row in self._rows.values()]

    def clear(self) -> None:
        """Drops all requests, and responses that were not collected."""
        self._agreement.settle(is_last=True)
        self._abort_running()
        self._rows.clear()
        self._finished.clear()

    def close(self) -> None:
        """Ends the engine; collective over the world."""
        stop(self._live)

    def step(self) -> None:
        """Hands queued requests to vLLM and lets it take one step.

        Raises:
            TokensDifferError: the ranks of this replica drew different tokens in an earlier step.
        """
        if self._is_updating:
            raise RuntimeError("the vllm engine has no complete weights: finish_update() first")
        self._agreement.settle()
        if not self._rows:
            return
        with keep_generators(self._device):
            self._add_waiting()
            # The core's outputs themselves: vLLM would make a dictionary and several objects of
            # every token, a quarter of a step's time with small models.
            outputs = self._live.llm.engine_core.get_output().outputs
        if outputs:  # a request's earlier tokens come before its last one
            self._take_drawn()
        drawn = [token for output in outputs for token in self._take(output)]
        for step in self._decoding.drawn():
            self._check_logps(step)
            if not self._agreement.is_alone:
                drawn += self._numbered(step)
            if not self._drawn.fits(step):
                self._take_drawn()
            self._drawn.add(step)
            if self._looks_at_texts:
                self._take_drawn()
        self._agreement.report(drawn)
        if not self._rows:
            self._agreement.settle(is_last=True)

    def _add_waiting(self) -> None:
        """Gives vLLM as many requests, the first ones, as it decodes together: others may never
        begin (`steps.max_policy_lag`), and to take a request in and out again is 0.15 ms of Python.
        """
        num_held = min(len(self._rows), self._settings.max_batch)
        if len(self._running) >= num_held:
            return
        held = {row.request.request_id for row in self._running.values()}
        waiting = [row for request_id, row in self._rows.items() if request_id not in held]
        for row in waiting[: num_held - len(held)]:
            self._add(row)

    def _add(self, row: RunningRequest) -> None:
        """Gives a request to vLLM; the tokens it has so far are part of the prompt."""
        params = sampling_params(row.request, len(row.tokens))
        prompt = {"type": "token", "prompt_token_ids": [*row.request.prompt, *row.tokens]}
        llm, name = self._live.llm, f"{row.request.request_id}-{self._num_named}"
        tasks = llm.get_supported_tasks()
        llm.engine_core.add_request(
            llm.input_processor.process_inputs(name, prompt, params, supported_tasks=tasks)
        )
        self._running[name] = row
        self._num_named += 1

    def _take(self, output: Any) -> Iterator[tuple[int, int]]:
        """Keeps a request's new tokens; yields (request id, token)."""
        row = self._running.get(output.request_id)
        if row is None:  # aborted since
            return
        request_id = row.request.request_id
        completion: Completion | None = None
        for token in output.new_token_ids:  # one, or none
            completion = self._append(row, token, self._decoding.logp(output.request_id))
            yield request_id, token
        if completion is None and not output.finished:
            return
        if completion is None:
            raise RuntimeError(
                f"vLLM ended request {request_id} with {output.finish_reason} after "
                f"{len(row.tokens)} of {row.request.sampling.max_new_tokens} tokens"
            )
        if output.finished:
            del self._rows[request_id], self._running[output.request_id]
            self._finished.append(completion)
        else:
            self._end_by_text(output.request_id, row, completion)

    def _numbered(self, step: Drawn) -> Iterator[tuple[int, int]]:
        """Yields (request id, token) of a step, but for requests that were aborted since."""
        for name, token in zip(step.names, step.tokens, strict=True):
            if name in self._running:
                yield self._running[name].request.request_id, token

    def _check_logps(self, step: Drawn) -> None:
        """Raises what `no_logprob` says where a value is no log-probability."""
        # The sum is finite only if all of them are.
        if math.isfinite(sum(step.logps)) and max(step.logps) <= 0:
            return
        for name, logp in zip(step.names, step.logps, strict=True):
            if name in self._running and not -float("inf") < logp <= 0:
                number = self._running[name].request.request_id
                raise no_logprob("vllm", logp, number, self._version, self._tensors)

    def _take_drawn(self) -> None:
        """Puts the tokens that are kept by step into their requests' rows."""
        for name, tokens, logps in self._drawn.take():
            row = self._running.get(name)
            if row is None:  # aborted since
                continue
            completion = row.extend(tokens, logps, self._version)
            if completion is not None:
                self._end_by_text(name, row, completion)

    def _end_by_text(self, name: str, row: RunningRequest, completion: Completion) -> None:
        """Takes a request from vLLM, which knows nothing of texts, and keeps its completion.

        Raises:
            RuntimeError: nothing but a text can have ended it here.
        """
        if not row.request.sampling.stop_strings:
            raise RuntimeError(f"vLLM goes on with request {name} after its last token")
        self._live.llm.engine_core.abort_requests([name])
        del self._rows[row.request.request_id], self._running[name]
        # Its experts were recorded just now.
        self._finished.append(replace(completion, experts=row.experts))

    def _append(self, row: RunningRequest, token: int, logp: float) -> Completion | None:
        if not -float("inf") < logp <= 0:
            number = row.request.request_id
            raise no_logprob("vllm", logp, number, self._version, self._tensors)
        return row.append(token, logp, self._version)

    @property
    def model(self) -> torch.nn.Module:
        """This rank's live module, for those who look into it; not to be changed."""
        return self._live.model


def layout_name(name: str) -> str | None:
    """Returns the layout's name of a vLLM parameter, which is its own; None: it is a copy."""
    return None if COPIES.is_copy(name) else name


def _part(
    family: Family, shape: ModelShape, layout: RolloutLayout, rank: int, ep: int
) -> RankLayout:
    """Returns what this rank's part of a replica holds."""
    _, tp_rank = layout.place(rank)
    found, experts = fused_layout(family, shape, layout.tp, tp_rank, ep), layout.experts_of(rank)
    if experts is None:
        return found
    return with_experts(found, ExpertTensors(family, shape), experts)
