"""Hub names of a run with their commits, the same on all ranks. No torch but under torchrun."""

from __future__ import annotations

import os

from hybridrl.cli.launch import is_rank
from hybridrl.config.hub import hub_names, names_from_json, names_to_json, with_names
from hybridrl.config.identity import pinned
from hybridrl.config.schema import Config
from hybridrl.parallel.failure import is_launched

HUB_NAMES = "HYBRIDRL_HUB_NAMES"  # for the ranks: hub names with their commits, as JSON


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
