"""Runs `hybridrl train` on this host. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from hybridrl.config.identity import run_folder
from hybridrl.config.rules import default_world_size
from hybridrl.config.schema import Config
from hybridrl.loop.preflight import validate_training
from hybridrl.parallel.host_gpus import num_local_gpus
from hybridrl.services.launch.local_ranks import launch_run
from hybridrl.services.launch.pinning import fits_on, laid_out
from hybridrl.services.launch.restarts import ElasticLaunch, LocalJob


def launch_training(
    config: Config,
    arguments: Sequence[str],
    world_size: int | None,
    resume: Literal["newest", "previous"],
) -> int:
    """Runs the ranks of a training run, and restarts them up to `run.max_restarts` times.

    Hub names in `config` are pinned. By default `world_size` is that of the layout or this host's
    GPUs. Returns the exit code.
    """
    size = world_size or default_world_size(config, num_local_gpus())
    found, laid = laid_out(config, size)
    validate_training(found, size, resume)
    folder, restarts = run_folder(found), found.run.max_restarts
    if not restarts:
        return launch_run([*arguments, *laid], size, folder)
    # The ranks choose the layout themselves, because a restart may have fewer ranks.
    again = ElasticLaunch(restarts, LocalJob(size, lambda fewer: fits_on(config, fewer)))
    return launch_run(arguments, size, folder, again)
