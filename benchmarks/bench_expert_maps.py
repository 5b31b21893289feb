"""Counts what the choice of an engine's expert map saves: bytes of the rank that receives most,
with experts dealt in order and as `hybridrl` deals them.

Looks at every pair of layouts of Qwen3-30B-A3B, bfloat16, with whole experts in the engine
(`rollout.ep` = `rollout.tp`), that its sizes and the numbers of ranks allow. Nothing runs on
devices: the figures are those of the planner, which is compared with independent counts in
tests/unit/test_expert_maps.py.

    python benchmarks/bench_expert_maps.py --out expert_maps.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from case_record import commit

from hybridrl.hybrid_engine.planning.expert_maps import ExpertTensors, lay_out_engines
from hybridrl.models.family import ModelShape, MoeShape, resolve_family
from hybridrl.models.weights import fused_layouts, megatron_layouts
from hybridrl.parallel.layout import TrainLayout

FAMILY = resolve_family("qwen3_moe", {})
SHAPE = ModelShape(48, 2048, 32, 4, 128, 6144, 151936, qk_norm=True, moe=MoeShape(128, 8, 768))
SIZES = (1, 2, 4, 8)


def layouts(world: int) -> Iterator[TrainLayout]:
    """Yields training layouts with dealt experts."""
    for tp, pp, cp, ep, etp in product(SIZES, (1, 2, 4), (1, 2), SIZES[1:], (1, 2)):
        fits = world % (tp * pp * cp) == 0 and world // pp % (ep * etp) == 0
        if fits and tp * cp <= 8:
            yield TrainLayout(world, tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)


def pairs(world: int, node: int) -> Iterator[dict[str, Any]]:
    """Yields what each pair of layouts receives, in order and as dealt."""
    tensors = ExpertTensors(FAMILY, SHAPE)
    for train in layouts(world):
        sources = megatron_layouts(FAMILY, SHAPE, train)
        for tp in (size for size in SIZES[1:] if world % size == 0):
            parts = fused_layouts(FAMILY, SHAPE, tp, tp)
            start = time.process_time()
            found = lay_out_engines(sources, parts, tensors, node)
            sizes = {axis: train.size(axis) for axis in ("tp", "pp", "cp", "ep", "etp")}
            yield {
                **sizes,
                "rollout_tp": tp,
                "in_order_gb": round(2 * found.linear.receive / 1e9, 3),
                "dealt_gb": round(2 * found.best.receive / 1e9, 3),
                "seconds": round(time.process_time() - start, 2),
            }


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns how often and how much a map saves."""
    less = [one for one in found if one["dealt_gb"] < one["in_order_gb"]]
    left = [one["dealt_gb"] / one["in_order_gb"] for one in less]
    whole = [one for one in found if one["etp"] == 1]
    return {
        "pairs": len(found),
        "pairs_that_receive_less": len(less),
        "pairs_with_whole_experts_in_training": len(whole),
        "of_these_receive_less": sum(one["etp"] == 1 for one in less),
        "share_that_is_left_median": round(statistics.median(left), 3) if left else None,
        "pairs_that_then_receive_no_expert_or_a_quarter": sum(share <= 0.25 for share in left),
        "slowest_seconds": max(one["seconds"] for one in found),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--node", type=int, default=8, help="ranks of a node")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    worlds = {}
    for world in given.worlds:
        found = list(pairs(world, min(world, given.node)))
        print(world, json.dumps(summary(found)), file=sys.stderr, flush=True)
        worlds[world] = {**summary(found), "each": found}
    report = {
        "benchmark": "bytes that a map of experts saves, Qwen3-30B-A3B, bfloat16",
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "commit": commit(),
        "ranks_of_a_node": given.node,
        "worlds": worlds,
    }
    if given.out:
        given.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
