"""One rank of the test of requests that an engine cannot serve: errors on all ranks, no hang.

bad_requests_worker.py ENGINE MODEL FOLDER
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import torch

from hybridrl.contracts.batch import Prompt
from hybridrl.errors import UserError
from hybridrl.loop.trainer import Trainer
from hybridrl.parallel.groups import PeerError
from hybridrl.rollout.build import EngineInputs
from hybridrl.rollout.common import packaged_engine
from hybridrl.rollout.common.settings import EngineSettings

BLOCK = 32  # tokens
# What the longest request may have beside what each engine keeps for itself.
FITS = {"vllm": 32, "sglang": 48}


def make_trainer(engine: str, model: str, folder: Path, rollout_tp: int) -> Trainer:
    config = {
        "run": {"name": f"tp{rollout_tp}", "dir": str(folder)},
        "model": {"path": model, "tokenizer": "examples/quickstart/model"},
        "train": {"tp": 2, "micro_batch_tokens": 256},
        "rollout": {"engine": engine, "tp": rollout_tp, "max_new_tokens": 60, "max_batch": 8},
        "algorithm": {"name": "grpo"},
        "data": {"prompts": "examples/quickstart/train.jsonl", "max_prompt_tokens": 6},
        "steps": {"prompts_per_step": 2, "samples_per_prompt": 2, "num_steps": 1},
        "reward": {"function": "scripted_reward:digits"},
        "log": {"console": False},
    }
    return Trainer.from_config(config)


def check_request_too_long(trainer: Trainer) -> None:
    """One replica gets a prompt that its engine was not started for; the other has work to do."""
    trainer.check_engine()
    sampler, rank = trainer.sampler, trainer.world.rank
    short, long = (Prompt(number, "", (3,) * length) for number, length in ((0, 4), (1, 7)))
    try:
        sampler.generate([short, long], step=0)
    except (ValueError, PeerError) as error:
        is_own = isinstance(error, ValueError)
        # The longer prompt is the larger group, so the first replica has it.
        assert is_own == (rank == 0), (rank, error)
        text = "has 7 prompt tokens and max_new_tokens=60; the engine allows at most 66"
        assert text in str(error) and (is_own or "rank 0 failed in generation" in str(error)), error
    else:
        raise AssertionError("a request that is too long was taken")
    batch = sampler.score(sampler.generate([short, short], step=0))
    assert batch.sample_ids_B.tolist() == [0, 1, 2, 3]


def check_cache_too_small(engine: str, model: str, folder: Path) -> None:
    """Room for two blocks of 32 tokens."""
    block = 2 * 4 * 1 * 32 * 4 * BLOCK  # keys and values, layers, heads, head, float32

    class Small:
        @staticmethod
        def of(inputs: EngineInputs) -> EngineSettings:
            return replace(EngineSettings.of(inputs), kv_cache_bytes=2 * block)

    vars(packaged_engine)["EngineSettings"] = Small
    try:
        make_trainer(engine, model, folder, 2)
    except UserError as error:
        name = "data.max_prompt_tokens + rollout.max_new_tokens"
        assert error.name == name and f"allowed: at most {FITS[engine]}:" in str(error), error
        assert "got 66 tokens" in str(error), error
    else:
        raise AssertionError("a cache that is too small was taken")


def main() -> None:
    engine, model, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    torch.manual_seed(0)
    trainer = make_trainer(engine, model, folder, 1)
    check_request_too_long(trainer)
    trainer.engine.close()
    check_cache_too_small(engine, model, folder)


if __name__ == "__main__":
    main()
