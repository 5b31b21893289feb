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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from case_record import command_of, commit

from hybridrl.hybrid_engine.planning.assign import assign
from hybridrl.hybrid_engine.planning.nodes import Cluster, planned_ms, predict
from hybridrl.hybrid_engine.planning.pieces import join
from hybridrl.hybrid_engine.planning.plan import Plan, plan_reshard
from hybridrl.hybrid_engine.planning.proof import prove
from hybridrl.models.family import read_model
from hybridrl.models.weights import RankLayout, fused_layouts, megatron_layouts
from hybridrl.parallel.layout import TrainLayout

ITEMSIZE = 2
MOST_OVER_BOUND = 1.3
GPUS_PER_NODE = 8
NETWORK = {"nic_gb_per_s": 45.0, "nics_per_node": 8, "latency_us": 10.0}  # 400 Gbit/s a GPU, 90 %
LINK_GB_PER_S = 345.0  # NVLink of an H200, measured with send and receive
Layouts = tuple[list[RankLayout], list[RankLayout]]


class Case(NamedTuple):
    """A model, how it trains and generates, and how many seconds planning may take."""

    name: str
    model: Path
    train: TrainLayout
    rollout_tp: int
    rollout_ep: int
    limit_s: float


def layouts(model: Path, train: TrainLayout, tp: int, ep: int) -> Layouts:
    family, shape = read_model(None, json.loads(model.read_text()))
    return megatron_layouts(family, shape, train), fused_layouts(family, shape, tp, ep)


ROOT = Path(__file__).parents[1]
DENSE = ROOT / "benchmarks" / "models" / "qwen2.5-7b.json"
QWEN3 = ROOT / "examples" / "recipes" / "models" / "qwen3-235b-a22b" / "config.json"
DEEPSEEK = ROOT / "benchmarks" / "models" / "deepseek-v3.json"
QWEN3_TRAIN = TrainLayout(256, tp=4, pp=8, ep=8)
DEEPSEEK_TRAIN = TrainLayout(1024, tp=8, pp=16, ep=32)
CASES = (
    Case("Qwen2.5-7B TP4 PP2 -> TP2", DENSE, TrainLayout(8, tp=4, pp=2), 2, 1, 1),
    Case("Qwen2.5-7B TP2 PP2 DP2 -> TP4", DENSE, TrainLayout(8, tp=2, pp=2), 4, 1, 1),
    Case("Qwen3-235B-A22B TP4 PP8 EP8 -> TP8 EP8", QWEN3, QWEN3_TRAIN, 8, 8, 10),
    Case("Qwen3-235B-A22B TP4 PP8 EP8 -> TP4 EP4", QWEN3, QWEN3_TRAIN, 4, 4, 10),
    Case("Qwen3-235B-A22B TP4 PP8 EP8 -> TP8", QWEN3, QWEN3_TRAIN, 8, 1, 10),
    Case("DeepSeek-V3 TP8 PP16 EP32 -> TP16 EP16", DEEPSEEK, DEEPSEEK_TRAIN, 16, 16, 60),
    Case("DeepSeek-V3 TP8 PP16 EP32 -> TP16", DEEPSEEK, DEEPSEEK_TRAIN, 16, 1, 60),
    Case(
        "DeepSeek-V3 TP8 EP128 -> TP32 EP32", DEEPSEEK, TrainLayout(1024, tp=8, ep=128), 32, 32, 25
    ),
)


def planned(sources: list[RankLayout], parts: list[RankLayout]) -> tuple[Plan, list[RankLayout]]:
    layout = assign(sources, parts, GPUS_PER_NODE).layout
    targets = [parts[tp_rank] for _, tp_rank in layout.assignment]
    plan = plan_reshard(sources, targets, ITEMSIZE, GPUS_PER_NODE)
    plan.hash()
    assert plan.ops[-1]
    return plan, targets


def measure(case: Case, repeats: int) -> dict[str, Any]:
    sources, parts = layouts(case.model, case.train, case.rollout_tp, case.rollout_ep)
    plan, targets = planned(sources, parts)
    last = case.train.world_size - 1
    prove(plan, sources, targets, ranks=sorted({0, last // 3, last}))
    wall, cpu = [], []
    for _ in range(repeats):
        start = time.perf_counter(), time.process_time()
        planned(sources, parts)
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    nodes = case.train.world_size // GPUS_PER_NODE
    cluster = Cluster(
        nodes=nodes, gpus_per_node=GPUS_PER_NODE, link_gb_per_s=LINK_GB_PER_S, **NETWORK
    )
    found = vars(predict(join(sources, targets), ITEMSIZE, cluster))
    rounded = {key: round(value, 3) for key, value in found.items()}
    return {
        "case": case.name,
        "ranks": case.train.world_size,
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
