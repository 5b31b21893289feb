"""Process groups of one job, and the collectives that keep ranks agreed.

Everything here is collective: every rank of the world calls it at the same point, or all wait until
`run.collective_timeout_s` and fail. An error of one rank is made known to all by `all_agree` before
anyone raises, so no rank is left waiting for a peer that has stopped.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from hybridrl.errors import UserError
from hybridrl.parallel.layout import Coordinates, TrainLayout
from hybridrl.platform import Platform


class PeerError(RuntimeError):
    """Another rank failed; its own message is in its log."""


class World:
    """This rank's place in the job and Megatron's process groups for the training layout.

    Megatron keeps the groups of a process in one place: a new World ends the use of an older one.

    Args:
        layout: training layout over all ranks.
        platform: device and backend of this rank.
        timeout_s: bound of every collective, seconds.
    """

    def __init__(self, layout: TrainLayout, platform: Platform, timeout_s: float) -> None:
        self.layout, self.platform = layout, platform
        self.rank: int = dist.get_rank()
        self.size: int = dist.get_world_size()
        parallel_state.destroy_model_parallel()  # of a World before this one, in the same process
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            order=layout.order,
            distributed_timeout_minutes=timeout_s / 60,  # type: ignore[arg-type]  # a timedelta takes it
            create_gloo_process_groups=True,
        )
        self.where: Coordinates = layout.coordinates(self.rank)
        self._check_groups()

    def _check_groups(self) -> None:
        """Refuses to go on when Megatron placed this rank elsewhere than our layout did."""
        megatron = Coordinates(
            tp=parallel_state.get_tensor_model_parallel_rank(),
            cp=parallel_state.get_context_parallel_rank(),
            dp=parallel_state.get_data_parallel_rank(),
            pp=parallel_state.get_pipeline_model_parallel_rank(),
        )
        if megatron != self.where:
            raise RuntimeError(
                f"rank {self.rank}: Megatron stands at {megatron}, the layout at {self.where}"
            )

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank holds the last pipeline stage, where losses are computed."""
        return self.where.pp == self.layout.pp - 1

    @property
    def reports(self) -> bool:
        """Whether this rank contributes loss sums: last stage, first tensor-parallel rank."""
        return self.is_last_stage and self.where.tp == 0

    def sum_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the sum of `values` (any shape, same on all ranks) over all ranks, on the CPU."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def max_over_world(self, values: torch.Tensor) -> torch.Tensor:
        """Returns the elementwise maximum of `values` over all ranks, on the CPU."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def _reduced(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        # A sync point: what is reduced here are metrics and columns that the host reads.
        on_device = values.to(self.platform.device, copy=True)
        dist.all_reduce(on_device, op=op)
        return on_device.cpu()

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's `value` (small, picklable), in rank order."""
        gathered: list[Any] = [None] * self.size
        dist.all_gather_object(gathered, value)
        return gathered

    @contextlib.contextmanager
    def all_agree(self, what: str) -> Iterator[None]:
        """Runs a part that may fail on one rank only; afterwards either all ranks go on or all
        raise.

        Raises:
            UserError: on every rank, when any rank met one (its own, or the first other's).
            PeerError: on the other ranks, when a rank failed otherwise.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:  # made global below, then raised again
            error = caught
        outcomes = self.gather_objects(_describe(error))
        if error is not None:
            raise error
        for rank, outcome in enumerate(outcomes):
            if isinstance(outcome, UserError):
                raise outcome
            if outcome is not None:
                raise PeerError(f"rank {rank} failed in {what}: {outcome}")


def _describe(error: Exception | None) -> UserError | str | None:
    if error is None or isinstance(error, UserError):
        return error
    return f"{type(error).__name__}: {error}"


def start_process_group(platform: Platform, timeout_s: float) -> None:
    """Joins the job that the launcher described in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Without these variables the job is this one process. A process group that is there already, of
    the user's script or of a Trainer that was not closed, is used as it is.
    """
    if dist.is_initialized():
        return
    timeout = datetime.timedelta(seconds=timeout_s)
    kwargs: dict[str, Any] = {} if platform.is_cpu else {"device_id": platform.device}
    if "MASTER_PORT" in os.environ:
        dist.init_process_group(platform.backend, timeout=timeout, **kwargs)
        return
    store = dist.HashStore()  # one process: no port is opened
    dist.init_process_group(
        platform.backend, store=store, rank=0, world_size=1, timeout=timeout, **kwargs
    )


def stop_process_group() -> None:
    """Leaves the job; a later `World` in this process starts afresh."""
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def same_on_all_ranks(world: World, what: str, value: str) -> None:
    """Checks that `value` (for example a schedule's hash) is equal everywhere.

    Raises:
        RuntimeError: naming the ranks that differ from rank 0.
    """
    values: Sequence[str] = world.gather_objects(value)
    differing = [rank for rank, other in enumerate(values) if other != values[0]]
    if differing:
        raise RuntimeError(f"{what} differs between rank 0 and ranks {differing}: {values}")
