"""Probe at the start of a run: the engine computes what the trainer computes.

After the first sync every replica answers a few fixed prompts, and the trainer computes the
log-probabilities of the same tokens. Checksums have found wrong weights before
(`HybridEngine.verify`); this finds an engine that uses them in another way: other positions, norms,
heads or precision. Collective over the world; raises on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
from hybridrl.contracts.ragged import joined_blobs
from hybridrl.generation.sampler import Sampler
from hybridrl.models.family import ModelShape
from hybridrl.roles.policy import Policy
from hybridrl.rollout.engine import Completion, Request, SamplingParams, generate
from hybridrl.training.mismatch import BOUNDS

PROMPT_TOKENS, NEW_TOKENS, REQUESTS = 16, 8, 4


class EngineDiffersError(RuntimeError):
    """The engine has the trainer's weights and computes other probabilities with them."""


@dataclass(frozen=True)
class Answers:
    """Answers of each replica to the same requests, in their order."""

    requests: Sequence[Request]
    by_replica: Sequence[Sequence[Completion]]


def check(
    sampler: Sampler,
    policy: Policy,
    max_prompt_tokens: int,
    enter_training: Callable[[], None],
) -> str:
    """Returns, as a sentence, how closely engine and trainer agree; enters the training phase."""
    answers = ask(sampler, policy.model.source.shape, max_prompt_tokens)
    enter_training()
    return f"engine and trainer agree within {compare(policy, answers):.1e} nats a token"


def ask(sampler: Sampler, shape: ModelShape, max_prompt_tokens: int) -> Answers:
    """Lets every replica answer the same fixed prompts of arbitrary tokens; in the rollout phase,
    with idle engines.
    """
    rng, world = np.random.default_rng(0), sampler.world
    length = min(PROMPT_TOKENS, max_prompt_tokens)
    # The temperature that the policy's log-probabilities are for, and nothing cut off.
    temperature = sampler.sampling.temperature or 1.0
    num_tokens = min(NEW_TOKENS, sampler.sampling.max_new_tokens)
    sampling = SamplingParams(temperature, max_new_tokens=num_tokens)
    requests = [
        Request(number, tuple(rng.integers(0, shape.vocab_size, length).tolist()), number, sampling)
        for number in range(REQUESTS)
    ]
    with world.all_agree("the first generation"):
        has_engine = world.rank in sampler.layout.ranks
        done = generate(sampler.engine, requests) if has_engine else []
    place = sampler.layout.assignment[world.rank]
    mine = (place[0], done) if place is not None and place[1] == 0 else None
    found = world.gather_objects(mine)
    by_replica = dict(part for part in found if part is not None)
    return Answers(requests, [by_replica[number] for number in range(sampler.layout.replicas)])


def compare(policy: Policy, answers: Answers) -> float:
    """Returns the mean absolute difference of the log-probabilities; in the training phase.

    Raises:
        EngineDiffersError: It is above the bound of the model's dtype; names the replica.
    """
    bound = BOUNDS[policy.model.source.dtype].refuse
    prompts = [
        Prompt(number, "", request.prompt, {}, completion.tokens)
        for completions in answers.by_replica
        for number, (request, completion) in enumerate(
            zip(answers.requests, completions, strict=True)
        )
    ]
    here = Producer.here("the probe")
    batch = TrainBatch.supervised(prompts, here)
    blobs = [done.blobs for part in answers.by_replica for done in part]
    for name, blob in joined_blobs(blobs).items():
        batch = batch.join_blob(here, name, blob)
    expected = policy.logprobs(batch)[batch.response_mask_T].split(
        [sum(len(done.tokens) for done in part) for part in answers.by_replica]
    )
    gaps = []
    for replica, (part, trained_T) in enumerate(zip(answers.by_replica, expected, strict=True)):
        logps = torch.tensor([logp for completion in part for logp in completion.logps])
        gap_T = (logps - trained_T).abs()
        gaps.append(float(gap_T.mean()))
        if not gaps[-1] <= bound:
            raise EngineDiffersError(
                f"replica {replica} and the trainer give the same tokens log-probabilities that "
                f"differ by {gaps[-1]:.2g} on average and {float(gap_T.max()):.2g} at most; "
                f"allowed is {bound:g} on average. Every engine parameter equals its source, so "
                f"they compute differently: {_likely_cause(policy.model.train.fp8)}; layer by "
                "layer: hybridrl check --mismatch CONFIG"
            )
    return max(gaps)


def _likely_cause(fp8: str) -> str:
    """Returns where to look for a difference, for a value of `train.fp8`."""
    if fp8 == "none":
        return (
            "look at the position, norm and head settings of the model's config.json, and at the "
            "engine's version (hybridrl check)"
        )
    return (
        f"with train.fp8={fp8} the trainer rounds what matrix products take to FP8, and the engine "
        "does not, which changes this model's probabilities by that much. Set train.fp8=none; if "
        "they differ still, look at the position, norm and head settings of the model's config.json"
    )
