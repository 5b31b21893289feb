"""Evaluation: responses to held-out prompts, greedy unless told otherwise, and their reward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hybridrl.batch import Prompt
from hybridrl.trainer.sampler import Sampler

# Enters the seeds in place of a step number: evaluation at a temperature samples the same way every
# time.
EVALUATION_STEP = -2


def evaluate(sampler: Sampler, prompts: Sequence[Prompt], temperature: float = 0.0) -> float:
    """Returns the mean reward of one response to each prompt; with rewards of 0 and 1, the
    accuracy.

    Collective; the same on all ranks.

    Args:
        sampler: with the weights to evaluate in its engine.
        prompts: the same on all ranks.
        temperature: 0 is greedy.
    """
    sampling = dataclasses.replace(sampler.sampling, temperature=temperature)
    local = sampler.generate(prompts, samples_per_prompt=1, step=EVALUATION_STEP, sampling=sampling)
    return float(sampler.score(local).reward_B.mean())


def is_due(every: int, step: int, last: int) -> bool:
    """Whether what happens after every `every` steps (0: never) and after the last is due now."""
    return step == last or (every > 0 and step % every == 0)
