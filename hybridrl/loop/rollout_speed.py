"""Measures the speed of a run's engine: `hybridrl bench rollout` on each rank.

Collective: all ranks start each round together and wait for the slowest replica. The run is built
as for `train`, so the engine has as much memory as training leaves free, and is compared with the
trainer. A round is the batch of one step: prompts of `data.max_prompt_tokens` random tokens, with
`steps.samples_per_prompt` responses of `rollout.max_new_tokens` tokens each. No two rounds share a
prompt, so prefix caching helps only within a group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
import torch

from hybridrl.config.schema import Config
from hybridrl.loop.trainer import Trainer
from hybridrl.platform import Platform
from hybridrl.rollout.engine import Request, generate, request_seed

# Number of new tokens per response in the warm-up round, which fills memory pools and compiles
# kernels.
WARM_UP_TOKENS = 16


def measure_rank(
    config: Config, num_rounds: int, started: float, tell: Callable[[str], None]
) -> dict[str, Any]:
    """Runs one rank of `hybridrl bench rollout`. `started` is the start's `time.monotonic`.

    Returns, the same on all ranks: `tokens_per_s` (all replicas together, median over rounds),
    `rounds_s`, `num_tokens` (per round), `start_s` (seconds until the engine may generate),
    `replicas`, `dtype`, and two maxima over ranks: `engine_bytes` (the engine's own memory) and
    `rank_bytes` (all memory in use on the device; on CPU, the peak of the process).
    """
    trainer = Trainer(config)
    trainer.check_engine()
    world = trainer.world
    start_s = max(world.gather_objects(time.monotonic() - started))
    tell(f"engine agrees with the trainer after {start_s:.0f} s")
    new_tokens = config.rollout.max_new_tokens
    warm_up_s = _generate(trainer, 0, min(WARM_UP_TOKENS, new_tokens))
    tell(f"warm-up took {warm_up_s:.1f} s")
    rounds_s = list[float]()
    for number in range(1, num_rounds + 1):
        rounds_s.append(_generate(trainer, number, new_tokens))
        tell(f"round {number} of {num_rounds} took {rounds_s[-1]:.2f} s")
    num_tokens = config.steps.prompts_per_step * config.steps.samples_per_prompt * new_tokens
    held = [part.num_bytes for part in trainer.engine.memory().values() if not part.is_shared]
    used = world.gather_objects((sum(held), _used_bytes(trainer.platform)))
    found = {
        "tokens_per_s": num_tokens / median(rounds_s),
        "rounds_s": rounds_s,
        "num_tokens": num_tokens,
        "start_s": start_s,
        "replicas": trainer.sampler.layout.replicas,
        "dtype": str(trainer.source.dtype).removeprefix("torch."),
        "engine_bytes": max(engine for engine, _ in used),
        "rank_bytes": max(rank for _, rank in used),
    }
    trainer.close()
    return found


def _generate(trainer: Trainer, number: int, new_tokens: int) -> float:
    """Generates one round. Returns how many seconds the slowest replica took."""
    world = trainer.world
    requests = round_requests(trainer, number, new_tokens)
    world.arrive("the previous round of generation")
    with world.all_agree("generation") as agreement:
        start = time.monotonic()
        done = generate(trainer.engine, requests) if requests else []
        agreement.value = time.monotonic() - start
        if any(len(completion.tokens) != new_tokens for completion in done):
            raise RuntimeError(
                f"the engine returned a response that does not have {new_tokens} tokens"
            )
    return max(agreement.values)


def round_requests(trainer: Trainer, number: int, new_tokens: int) -> list[Request]:
    """Returns this replica's requests for a round, in whole groups; [] without an engine."""
    config, layout = trainer.config, trainer.sampler.layout
    place = layout.assignment[trainer.world.rank]
    if place is None:
        return []
    sampling = replace(trainer.sampler.sampling, max_new_tokens=new_tokens, stop_token_ids=())
    rng = np.random.default_rng((config.run.seed, number))
    shape = config.steps.prompts_per_step, config.data.max_prompt_tokens
    prompts = rng.integers(0, trainer.source.shape.vocab_size, shape).tolist()
    samples = config.steps.samples_per_prompt
    return [
        Request(
            group * samples + sample,
            tuple(prompts[group]),
            request_seed(config.run.seed, number, group * samples + sample),
            sampling,
        )
        for group in range(place[0], len(prompts), layout.replicas)
        for sample in range(samples)
    ]


def _used_bytes(platform: Platform) -> int:
    if platform.is_cpu:
        return platform.peak_memory_bytes()
    free, total = torch.cuda.mem_get_info()
    return total - free
