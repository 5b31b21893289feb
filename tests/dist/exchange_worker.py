"""One rank of the test of where a step's tokens are: with what trains on them, and nowhere else.

exchange_worker.py FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from small_runs import small_run

from hybridrl.contracts.batch import TrainBatch
from hybridrl.data.packing import even_sizes
from hybridrl.loop.loop import Trainer
from hybridrl.parallel.exchange import bring

UPDATES = 2
KNOBS = (f"steps.updates_per_step={UPDATES}", "algorithm.kl_coef=0.1", "log.rollouts_every=0")
# Knobs, and how often tokens travel in a step.
WAYS = {
    "replicas of two ranks": (("train.tp=2",), 1),
    "stages": (("train.pp=2",), 1),
    "contexts": (("train.cp=2",), 1),
    # Once to the policy's ranks, and once to the reference's.
    "reference elsewhere": (("placement.policy=0-1", "placement.reference=2-3"), 2),
    "engines elsewhere": (("placement.policy=0-1", "placement.rollout=2-3"), 1),
}


@contextmanager
def counted(trainer: Trainer) -> Iterator[list[torch.dtype]]:
    """Gives what kinds of columns travel inside; token numbers are the 32-bit integers."""
    found: list[torch.dtype] = []
    exchange = trainer.world.all_to_all

    def noted(received: torch.Tensor, *more: Any) -> None:
        found.append(received.dtype)
        exchange(received, *more)

    trainer.world.all_to_all = noted  # type: ignore[method-assign]
    yield found
    trainer.world.all_to_all = exchange  # type: ignore[method-assign]


def check_places(trainer: Trainer, batch: TrainBatch) -> None:
    """A sample's tokens are on the ranks of the replica that trains on it, in each mini-batch."""
    assert batch.holders is not None
    mesh, table_BW = trainer.policy.model.mesh, batch.holders.by_rank_BW
    assert not table_BW[:, [r for r in range(4) if r not in mesh.ranks]].any()
    assert (table_BW.sum(1) == mesh.layout.world_size // mesh.layout.dp).all()
    assert len(batch.tokens_T) == int(batch.lengths_B[table_BW[:, trainer.world.rank]].sum())
    end = 0
    for size in even_sizes(batch.num_samples, UPDATES):
        part, end = batch.select(range(end, end + size)), end + size
        plan = trainer.policy.model.plan(part)
        assert plan.here is part  # nothing had to be brought
        mine = {i for work in plan.inputs for i in work.whole.sample_indices}
        assert mine == set(part.rows_H.tolist())


def check_way(folder: Path, name: str, knobs: Sequence[str], num_exchanges: int) -> None:
    given = *KNOBS, *knobs, f"run.name={name.replace(' ', '-')}"
    with small_run(folder, *given) as trainer:
        seen: list[TrainBatch] = []
        update = trainer.update

        def noted(batch: TrainBatch) -> dict[str, float]:
            seen.append(batch)
            return update(batch)

        trainer.update = noted  # type: ignore[method-assign]
        trainer.enter_rollout()
        with counted(trainer) as kinds:
            trainer.train_step()
        assert kinds.count(torch.int32) == num_exchanges, kinds
        check_places(trainer, seen[0])
        check_gradients(trainer, seen[0])


def check_gradients(trainer: Trainer, batch: TrainBatch) -> None:
    """They and log-probabilities are those of the whole batch on every rank, bit for bit."""
    trainer.enter_training()
    part = batch.select(range(batch.num_samples // 2))
    everywhere = torch.ones(part.num_samples, 4, dtype=torch.bool)
    whole = replace(bring(part, everywhere, trainer.world), holders=None, num_observed_B=None)
    logps = [trainer.policy.logprobs(one) for one in (part, whole)]
    places = whole.token_places(part.rows_H)
    assert torch.equal(logps[0], logps[1][places]) and logps[1].any()
    dealt, at_once = (trainer.policy.gradients(one) for one in (part, whole))
    assert repr(dealt.metrics) == repr(at_once.metrics), (dealt.metrics, at_once.metrics)
    assert dealt.grad_norm > 0


def main() -> None:
    folder = Path(sys.argv[1])
    for name, (knobs, num_exchanges) in WAYS.items():
        check_way(folder, name, knobs, num_exchanges)
        print(f"{name}: ok", flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
