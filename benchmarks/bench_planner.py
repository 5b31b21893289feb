"""Measures planning at scale and predicts the reshard on clusters: no GPU, no weights.

Each case is planned as a start of training does it: ranks assigned, sources chosen, digest made,
one rank's operations written out; some ranks' operations are proven first, and a plan that is not
proven is not timed. Then the reshard is predicted for the cluster (nodes.py).

    python benchmarks/bench_planner.py

Exit code 1 where a case takes more processor time than its limit, or is predicted at over 1.3 times
the bound.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from case_record import command_of, commit
from paper_models import deepseek_v3, engine_parts, qwen3_235b_a22b, train_layouts

from hybridrl.hybrid_engine.planning.assign import assign
from hybridrl.hybrid_engine.planning.nodes import Cluster, planned_ms, predict
from hybridrl.hybrid_engine.planning.pieces import join
from hybridrl.hybrid_engine.planning.plan import Plan, plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.models.family import ModelShape, read_model, resolve_family
from hybridrl.models.weights import (
    RankLayout,
    fused_layout,
    fused_layouts,
    megatron_layout,
    megatron_layouts,
)
from hybridrl.parallel.layout import TrainLayout

ITEMSIZE = 2
MOST_OVER_BOUND = 1.3
GPUS_PER_NODE = 8
NETWORK = {"nic_gb_per_s": 45.0, "nics_per_node": 8, "latency_us": 10.0}  # 400 Gbit/s a GPU, 90 %
LINK_GB_PER_S = 345.0  # NVLink of an H200, measured with send and receive
Layouts = tuple[list[RankLayout], list[RankLayout]]


@dataclass(frozen=True)
class Case:
    """A model, how it trains and generates, and how many seconds planning may take."""

    name: str
    world_size: int
    limit_s: float
    layouts: Callable[[], Layouts]


def dense(train: TrainLayout, tp: int) -> Layouts:
    """Returns the layouts of Qwen2.5-7B."""
    family = resolve_family("qwen2", {})
    shape = ModelShape(28, 3584, 28, 4, 128, 18944, 152064, qkv_bias=True)
    sources = [megatron_layout(family, shape, train, rank) for rank in range(train.world_size)]
    return sources, [fused_layout(family, shape, tp, tp_rank) for tp_rank in range(tp)]


def paper(
    model: Any, train: tuple[int, int, int, int], tp: int, is_expert_parallel: bool
) -> Layouts:
    """Returns the layouts of a mixture of experts; `train` is world size, TP, PP and EP."""
    described = model()
    return train_layouts(described, *train), engine_parts(described, tp, is_expert_parallel)


def of_family(name: str, train: TrainLayout, tp: int, ep: int) -> Layouts:
    """Returns the layouts of a model in benchmarks/models by the family's own table."""
    content = json.loads((Path(__file__).parent / "models" / f"{name}.json").read_text())
    family, shape = read_model(None, content)
    return megatron_layouts(family, shape, train), fused_layouts(family, shape, tp, ep)


QWEN3 = (256, 4, 8, 8)
DEEPSEEK = (1024, 8, 16, 32)
CASES = (
    Case("Qwen2.5-7B TP4 PP2 -> TP2", 8, 1, partial(dense, TrainLayout(8, tp=4, pp=2), 2)),
    Case("Qwen2.5-7B TP2 PP2 DP2 -> TP4", 8, 1, partial(dense, TrainLayout(8, tp=2, pp=2), 4)),
    Case(
        "Qwen3-235B-A22B TP4 PP8 EP8 -> TP8 EP8", 256, 10,
        partial(paper, qwen3_235b_a22b, QWEN3, 8, True),
    ),
    Case(
        "Qwen3-235B-A22B TP4 PP8 EP8 -> TP4 EP4", 256, 10,
        partial(paper, qwen3_235b_a22b, QWEN3, 4, True),
    ),
    Case(
        "Qwen3-235B-A22B TP4 PP8 EP8 -> TP8", 256, 10,
        partial(paper, qwen3_235b_a22b, QWEN3, 8, False),
    ),
    Case(
        "DeepSeek-V3 TP8 PP16 EP32 -> TP16 EP16", 1024, 60,
        partial(paper, deepseek_v3, DEEPSEEK, 16, True),
    ),
    Case(
        "DeepSeek-V3 TP8 PP16 EP32 -> TP16", 1024, 60,
        partial(paper, deepseek_v3, DEEPSEEK, 16, False),
    ),
    Case(
        "DeepSeek-V3 by its family TP8 EP128 -> TP32 EP32", 1024, 25,
        partial(of_family, "deepseek-v3", TrainLayout(1024, tp=8, ep=128), 32, 32),
    ),
)  # fmt: skip


def planned(sources: list[RankLayout], parts: list[RankLayout]) -> tuple[Plan, list[RankLayout]]:
    """Does what every rank does at the start."""
    layout = assign(sources, parts, GPUS_PER_NODE).layout
    targets = [parts[tp_rank] for _, tp_rank in layout.assignment]
    plan = plan_reshard(sources, targets, ITEMSIZE, GPUS_PER_NODE)
    plan.hash()
    assert plan.ops[-1]
    return plan, targets


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Proves, times and predicts one case."""
    sources, parts = case.layouts()
    plan, targets = planned(sources, parts)
    last = case.world_size - 1
    prove(plan, sources, targets, ranks=sorted({0, last // 3, last}))
    wall, cpu = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        planned(sources, parts)
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    nodes = case.world_size // GPUS_PER_NODE
    cluster = Cluster(
        nodes=nodes, gpus_per_node=GPUS_PER_NODE, link_gb_per_s=LINK_GB_PER_S, **NETWORK
    )
    found = vars(predict(join(sources, targets), ITEMSIZE, cluster))
    rounded = {key: round(value, 3) for key, value in found.items()}
    return {
        "case": case.name,
        "ranks": case.world_size,
        "nodes": nodes,
        "planning_s": {"median": round(statistics.median(wall), 3), "max": round(max(wall), 3)},
        "planning_cpu_s": round(statistics.median(cpu), 3),
        "limit_s": case.limit_s,
        "max_receive_bytes": max(plan.receive_bytes),
        "max_send_bytes": max(plan.send_bytes),
        "max_peers": max(plan.messages),
        "prediction": {**rounded, "planned_ms": round(planned_ms(plan.traffic, cluster), 3)},
        "over_bound": round(found["predicted_ms"] / found["bound_ms"], 4),
    }


def main() -> None:
    """Measures every case, writes the result, prints it, and judges it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="part of the names of the cases to measure")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/planner.json"))
    args = parser.parse_args()
    cases = [case for case in CASES if args.only.lower() in case.name.lower()]
    if not cases:
        names = "".join(f"\n  {case.name}" for case in CASES)
        parser.error(f"--only {args.only!r} is in no name of a case:{names}")
    found = [measure(case, args.repeats) for case in cases]
    result = {
        "benchmark": "planner",
        "command": command_of(sys.argv),
        "commit": commit(),
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cores": os.cpu_count(),
            "load_average": os.getloadavg()[1],  # over the last 5 minutes, others' work included
        },
        "cluster": {"gpus_per_node": GPUS_PER_NODE, "link_gb_per_s": LINK_GB_PER_S, **NETWORK},
        "repeats": args.repeats,
        "cases": found,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    # One thread that waits for nothing: its processor time is its time on a core of its own.
    slow = [case["case"] for case in found if case["planning_cpu_s"] > case["limit_s"]]
    far = [case["case"] for case in found if case["over_bound"] > MOST_OVER_BOUND]
    if slow or far:
        sys.exit(f"over the time limit: {slow}; over {MOST_OVER_BOUND} times the bound: {far}")


if __name__ == "__main__":
    main()
