"""One rank of the test of a package's engine on some of the ranks only: the weights arrive, and
engine and trainer agree, wherever the policy lies.

placement_engine_worker.py ENGINE MODEL FOLDER
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hybridrl.loop.trainer import Trainer

PLACEMENTS = {
    "disjoint": {"policy": "0", "rollout": "1-2"},
    "overlapping": {"policy": "0-1", "rollout": "1-2"},
    "first": {"policy": "all", "rollout": "0"},
}
ENGINES = {"1-2": (1, 2), "0": (0,)}


def check(engine: str, model: str, folder: Path, name: str, placement: dict[str, str]) -> None:
    """Two steps of a run whose engine is proven before the first of them."""
    config = {
        "run": {"name": name, "dir": str(folder)},
        "model": {"path": model, "tokenizer": "examples/quickstart/model"},
        "train": {"micro_batch_tokens": 256, "learning_rate": 1e-3},
        "rollout": {
            "engine": engine,
            "tp": 1 if placement["rollout"] == "0" else 2,
            "max_new_tokens": 8,
            "max_batch": 8,
            "verify": 1,
        },
        "algorithm": {"name": "grpo"},
        "data": {"prompts": "examples/quickstart/train.jsonl", "max_prompt_tokens": 6},
        "steps": {"prompts_per_step": 4, "samples_per_prompt": 2, "num_steps": 2},
        "reward": {"function": "scripted_reward:digits"},
        "log": {"console": False, "tensorboard": False},
        "placement": placement,
    }
    trainer = Trainer.from_config(config)
    metrics = []
    trainer.check_engine()
    for _ in range(2):
        metrics.append(trainer.train_step())
    gaps = [step["mismatch/logprob_diff_mean"] for step in metrics]
    assert max(gaps) < 1e-4, (name, gaps)  # the engine samples with the weights of this step
    engines = trainer.sampler.layout.ranks
    assert engines == ENGINES[placement["rollout"]], (name, engines)
    # Engines have made groups on some ranks; all of them still make the same ones together.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1), group=group)
    assert bool(trainer.engine.tensors()) is (trainer.world.rank in engines), name
    assert metrics[-1]["generate/tokens"] > 0
    trainer.close()


def main() -> None:
    engine, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    for name, placement in PLACEMENTS.items():
        check(engine, model, folder, name, placement)


if __name__ == "__main__":
    main()
