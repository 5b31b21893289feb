"""A reward model never runs while the engine holds the memory that it generates with: a KV cache
may take nearly all of a GPU. One rank, in this process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_line import QUICKSTART
from small_runs import small_run
from transformers import AutoConfig, AutoModelForSequenceClassification

from hybridrl import Trainer
from hybridrl.contracts.batch import ScoredBatch
from hybridrl.hybrid_engine.memory.phases import Phase


def reward_model(folder: Path) -> Path:
    config = AutoConfig.from_pretrained(QUICKSTART / "model", num_labels=1, dtype=torch.float32)
    torch.manual_seed(0)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    # As `hybridrl convert` leaves it.
    kept = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**kept, "architectures": ["Qwen3ForCausalLM"]}))
    return folder


def watched(trainer: Trainer) -> list[Phase]:
    """Makes the trainer's judge note the phase that it is called in."""
    (judge,), phases = trainer.sampler.reward_models, []

    def note(batch: ScoredBatch) -> ScoredBatch:
        phases.append(trainer.hybrid_engine.phases.phase)
        return judge(batch)

    trainer.sampler.reward_models = [note]
    return phases


def test_judges_run_in_the_training_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge = f"{{function: reward_model, options: {{path: {reward_model(tmp_path / 'judge')}}}}}"
    knobs = (
        f"reward.functions.judge={judge}",
        "reward.function=exact_match",
        "reward.isolated=null",
        f"data.eval_prompts={QUICKSTART / 'heldout.jsonl'}",
        "data.eval_limit=4",
        "steps.eval_every=1",
        "steps.num_steps=2",
        "algorithm.max_resampling=2",
        "rollout.max_new_tokens=4",
    )
    with small_run(tmp_path, *knobs) as trainer:

        def all_alike(batch: ScoredBatch) -> torch.Tensor:  # so that every group is replaced
            return torch.ones(batch.num_samples, dtype=torch.bool)

        monkeypatch.setattr(trainer.algorithm, "uninformative", all_alike)
        phases = watched(trainer)
        trainer.fit()
        assert trainer.step == 2
    # Before the run, and in each step the first samples, two rounds more, and the evaluation.
    assert phases == [Phase.TRAIN] * (1 + 2 * (3 + 1))
