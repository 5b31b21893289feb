"""Chooses training's order of parallel axes with which engines receive the fewest bytes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hybridrl.config.rules_placement import AUTO_ORDER
from hybridrl.config.schema import TrainConfig
from hybridrl.hybrid_engine.planning.assign import OrderChoice, choose_order, ranks_moved
from hybridrl.hybrid_engine.planning.owned import equal_shares
from hybridrl.models.family import Family, ModelShape
from hybridrl.models.weights import RankLayout, fused_layouts, megatron_layouts
from hybridrl.parallel.layout import DEFAULT_ORDER, TrainLayout


@dataclass(frozen=True)
class Ordered:
    """A training layout, and the cost of the order of its axes.

    Args:
        sources: For each rank, the layout of the elements that are sent to engines.
        choice: Order that 'auto' would choose. None if there is no choice: the model has experts,
            or each engine has a single rank, which needs all weights.
    """

    layout: TrainLayout
    whole: list[RankLayout]
    sources: list[RankLayout]
    choice: OrderChoice | None


def is_settled(train: TrainConfig, rollout_tp: int) -> bool:
    """Returns whether the order does not depend on the model's shape."""
    return train.order != AUTO_ORDER or rollout_tp == 1


def lay_out(train: TrainConfig, world_size: int) -> TrainLayout:
    """Returns the layout in the configured order; for 'auto', in Megatron's default order."""
    order = DEFAULT_ORDER if train.order == AUTO_ORDER else train.order
    sizes = train.tp, train.pp, train.cp, train.ep, train.vpp
    return TrainLayout(world_size, *sizes, order, train.etp)


def order_layout(
    train: TrainConfig,
    family: Family,
    shape: ModelShape,
    world_size: int,
    rollout_tp: int,
    ranks_per_node: int,
) -> Ordered:
    """Returns the training layout, with its order chosen if the configuration says 'auto'.

    Experts have a separate grid of ranks; their models keep Megatron's default order for 'auto'.
    """
    if shape.moe is not None:
        layout = lay_out(train, world_size)
        whole = megatron_layouts(family, shape, layout)
        sources = equal_shares(layout, whole) if train.fuse_param_gather else whole
        return Ordered(layout, whole, sources, None)
    own = replace(lay_out(train, world_size), order=DEFAULT_ORDER)
    whole = megatron_layouts(family, shape, own)
    sources = equal_shares(own, whole) if train.fuse_param_gather else whole
    layout, choice = lay_out(train, world_size), None
    if rollout_tp > 1:
        parts = fused_layouts(family, shape, rollout_tp)
        choice = choose_order(own, sources, parts, ranks_per_node)
        if train.order == AUTO_ORDER:
            layout = replace(layout, order=choice.order)
    ranks = ranks_moved(own, layout)
    whole, sources = [whole[rank] for rank in ranks], [sources[rank] for rank in ranks]
    return Ordered(layout, whole, sources, choice)
