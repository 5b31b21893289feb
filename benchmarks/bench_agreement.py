"""Times what the ranks of a replica take in each step to compare what they drew, on CPU.

Each rank is busy for --step-ms and up to a fifth more, another time in each step, as a host is with
a decode step; then it reports its tokens and settles, as engines do. Through memory that the ranks
share and by messages, knowing of a step before the next one is taken and a step later
(`steps_ahead`). Times are of rank 0: a whole step, and what of it is the comparison, the wait for a
slower peer included.

    python benchmarks/bench_agreement.py --out OUT.json

What it should show: through memory the comparison takes less than 0.2 ms, by messages several times
as long.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from case_record import command_of, commit
from reshard_clock import machine

WAYS = {"memory": "_SharedSums", "messages": "_GatheredSums"}
TIMEOUT_S = 60.0


def main() -> int:
    """Runs the ranks and writes one JSON file."""
    arguments = parse()
    if arguments.folder is not None:
        take_steps(arguments)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d"]
        command += ["--rdzv-endpoint=localhost:0", f"--nproc-per-node={arguments.ranks}", __file__]
        subprocess.run([*command, *sys.argv[1:], "--folder", folder], check=True)
        found = json.loads(Path(folder, "found.json").read_text())
    report = {
        "benchmark": "ranks of a replica compare what they drew",
        "command": command_of(sys.argv),
        "commit": commit(),
        "machine": machine(1),
        "ranks": arguments.ranks,
        "requests": arguments.requests,
        "busy_ms": arguments.step_ms,
        "us_per_step": found,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    for way, taken in found.items():
        print(f"{way:28} {taken['step']:6} us a step, {taken['comparison']:6} of them to compare")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)  # one of the ranks
    return parser.parse_args()


def take_steps(arguments: argparse.Namespace) -> None:
    """Takes the steps of every way, as one of the ranks."""
    from hybridrl.rollout.common import agreement

    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    found: dict[str, Any] = {}
    for way, kind in WAYS.items():
        for ahead in (0, 1):
            ours = agreement.TokenAgreement.over(group, TIMEOUT_S, ahead)
            if type(ours._sums).__name__ != kind:
                ranks = range(arguments.ranks)
                ours = agreement.TokenAgreement(ranks, agreement._GatheredSums(group), ahead)
            name = f"{way}, " + ("a step later" if ahead else "before the next step")
            found[name] = steps_of(ours, rank, arguments)
    if rank == 0:
        Path(arguments.folder, "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def steps_of(ours: Any, rank: int, arguments: argparse.Namespace) -> dict[str, int]:
    """Returns microseconds of a step, and of its comparison."""
    draw = random.Random(rank)
    drawn = [(number, 7 * number) for number in range(arguments.requests)]
    compared = 0.0
    began = time.perf_counter()
    for _ in range(arguments.steps):
        before = time.perf_counter()
        ours.settle()
        begun = time.perf_counter()
        until = begun + arguments.step_ms * (1 + 0.2 * draw.random()) / 1e3
        while (now := time.perf_counter()) < until:
            pass
        ours.report(drawn)
        compared += begun - before + time.perf_counter() - now
    ours.settle(is_last=True)
    step = (time.perf_counter() - began) / arguments.steps
    return {"step": round(1e6 * step), "comparison": round(1e6 * compared / arguments.steps)}


if __name__ == "__main__":
    sys.exit(main())
