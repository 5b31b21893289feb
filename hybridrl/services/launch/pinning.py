"""Fixes hub commits and the layout for all ranks. Imports torch only under torchrun."""

from __future__ import annotations

import os

import typer

from hybridrl.config.hub import hub_names, names_from_json, names_to_json, with_names
from hybridrl.config.identity import pinned
from hybridrl.config.rules import default_world_size
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.loop.preflight import model_violations
from hybridrl.parallel.failure import is_launched
from hybridrl.parallel.host_gpus import local_host, num_local_gpus
from hybridrl.services.launch.local_ranks import is_rank
from hybridrl.services.planner.choose import needs_choice, overrides_of, with_layout

HUB_NAMES = "HYBRIDRL_HUB_NAMES"  # passes hub names and commits to the ranks, as JSON


def laid_out(config: Config, world_size: int | None) -> tuple[Config, list[str], int]:
    """Returns the config with its layout, chosen values as overrides, and the number of ranks.

    By default, ranks are as many as this host's GPUs, or as the layout needs.
    """
    num_gpus = num_local_gpus()
    size = world_size or default_world_size(config, num_gpus)
    # Ranks receive the layout from rank 0 or from the launcher.
    if is_rank() or not needs_choice(config, size, num_gpus > 0):
        return config, [], size
    found = with_layout(config, size, local_host())
    overrides = overrides_of(found)
    if config.layout.is_open(size):
        chosen = " ".join(overrides[:-2]) or "nothing, because the config sets all values"
        typer.echo(f"layout: auto chose {chosen}", err=True)
    elif found != config:
        level = found.train.optimizer_memory
        typer.echo(f"train.optimizer_memory: auto chose {level}", err=True)
    return found, overrides, size


def fits_on(config: Config, world_size: int) -> bool:
    """Whether `world_size` ranks can train the run, with the configured or an automatic layout."""
    try:
        found = with_layout(config, world_size, local_host())
    except ConfigError:
        return False
    return not model_violations(found, world_size)[1]


def with_commits(config: Config) -> Config:
    """Returns the config with hub names pinned to commits, by the launcher or else by rank 0."""
    if is_launched():
        return with_names(config, names_from_json(os.environ[HUB_NAMES]))
    if not is_rank():
        found = pinned(config)
        os.environ[HUB_NAMES] = names_to_json(hub_names(found))
        return found
    from hybridrl.loop.setup import pinned_on_all_ranks

    return pinned_on_all_ranks(config)
