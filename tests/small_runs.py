"""Small runs in the test's own process: one rank, the quickstart's model, scripted rollouts."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from command_line import FRESH, NO_EVALUATION, QUICKSTART

from hybridrl import Trainer

SMALL = (
    *FRESH,
    f"data.prompts={QUICKSTART / 'train.jsonl'}",
    *NO_EVALUATION,
    "steps.prompts_per_step=4",
    "steps.samples_per_prompt=2",
    "train.warmup_steps=0",
    "rollout.engine=scripted",
    "reward.function=scripted_reward:digits",
    "reward.extract=null",
    "reward.isolated=false",
    "log.tensorboard=false",
    "log.console=false",
    "checkpoint.every=0",
)


@contextmanager
def small_run(
    folder: Path, *overrides: str, config: str = "grpo.yaml", **given: Any
) -> Iterator[Trainer]:
    """Yields a trainer with SMALL and `overrides`, whose run folder lies in `folder`; closes it."""
    knobs = [*SMALL, f"run.dir={folder}", *overrides]
    if config == "ppo.yaml":
        knobs.remove("steps.samples_per_prompt=2")
    trainer = Trainer.from_config(QUICKSTART / config, knobs, **given)
    try:
        yield trainer
    finally:
        trainer.close()


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Makes writing beyond a size fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
