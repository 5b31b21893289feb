"""Entry points of `hybridrl train` and `hybridrl eval` on one rank."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from hybridrl.config.schema import Config
from hybridrl.loop.evaluate import Evaluation
from hybridrl.loop.exports import export_command
from hybridrl.loop.trainer import Trainer
from hybridrl.parallel import heartbeat


def train_rank(config: Config, resume: Literal["newest", "previous"] = "newest") -> int:
    """Runs one rank of `hybridrl train`. Returns 0, or 128 plus the signal that stopped it."""
    trainer = Trainer(config)
    try:
        trainer.fit(resume=resume)
    except KeyboardInterrupt:
        code = 128 + signal.SIGINT
    except SystemExit as stop:
        code = int(str(stop.code))
    else:
        if (command := export_command(config)) is not None:
            trainer.journal.notify(f"to export the model as an HF directory: {command}")
        trainer.close()
        return 0
    heartbeat.leave()  # while rank 0 still closes trackers, it must not report this rank as failed
    return code


def evaluate_rank(
    config: Config,
    checkpoint: Path | None,
    prompts: Sequence[str] | None,
    temperature: float | None = None,
) -> dict[str, Any]:
    """Runs one rank of `hybridrl eval`.

    Args:
        config: Configuration. Its layout may differ from that of the checkpoint's run.
        checkpoint: Checkpoint or run folder. If None, the run's newest checkpoint, or the initial
            weights if there is no checkpoint.
        prompts: Files that replace `data.eval_prompts`.
        temperature: Temperature that replaces `eval.temperature`; 0 means greedy.

    Returns:
        `Evaluation.as_json`; `validation`, the results on held-out rows with responses (`loss`,
            `perplexity`, `preference/accuracy` and others); `checkpoint` (None for the initial
            weights), `model`, and `adapter` (`lora.path`).

    Raises:
        UserError: The configuration names no data to evaluate on.
    """
    if prompts is not None:
        config = config.with_eval_prompts(prompts)
    trainer = Trainer(config, trains=False)
    folder = trainer.store.newest() if checkpoint is None else checkpoint
    if folder is not None:
        trainer.load_checkpoint(folder)
    else:
        trainer.reshard()
    validation = trainer.validate()
    # If there are neither prompts nor held-out rows, `evaluate` raises an error.
    if trainer.evaluations.have_prompts or not validation:
        found = trainer.evaluate(temperature)
    else:
        found = Evaluation(None, None, {}, 0, 0, "no responses were generated")
    trainer.close()
    return {
        **found.as_json(),
        "validation": {name.removeprefix("eval/"): v for name, v in sorted(validation.items())},
        "checkpoint": str(folder) if folder is not None else None,
        "model": config.model.path or config.model.init,
        "adapter": config.lora.path,
    }
