"""What one rank of each command does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridrl.checkpoint.folders import find_checkpoint
from hybridrl.config.schema import Config
from hybridrl.trainer.evaluate import evaluate
from hybridrl.trainer.loop import Trainer


def train_rank(config: Config) -> None:
    """Runs one rank of `hybridrl train`."""
    trainer = Trainer(config)
    trainer.fit()
    trainer.close()


def evaluate_rank(
    config: Config, checkpoint: Path | None, prompts: Sequence[str] | None, temperature: float
) -> dict[str, Any]:
    """Runs one rank of `hybridrl eval`.

    Args:
        config: of the run; its layout need not be the one that saved the checkpoint.
        checkpoint: a checkpoint or run folder; None: the run's newest, or the initial weights if
            there is none.
        prompts: files in place of `data.eval_prompts`.
        temperature: of the responses; 0 is greedy.

    Returns:
        `accuracy`, `num_prompts`, `checkpoint` (None for the initial weights).
    """
    if prompts is not None:
        data = config.data.model_copy(update={"eval_prompts": tuple(prompts)})
        config = config.model_copy(update={"data": data})
    trainer = Trainer(config, trains=False)
    folder = trainer.store.newest() if checkpoint is None else find_checkpoint(checkpoint)
    if folder is not None:
        trainer.load_checkpoint(folder)
    else:
        trainer.reshard()
    accuracy = evaluate(trainer.engine, trainer.eval_prompts, temperature)
    num_prompts = len(trainer.eval_prompts)
    trainer.close()
    return {
        "accuracy": accuracy,
        "num_prompts": num_prompts,
        "checkpoint": str(folder) if folder is not None else None,
    }
