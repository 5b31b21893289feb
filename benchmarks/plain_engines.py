"""Generation straight through an engine's package, as the benchmark of the loop compares it with.

Of each engine: how its cached prefixes are dropped, and how it generates the samples of a replica
with as little around it as the package allows, in the same process with the same weights.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, NamedTuple


class Plain(NamedTuple):
    """How a package is used without the loop.

    Args:
        forget: drops what is cached of earlier prompts; given the trainer.
        generate: given the trainer, the prompts, and whether log-probabilities are asked for.
    """

    forget: Callable[[Any], None]
    generate: Callable[[Any, Any, bool], None]


def own_prompts(trainer: Any, prompts: Any) -> Iterator[tuple[int, list[int]]]:
    """Yields number and tokens of every sample of this replica."""
    sampler = trainer.sampler
    replica, number = sampler.layout.assignment[trainer.world.rank][0], 0
    for group, prompt in enumerate(prompts):
        if group % sampler.layout.replicas != replica:
            continue
        for _ in range(sampler.samples_per_prompt):
            yield number, list(prompt.tokens)
            number += 1


def forget_vllm(trainer: Any) -> None:
    trainer.engine._live.llm.reset_prefix_cache()


def plain_vllm(trainer: Any, prompts: Any, with_logprobs: bool) -> None:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    sampling, llm = trainer.sampler.sampling, trainer.engine._live.llm
    for number, tokens in own_prompts(trainer, prompts):
        params = SamplingParams(
            temperature=sampling.temperature,
            max_tokens=sampling.max_new_tokens,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            seed=number if with_logprobs else None,
            logprobs=0 if with_logprobs else None,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        llm.add_request(f"plain-{number}", {"type": "token", "prompt_token_ids": tokens}, params)
    while llm.has_unfinished_requests():
        llm.step()
    # Nobody else takes their tokens. Names that vLLM makes differ between ranks.
    trainer.engine._decoding.take_steps()


def forget_sglang(trainer: Any) -> None:
    trainer.engine._scheduler.forget_requests()


def plain_sglang(trainer: Any, prompts: Any, with_logprobs: bool) -> None:
    """SGLang's loop with its sampler and its way with tokens, which are read at the end."""
    from sglang.srt.layers.sampler import create_sampler
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling, scheduler = trainer.sampler.sampling, trainer.engine._scheduler
    runner = scheduler.tp_worker.model_runner
    ours, made = runner.sampler, SamplingBatchInfo.from_schedule_batch
    runner.sampler = create_sampler()
    scheduler.process_batch_result = MethodType(Scheduler.process_batch_result, scheduler)
    SamplingBatchInfo.from_schedule_batch = staticmethod(made.without_seeds)
    requests = []
    try:
        for number, tokens in own_prompts(trainer, prompts):
            params = SamplingParams(
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
                stop_token_ids=list(sampling.stop_token_ids),
            )
            params.normalize(None)
            asked = TokenizedGenerateReqInput(
                rid=f"plain-{number}",
                input_text=None,
                input_ids=array("q", tokens),
                input_embeds=None,
                token_type_ids=None,
                mm_inputs=None,
                sampling_params=params,
                return_logprob=with_logprobs,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
            )
            requests.append(scheduler.add(asked))
        while not all(request.finished() for request in requests):
            scheduler.turn()
    finally:
        runner.sampler = ours
        del scheduler.process_batch_result
        SamplingBatchInfo.from_schedule_batch = staticmethod(made)


PLAIN = {"vllm": Plain(forget_vllm, plain_vllm), "sglang": Plain(forget_sglang, plain_sglang)}
