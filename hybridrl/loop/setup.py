"""Prepares a run: hub commits, rules, machines and layout. Collective."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist

from hybridrl.config.generation import on_policy_rules, with_generation_config
from hybridrl.config.hub import hub_names, with_names
from hybridrl.config.identity import pinned
from hybridrl.config.lag import generates_ahead
from hybridrl.config.placement import Machines, Placement
from hybridrl.config.rules import check, without_training
from hybridrl.config.rules_optimizer import gradient_rules
from hybridrl.config.rules_placement import placed
from hybridrl.config.schema import Config
from hybridrl.config.source import read_model_config
from hybridrl.config.teacher import teacher_rules
from hybridrl.errors import ConfigError
from hybridrl.hybrid_engine.planning.order import is_settled, lay_out, order_layout
from hybridrl.models.family import read_model
from hybridrl.parallel.groups import World, same_on_all_ranks
from hybridrl.parallel.host_gpus import Host, LocalGpu
from hybridrl.parallel.joining import from_rank_0
from hybridrl.parallel.layout import DEFAULT_ORDER, TrainLayout
from hybridrl.parallel.mesh import Meshes
from hybridrl.platform import Platform
from hybridrl.rollout.model_rules import policy_rules

PLANNER = "hybridrl.services.planner.choose"
"""Module with the LayoutChooser `chosen_layout`; imported by name, and only for `layout: auto`."""


class LayoutChooser(Protocol):
    """Function that chooses a layout, as configuration values by dotted key."""

    def __call__(
        self, config: Config, world_size: int, host: Host, gpus_per_node: int | None
    ) -> Mapping[str, Any]: ...


def pinned_on_all_ranks(config: Config) -> Config:
    """Returns the configuration with rank 0's choices; collective, before a World exists.

    These are a commit for every hub name, the layout if `layout: auto` leaves it open, and
    `train.optimizer_memory` on GPUs if it is 'auto'. Also fills in the values that
    `rollout.generation_config` copies from the model. Raises UserError on every rank if a hub name
    or a layout cannot be found.
    """
    config = with_names(config, from_rank_0(lambda: hub_names(pinned(config))))
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    is_level_open = torch.cuda.is_available() and config.train.optimizer_memory == "auto"
    if config.layout.is_open(world_size) or is_level_open:
        chosen = from_rank_0(lambda: _chosen_layout(config, world_size))
        config = config.with_values(chosen)
    return with_generation_config(config)


def _chosen_layout(config: Config, world_size: int) -> Mapping[str, Any]:
    choose: LayoutChooser = importlib.import_module(PLANNER).chosen_layout
    if not torch.cuda.is_available():
        return choose(config, world_size, Host(), None)
    found = torch.cuda.get_device_properties(0)
    count = int(os.environ.get("LOCAL_WORLD_SIZE") or torch.cuda.device_count())
    host = Host(count, LocalGpu(found.name, found.total_memory))
    return choose(config, world_size, host, count)


def check_rules(config: Config, machines: Machines, trains: bool) -> None:
    """Checks the whole configuration, given the machines and the model's shape; without `trains`,
    skips the teacher and knobs for training. Raises ConfigError with every violated rule.
    """
    has_model = (config.model.path is None) != (config.model.init is None)
    model_config = read_model_config(config.model) if has_model else None
    dtype = str(Platform.detect().default_dtype()).removeprefix("torch.")
    size = machines.num_ranks
    found = check(config, size, model_config, dtype, is_script=True, machines=machines)
    if trains:
        found = found or list(gradient_rules(config, can_lower=True))
        found += [*on_policy_rules(config), *teacher_rules(config, model_config or {})]
    if model_config is not None and not found:
        family, shape = read_model(config.model.family, model_config)
        found += policy_rules(config, family, shape, model_config)
    if not trains:
        found = without_training(found)
    if found:
        raise ConfigError(found)


def find_machines(platform: Platform) -> Machines:
    """Returns the GPUs and nodes on which the ranks run; collective."""
    size = dist.get_world_size()
    own = None if platform.is_cpu else torch.cuda.get_device_name(platform.device)
    names: list[Any] = [None] * size
    dist.all_gather_object(names, own)
    return Machines(size, _local_ranks(size), None if None in names else names)


def make_meshes(config: Config, platform: Platform, machines: Machines) -> Meshes:
    """Creates the process groups for all roles. The configuration must pass `check_rules`."""
    world = World(platform, config.run.collective_timeout_s, config.run.stall_timeout_s)
    placement, _ = placed(config, machines)
    world.sums_on_host = generates_ahead(config, placement)
    return Meshes(world, placement, training_layout(config, placement))


def report_order(config: Config, meshes: Meshes, notify: Callable[[str], None]) -> None:
    """Reports which order of ranks `train.order=auto` chose, unless it is the default."""
    if (order := meshes.of("policy").layout.order) not in (config.train.order, DEFAULT_ORDER):
        notify(f"train.order=auto chose {order}, because engines then receive the fewest bytes")


def training_layout(config: Config, placement: Placement) -> TrainLayout:
    """Returns the policy's layout. `train.order=auto` needs LOCAL_WORLD_SIZE and all ranks."""
    train, tp = config.train, config.rollout.tp
    world_size = len(placement.policy.ranks)
    if not placement.is_shared:
        return lay_out(train, world_size)
    if is_settled(train, tp) or "LOCAL_WORLD_SIZE" not in os.environ:
        return lay_out(train, world_size)
    hf_config = read_model_config(config.model)
    family, shape = read_model(config.model.family, hf_config)
    return order_layout(train, family, shape, world_size, tp, _local_ranks(world_size)).layout


def ranks_per_node(world: World) -> int:
    """Returns the number of consecutive ranks on a node; collective."""
    found = _local_ranks(world.size)
    same_on_all_ranks(world, "LOCAL_WORLD_SIZE", str(found))
    return found


def _local_ranks(world_size: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # unset without a launcher


def with_epochs(config: Config, num_prompts: int) -> Config:
    """Returns the configuration with the number of steps that `steps.num_epochs` requires."""
    steps = config.steps
    if steps.num_epochs is None:
        return config
    num_steps = math.ceil(steps.num_epochs * num_prompts / steps.prompts_per_step)
    return config.model_copy(update={"steps": steps.model_copy(update={"num_steps": num_steps})})
