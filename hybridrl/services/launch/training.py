"""`hybridrl train` on this host: the process that settles what the ranks shall do, and starts them.
No torch.
"""

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
    """Runs the ranks of a training, again where `run.max_restarts` says so.

    Args:
        config: as it was written, with hub names at their commits.
        arguments: of `hybridrl` in a rank.
        world_size: number of ranks; None: as many as this host's GPUs, or the layout, ask for.
        resume: the checkpoint to go on from.

    Returns:
        The exit code.

    Raises:
        ConfigError: something is wrong that can be seen before ranks start.
        UserError: the run folder cannot be made, or another run is in it.
    """
    size = world_size or default_world_size(config, num_local_gpus())
    found, laid = laid_out(config, size)
    validate_training(found, size, resume)
    folder, restarts = run_folder(found), found.run.max_restarts
    if not restarts:
        return launch_run([*arguments, *laid], size, folder)
    # What was chosen is not handed on: fewer ranks choose anew.
    again = ElasticLaunch(restarts, LocalJob(size, lambda fewer: fits_on(config, fewer)))
    return launch_run(arguments, size, folder, again)
