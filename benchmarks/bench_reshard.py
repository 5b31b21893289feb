"""Counts what a reshard moves from training ranks into inference engines, beside three other ways.

Four processes over gloo, a Qwen2.5-7B shrunken in width, depth and vocabulary, and buffers by the
same factor. Every way writes the same engine parameters from the same weights over the same ranks;
one that writes a wrong bit is refused. What must be received at least is computed from the weights'
own numbering, without the weight table, the plan or any of the ways.

* hybrid_engine: the plan through the packed transport, parameters that are cut alike shared.
* all_gather: each Megatron parameter is sent to all stages and gathered over tensor-parallel ranks,
  so that every rank holds each full tensor once and cuts its part out (verl's way).
* buckets: the same by buckets of full tensors, one broadcast and one gather a bucket (slime's way).
* hf_stream: each HF tensor is gathered on rank 0, sent to all, and loaded by name (OpenRLHF's way).

Per rank it reports bytes received and sent, messages sent, launches (collectives, or exchanges of
grouped messages), staging (the most that lay in memory at once beside model and engine; of
hf_stream without the buffers of its gather), and bytes of engine parameters written and aliased,
that is, shared with the trainer. Collectives are counted as rings.

    python benchmarks/bench_reshard.py [--cases tp2pp2/tp4 dp4/tp4] [--out /tmp/counts.json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from case_record import commit
from reshard_ways import (
    BUCKET_BYTES,
    CASES,
    ROOT,
    STAGING_BYTES,
    WAYS,
    WORLD,
    Job,
    model_bytes,
    real_shape,
    shrunken,
    small_shape,
)
from torch import Tensor

from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import stop_process_group
from hybridrl.platform import Platform

# Measuring


class Meter:
    """Counts what goes over the link, in place of torch.distributed's functions while entered."""

    NAMES = ("batch_isend_irecv", "all_gather_into_tensor", "broadcast")

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.received_bytes = self.sent_bytes = self.messages = self.launches = 0
        self._real: dict[str, Callable[..., Any]] = {}

    def __enter__(self) -> Meter:
        for name in self.NAMES:
            self._real[name] = getattr(dist, name)
            setattr(dist, name, getattr(self, name))
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._real.items():
            setattr(dist, name, function)

    def _add(self, received: int, sent: int, messages: int) -> None:
        self.received_bytes += received
        self.sent_bytes += sent
        self.messages += messages
        self.launches += 1

    def batch_isend_irecv(self, transfers: list[dist.P2POp]) -> list[dist.Work]:
        sent = [t.tensor.nbytes for t in transfers if t.op is dist.isend]
        received = [t.tensor.nbytes for t in transfers if t.op is dist.irecv]
        self._add(sum(received), sum(sent), len(sent))
        return self._real["batch_isend_irecv"](transfers)

    def all_gather_into_tensor(self, whole: Tensor, part: Tensor, group: Any = None) -> None:
        others = dist.get_world_size(group) - 1
        self._add(others * part.nbytes, others * part.nbytes, others)
        self._real["all_gather_into_tensor"](whole, part, group)

    def broadcast(self, tensor: Tensor, source: int, group: Any = None) -> None:
        ranks = dist.get_process_group_ranks(group or dist.group.WORLD)
        place = (ranks.index(self.rank) - ranks.index(source)) % len(ranks)
        sends = place < len(ranks) - 1
        self._add(tensor.nbytes * (place > 0), tensor.nbytes * sends, int(sends))
        self._real["broadcast"](tensor, source, group)


def counted(job: Job, way: Any) -> dict[str, int]:
    """Runs a way twice; it must be right both times. Returns the counts of the second run."""
    way.run()
    job.check(way.engine)
    shared = {t.untyped_storage().data_ptr() for t in job.trained.values()}
    for tensor in way.engine.values():
        if tensor.untyped_storage().data_ptr() not in shared:
            tensor.view(torch.int16).fill_(-1)
    with Meter(job.rank) as meter:
        way.run()
    job.check(way.engine)
    return {
        "received_bytes": meter.received_bytes,
        "sent_bytes": meter.sent_bytes,
        "messages": meter.messages,
        "launches": meter.launches,
        "staging_bytes": way.staging_bytes,
        "written_bytes": sum(t.nbytes for t in way.engine.values()) - way.aliased_bytes,
        "aliased_bytes": way.aliased_bytes,
    }


MEASURES: dict[str, Callable[[Job, Any], dict[str, int]]] = {"counts": counted}
"""What can be measured of a way, on one rank; the report is lists of it over ranks."""


# Report


def over_ranks(found: Mapping[str, int]) -> dict[str, list[int]]:
    """Returns each number as a list over ranks; collective."""
    everyone: list[Any] = [None] * WORLD
    dist.all_gather_object(everyone, dict(found))
    return {key: [one[key] for one in everyone] for key in found}


def report_case(job: Job, measure: str) -> dict[str, Any]:
    engine = sum(tensor.nbytes for tensor in job.empty_engine().values())
    least = over_ranks({"minimum": job.minimum_bytes(), "engine": engine})
    ways = {name: over_ranks(MEASURES[measure](job, make(job))) for name, make in WAYS.items()}
    for name, found in ways.items():
        pairs = zip(found["received_bytes"], least["minimum"], strict=True)
        if any(received < minimum for received, minimum in pairs):
            raise AssertionError(f"{job.name}, {name}: received less than it must")
        assert sum(found["received_bytes"]) == sum(found["sent_bytes"])
    return {
        "case": job.name,
        "tp_ranks": [tp_rank for _, tp_rank in job.rollout.assignment],
        "minimum_receive_bytes": least["minimum"],
        "engine_bytes": least["engine"],
        "ways": ways,
    }


def run_rank(out: Path, cases: Sequence[str], measure: str) -> None:
    is_gpu = torch.cuda.is_available()
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_gpu else "gloo")
    world = World(Platform.detect(), timeout_s=600)
    made: dict[tuple[int, ...], dist.ProcessGroup] = {}

    def groups(ranks: Sequence[int]) -> dist.ProcessGroup:
        return made[tuple(ranks)]

    found = []
    for name in cases:
        job = Job(name, world, device, groups)
        for axis in ("tp", "pp"):
            for ranks in map(tuple, job.train.groups(axis)):
                if ranks not in made:
                    made[ranks] = dist.new_group(list(ranks))
        found.append(report_case(job, measure))
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    stop_process_group()


def table(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of a table: the fullest rank of each way, in KiB."""
    yield "case         way              least receives   sends staging launches"
    for case in cases:
        least = max(case["minimum_receive_bytes"]) / 1024
        for way, found in case["ways"].items():
            most = {key: max(values) for key, values in found.items()}
            kib = [most[f"{key}_bytes"] / 1024 for key in ("received", "sent", "staging")]
            received, sent, staging = kib
            yield (
                f"{case['case']:12} {way:14} {least:7.0f} {received:8.0f} {sent:7.0f} "
                f"{staging:7.0f} {most['launches']:8}"
            )


def main() -> None:
    """Starts the ranks, writes the result, prints it, and judges the hybrid engine's bytes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--measure", choices=tuple(MEASURES), default="counts")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "benchmarks/results/reshard_cpu_counts.json"
    )
    parser.add_argument("--rank-out", type=Path, help=argparse.SUPPRESS)  # one of the ranks
    args = parser.parse_args()
    if args.rank_out:
        run_rank(args.rank_out, args.cases, args.measure)
        return
    from launch import run_ranks  # of tests/, whose references reshard_ways.py needs too

    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "cases.json"
        command = ["--rank-out", str(found), "--measure", args.measure, "--cases", *args.cases]
        run_ranks(WORLD, str(Path(__file__).resolve()), command, timeout_s=600)
        cases = json.loads(found.read_text())
    result = {
        "benchmark": f"reshard, {args.measure}",
        "commit": commit(),
        "machine": {"torch": torch.__version__, "backend": "gloo", "ranks": WORLD},
        "model": {
            "shape": vars(small_shape()),
            "bytes": model_bytes(small_shape()),
            "stands_for_bytes": model_bytes(real_shape()),
            "staging_limit_bytes": shrunken(STAGING_BYTES),
            "bucket_bytes": shrunken(BUCKET_BYTES),
        },
        "cases": cases,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print("\n".join(table(cases)))
    more = [
        case["case"]
        for case in cases
        if case["ways"]["hybrid_engine"]["received_bytes"] != case["minimum_receive_bytes"]
    ]
    if more:
        sys.exit(f"the hybrid engine receives more than the least: {more}")


if __name__ == "__main__":
    main()
