"""The `vllm` engine: vLLM inside this process, its live parameters written by the hybrid engine.

Owns requests on their way through vLLM's continuous batching, and the order of an update (stop,
write, forget the cache). Not owned: how vLLM is started (vllm_start.py) and who sends weights.

Who waits for whom: `submit`, `step`, `begin_update` and `finish_update` are made by all
tensor-parallel ranks of a replica alike; replicas are independent of each other. Invariant: between
calls every unfinished request lies here with all its tokens, so that vLLM's own state can be
dropped at any time and a request continues from prompt and tokens: what it draws next depends on
its seed and its position alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from hybridrl.config.engines import ENGINES
from hybridrl.errors import ModelError
from hybridrl.hybrid_engine.alias import TrainingShard, is_view, shared_views
from hybridrl.hybrid_engine.expert_maps import ExpertTensors, with_experts
from hybridrl.models.boxes import Shape
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.weights import RankLayout, fused_layout, hf_shapes
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.rollout.agreement import TokenAgreement
from hybridrl.rollout.build import EngineInputs
from hybridrl.rollout.engine import (
    Completion,
    Holding,
    Request,
    RunningRequest,
    SamplingParams,
    new_rows,
)
from hybridrl.rollout.process_state import keep_generators
from hybridrl.rollout.sampling import draw_seeds, no_logprob
from hybridrl.rollout.scheme import check_parameters, check_placement
from hybridrl.rollout.vllm_arguments import EngineSettings
from hybridrl.rollout.vllm_decoding import DecodingSteps
from hybridrl.rollout.vllm_experts import deal_experts, live_tensors
from hybridrl.rollout.vllm_latent import absorb, check_latent, set_epsilon, stale_copy
from hybridrl.rollout.vllm_routing import RecordedExperts
from hybridrl.rollout.vllm_start import start, stop
from hybridrl.rollout.vllm_version import head_dim_rule, is_scheduler_known

LOWEST_TEMPERATURE = ENGINES["vllm"].lowest_temperature


def build(inputs: EngineInputs) -> VllmEngine:
    """Builds this rank's part of a replica; collective over the world."""
    settings = EngineSettings(
        inputs.family.for_engines(inputs.hf_config),
        inputs.family.architectures,
        inputs.dtype_name,
        inputs.rollout.max_batch,
        max_tokens=inputs.max_tokens,
        reserved_bytes=inputs.reserved_bytes,
        timeout_s=inputs.timeout_s,
        eager=inputs.rollout.eager,
        ep=inputs.rollout.ep,
        records_experts=inputs.records_experts,
    )
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
        is_cpu = self._device.type == "cpu"
        for violation in head_dim_rule(shape.head_dim, is_cpu, shape.latent_dim):
            raise violation
        self._layout = _part(family, shape, layout, rank, settings.ep)
        # Every unfinished request, in order of arrival, and those that vLLM has, by its name for
        # them. A name is given once: of an aborted request a token may still be under way.
        self._rows: dict[int, RunningRequest] = {}
        self._running: dict[str, RunningRequest] = {}
        self._num_named = 0
        self._experts: RecordedExperts | None = None
        free_bytes = self._free_bytes()
        views = self._start(family, shape, layout, rank, shard)
        self._tensors = live_tensors(self._live.model)
        # A layer that vLLM repacked after loading has memory of its own again.
        self.shared = frozenset(n for n, one in self._tensors.items() if is_view(n, one, views))
        self._agreement = TokenAgreement(self._live.tp_group)
        scheduler = self._live.llm.engine_core.engine_core.scheduler
        self._decoding = DecodingSteps(scheduler, is_scheduler_known(self._live.version))
        self._finished: list[Completion] = []
        self._version = -1
        self._is_updating = True
        self._is_asleep = self._keeps_memory = False
        self.sleep()  # a run begins in the training phase
        self._kept_bytes = free_bytes - self._free_bytes()

    def _start(
        self,
        family: Family,
        shape: ModelShape,
        layout: RolloutLayout,
        rank: int,
        shard: TrainingShard | None,
    ) -> dict[str, Tensor]:
        """Starts vLLM; returns the trainer's parameters that became the engine's."""
        # Raised once vLLM has started: only then can it be stopped.
        refusals: list[ModelError] = []
        views: dict[str, Tensor] = {}

        def prepare(model: torch.nn.Module, version: str) -> None:
            """Runs before vLLM measures memory."""
            try:
                if (experts := layout.experts_of(rank)) is not None:
                    deal_experts(model, experts)
                self._check(model, hf_shapes(family, shape), version)
                if shape.latent is not None:
                    check_latent(model, shape.latent, shape.num_layers, version)
            except ModelError as error:
                refusals.append(error)
            else:
                set_epsilon(model)
                views.update(_share(model, shard, self._layout))

        def listen(model: torch.nn.Module, cache: Any) -> None:
            """Runs before vLLM captures graphs."""
            if not self._settings.records_experts or refusals:
                return
            try:
                self._experts = RecordedExperts(model, cache, shape, self._device)
            except ModelError as error:
                refusals.append(error)

        itemsize = getattr(torch, self._settings.dtype).itemsize
        weight_bytes = sum(prod(size) for size in self._layout.shapes.values()) * itemsize
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

    def _check(self, model: torch.nn.Module, shapes: dict[str, Shape], version: str) -> None:
        tensors = live_tensors(model)
        load: Any = model.load_weights
        check_parameters(self._layout, tensors, version)
        check_placement(self._layout, tensors, shapes, load, version)

    # WeightTarget

    def layout(self) -> RankLayout:
        """Returns what of the HF checkpoint each of this rank's fused parameters holds."""
        return self._layout

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the live parameters, which generation reads; written in place, never replaced."""
        return self._tensors

    def stale_copy(self) -> str | None:
        """Returns the first copy of a parameter that is not of its present weights, if any."""
        return stale_copy(self._live.model)

    def sleep(self, keeps_memory: bool = False) -> None:
        """Stops generation and gives weights and KV cache back; running requests keep their tokens.

        The addresses stay reserved, so parameters and CUDA graphs are valid again after the next
        update. On CPU everything fits at once, and nothing is given back.
        """
        self._stop_generation()
        self._keeps_memory = keeps_memory
        if not keeps_memory and self._device.type != "cpu" and not self._is_asleep:
            self._live.llm.sleep(level=2)  # 2: no copy of weights that are about to be replaced
            self._is_asleep = True

    def begin_update(self) -> None:
        """Stops generation and maps the weights; running requests keep their tokens here."""
        self._stop_generation()
        if self._is_asleep:
            self._live.llm.wake_up(tags=["weights"])

    def finish_update(self, version: int) -> None:
        """Maps the KV cache and allows generation with the weights `version`."""
        if self._is_asleep:
            self._live.llm.wake_up(tags=["kv_cache"])
            self._is_asleep = False
        # Keys and values of older weights may be cached.
        if not self._live.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache, which holds keys of older weights")
        if self._experts is not None:
            self._experts.forget()
        absorb(self._live.model)
        self._version = version
        self._is_updating = False

    def _stop_generation(self) -> None:
        self._is_updating = True
        self._live.llm.engine_core.abort_requests(list(self._running))
        self._running.clear()

    # RolloutEngine

    def memory(self) -> dict[str, Holding]:
        """Returns bytes on this rank by what they are for; what the engine keeps while it sleeps is
        measured, on GPUs.
        """
        sizes = {name: t.numel() * t.element_size() for name, t in self._tensors.items()}
        shared = sum(sizes[name] for name in self.shared)
        caches = self._live.llm.engine_core.engine_core.scheduler.kv_cache_config.kv_cache_tensors
        never_sleeps = self._device.type == "cpu" or self._keeps_memory
        return {
            "weights": Holding(sum(sizes.values()) - shared, never_sleeps),
            "weights shared with the trainer": Holding(shared, is_shared=True),
            "KV cache": Holding(sum(cache.size for cache in caches), never_sleeps),
            "graphs and workspace": Holding(self._kept_bytes, stays=True),
        }

    def _free_bytes(self) -> int:
        if self._device.type == "cpu":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]

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
            for violation in self._violations(request):
                raise violation
        rows = new_rows(self._rows.values(), requests)
        self._rows.update((row.request.request_id, row) for row in rows)

    def collect(self) -> list[Completion]:
        """Returns, once, what finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def pending(self) -> list[Request]:
        """Returns the unfinished requests with the tokens they have."""
        return [row.so_far() for row in self._rows.values()]

    def clear(self) -> None:
        """Drops all requests, and responses that were not collected."""
        self._agreement.settle()
        if self._running:
            self._live.llm.engine_core.abort_requests(list(self._running))
        self._running.clear()
        self._rows.clear()
        self._finished.clear()

    def close(self) -> None:
        """Ends the engine; collective over the world."""
        stop(self._live)

    def step(self) -> None:
        """Hands queued requests to vLLM and lets it take one step.

        Raises:
            TokensDifferError: the ranks of this replica drew different tokens in the step before.
        """
        if self._is_updating:
            raise RuntimeError("the vllm engine has no complete weights: finish_update() first")
        self._agreement.settle()
        if not self._rows:
            return
        with keep_generators(self._device):
            if len(self._running) < len(self._rows):
                held = {row.request.request_id for row in self._running.values()}
                for request_id, row in self._rows.items():
                    if request_id not in held:
                        self._add(row)
            # The core's outputs themselves: vLLM would make a dictionary and several objects of
            # every token, a quarter of a step's time with small models.
            outputs = self._live.llm.engine_core.get_output().outputs
        drawn = [token for output in outputs for token in self._take(output)]
        for name, token, logp in self._decoding.drawn():
            row = self._running[name]
            if self._append(row, token, logp) is not None:
                raise RuntimeError(f"vLLM goes on with request {name} after its last token")
            drawn.append((row.request.request_id, token))
        self._agreement.report(drawn)
        if not self._rows:
            self._agreement.settle()  # no step follows that would

    def _violations(self, request: Request) -> Iterator[ValueError]:
        name, sampling = f"request {request.request_id}", request.sampling
        longest = len(request.prompt) + sampling.max_new_tokens
        if longest > self._settings.max_tokens:
            yield ValueError(
                f"{name} has {len(request.prompt)} prompt tokens and max_new_tokens="
                f"{sampling.max_new_tokens}, together more than {self._settings.max_tokens}, "
                "the longest that the engine was started for"
            )
        if 0 < sampling.temperature < LOWEST_TEMPERATURE:
            yield ValueError(
                f"{name} has temperature={sampling.temperature}; vLLM samples at 0 or at "
                f"{LOWEST_TEMPERATURE} and above"
            )

    def _add(self, row: RunningRequest) -> None:
        """Gives a request to vLLM; the tokens it has so far are part of the prompt."""
        from vllm.sampling_params import SamplingParams as VllmSamplingParams

        sampling: SamplingParams = row.request.sampling
        params = VllmSamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_new_tokens - len(row.tokens),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            # vLLM keeps seeds as signed 64-bit numbers, and takes -1 for none.
            seed=int(draw_seeds([row.request.seed], [0])[0] >> 1),
            logprobs=0,
            detokenize=False,
            skip_clone=True,  # nobody else has them; a deep copy is a tenth of a CPU's step
        )
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
        if output.finished != (completion is not None):
            raise RuntimeError(
                f"vLLM ended request {request_id} with {output.finish_reason} after "
                f"{len(row.tokens)} of {row.request.sampling.max_new_tokens} tokens"
            )
        if completion is not None:
            del self._rows[request_id], self._running[output.request_id]
            self._finished.append(completion)

    def _append(self, row: RunningRequest, token: int, logp: float) -> Completion | None:
        if not -float("inf") < logp <= 0:
            number = row.request.request_id
            raise no_logprob("vllm", logp, number, self._version, self._tensors)
        return row.append(token, logp, self._version)

    @property
    def model(self) -> torch.nn.Module:
        """This rank's live module, for those who look into it; not to be changed."""
        return self._live.model


def _part(
    family: Family, shape: ModelShape, layout: RolloutLayout, rank: int, ep: int
) -> RankLayout:
    """Returns what this rank's part of a replica holds."""
    _, tp_rank = layout.place(rank)
    found, experts = fused_layout(family, shape, layout.tp, tp_rank, ep), layout.experts_of(rank)
    if experts is None:
        return found
    return with_experts(found, ExpertTensors(family, shape), experts)


def _share(
    model: torch.nn.Module, shard: TrainingShard | None, layout: RankLayout
) -> dict[str, Tensor]:
    """Puts the trainer's parameters in the place of the engine's that hold the same."""
    if shard is None:
        return {}
    live = dict(model.named_parameters())
    views = shared_views(shard, layout, next(iter(live.values())).dtype)
    for name, view in views.items():
        live[name].data = view
    return views
