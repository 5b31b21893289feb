"""Proves that a plan's operations fill every target correctly. Pure, no torch.

The proof depends only on the operations and the layouts, not on how plan.py chose the operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hybridrl.hybrid_engine.planning.plan import CopyOp, Plan, PlanError
from hybridrl.hybrid_engine.planning.wire_elements import wire_layouts
from hybridrl.models.boxes import Box, intersection, moved, show, sizes, tiling_fault, volume
from hybridrl.models.weights import RankLayout, Region

FAULTS = {
    "hole": "never written",
    "overlap": "written more than once",
    "outside": "outside of the tensor",
}


def prove(
    plan: Plan,
    sources: Sequence[RankLayout],
    targets: Sequence[RankLayout],
    ranks: Iterable[int] | None = None,
) -> None:
    """Checks a plan against its source and target layouts.

    Every element of every target tensor must be written exactly once, or not at all if it is
    padding. Every operation must read the same HF elements that it writes. In a large job each rank
    checks only its own operations (`ranks`).

    Raises PlanError, which names the rank, the tensor and the first wrong elements.
    """
    if not len(plan.ops) == len(sources) == len(targets):
        raise PlanError(
            f"a plan for {len(plan.ops)} ranks, but {len(sources)} source layouts and "
            f"{len(targets)} target layouts"
        )
    sizes_of = plan.itemsize, plan.weight_itemsize or plan.itemsize
    sources, targets = (wire_layouts(one, *sizes_of) for one in (sources, targets))
    different = {id(layout): layout for layout in sources}  # equal layouts may be one object
    by_tensor = {key: _by_tensor(layout) for key, layout in different.items()}
    held = [by_tensor[id(layout)] for layout in sources]
    for rank in range(len(targets)) if ranks is None else ranks:
        ops, target = plan.ops[rank], targets[rank]
        wanted = _by_tensor(target)
        written: dict[str, list[Box]] = {name: [] for name in target.shapes}
        for op in ops:
            if op.dest_rank != rank or not 0 <= op.source_rank < len(sources):
                raise PlanError(f"rank {rank}: {op} has a wrong source or destination rank")
            _prove_op(op, held[op.source_rank].get(op.source, []), wanted.get(op.dest, []))
            written[op.dest].append(op.dest_box)
        for name, box in target.padding:
            written[name].append(box)
        for name, shape in target.shapes.items():
            fault = tiling_fault(written[name], shape)
            if fault:
                raise PlanError(f"rank {rank}: {name}{show(fault[1])} is {FAULTS[fault[0]]}")


def _by_tensor(layout: RankLayout) -> dict[str, list[Region]]:
    found: dict[str, list[Region]] = {}
    for region in layout.regions:
        found.setdefault(region.local, []).append(region)
    return found


def _prove_op(op: CopyOp, held: Sequence[Region], wanted: Sequence[Region]) -> None:
    """Checks that an operation's boxes contain the same HF elements in the same order."""
    where = f"rank {op.dest_rank}: {op.dest}{show(op.dest_box)}"
    source = f"{op.source}{show(op.source_box)} of rank {op.source_rank}"
    if sizes(op.source_box) != sizes(op.dest_box):
        raise PlanError(f"{where} is copied from {source}, which has another shape")
    proven = 0
    for region in wanted:
        box = intersection(region.local_box, op.dest_box)
        if box is None:
            continue
        hf_box = moved(box, region.local_box, region.hf_box)
        read = moved(box, op.dest_box, op.source_box)
        for other in held:
            part = intersection(other.local_box, read)
            if part is None:
                continue
            meant = moved(part, read, hf_box)
            found = moved(part, other.local_box, other.hf_box)
            if (other.hf, found) != (region.hf, meant):
                raise PlanError(
                    f"{where} is {region.hf}{show(meant)}, but is copied from {source}, "
                    f"which is {other.hf}{show(found)}"
                )
            proven += volume(part)
    if proven != volume(op.dest_box):
        raise PlanError(
            f"{where} is copied from {source}, but includes elements that are not weights"
        )
