"""Estimates memory if all models share all ranks, with the peaks that `hybridrl plan` computes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from hybridrl.config.placement import Place
from hybridrl.config.schema import Config
from hybridrl.models.adapters.rows import num_parameters
from hybridrl.models.family import Family
from hybridrl.models.quantized import quantized_bytes, split_family
from hybridrl.models.trainable import synced_family, unmerged_family
from hybridrl.parallel.layout import TrainLayout
from hybridrl.rollout.model_rules import held_family
from hybridrl.rollout.registry import ENGINES
from hybridrl.services.planner.hardware import Assumptions
from hybridrl.services.planner.phase_memory import (
    Elements,
    Held,
    HeldEngine,
    HeldModel,
    Memory,
    RoleModel,
    estimate_memory,
    itemsize_of,
)
from hybridrl.services.planner.sizes import engine_elements, fullest_stage, shared_elements


@dataclass(frozen=True)
class FullestRank:
    """Models (the policy first) and engine parameters on the fullest rank.

    `engine` counts FP8 weights and scales as elements of the model's type with as many bytes.
    `shared` elements are in the trainer's memory, and each sync changes `synced` elements.
    """

    models: Sequence[HeldModel]
    layout: TrainLayout
    engine: int
    shared: int
    synced: int


def layout_of(config: Config, world_size: int) -> TrainLayout:
    train = config.train
    sizes = train.tp, train.pp, train.cp, train.ep, train.vpp
    return TrainLayout(world_size, *sizes, etp=train.etp)


def transport_of(config: Config, assumed: Assumptions | None) -> Literal["packed", "peer"]:
    """Returns the transport that a run chooses if a node's GPUs can read each other."""
    far = assumed is None or assumed.cluster.nodes > 1
    wanted = config.rollout.transport
    is_packed = config.lora.is_on and wanted == "auto"
    is_packed |= config.rollout.quantization == "fp8"
    is_packed |= wanted == "packed" or config.train.release_weights_in_rollout
    return "packed" if far or is_packed else "peer"


def fullest_rank(config: Config, models: Sequence[RoleModel], world_size: int) -> FullestRank:
    """Returns models and engine on the fullest rank; ModelError if a tensor cannot be sharded."""
    family, shape = models[0].family, models[0].engine_shape
    layout, train, rollout = layout_of(config, world_size), config.train, config.rollout
    traits = ENGINES[rollout.engine]
    sent, shared = held_family(rollout.engine, family, shape), 0
    engine, synced = (
        engine_elements(part, shape, rollout.tp, rollout.ep)
        if traits.has_fused_parameters
        else num_parameters(part, shape)
        for part in (sent, synced_family(family, shape, sent))
    )
    in_16_bits = None
    if rollout.quantization == "fp8":
        in_fp8, in_16_bits = split_family(family, shape)
        num = engine_elements(in_fp8, shape, rollout.tp, rollout.ep)
        saved = num - quantized_bytes(num) // itemsize_of(config, on_gpu=True)
        engine, synced = engine - saved, synced - saved
    can_share = family.lora is None or sent.lora is not None
    if traits.shares_memory and can_share and not train.release_weights_in_rollout:
        has_buckets = not train.fuse_param_gather
        same = in_16_bits or unmerged_family(family, shape, sent)
        shared = shared_elements(same, shape, layout, rollout.tp, rollout.ep, has_buckets)
    place = Place(tuple(range(world_size)), train.tp, train.pp, train.cp, train.ep, train.vpp)

    def sizes(model: RoleModel, of: Family) -> Elements:
        return fullest_stage(of, model.shape, layout, model.head)

    held = [
        HeldModel(
            model,
            place,
            layout,
            sizes(model, model.own or model.family),
            sizes(model, model.trained_family) if model.is_trained else Elements(),
        )
        for model in models
        if not model.is_shared
    ]
    return FullestRank(held, layout, engine, shared, synced)


def memory_alike(
    config: Config, held: FullestRank, world_size: int, assumed: Assumptions
) -> Memory:
    """Returns the estimated memory peaks of the fullest rank. Assumes that ranks have GPUs."""
    itemsize = itemsize_of(config, on_gpu=True)
    ranks = Held(held.models, HeldEngine(itemsize * (held.engine - held.shared), world_size))
    shape, transport = held.models[0].model.shape, transport_of(config, assumed)
    return estimate_memory(config, shape, world_size, ranks, transport, on_gpu=True)
