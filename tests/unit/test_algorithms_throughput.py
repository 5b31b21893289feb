"""Advantages and losses of a million tokens, on one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.base import CriticAlgorithm
from hybridrl.batch import Producer, Prompt, RolloutBatch, TrainBatch
from hybridrl.config.algorithm import ReinforceConfig
from hybridrl.config.schema import GrpoConfig, PpoConfig
from hybridrl.data.collate import micro_batch

NUM_SAMPLES, NUM_TOKENS, GROUP = 1024, 1024 * 1024, 8
LIMIT_S = 0.05
HERE = Producer.here("test")


@pytest.fixture(scope="module")
def million() -> Iterator[TrainBatch]:
    """1,024 responses of 512 to 1,536 tokens, a million together."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    generator = torch.manual_seed(0)
    half = torch.randint(512, 1537, (NUM_SAMPLES // 2,), generator=generator)
    lengths_B = torch.cat([half, 2048 - half])
    prompts = [Prompt(i, "", (1,)) for i in range(NUM_SAMPLES // GROUP)]
    total = NUM_TOKENS + NUM_SAMPLES

    def column() -> torch.Tensor:
        return torch.rand(total, generator=generator) * batch.response_mask_T

    batch = RolloutBatch(
        prompts=tuple(prompts[i // GROUP] for i in range(NUM_SAMPLES)),
        sample_ids_B=torch.arange(NUM_SAMPLES),
        group_B=torch.arange(NUM_SAMPLES) // GROUP,
        tokens_T=torch.ones(total, dtype=torch.int64),
        lengths_B=lengths_B + 1,
        prompt_lengths_B=torch.ones(NUM_SAMPLES, dtype=torch.int64),
        behaviour_logp_T=torch.zeros(total),
        versions_B=torch.zeros(NUM_SAMPLES, dtype=torch.int64),
        finished_B=torch.ones(NUM_SAMPLES, dtype=torch.bool),
        producer=HERE,
    )
    reward_B = torch.rand(NUM_SAMPLES, generator=generator)
    made = batch.scored(reward_B, {"a": reward_B}, HERE).to_train(HERE)
    yield made.join_columns(HERE, old_logp_T=-column(), values_T=column())
    torch.set_num_threads(threads)


def least_s(call: Callable[[], object], repeats: int = 12) -> float:
    """Returns the least CPU time of one call: others use the machine, and its caches, too."""
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
        if times[-1] < LIMIT_S / 2:
            break
    return min(times)


@pytest.mark.parametrize(
    "config",
    [
        GrpoConfig(),
        GrpoConfig(name="gspo"),
        GrpoConfig(name="kl_cov"),
        GrpoConfig(name="gdpo"),
        ReinforceConfig(),
        PpoConfig(),
        PpoConfig(name="vapo"),
    ],
    ids=lambda config: config.name,
)
def test_advantages_and_the_loss_of_a_million_tokens_take_50_ms_each(
    config, million, record_property
):
    algorithm = make_algorithm(config)
    filled = algorithm.advantages(million)
    micro = micro_batch(filled, range(NUM_SAMPLES), 1, 1)
    logp_S = micro.old_logp_S + 0.01
    denominator = algorithm.denominator(filled)

    def losses() -> None:
        algorithm.loss(logp_S, logp_S, micro, denominator)
        if isinstance(algorithm, CriticAlgorithm):
            algorithm.value_loss(logp_S, micro, denominator)

    taken = {"advantages": least_s(lambda: algorithm.advantages(million)), "loss": least_s(losses)}
    for name, seconds in taken.items():
        record_property(f"{name}_ms", round(1000 * seconds, 1))
    print(config.name, {name: f"{1000 * s:.1f} ms" for name, s in taken.items()})
    assert max(taken.values()) < LIMIT_S, taken
