"""Measures what the data contract's checks cost in a step, and their share of a measured step.

The batch goes through what one rank does with it in a step (loop/loop.py): its share of
rollouts collected and scored, what the other ranks tell of theirs joined and ordered, columns
and advantages added, cut into updates and selected. This runs with the checks and with them taken
out, in turn; the difference is their cost. Ideal: nothing is copied for a check, so the least it
can cost is reading each column once.

    python benchmarks/bench_batch_checks.py --metrics runs/quickstart-grpo/metrics.jsonl

Exit code 1 where the checks take 1% of the median step of that file, or more.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from case_record import commit

from hybridrl.algorithms import make_algorithm
from hybridrl.algorithms.base import Algorithm
from hybridrl.config.schema import GrpoConfig
from hybridrl.contracts.batch import (
    BatchError,
    Producer,
    Prompt,
    Rollout,
    RolloutBatch,
    ScoredBatch,
    TrainBatch,
)
from hybridrl.generation.gathered import gathered_batch, table_of

LIMIT = 0.01
HERE = Producer.here("benchmark")


def make_rollouts(args: argparse.Namespace) -> tuple[list[Rollout], list[int]]:
    """Returns a step's rollouts and their groups, of the shape that the options say."""
    rng = random.Random(0)
    rollouts = []
    for p in range(args.prompts):
        prompt = Prompt(p, "", tuple(rng.randrange(1, 30) for _ in range(args.prompt_tokens)))
        for s in range(args.samples):
            length = rng.randint(max(args.response_tokens - 2, 1), args.response_tokens + 2)
            tokens = tuple(rng.randrange(1, 30) for _ in range(length))
            logps = tuple(-rng.random() for _ in range(length))
            rollouts.append(Rollout(p * args.samples + s, prompt, tokens, logps, "stop", 1))
    return rollouts, [i // args.samples for i in range(len(rollouts))]


def step(
    rollouts: list[Rollout], groups: list[int], ranks: int, updates: int, algorithm: Algorithm
) -> list[TrainBatch]:
    """Does with batches what one rank does in a step."""
    share = len(rollouts) // ranks
    local = RolloutBatch.from_rollouts(rollouts[:share], groups[:share], HERE)
    reward_B = local.tokens_T[local.offsets[1:] - 1].float() % 2
    scored = local.scored(reward_B, {"exact_match": reward_B}, HERE)
    prompts = dict(zip(groups, (one.prompt for one in rollouts), strict=True))
    first: Any = SimpleNamespace(rank=0, size=ranks)
    batch = gathered_batch([table_of(scored)] * ranks, scored, prompts, first)
    train = batch.to_train(HERE).join_columns(HERE, old_logp_T=batch.behaviour_logp_T)
    return algorithm.advantages(train).split(updates)


@contextmanager
def without_checks() -> Iterator[None]:
    """Takes the checks of the data contract out."""

    def nothing(*args: object, **keywords: object) -> None:
        return

    with (
        patch("hybridrl.contracts.batch.check", nothing),
        patch.object(RolloutBatch, "__post_init__", nothing),
        patch.object(ScoredBatch, "__post_init__", nothing),
    ):
        yield


def verify(rollouts: list[Rollout], groups: list[int], algorithm: Algorithm) -> None:
    """Refuses to time checks that do not check, or a patch that does not take them out."""
    (batch,) = step(rollouts, groups, 1, 1, algorithm)
    bad_T = torch.full((batch.num_tokens,), torch.nan)
    with without_checks():
        batch.join_columns(HERE, values_T=bad_T)
    try:
        batch.join_columns(HERE, values_T=bad_T)
    except BatchError:
        return
    sys.exit("the checks let a NaN through: nothing is timed")


def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Returns milliseconds of each repeat: with the checks, and without."""
    algorithm = make_algorithm(GrpoConfig())
    rollouts, groups = make_rollouts(args)
    verify(rollouts, groups, algorithm)
    times: dict[str, list[float]] = {"with_checks_ms": [], "without_checks_ms": []}
    for repeat in range(args.warmup + args.repeats):
        for name, found in times.items():
            start = time.perf_counter()
            if name == "with_checks_ms":
                step(rollouts, groups, args.ranks, args.updates, algorithm)
                elapsed = time.perf_counter() - start
            else:
                with without_checks():
                    start = time.perf_counter()
                    step(rollouts, groups, args.ranks, args.updates, algorithm)
                    elapsed = time.perf_counter() - start
            if repeat >= args.warmup:
                found.append(elapsed * 1e3)
    return times


def summary(values: list[float]) -> dict[str, float]:
    """Returns median, p10 and p90."""
    tenths = statistics.quantiles(values, n=10)
    found = {"median": statistics.median(values), "p10": tenths[0], "p90": tenths[-1]}
    return {name: round(value, 4) for name, value in found.items()}


def options() -> argparse.Namespace:
    """Returns the command line's options; the defaults have the quickstart's shape."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8, help="of each prompt")
    parser.add_argument("--prompt-tokens", type=int, default=6)
    parser.add_argument("--response-tokens", type=int, default=9, help="on average")
    parser.add_argument("--ranks", type=int, default=4, help="engine replicas")
    parser.add_argument("--updates", type=int, default=1, help="optimizer steps a step")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--metrics", type=Path, help="metrics.jsonl of a run of that shape")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/batch_checks.json"))
    return parser.parse_args()


def main() -> None:
    """Measures, writes the result, prints it, and judges the share of the step."""
    args = options()
    torch.set_num_threads(1)
    times = measure(args)
    pairs = zip(times["with_checks_ms"], times["without_checks_ms"], strict=True)
    checks = summary([with_checks - without for with_checks, without in pairs])
    result: dict[str, object] = {
        "benchmark": "batch_checks",
        "commit": commit(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        },
        "shape": {n: getattr(args, n) for n in ("prompts", "samples", "ranks", "updates")}
        | {"prompt_tokens": args.prompt_tokens, "response_tokens": args.response_tokens},
        "repeats": args.repeats,
        "checks_ms": checks,
        **{name: summary(found) for name, found in times.items()},
    }
    share = None
    if args.metrics is not None:
        lines = [json.loads(line) for line in args.metrics.read_text().splitlines()]
        step_ms = 1e3 * statistics.median(line["time_s/step"] for line in lines)
        share = checks["median"] / step_ms
        result |= {"step_ms": round(step_ms, 3), "share_of_step": round(share, 6), "limit": LIMIT}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    if share is not None and share >= LIMIT:
        sys.exit(f"the checks take {share:.2%} of a step; allowed: under {LIMIT:.0%}")


if __name__ == "__main__":
    main()
