"""Samplers of several turns over a scripted engine: a turn follows from its seed alone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
from own_environments import Numbers

from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.reward import RewardConfig
from hybridrl.contracts.batch import Prompt
from hybridrl.environments.chat import ObservationEncoder
from hybridrl.generation.episodes import Episodes
from hybridrl.generation.sampler import Sampler
from hybridrl.generation.schedule import SYNCHRONOUS, Schedule
from hybridrl.parallel.groups import World
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.rewards.base import Scorer
from hybridrl.rollout.engine import Request, SamplingParams
from hybridrl.rollout.scripted import ScriptedEngine

STOP, SEED, STEP = 1, 11, 5
SAMPLING = SamplingParams(max_new_tokens=24, stop_token_ids=(STOP,))


def answer(request: Request) -> tuple[list[int], list[float]]:
    """A turn that follows from its request's seed alone; some are too long for their limit."""
    rng = random.Random(request.seed + (request.sampling.temperature == 0))
    tokens = [rng.randrange(2, 90) for _ in range(rng.choice([1, 2, 3, 5]))] + [STOP]
    return tokens, [-rng.random() for _ in tokens]


class Recorded(ScriptedEngine):
    """Keeps what it was fed, and tells as experts of a position the request that it was of."""

    def __init__(self) -> None:
        super().__init__(answer, {}, max_batch=5)
        self.fed: dict[int, list[Request]] = {}

    def submit(self, requests: list[Request]) -> None:
        super().submit(requests)
        for request in requests:
            self.fed.setdefault(request.request_id, []).append(request)

    def step(self) -> None:
        for row in list(self._rows.values())[: self._max_batch]:
            read, known = len(row.request.prompt) + len(row.tokens), row.num_recorded()
            row.record(known, np.full((read - known, 2), expert_of(row.request.seed), np.uint8))
        super().step()


def expert_of(seed: int) -> int:
    """Returns the expert that stands for a turn."""
    return seed % 251


def make_sampler(
    world: World,
    layout: RolloutLayout,
    environment: Mapping[str, Any],
    reward: Mapping[str, Any],
    schedule: Schedule = SYNCHRONOUS,
) -> Sampler:
    """A sampler of three responses a prompt."""
    section = EnvironmentConfig.model_validate(environment)
    engine = Recorded()
    engine.finish_update(0)
    scorer = Scorer(RewardConfig.model_validate(reward), Numbers(), environment=section)
    encoder = ObservationEncoder(Numbers(), 100, (STOP,))
    replica = ReplicaGroup(layout, world.rank, world.heartbeat)
    episodes = Episodes(section, replica, Numbers(), encoder, SEED)
    return Sampler(
        world=world,
        layout=layout,
        replica=replica,
        engine=engine,
        scorer=scorer,
        sampling=SAMPLING,
        samples_per_prompt=3,
        seed=SEED,
        episodes=episodes,
        schedule=schedule,
    )


def prompts(**columns: object) -> list[Prompt]:
    """Four prompts."""
    return [Prompt(n, "p" * n, tuple(range(2, 4 + n)), {"fault": "", **columns}) for n in range(4)]
