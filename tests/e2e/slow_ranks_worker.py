"""One rank of the test of slow ranks: slow_ranks_worker.py FOLDER.

Wherever ranks come together after work of their own, one of the two takes far longer for that work
than `run.collective_timeout_s`: to start, to read prompts, to score, to write and to read files.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from command_line import QUICKSTART

from hybridrl import Trainer
from hybridrl.checkpoint import sharded_files

BOUND_S, SLOW_S = 2.5, 3.5
RANK = int(os.environ["RANK"])
OVERRIDES = (
    "model.path=null",
    f"model.init={QUICKSTART / 'model'}",
    "train.tp=1",
    "train.pp=1",
    "steps.prompts_per_step=2",
    "steps.samples_per_prompt=2",
    "data.eval_prompts=null",
    "steps.eval_every=0",
    "reward.extract=null",
    "log.tensorboard=false",
    "checkpoint.every=1",
    f"run.collective_timeout_s={BOUND_S}",
)
SLOW: dict[str, int] = {}  # what was slow on this rank, and how often


def slowly(what: str, real: Callable[..., Any], on_rank: int, once: bool = True) -> Any:
    """Returns a function that takes SLOW_S longer on one rank."""

    def slow(*args: Any, **kwargs: Any) -> Any:
        if on_rank == RANK and not (once and what in SLOW):
            SLOW[what] = SLOW.get(what, 0) + 1
            time.sleep(SLOW_S)
        return real(*args, **kwargs)

    return slow


def digits(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    return sum(letter.isdigit() for letter in response) / max(len(response), 1)


def rows() -> Iterator[Mapping[str, object]]:
    """The quickstart's prompts, which come slowly on rank 1."""
    slowly("reading prompts", lambda: None, 1)()
    yield from map(json.loads, (QUICKSTART / "train.jsonl").read_text().splitlines()[:16])


def train(folder: Path, num_steps: int) -> None:
    """Samples, learns and saves: what is slow is slow between collectives of different kinds."""
    given = [*OVERRIDES, f"run.dir={folder}", f"steps.num_steps={num_steps}"]
    reward = slowly("scoring", digits, 1)
    trainer = Trainer.from_config(QUICKSTART / "grpo.yaml", given, reward=reward, prompts=rows())
    trainer.journal.start = slowly("opening the run folder", trainer.journal.start, 0)
    trainer.journal.dump.write = slowly("dumping samples", trainer.journal.dump.write, 0)
    trainer.fit()
    trainer.close()


def learn(folder: Path) -> None:
    """Learns from demonstrations: no generation brings the ranks together in a step."""
    given = [*OVERRIDES, f"run.dir={folder}", "steps.num_steps=2", "checkpoint.every=0"]
    given += ["steps.samples_per_prompt=1", "steps.stop_at_accuracy=null"]
    trainer = Trainer.from_config(QUICKSTART / "sft.yaml", given)
    trainer.journal.log = slowly("logging a step", trainer.journal.log, 0)
    trainer.fit()
    trainer.close()


def main() -> None:
    folder = Path(sys.argv[1])
    slowly("starting", lambda: None, 1)()
    os.fsync = slowly("writing a checkpoint", os.fsync, 1)
    read = slowly("reading a checkpoint", sharded_files._FileReader.read_data, 1)
    sharded_files._FileReader.read_data = read
    train(folder, 1)
    train(folder, 2)
    learn(folder)
    found = {0: {"opening the run folder", "dumping samples", "logging a step"}}
    ones = {"starting", "reading prompts", "scoring", "writing a checkpoint"}
    assert set(SLOW) == found.get(RANK, ones | {"reading a checkpoint"}), SLOW


if __name__ == "__main__":
    main()
