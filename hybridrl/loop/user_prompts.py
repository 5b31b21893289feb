"""Generates responses to prompts from a user's script, outside a run's steps. Collective. Prompts
are read and rendered in the same way as the run's own prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybridrl.config.schema import Config
from hybridrl.data.prompts import load_prompts
from hybridrl.errors import UserError
from hybridrl.generation.sampler import Sampler
from hybridrl.loop.evaluate import EVALUATION_STEP
from hybridrl.rewards.base import Scorer
from hybridrl.rewards.functions import no_reward

UserPrompt = str | Sequence[Mapping[str, object]]
"""A text, or the messages of a chat."""


def responses_to(
    prompts: Sequence[UserPrompt],
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    sampler: Sampler,
    temperature: float | None,
    max_new_tokens: int | None,
) -> list[str]:
    """Generates a single-turn response to each prompt, without environment or rewards.

    Returns the texts in the order of the prompts. Defaults are those of the run's evaluations.
    Raises UserError if there are no prompts, if a prompt exceeds `data.max_prompt_tokens`, or if
    `max_new_tokens` exceeds the engine's maximum.
    """
    longest = config.eval.most_new_tokens(config.rollout.max_new_tokens)
    num_tokens = longest if max_new_tokens is None else max_new_tokens
    if not 1 <= num_tokens <= longest:
        remedy = "Raise eval.max_new_tokens, the longest response that the engine supports."
        raise UserError("max_new_tokens", num_tokens, f"1 to {longest}", remedy)
    if isinstance(prompts, str) or not prompts:
        got = "one text" if prompts else "nothing"
        raise UserError("prompts", got, "a list of texts or chats", "Pass a list.")
    # The caller expects a response to every prompt, so a bad prompt is an error.
    data = config.data.model_copy(update={"on_bad_row": "stop"})
    loaded = load_prompts(data, tokenizer, [{data.prompt_key: prompt} for prompt in prompts])
    if loaded.left_out.num:
        place, length = loaded.left_out.first()
        allowed = f"at most data.max_prompt_tokens={config.data.max_prompt_tokens}"
        raise UserError(place, length, allowed, "Raise data.max_prompt_tokens.")
    sampling = replace(
        sampler.sampling,
        temperature=config.eval.temperature if temperature is None else temperature,
        max_new_tokens=num_tokens,
    )
    with sampler.judged_by(Scorer(config.reward, tokenizer, no_reward)):
        local = sampler.generate(
            loaded.prompts, samples_per_prompt=1, step=EVALUATION_STEP, sampling=sampling
        )
        with sampler.world.all_agree("collecting responses") as agreement:
            if local is not None:
                texts = sampler.scorer.responses(local)
                agreement.value = dict(zip(local.sample_ids_B.tolist(), texts, strict=True))
    responses = {n: text for found in agreement.values for n, text in (found or {}).items()}
    return [responses[number] for number in range(len(prompts))]
