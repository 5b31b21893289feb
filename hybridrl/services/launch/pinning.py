"""What is settled once of a run and the same on all ranks: hub names' commits, and the layout. No
torch but under torchrun.
"""

from __future__ import annotations

import os

import typer

from hybridrl.config.hub import hub_names, names_from_json, names_to_json, with_names
from hybridrl.config.identity import pinned
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError
from hybridrl.loop.preflight import model_violations
from hybridrl.parallel.failure import is_launched
from hybridrl.parallel.host_gpus import local_host
from hybridrl.services.launch.local_ranks import is_rank
from hybridrl.services.planner.choose import overrides_of, with_layout

HUB_NAMES = "HYBRIDRL_HUB_NAMES"  # for the ranks: hub names with their commits, as JSON


def laid_out(config: Config, world_size: int) -> tuple[Config, list[str]]:
    """Returns a configuration with its layout, chosen where it asks for that, and the choice as
    overrides for the ranks. Of the process that starts them.
    """
    # Ranks get it from rank 0, or from the process that starts them.
    if is_rank() or not config.layout.is_open(world_size):
        return config, []
    found = with_layout(config, world_size, local_host())
    overrides = overrides_of(found)
    chosen = " ".join(overrides[:-2]) or "nothing: all of it is written"
    typer.echo(f"layout: auto chose {chosen}", err=True)
    return found, overrides


def fits_on(config: Config, world_size: int) -> bool:
    """Whether so many ranks can train a run, in a layout of theirs where it is to be chosen."""
    try:
        found = with_layout(config, world_size, local_host())
    except ConfigError:
        return False
    return not model_violations(found, world_size)[1]


def with_commits(config: Config) -> Config:
    """Returns a configuration with every hub name at a commit. Who starts the ranks asks for it and
    tells them; under torchrun rank 0 does.
    """
    if is_launched():
        return with_names(config, names_from_json(os.environ[HUB_NAMES]))
    if not is_rank():
        found = pinned(config)
        os.environ[HUB_NAMES] = names_to_json(hub_names(found))
        return found
    from hybridrl.loop.setup import pinned_on_all_ranks

    return pinned_on_all_ranks(config)
