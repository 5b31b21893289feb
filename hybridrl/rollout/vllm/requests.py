"""What vLLM is asked for: which requests it can take, and a request's sampling as it has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridrl.models.hf.config_keys import end_tokens_of
from hybridrl.rollout.common.sampling import draw_seeds
from hybridrl.rollout.common.settings import EngineSettings, too_long
from hybridrl.rollout.engine import Request
from hybridrl.rollout.registry import ENGINES

LOWEST_TEMPERATURE = ENGINES["vllm"].lowest_temperature
MOST_STOP_TOKENS = 128  # that vLLM's second model runner keeps from being drawn too early


def request_rules(request: Request, settings: EngineSettings) -> Iterator[ValueError]:
    """Yields what vLLM cannot do of a request."""
    yield from too_long(request, settings)
    name, sampling = f"request {request.request_id}", request.sampling
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        yield ValueError(
            f"{name} has temperature={sampling.temperature}; vLLM samples at 0 or at "
            f"{LOWEST_TEMPERATURE} and above"
        )
    if sampling.min_new_tokens:
        # vLLM counts those of the model too.
        stops = {*sampling.stop_token_ids, *end_tokens_of(settings.hf_config)}
        if len(stops) > MOST_STOP_TOKENS:
            yield ValueError(
                f"{name} has {len(stops)} stop_token_ids, with those of the model; with "
                f"min_new_tokens vLLM takes {MOST_STOP_TOKENS} at most: give fewer, or "
                "min_new_tokens=0"
            )
    if (violation := _lost_presence(request, len(request.tokens))) is not None:
        yield violation


def sampling_params(request: Request, num_tokens: int) -> Any:
    """Returns vLLM's SamplingParams of the rest of a response that has `num_tokens`, which vLLM
    gets as a part of the prompt. Raises ValueError if it goes on with presence_penalty.
    """
    from vllm.sampling_params import SamplingParams

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
        # vLLM keeps seeds as signed 64-bit numbers, and takes -1 for none.
        seed=int(draw_seeds([request.seed], [0])[0] >> 1),
        logprobs=0,
        detokenize=False,
        skip_clone=True,  # nobody else has them; a deep copy is a tenth of a CPU's step
    )


def _lost_presence(request: Request, num_tokens: int) -> ValueError | None:
    """Returns the refusal of a request that goes on after its first tokens with presence_penalty:
    vLLM gets them as a part of the prompt, of which this penalty says nothing.

    Configurations do not lead here: penalties are refused where samples are trained on, and no
    evaluation is saved before its end. A script that gives the sampler SamplingParams may.
    """
    if not request.sampling.presence_penalty or not num_tokens:
        return None
    name = f"request {request.request_id}"
    return ValueError(f"{name} goes on with presence_penalty, which needs all its tokens")
