"""One rank of the test of exact mode with tensor parallelism: exact_worker.py MODEL FOLDER."""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

from hybridrl.loop.trainer import Trainer


def checksum(prompt: str, response: str, columns: dict[str, Any]) -> float:
    return zlib.crc32(response.encode()) % 1000 / 1000


def metrics_of(model: str, folder: Path, match: str) -> dict[str, float]:
    """Returns the metrics of the second of two steps."""
    config: dict[str, Any] = {
        "run": {"name": match, "dir": str(folder)},
        "model": {"init": model, "dtype": "bfloat16"},
        "train": {"tp": 2, "micro_batch_tokens": 128, "learning_rate": 1e-3, "layers": "torch"},
        "rollout": {"engine": "vllm", "tp": 2, "max_new_tokens": 9, "max_batch": 3},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": "examples/quickstart/train.jsonl", "max_prompt_tokens": 40},
        "steps": {"prompts_per_step": 2, "samples_per_prompt": 3, "num_steps": 2},
        "numerics": {"match": match},
        "log": {"console": False},
    }
    trainer = Trainer.from_config(config, reward=checksum)
    trainer.check_engine()
    trainer.train_step()
    found = trainer.train_step()
    trainer.engine.close()
    return found


def main() -> None:
    folder = Path(sys.argv[2])
    exact, close = (metrics_of(sys.argv[1], folder, match) for match in ("exact", "close"))
    assert exact["mismatch/logprob_diff_max"] == 0.0, exact
    # Gradients are the usual ones, of other samples.
    assert 0.5 < exact["policy/grad_norm"] / close["policy/grad_norm"] < 2, (exact, close)
    # The usual operations round differently, so that the test can fail.
    assert close["mismatch/logprob_diff_max"] > 0.0, close


if __name__ == "__main__":
    main()
