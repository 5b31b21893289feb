"""Small runs in the test's own process: one rank, the quickstart's model, scripted rollouts."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from command_line import QUICKSTART

from hybridrl import Trainer

SMALL = (
    "model.path=null",
    f"model.init={QUICKSTART / 'model'}",
    f"data.prompts={QUICKSTART / 'train.jsonl'}",
    "data.eval_prompts=null",
    "steps.eval_every=0",
    "steps.prompts_per_step=4",
    "steps.samples_per_prompt=2",
    "train.tp=1",
    "train.pp=1",
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
    """Builds a trainer whose run folder lies in `folder`, and closes it at the end.

    Args:
        folder: of run folders.
        overrides: knobs on top of SMALL.
        config: of the quickstart's configurations.
        **given: objects in place of sections, as of `Trainer`.
    """
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
