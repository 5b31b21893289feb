"""Checks requests for vLLM, and translates their sampling parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hybridrl.models.hf.config_keys import end_tokens_of
from hybridrl.rollout.common.sampling import draw_seeds
from hybridrl.rollout.common.settings import EngineSettings, too_long
from hybridrl.rollout.engine import Request
from hybridrl.rollout.registry import ENGINES

TRAITS = ENGINES["vllm"]


def request_rules(request: Request, settings: EngineSettings) -> Iterator[ValueError]:
    """Yields the reasons why vLLM cannot generate a response to a request."""
    yield from too_long(request, settings)
    name, sampling = f"request {request.request_id}", request.sampling
    lowest, highest = TRAITS.lowest_temperature, TRAITS.highest_temperature
    if sampling.temperature and not lowest <= sampling.temperature <= highest:
        yield ValueError(
            f"{name} has temperature={sampling.temperature}; vLLM allows 0, or "
            f"{lowest} to {highest}"
        )
    most = TRAITS.max_stop_tokens
    if sampling.min_new_tokens and most is not None:
        # vLLM adds the model's own end tokens.
        stops = {*sampling.stop_token_ids, *end_tokens_of(settings.hf_config)}
        if len(stops) > most:
            yield ValueError(
                f"{name} has {len(stops)} stop_token_ids, including the model's; vLLM allows at "
                f"most {most} with min_new_tokens. Give fewer, or min_new_tokens=0."
            )
    if (violation := _lost_presence(request, len(request.tokens))) is not None:
        yield violation


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
        logprobs=0,
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
