"""The `vllm` engine: vLLM in this process, with live parameters that the hybrid engine writes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from hybridrl.errors import ModelError
from hybridrl.models.hf.config_keys import end_tokens_of
from hybridrl.rollout.common.engine_memory import SleepingMemory, check_caches, own_memory
from hybridrl.rollout.common.packaged_engine import PackagedEngine
from hybridrl.rollout.common.process_state import keep_generators
from hybridrl.rollout.common.sampling import draw_seeds
from hybridrl.rollout.common.settings import too_long
from hybridrl.rollout.common.weight_copies import LatentCopies
from hybridrl.rollout.engine import Completion, Request, RunningRequest
from hybridrl.rollout.registry import ENGINES
from hybridrl.rollout.vllm import exact, exact_gpu
from hybridrl.rollout.vllm.adapters import LiveAdapters, slot_tensors
from hybridrl.rollout.vllm.decoding import DecodingSteps, StepBuffer, StepTokens
from hybridrl.rollout.vllm.experts import deal_experts
from hybridrl.rollout.vllm.fp8 import check_kernels, is_cache_scale, multiply_unrounded_tokens
from hybridrl.rollout.vllm.images import PixelItems
from hybridrl.rollout.vllm.memory import allocations
from hybridrl.rollout.vllm.repairs import compute_wide_logits, rotate_with_torch
from hybridrl.rollout.vllm.routing import RecordedExperts
from hybridrl.rollout.vllm.start import LiveEngine, caches_of, runner_of, start, stop
from hybridrl.rollout.vllm.version import NAME, is_scheduler_known

COPIES = LatentCopies("W_UK_T", "W_UV", "num_heads")
# vLLM's names that differ from those in HF checkpoints, apart from fused parameters: in models with
# images, and in GPT-OSS.
RENAMED = (
    (re.compile(r"^language_model\.(model\.|lm_head\.)"), r"\1"),
    (re.compile(r"^visual\."), "model.visual."),
    (re.compile(r"^model\.embedding\."), "model.embed_tokens."),
    (re.compile(r"^(model\.layers\.\d+)\.attn\."), r"\1.self_attn."),
)


class VllmEngine(PackagedEngine[LiveEngine, RecordedExperts]):
    name = "vllm"
    copies = COPIES

    @staticmethod
    def _layout_name(name: str) -> str | None:
        if COPIES.is_copy(name) or is_cache_scale(name):
            return None
        for pattern, replacement in RENAMED:
            name = pattern.sub(replacement, name)
        return name

    def _start(self) -> None:
        # Requests in vLLM, by vLLM's names. Names are never reused, because vLLM may still return a
        # token for an aborted request.
        self._running: dict[str, RunningRequest] = {}
        self._num_named = self._num_updates = 0
        # Tokens that were not appended to their rows yet. The buffer is emptied after every step
        # while any request has stop strings.
        self._drawn, self._has_stop_strings = StepBuffer(), False
        self._live = start(
            self._inputs,
            prepare=self._prepare,
            prepare_loading=self._prepare_loading,
            prepare_adapter=lambda model: self._prepare_adapter(model, slot_tensors(model)),
            listen=lambda model, cache: self._record_with(
                lambda: RecordedExperts(model, cache, self._shape, self._device)
            ),
        )
        scheduler = self._live.llm.engine_core.engine_core.scheduler
        if self._experts is not None:
            try:
                self._experts.attach(scheduler, self._running)
            except ModelError as error:
                self._refusals.append(error)
        self._lora_requests: Mapping[str, Any] = {}
        if self._inputs.slots is not None and not self._refusals:
            adapters = LiveAdapters(runner_of(self._live.llm), self._inputs.slots.adapters)
            self._adapters, self._lora_requests = adapters, adapters.requests
        self._cache_bytes = sum(int(one.size) for one in scheduler.kv_cache_config.kv_cache_tensors)
        self._decoding = DecodingSteps(scheduler, is_scheduler_known(self._live.version))
        self._runs_ahead = self._decoding.is_async

    @cached_property
    def _pixels(self) -> PixelItems:
        return PixelItems.of(self._settings, self._shape)

    def _settle(self, model: torch.nn.Module) -> None:
        if self._settings.quantization == "fp8":
            check_kernels(model, self._inputs.version)
            multiply_unrounded_tokens(model, self._settings.max_batch)
        if (experts := self._placement.experts_of(self._rank)) is not None:
            deal_experts(model, experts)
        if self._settings.is_exact:
            if self._device.type == "cpu":
                exact.compute_exactly(model)
            else:
                assert self._settings.rotary is not None  # rules allow only such models
                exact_gpu.compute_exactly(model, self._settings.rotary)
        elif self._device.type == "cpu" and self._dtype != torch.float32:
            compute_wide_logits(model)
        if self._shape.latent is not None and self._device.type == "cpu":
            rotate_with_torch(model, self._inputs.version)

    def _own_memory(self) -> SleepingMemory:
        caches, pieces = caches_of(runner_of(self._live.llm)), allocations()
        check_caches(caches, self._cache_bytes, pieces, NAME, self._live.version)
        whole, in_part = self._written_parameters()
        return own_memory(self._device, pieces, [*whole, *caches], in_part)

    def _forget_cache(self) -> None:
        if not self._live.llm.reset_prefix_cache():
            raise RuntimeError(
                "vLLM did not clear its prefix cache, which contains keys from older weights"
            )
        self._num_updates += 1

    def _record_running(self) -> None:
        if self._experts is not None:
            self._decoding.write()
            self._experts.record_running()

    def _drop_running(self) -> None:
        names, core = list(self._running), self._live.llm.engine_core
        self._running.clear()
        if names:
            core.abort_requests(names)
        if self._shape.vision is not None:  # features of images would stay on the device
            core.reset_encoder_cache()

    def close(self) -> None:
        stop(self._live)

    def submit(self, requests: Sequence[Request]) -> None:
        is_idle = not self._rows
        super().submit(requests)
        new = any(request.sampling.stop_strings for request in requests)
        self._has_stop_strings = new or (self._has_stop_strings and not is_idle)

    def _request_rules(self, request: Request) -> Iterable[ValueError]:
        yield from too_long(request, self._settings)
        name, sampling = f"request {request.request_id}", request.sampling
        traits = ENGINES[self.name]
        lowest, highest = traits.lowest_temperature, traits.highest_temperature
        if sampling.temperature and not lowest <= sampling.temperature <= highest:
            yield ValueError(
                f"{name} has temperature={sampling.temperature}; vLLM allows 0, or "
                f"{lowest} to {highest}"
            )
        most = traits.max_stop_tokens
        if sampling.min_new_tokens and most is not None:
            # vLLM adds the model's own end tokens.
            stops = {*sampling.stop_token_ids, *end_tokens_of(self._settings.hf_config)}
            if len(stops) > most:
                yield ValueError(
                    f"{name} has {len(stops)} stop_token_ids, including the model's; vLLM allows "
                    f"at most {most} with min_new_tokens. Give fewer, or min_new_tokens=0."
                )
        if (violation := _lost_presence(request, len(request.tokens))) is not None:
            yield violation

    def _decode(self) -> tuple[list[str], list[int]]:
        with keep_generators(self._device):
            self._add_waiting()
            # Read the core's outputs directly: vLLM would create a dictionary and several objects
            # for every token, a quarter of a step's time with small models.
            outputs = self._live.llm.engine_core.get_output().outputs
        if outputs:  # these contain last tokens, which must follow the earlier ones
            self._take_drawn()
        names: list[str] = []
        tokens: list[int] = []
        for output in outputs:
            names += [output.request_id] * len(output.new_token_ids)
            tokens += output.new_token_ids
            self._take(output)
        for step in self._decoding.take_steps():
            self._check_logps(step.logps, partial(self._number_of, step))
            names += step.names
            tokens += step.tokens
            if not self._drawn.fits(step):
                self._take_drawn()
            self._drawn.add(step)
            if self._has_stop_strings:
                self._take_drawn()
        return names, tokens

    def _add_waiting(self) -> None:
        """Passes requests to vLLM in order, at most as many as it decodes together, and images of
        at most MAX_PIXEL_BYTES. Further requests may never start (`steps.max_policy_lag`), and
        adding and removing a request takes 0.15 ms of Python.
        """
        num_held = min(len(self._rows), self._settings.max_batch)
        if len(self._running) >= num_held:
            return
        held = {row.request.request_id for row in self._running.values()}
        waiting = [row for request_id, row in self._rows.items() if request_id not in held]
        requests = [row.request for row in waiting]
        beginning: Sequence[Request] = requests[: num_held - len(held)]
        if any(request.contents for request in beginning):
            running = (row.request for row in self._running.values())
            beginning = self._pixels.admitted(beginning, running)
        for index, request in enumerate(beginning):
            if request.contents:
                self._pixels.decode_following(requests[index:])
            self._add(waiting[index])

    def _add(self, row: RunningRequest) -> None:
        """Passes a request to vLLM; its tokens so far become part of the prompt."""
        params = sampling_params(row.request, len(row.tokens))
        prompt = {"type": "token", "prompt_token_ids": [*row.request.prompt, *row.tokens]}
        llm, name = self._live.llm, f"{row.request.request_id}-{self._num_named}"
        tasks = llm.get_supported_tasks()
        request = llm.input_processor.process_inputs(
            name,
            prompt,
            params,
            supported_tasks=tasks,
            lora_request=self._lora_requests.get(row.request.adapter or ""),
        )
        if row.request.contents:
            request.mm_features = self._pixels.features_of(row.request.contents, self._num_updates)
        llm.engine_core.add_request(request)
        self._running[name] = row
        self._num_named += 1

    def _number_of(self, step: StepTokens, place: int) -> int | None:
        """Returns the id of a request in a step; None if the request was aborted since then."""
        row = self._running.get(step.names[place])
        return None if row is None else row.request.request_id

    def _take(self, output: Any) -> None:
        name = output.request_id
        row = self._running.get(name)
        if row is None:  # aborted since
            return
        completion: Completion | None = None
        for token in output.new_token_ids:  # at most one token
            logp = self._decoding.logp(name)
            self._check_logps([logp], lambda _: row.request.request_id)
            row.record_likely(self._decoding.likely(name))
            completion = row.append(token, logp, self._version)
        if completion is None and not output.finished:
            return
        if completion is None:
            raise RuntimeError(
                f"vLLM ended request {row.request.request_id} with {output.finish_reason} after "
                f"{len(row.tokens)} of {row.request.sampling.max_new_tokens} tokens"
            )
        if output.finished:
            del self._running[name]
            self._finish(completion)
        else:
            self._end_by_text(name, row, completion)

    def _take_drawn(self) -> None:
        for name, tokens, logps, likely in self._drawn.take():
            row = self._running.get(name)
            if row is None:  # aborted since
                continue
            row.record_likely(likely)
            completion = row.extend(tokens, logps, self._version)
            if completion is not None:
                self._end_by_text(name, row, completion)

    def _end_by_text(self, name: str, row: RunningRequest, completion: Completion) -> None:
        """Finishes a request that ended at a stop string, and aborts it in vLLM."""
        if not row.request.sampling.stop_strings:
            raise RuntimeError(f"vLLM did not end request {name} after its last token")
        self._live.llm.engine_core.abort_requests([name])
        del self._running[name]
        self._finish(replace(completion, blobs=row.blobs))  # the abort recorded the last blobs


def sampling_params(request: Request, num_tokens: int) -> Any:
    """Returns vLLM's SamplingParams for the rest of a response, whose first `num_tokens` tokens are
    part of vLLM's prompt. Raises ValueError if there are any, with a presence_penalty.
    """
    from vllm import SamplingParams

    if (violation := _lost_presence(request, num_tokens)) is not None:
        raise violation
    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_new_tokens - num_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        min_tokens=max(0, sampling.min_new_tokens - num_tokens),
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        ignore_eos=True,
        # vLLM stores seeds as signed 64-bit numbers; -1 means none.
        seed=int(draw_seeds([request.seed], [0])[0] >> 1),
        logprobs=sampling.num_likely,
        detokenize=False,
        skip_clone=True,  # the object is not shared, and a deep copy takes a tenth of a CPU step
    )


def _lost_presence(request: Request, num_tokens: int) -> ValueError | None:
    """Returns the error for a continued request with presence_penalty, which vLLM would not apply
    to earlier tokens. Only a script that passes SamplingParams to the sampler can cause it, because
    training rejects penalties and evaluations are not interrupted.
    """
    if not request.sampling.presence_penalty or not num_tokens:
        return None
    name = f"request {request.request_id}"
    return ValueError(
        f"{name} continues with presence_penalty, which vLLM cannot apply to earlier tokens"
    )


build = VllmEngine.build
