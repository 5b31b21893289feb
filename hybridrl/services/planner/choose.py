"""Resolves `layout: auto` once, before ranks start, as configuration overrides. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from hybridrl.config.identity import saved_config
from hybridrl.config.layout import CHOSEN_KEYS
from hybridrl.config.placement import Machines
from hybridrl.config.rules import check
from hybridrl.config.rules_lora import lora_section_rules
from hybridrl.config.rules_optimizer import LEVEL_KEY, allowed_levels, level_name
from hybridrl.config.rules_placement import placed
from hybridrl.config.schema import Config
from hybridrl.config.source import read_model_config
from hybridrl.errors import ConfigError, UserError
from hybridrl.models.adapters.settings import lora_rules
from hybridrl.models.family import read_model
from hybridrl.parallel.host_gpus import Host
from hybridrl.rollout.registry import ENGINES
from hybridrl.services.planner.estimate import Estimate, estimate
from hybridrl.services.planner.fit import Changes, with_margin
from hybridrl.services.planner.hardware import (
    GIB,
    NO_BOUND_GIB,
    Assumptions,
    ClusterFile,
    assume,
    merged,
)
from hybridrl.services.planner.phase_memory import RoleModel, role_models
from hybridrl.services.planner.planned_models import planned_models
from hybridrl.services.planner.search import Candidate, Result, Search, pinned_keys
from hybridrl.services.planner.text import memory_size

LORA_RANK = 32  # rank of the adapters that a search proposes


@dataclass(frozen=True)
class Adapters:
    """The fastest layout with LoRA adapters, where full training does not fit.

    `full` is the estimate for full training in this layout, on GPUs with enough memory for it.
    """

    rank: int
    best: Candidate
    full: Estimate


def with_layout(
    config: Config, world_size: int, host: Host, given: ClusterFile | None = None
) -> Config:
    """Returns the configuration with all layout keys and a level of the optimizer state.

    Call it once per run. Uses the layout from the run folder if it was chosen for the same number
    of ranks, or else the layout with the shortest predicted step among those that fit. Without
    `layout: auto`, chooses only `train.optimizer_memory` if that is 'auto'.

    Raises:
        ConfigError: Every layout violates a configuration rule, or no layout fits into memory.
    """
    if not config.layout.is_open(world_size):
        return _with_level(config, world_size, host, given)
    free = [key for key in CHOSEN_KEYS if key not in pinned_keys(config)]
    saved = saved_config(config)
    if saved is not None and saved.layout.chosen_for == world_size:
        kept = {key: saved.value(key) for key in free if key in saved.layout.chosen_keys}
        if LEVEL_KEY in free:  # it was not among the chosen keys of earlier versions
            kept[LEVEL_KEY] = level_name(saved.train)
        if len(kept) == len(free):
            found = _with(config, kept, free, world_size)
            return _with_level(found, world_size, host, given)
    result, assumed = search(config, world_size, host, given)
    if not result.best:
        raise ConfigError(_nothing(config, result, assumed))
    best = result.best[0].changes
    found = _with(config, {key: best[key] for key in free}, free, world_size)
    return _with_level(found, world_size, host, given)


def chosen_values(config: Config) -> Changes:
    """Returns the values that `with_layout` has set, by key."""
    keys = list(config.layout.chosen_keys)
    if LEVEL_KEY not in keys:
        keys.insert(0, LEVEL_KEY)
    if config.layout.chosen_for is not None:
        keys += ["layout.chosen_for", "layout.chosen_keys"]
    return {key: config.value(key) for key in keys}


def chosen_layout(
    config: Config, world_size: int, host: Host, gpus_per_node: int | None
) -> Changes:
    """Returns the values that `with_layout` chooses, by key. Each rank calls this."""
    given = None if gpus_per_node is None else ClusterFile(gpus_per_node=gpus_per_node)
    return chosen_values(with_layout(config, world_size, host, given))


def overrides_of(config: Config) -> list[str]:
    """Returns the values that `with_layout` has set, as overrides for the ranks."""
    return [f"{key}={json.dumps(value)}" for key, value in chosen_values(config).items()]


def search(
    config: Config, world_size: int, host: Host, given: ClusterFile | None = None
) -> tuple[Result, Assumptions]:
    """Evaluates all layouts; see `with_layout`. ConfigError for unknown models or own ranks."""
    section = merged(config.cluster, given)
    asks_for_gpus = section is not None or ENGINES[config.rollout.engine].runs_on_gpus
    section = section or ClusterFile()
    if not asks_for_gpus and host.num_gpus == 0:
        section = ClusterFile(nodes=1, gpus_per_node=world_size, gpu_memory_gib=NO_BOUND_GIB)
    assumed, roles, hf_config = _inputs(config, section, world_size, host)
    return Search(config, roles, hf_config, world_size, assumed).run(), assumed


def _inputs(
    config: Config, section: ClusterFile, world_size: int, host: Host
) -> tuple[Assumptions, list[RoleModel], dict[str, Any]]:
    """Returns the cluster, the models and the policy's config.json, or raises ConfigError."""
    assumed, errors = assume(section, world_size, host)
    if assumed is None:
        raise ConfigError(errors)
    placement, misplaced = placed(config, Machines(world_size, assumed.cluster.gpus_per_node))
    if misplaced or not placement.is_shared:
        allowed = "config, because the section placement gives some roles their own ranks or sizes"
        remedy = "Set the sizes in train and rollout, or remove the section placement."
        raise ConfigError(misplaced or [UserError("layout.choose", "auto", allowed, remedy)])
    models, unknown = planned_models(config)
    if models is None or unknown:
        raise ConfigError(unknown)
    try:
        hf_config = read_model_config(config.model)
        family, shape = read_model(config.model.family, hf_config)
        return assumed, role_models(config, models, family, shape), hf_config
    except UserError as error:
        raise ConfigError([error]) from None


def search_with_adapters(
    config: Config, world_size: int, host: Host, given: ClusterFile | None = None
) -> Adapters | None:
    """Evaluates all layouts with LoRA adapters; None if none fits or the run cannot have them."""
    if config.lora.is_on:
        return None
    changed = config.with_values({"lora.rank": LORA_RANK})
    try:
        family, shape = read_model(config.model.family, read_model_config(config.model))
        if [*lora_section_rules(changed), *lora_rules(changed.lora, family, shape)]:
            return None
        result, _ = search(changed, world_size, host, given)
        models, _ = planned_models(config)
    except UserError:  # the search without adapters has reported other errors
        return None
    section = merged(config.cluster, given) or ClusterFile()
    roomy, _ = assume(section.model_copy(update={"gpu_memory_gib": NO_BOUND_GIB}), world_size, host)
    if models is None or roomy is None or not result.best:
        return None
    best, roles = result.best[0], role_models(config, models, family, shape)
    full = estimate(config.with_values(best.changes), roles, world_size, roomy)
    return Adapters(LORA_RANK, best, full)


def needs_choice(config: Config, world_size: int, has_gpus: bool) -> bool:
    """Whether `with_layout` has something to choose for this number of ranks."""
    is_level_open = has_gpus and config.train.optimizer_memory == "auto"
    return config.layout.is_open(world_size) or is_level_open


def _with_level(config: Config, world_size: int, host: Host, given: ClusterFile | None) -> Config:
    """Sets the fastest level that fits, or the smallest, if the level is 'auto'.

    'auto' stays, and means 'device', if there are no GPUs, if some roles have their own ranks, or
    if rules are violated (reported elsewhere). A run gets no faster level than it had before.
    """
    levels = allowed_levels(config)
    if config.train.optimizer_memory != "auto" or levels[-1] == "device":
        return config
    section = merged(config.cluster, given)
    if section is None and host.num_gpus == 0 and not ENGINES[config.rollout.engine].runs_on_gpus:
        return config
    try:
        assumed, roles, hf_config = _inputs(config, section or ClusterFile(), world_size, host)
        if check(config, world_size, hf_config):
            return config
        for level in _from_saved(config, levels):
            found = config.with_values({LEVEL_KEY: level})
            if estimate(found, roles, world_size, assumed).spare_bytes >= 0:
                break
    except UserError:
        return config
    return config if level == "device" else found


def _from_saved(config: Config, levels: list[str]) -> list[str]:
    """Returns the levels from the one of the run folder's configuration on; all if it has none."""
    saved = saved_config(config)
    before = "" if saved is None else level_name(saved.train)
    return levels[levels.index(before) :] if before in levels else levels


def _with(config: Config, values: Changes, keys: list[str], world_size: int) -> Config:
    chosen = {"layout.chosen_for": world_size, "layout.chosen_keys": tuple(keys)}
    return config.with_values({**values, **chosen})


def _nothing(config: Config, result: Result, assumed: Assumptions) -> list[UserError]:
    nearest = result.nearest
    if nearest is None:
        return list(result.refusals.values())
    needed = with_margin(nearest.found.most_bytes)
    values = " ".join(f"{key}={value}" for key, value in nearest.changes.items())
    pinned = sorted(pinned_keys(config))
    free = f", or leave out {', '.join(pinned)}" if pinned else ""
    found = f"auto, but the smallest layout found, {values}, needs {memory_size(needed)} per GPU"
    allowed = f"a layout that fits into {assumed.gpu_memory_bytes / GIB:.1f} GiB"
    lower = "rollout.max_new_tokens, data.max_prompt_tokens or rollout.max_batch"
    remedy = f"Start more ranks, or lower {lower}{free}."
    return [UserError("layout.choose", found, allowed, remedy)]
