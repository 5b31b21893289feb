"""Measures the exchange of a step's samples among many ranks: host seconds and bytes a rank.

The ranks are threads of one process, each with the code of a real one: its own samples scored, the
table of all told, tokens brought to the replica that trains on them, three columns of
log-probabilities and values from the rank of a replica that has them to the others, advantages, and
the mini-batches of two updates. What goes between threads is copied as a message would be. Host
seconds are a thread's own CPU time; bytes are those of all token columns that a rank holds at the
same time, also of batches that are about to be dropped. A rank's share is what the columns of the
samples that it trains on take.

    python benchmarks/bench_exchange.py

Exit code 1 where a rank holds more than --most-shares of its share, or takes longer than --most-s.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from case_record import commit
from torch import Tensor

from hybridrl.algorithms import make_algorithm
from hybridrl.config.schema import GrpoConfig
from hybridrl.contracts.batch import Producer, Prompt, RolloutBatch, ScoredBatch, TrainBatch
from hybridrl.contracts.checks import columns_of
from hybridrl.generation.sample_tables import gathered_batch, table_of
from hybridrl.parallel.exchange import Route, bring
from hybridrl.training.batches.batch_plan import mini_batch_sizes
from hybridrl.training.batches.packing import even_sizes
from hybridrl.training.batches.prompt_sharing import ScheduleInputs, schedule_samples

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from thread_ranks import ThreadRank, on_ranks  # noqa: E402

HERE, UPDATES = Producer.here("the benchmark"), 2


class Clock:
    """CPU seconds of a thread, by part."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the block for a part."""
        began = time.thread_time()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.thread_time() - began


def held(*batches: RolloutBatch) -> int:
    """Returns the bytes of token columns, each piece of memory once."""
    pieces = {}
    for batch in batches:
        declared = columns_of(type(batch))
        for name, column in batch.columns().items():
            if declared[name].per_token:
                storage = column.untyped_storage()
                pieces[storage.data_ptr()] = storage.nbytes()
    return sum(pieces.values())


def made(prompts: list[Prompt], rank: int, size: int, samples: int, length: int) -> ScoredBatch:
    """Returns the samples of a rank: token t of sample s says so, and which it is."""
    groups = torch.arange(rank, len(prompts), size).repeat_interleave(samples)
    ids = groups * samples + torch.arange(samples).repeat(len(groups) // samples)
    tokens_T = ((ids[:, None] * 7919 + torch.arange(length)) % 50_000).flatten()
    logp_T = -(tokens_T.float() + 1) / 50_000
    num = len(ids)
    prompt_lengths_B = torch.full((num,), len(prompts[0].tokens))
    for group, row in zip(groups.tolist(), tokens_T.view(num, length), strict=True):
        row[: len(prompts[0].tokens)] = torch.tensor(prompts[group].tokens)
    logp_T.view(num, length)[:, : len(prompts[0].tokens)] = 0
    rollouts = RolloutBatch(
        prompts=tuple(prompts[group] for group in groups.tolist()),
        sample_ids_B=ids,
        group_B=groups,
        tokens_T=tokens_T,
        lengths_B=torch.full((num,), length),
        prompt_lengths_B=prompt_lengths_B,
        behaviour_logp_T=logp_T,
        versions_B=torch.zeros(num, dtype=torch.int64),
        finished_B=torch.ones(num, dtype=torch.bool),
        producer=HERE,
    )
    return rollouts.scored((ids % 3).float(), {"part": (ids % 3).float()}, HERE)


def tables(batch: TrainBatch, size: int, tp: int, budget: int) -> tuple[Tensor, Tensor]:
    """Returns which ranks train on which samples, and which has the results, (B, W) each."""
    lengths, groups = tuple(batch.lengths_B.tolist()), tuple(batch.group_B.tolist())
    parts = tuple(mini_batch_sizes(batch, UPDATES))
    inputs = ScheduleInputs(lengths, groups, None, parts, size // tp, budget, 1, 24_576)
    dealt = schedule_samples(inputs)
    want_BW = torch.zeros(len(lengths), size, dtype=torch.bool)
    first_BW = torch.zeros_like(want_BW)
    for dp, micro_batches in enumerate(dealt):
        rows = [row for micro in micro_batches for row in micro]
        want_BW[rows, dp * tp : (dp + 1) * tp] = True
        first_BW[rows, dp * tp] = True
    return want_BW, first_BW


def step(world: ThreadRank, prompts: list[Prompt], case: argparse.Namespace) -> dict[str, Any]:
    """Takes a rank's part of a step; returns its seconds and bytes."""
    clock, all_prompts = Clock(), dict(enumerate(prompts))
    own: ScoredBatch | None = made(prompts, world.rank, world.size, case.samples, case.length)
    assert own is not None
    world.gather_objects(None)  # what was measured before is over
    with clock.part("table"):
        table = table_of(own)
    tables = world.gather_objects(table)
    with clock.part("told"):
        scored = gathered_batch(tables, own, all_prompts, world)
    most = held(own, scored)
    own = None
    batch: TrainBatch = scored.to_train(HERE)
    with clock.part("schedule"):
        want_BW, first_BW = tables(batch, world.size, case.tp, case.budget)
    with clock.part("bring"):
        batch = bring(batch, want_BW, world, UPDATES)
    most = max(most, held(scored, batch))
    mine = (batch.tokens_T % 50_000 + 1).float() / -50_000 * batch.response_mask_T
    if not torch.equal(batch.behaviour_logp_T, mine):
        raise AssertionError(f"rank {world.rank}: other samples came than were made")
    column_T = mine if world.rank % case.tp == 0 else torch.zeros_like(mine)
    for name in ("old_logp_T", "reference_logp_T"):
        with clock.part("columns"):
            given = batch.lengths_B, first_BW, want_BW, world, batch.rows_H
            found_T = Route(*given)(column_T)
            batch = batch.join_columns(HERE, **{name: found_T})
        if not torch.equal(found_T, mine):
            raise AssertionError(f"rank {world.rank}: another column came than was computed")
    del found_T, mine, column_T
    with clock.part("advantages"):
        batch = make_algorithm(GrpoConfig(kl_coef=0.1)).advantages(batch)
    share, end = held(batch), 0
    most = max(most, held(scored, batch))
    for size in even_sizes(batch.num_samples, UPDATES):
        with clock.part("parts"):
            part = batch.select(range(end, end + size))
        end += size
        most = max(most, held(scored, batch, part))
    return {"seconds": clock.seconds, "held_bytes": most, "share_bytes": share}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, value in (
        ("ranks", 64),
        ("tp", 1),
        ("prompts", 1024),
        ("samples", 16),
        ("length", 8192),
        ("budget", 32_768),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--most-shares", type=float, default=3.0)
    parser.add_argument("--most-s", type=float, default=1.0)
    parser.add_argument("--out", type=Path)
    case = parser.parse_args()
    torch.set_num_threads(1)
    tokens = [tuple(range(1, case.length // 16 + 1))] * case.prompts
    prompts = [Prompt(number, "", own) for number, own in enumerate(tokens)]
    began = time.perf_counter()
    ranks = on_ranks(case.ranks, lambda world: step(world, prompts, case))
    parts = {part: max(one["seconds"][part] for one in ranks) for part in ranks[0]["seconds"]}
    slowest = max(sum(one["seconds"].values()) for one in ranks)
    share = max(one["share_bytes"] for one in ranks)
    shares = max(one["held_bytes"] / one["share_bytes"] for one in ranks)
    record = {
        "commit": commit(),
        "machine": f"{platform.processor() or platform.machine()}, {torch.__version__}",
        "case": {name: value for name, value in vars(case).items() if name != "out"},
        "host_s_of_slowest_rank": round(slowest, 3),
        "host_s_by_part": {part: round(seconds, 3) for part, seconds in parts.items()},
        "share_gb": round(share / 1e9, 4),
        "held_of_share": round(shares, 2),
        "all_columns_gb": round(sum(one["share_bytes"] for one in ranks) / case.tp / 1e9, 2),
        "peak_of_process_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "wall_s": round(time.perf_counter() - began, 1),
    }
    text = json.dumps(record, indent=1)
    print(text)
    if case.out is not None:
        case.out.write_text(text + "\n")
    return int(shares > case.most_shares or slowest > case.most_s)


if __name__ == "__main__":
    sys.exit(main())
