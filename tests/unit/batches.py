"""Batches for the tests of this folder."""

from __future__ import annotations

import random
from dataclasses import replace

import torch

from hybridrl.config.needs import Feedback
from hybridrl.contracts.batch import Blob, Producer, Prompt, Rollout, RolloutBatch, TrainBatch
from hybridrl.contracts.blobs import BlobKind, declare
from hybridrl.contracts.checks import RESPONSE, columns_of
from hybridrl.contracts.routed_experts import ROUTED_EXPERTS
from hybridrl.data.supervised import supervised_batch

LOGP_COLUMNS = tuple(
    name
    for name, column in columns_of(TrainBatch).items()
    if column == RESPONSE and name not in columns_of(RolloutBatch)
)
TEACHER_TOP = 3
EXPERT_WIDTH = 4  # of layers and experts of a token together
FEATURES = declare(BlobKind("features of tests", ("float16",), rows="any", row_dims=2))


def seeded(seed: int) -> torch.Generator:
    """Returns a generator that draws as after the slower `torch.manual_seed`."""
    return torch.Generator().manual_seed(seed)


def rollouts(num_prompts: int = 3, samples_per_prompt: int = 2, seed: int = 0) -> list[Rollout]:
    """Returns rollouts of unequal lengths; sample i is of prompt i // samples_per_prompt."""
    rng = random.Random(seed)
    made = []
    for p in range(num_prompts):
        tokens = tuple(rng.randrange(1, 50) for _ in range(rng.randint(1, 5)))
        prompt = Prompt(100 + p, f"prompt {p}", tokens, {"answer": str(p)})
        for s in range(samples_per_prompt):
            length = rng.randint(1, 7)
            made.append(
                Rollout(
                    sample_id=p * samples_per_prompt + s,
                    prompt=prompt,
                    tokens=tuple(rng.randrange(1, 50) for _ in range(length)),
                    logps=tuple(-rng.random() for _ in range(length)),
                    finish_reason=rng.choice(["stop", "length"]),
                    version=p,
                )
            )
    return made


def rollout_batch(num_prompts: int = 3, samples_per_prompt: int = 2, seed: int = 0) -> RolloutBatch:
    """Returns the batch of `rollouts`."""
    made = rollouts(num_prompts, samples_per_prompt, seed)
    groups = [i // samples_per_prompt for i in range(len(made))]
    return RolloutBatch.from_rollouts(made, groups, Producer.here("test engine"))


def train_batch(num_prompts: int = 3, samples_per_prompt: int = 2, seed: int = 0) -> TrainBatch:
    """Returns a batch with every column filled."""
    batch = rollout_batch(num_prompts, samples_per_prompt, seed)
    generator = seeded(seed)
    reward_B = torch.randn(batch.num_samples, generator=generator)
    made = batch.scored(reward_B, {"part": reward_B * 2}, Producer.here("test reward"))
    mask_T = batch.response_mask_T
    columns = {n: torch.randn(batch.num_tokens, generator=generator) * mask_T for n in LOGP_COLUMNS}
    shape = batch.num_tokens, TEACHER_TOP
    columns["teacher_logp_TK"] = torch.randn(shape, generator=generator) * mask_T[:, None]
    drawn_TK = torch.randint(1, 50, shape, generator=generator).int()
    columns["teacher_tokens_TK"] = drawn_TK * mask_T[:, None]
    columns["versions_T"] = torch.arange(batch.num_tokens) // 3 * mask_T
    found = made.to_train(Producer.here("test")).join_columns(Producer.here("test"), **columns)
    # Numbers of more than 256 experts in every other batch.
    dtype, most = ((torch.uint8, 256), (torch.int16, 1000))[seed % 2]
    size = batch.num_tokens - batch.num_samples, EXPERT_WIDTH
    experts_NK = torch.randint(0, most, size, generator=generator).to(dtype)
    num_rows_B = torch.randint(0, 3, (batch.num_samples,), generator=generator)
    size = int(num_rows_B.sum()), 2, 3
    blobs = {
        ROUTED_EXPERTS: Blob(experts_NK, batch.lengths_B - 1),
        FEATURES.name: Blob(torch.randn(size, generator=generator).half(), num_rows_B),
    }
    return replace(found, blobs=blobs)


def observed_batch(num_prompts: int = 3, samples_per_prompt: int = 2, seed: int = 0) -> TrainBatch:
    """Returns `train_batch`, with observations among the response tokens of most samples."""
    rng = random.Random(seed)
    made = rollouts(num_prompts, samples_per_prompt, seed)
    for i, one in enumerate(made):
        observed = (*(rng.random() < 0.4 for _ in one.tokens[1:]), False)
        logps = tuple(logp * (not seen) for logp, seen in zip(one.logps, observed, strict=True))
        made[i] = replace(one, logps=logps, observed=observed)
    groups = [i // samples_per_prompt for i in range(len(made))]
    batch = RolloutBatch.from_rollouts(made, groups, Producer.here("test engine"))
    generator, mask_T = seeded(seed), batch.response_mask_T
    reward_B = torch.randn(batch.num_samples, generator=generator)
    scored = batch.scored(reward_B, {"part": reward_B * 2}, Producer.here("test reward"))
    columns = {n: torch.randn(batch.num_tokens, generator=generator) * mask_T for n in LOGP_COLUMNS}
    return scored.to_train(Producer.here("test")).join_columns(Producer.here("test"), **columns)


def feedback_batch(feedback: Feedback, num: int, seed: int) -> TrainBatch:
    """Returns a batch of `num` pairs, or labelled responses with unrelated ones."""
    rng = random.Random(seed)

    def tokens() -> tuple[int, ...]:
        return tuple(rng.randrange(1, 50) for _ in range(rng.randint(1, 9)))

    prompts = [
        Prompt(p, "", tokens(), {"label": p % 3 != 0}, tokens(), tokens()) for p in range(num)
    ]
    batch = supervised_batch(prompts, feedback)
    generator = seeded(seed)
    logp_T = -torch.rand(batch.num_tokens, generator=generator).mul(2).exp2() + 0.9
    noise_T = torch.randn(batch.num_tokens, generator=generator)
    mask_T = batch.response_mask_T
    return batch.join_columns(
        Producer.here("test"),
        old_logp_T=logp_T * mask_T,
        reference_logp_T=(logp_T + 0.5 * noise_T - 0.1) * mask_T,
    )
