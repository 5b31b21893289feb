"""Computes training and engine layouts, and elements per rank, as in a run. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from hybridrl.config.placement import Placement
from hybridrl.config.schema import Config
from hybridrl.hybrid_engine.memory.alias import shared_names
from hybridrl.hybrid_engine.planning.assign import Assignment, OrderChoice, assign, evaluate_layout
from hybridrl.hybrid_engine.planning.expert_maps import Engines, ExpertTensors, lay_out_engines
from hybridrl.hybrid_engine.planning.order import lay_out, order_layout
from hybridrl.hybrid_engine.planning.owned import equal_shares, without
from hybridrl.models.adapters.rows import base_of
from hybridrl.models.expert_stacks import stacks_are_even
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.quantized import SCALES, engine_scales, quantized_shapes, trainer_scales
from hybridrl.models.trainable import synced_family, unmerged_family
from hybridrl.models.weights import (
    NOTHING,
    RankLayout,
    fused_layouts,
    hf_layout,
    hf_shapes,
    megatron_layouts,
)
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.rollout.model_rules import held_family
from hybridrl.rollout.registry import ENGINES
from hybridrl.services.planner.phase_memory import (
    Elements,
    Held,
    HeldEngine,
    HeldModel,
    RoleModel,
    fullest,
    layout_bytes,
)


@dataclass(frozen=True)
class Placed:
    """Training and engine layouts of a run, by global rank.

    Args:
        layout, choice: The policy's layout, with the chosen order of axes and its cost.
        whole: Training layout of each rank.
        sources: For each rank, the layout of the elements that the rank sends to engines.
        parts: Layout of each tensor-parallel rank of an engine.
        shared: For each rank, the number of engine elements that share the trainer's memory.
        once: HF tensors that never change and are sent only once, and their scales.
    """

    placement: Placement
    layout: TrainLayout
    choice: OrderChoice | None
    whole: list[RankLayout]
    sources: list[RankLayout]
    parts: list[RankLayout]
    engines: Engines
    shared: list[int]
    once: frozenset[str] = frozenset()

    def shares(self, model: RoleModel) -> bool:
        """Whether a model uses the policy's frozen weights."""
        return model.own is not None and self.placement.of(model.role) == self.placement.policy

    def holds_nothing(self, model: RoleModel) -> bool:
        """Whether a model needs no memory for weights."""
        return model.is_shared and self.shares(model)

    @property
    def best(self) -> Assignment:
        return self.engines.best

    @property
    def targets(self) -> list[RankLayout]:
        return self.engines.targets


def place_models(
    config: Config, placement: Placement, family: Family, shape: ModelShape, node: int
) -> Placed:
    """Returns the layouts of policy (with adapters) and engines, as in `loop/setup.py`."""
    train, tp, ranks = config.train, config.rollout.tp, placement.policy.ranks
    base, sent = base_of(family), held_family(config.rollout.engine, family, shape)
    if ENGINES[config.rollout.engine].has_fused_parameters:
        parts = fused_layouts(sent, shape, tp, config.rollout.ep)
    else:
        parts = [hf_layout(hf_shapes(sent, shape))]
    choice = None
    if placement.is_shared:
        ordered = order_layout(train, base, shape, len(ranks), tp, node)
        layout, choice = ordered.layout, ordered.choice
        whole, sources = ordered.whole, ordered.sources
    else:
        layout = lay_out(train, len(ranks))
        whole = megatron_layouts(base, shape, layout)
        sources = equal_shares(layout, whole) if train.fuse_param_gather else whole
    if family is not base:
        whole = megatron_layouts(family, shape, layout)
        sources = sources if sent is base else megatron_layouts(sent, shape, layout)
    world_size = placement.num_ranks
    whole, sources = (_spread(found, ranks, world_size) for found in (whole, sources))
    takes_maps = config.rollout.ep > 1 and ENGINES[config.rollout.engine].takes_expert_maps
    tensors = ExpertTensors(family, shape) if takes_maps else None
    engines = lay_out_engines(sources, parts, tensors, node, placement.rollout)
    if config.rollout.quantization == "fp8":
        quantized = quantized_shapes(base, shape)
        sources = _each(sources, lambda one: trainer_scales(one, quantized)[0])
        targets = _each(engines.targets, lambda one: engine_scales(one, quantized))
        engines = replace(engines, targets=targets)
    shared = [0] * world_size
    if family is base or sent is not base:
        unmerged = hf_shapes(unmerged_family(family, shape, sent), shape)
        others = hf_shapes(family, shape).keys() - unmerged.keys()
        kept = without(whole, others) if others else whole
        shared = _shared(config, layout, kept, engines.targets)
    synced = hf_shapes(synced_family(family, shape, sent), shape)
    once = frozenset(hf_shapes(sent, shape)) - synced.keys()
    once |= {f"{name}{SCALES}" for name in once}
    return Placed(placement, layout, choice, whole, sources, parts, engines, shared, once)


def _each(
    layouts: Sequence[RankLayout], change: Callable[[RankLayout], RankLayout]
) -> list[RankLayout]:
    """Returns changed layouts; layouts that are one object remain one object."""
    found: dict[int, RankLayout] = {}
    for layout in layouts:
        if id(layout) not in found:
            found[id(layout)] = change(layout)
    return [found[id(layout)] for layout in layouts]


def _spread(
    layouts: Sequence[RankLayout], ranks: Sequence[int], world_size: int
) -> list[RankLayout]:
    """Returns a layout for every global rank; ranks that are not in `ranks` hold nothing."""
    held = dict(zip(ranks, layouts, strict=True))
    return [held.get(rank, NOTHING) for rank in range(world_size)]


def _shared(
    config: Config, layout: TrainLayout, whole: list[RankLayout], targets: list[RankLayout]
) -> list[int]:
    shares_memory = ENGINES[config.rollout.engine].shares_memory
    if not shares_memory or config.train.release_weights_in_rollout:
        return [0] * len(whole)
    found: dict[tuple[int, int], int] = {}
    for source, target in zip(whole, targets, strict=True):
        if (id(source), id(target)) not in found:
            is_even = stacks_are_even(source.shapes, layout, not config.train.fuse_param_gather)
            names = shared_names(source, target, is_even)
            found[id(source), id(target)] = sum(prod(target.shapes[name]) for name in names)
    return [found[id(s), id(t)] for s, t in zip(whole, targets, strict=True)]


def choices(order: str, placed: Placed, node: int, itemsize: int) -> dict[str, Any]:
    """Returns the costs of the chosen assignment and of alternatives on the same ranks."""
    sources, parts, placement = placed.sources, placed.parts, placed.placement
    in_turn = RolloutLayout.consecutive(len(placement.rollout), len(parts))
    in_turn, known = in_turn.on(placement.rollout, len(sources)), placed.engines.costs
    consecutive = evaluate_layout(sources, parts, in_turn, known)
    free = assign(sources, parts, node, is_ascending=False, ranks=placement.rollout, costs=known)
    choice, remedy = placed.choice, None
    if choice is not None and choice.receive < placed.best.receive:
        remedy = f"Set train.order=auto to use {choice.order} instead of {order}."
    named = {"used": placed.best, "consecutive": consecutive, "any_order": free}
    if placed.best.layout.experts is not None:
        named["experts_in_order"] = placed.engines.linear
    costs = {
        name: {
            "tp_ranks": [found.layout.tp_rank(rank) for rank in range(len(sources))],
            "max_receive_bytes": itemsize * found.receive,
            "max_send_bytes": itemsize * found.send,
        }
        for name, found in named.items()
    }
    return {**costs, "remedy": remedy}


def held_by_ranks(
    models: Sequence[RoleModel], placed: Placed, itemsize: int, transport: str
) -> list[tuple[tuple[int, ...], Held]]:
    """Groups ranks that hold the same models; returns each group and its fullest rank's parts."""
    placement, sizes = placed.placement, _Sizes(models[0], placed)
    parts = [sizes.of(model) for model in models if not placed.holds_nothing(model)]
    peers_bytes = 0  # size of the peer memory that each rank allocates for weights
    if transport == "peer" and models[0].is_trained:
        peers_bytes = itemsize * fullest(placed.whole).num
    sets: dict[tuple[bool, ...], list[int]] = {}
    for rank in range(placement.num_ranks):
        holds = [rank in part for part in parts]
        sets.setdefault((*holds, rank in placement.rollout), []).append(rank)
    found = []
    for ranks in sets.values():
        held = [
            replace(
                part[ranks[0]],
                held=max(part[rank].held for rank in ranks),
                trained=max(part[rank].trained for rank in ranks),
            )
            for part in parts
            if ranks[0] in part
        ]
        engine = None
        if ranks[0] in placement.rollout:
            own = (
                layout_bytes(placed.targets[r], itemsize) - itemsize * placed.shared[r]
                for r in ranks
            )
            engine = HeldEngine(max(own), len(placement.rollout))
        own_bytes = sum(itemsize * h.held.num for h in held if h.model.role == "policy")
        sums = [sum(part[rank].held.num for part in parts if rank in part) for rank in ranks]
        most = max(sums)
        at_most = tuple(rank for rank, one in zip(ranks, sums, strict=True) if one == most)
        found.append((tuple(ranks), Held(held, engine, max(0, peers_bytes - own_bytes), at_most)))
    return found


class _Sizes:
    """Counts a model's elements on each rank. Equal layouts are counted only once."""

    def __init__(self, policy: RoleModel, placed: Placed) -> None:
        self._placed = placed
        # The layouts of `placed` are engines', without a layer for multi-token prediction.
        key = policy.family, policy.engine_shape, placed.layout, policy.head
        self._found = {key: [placed.whole[rank] for rank in placed.placement.policy.ranks]}

    def of(self, model: RoleModel) -> dict[int, HeldModel]:
        place, layout = self._placed.placement.of(model.role), self._placed.layout
        if place != self._placed.placement.policy:
            sizes = place.tp, place.pp, place.cp, place.ep, place.vpp
            layout = TrainLayout(len(place.ranks), *sizes, etp=place.etp)
        own = model.own if self._placed.shares(model) else None
        held = self._elements(model, own or model.family, layout)
        trained = [Elements()] * len(held)
        if model.is_trained:
            trained = self._elements(model, model.trained_family, layout)
        parts = zip(place.ranks, held, trained, strict=True)
        return {rank: HeldModel(model, place, layout, *sizes) for rank, *sizes in parts}

    def _elements(self, model: RoleModel, of: Family, layout: TrainLayout) -> list[Elements]:
        key = of, model.shape, layout, model.head
        if key not in self._found:
            self._found[key] = megatron_layouts(*key)
        parts = self._found[key]
        elements = {id(part): fullest([part]) for part in parts}
        return [elements[id(part)] for part in parts]
