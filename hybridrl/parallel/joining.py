"""Joins and leaves the job: connects to the store and creates torch's default process group.

Every rank calls these functions in the same order, and waits until all ranks have started.
"""

from __future__ import annotations

import datetime
import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.rendezvous import rendezvous

from hybridrl.errors import UserError
from hybridrl.parallel import heartbeat
from hybridrl.parallel.descriptors import raise_limit
from hybridrl.parallel.failure import STORE_FD, PeerError
from hybridrl.platform import Platform

# Time for all processes to start: they may import from a slow disk, and send no heartbeats.
START_S = 600.0
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # set by torchrun's agent
# Defaults for NCCL, which the user can override. GRAPH_REGISTER is off, because NCCL would register
# the memory of CUDA graphs with all peers, but sleeping engines unmap this memory, and NCCL 2.28
# hung on blocks in peer memory. NVL_CHUNKSIZE is the chunk size of point-to-point messages: 512 KiB
# gives too few chunks to pipeline 64 MiB over 32 channels, so two H200 reached 148 instead of 281
# GB/s.
NCCL_SETTINGS = {"NCCL_GRAPH_REGISTER": "0", "NCCL_P2P_NVL_CHUNKSIZE": "65536"}
T = TypeVar("T")
_JOB: list[tuple[dist.Store, int, int]] = []  # (store, rank, size); empty until the first start
# Counters of process groups and of `from_rank_0` calls, equal on all ranks.
_STARTS, _BROADCASTS = itertools.count(), itertools.count()


def start_process_group(platform: Platform, timeout_s: float) -> None:
    """Joins the job that RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT describe, if they are set.

    If a process group already exists, because the user's script created it or a Trainer was not
    closed, it is used unchanged. Processes may start up to START_S apart.

    No device is passed to torch, because torch would then connect every group immediately. Megatron
    and vLLM create dozens of groups but use only a few, and each connected group takes 50 to 100 MB
    of GPU memory (7.5 GB in total).
    """
    if dist.is_initialized():
        return
    raise_limit()
    for name, value in NCCL_SETTINGS.items():
        os.environ.setdefault(name, value)
    timeout = datetime.timedelta(seconds=timeout_s)
    if "MASTER_PORT" in os.environ:
        start = datetime.timedelta(seconds=max(timeout_s, START_S))
        store, rank, size = _job(start)
        # Without a prefix, a later start in these processes would read this start's addresses.
        store = dist.PrefixStore(f"start_{next(_STARTS)}", store)
        _wait_for_all(store, rank, size, start)
        store.set_timeout(timeout)
    else:
        store, rank, size = dist.HashStore(), 0, 1  # opens no port
    dist.init_process_group(
        platform.backend, store=store, rank=rank, world_size=size, timeout=timeout
    )
    heartbeat.of_job(timeout_s, None)  # a World sets its own timeouts later


def from_rank_0(make: Callable[[], T]) -> T:
    """Calls `make` on rank 0 only and returns its result on all ranks; collective.

    May be called before `start_process_group`. The result or UserError must be picklable.

    Raises on every rank the UserError of `make`, or PeerError after START_S or if rank 0 failed.
    """
    key, timeout = f"from_rank_0/{next(_BROADCASTS)}", datetime.timedelta(seconds=START_S)
    if dist.is_initialized():
        store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    elif "MASTER_PORT" in os.environ:
        store, rank, _ = _job(timeout)
    else:
        return make()
    if rank == 0:
        outcome: tuple[Any, Exception | None] = None, PeerError("rank 0 failed before the run", 0)
        try:
            outcome = make(), None
        except UserError as error:
            outcome = None, error
        finally:
            store.set(key, pickle.dumps(outcome))  # type: ignore[arg-type]  # it takes bytes too
    else:
        try:
            store.wait([key], timeout)
        except dist.DistError as error:
            raise PeerError(f"rank 0 did not answer: {error}", 0) from error
        outcome = pickle.loads(store.get(key))
    found, failure = outcome
    if failure is not None:
        raise failure
    return cast(T, found)


def _job(timeout: datetime.timedelta) -> tuple[dist.Store, int, int]:
    """Returns the job's store, which later starts reuse, this rank and the world size."""
    if not _JOB and STORE_FD in os.environ:
        fd, size = int(os.environ.pop(STORE_FD)), int(os.environ["WORLD_SIZE"])
        os.set_inheritable(fd, False)
        served = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            size,
            is_master=True,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=fd,
        )
        _JOB.append((served, 0, size))
    elif not _JOB:
        _JOB.append(next(rendezvous("env://", timeout=timeout)))
    store, rank, size = _JOB[0]
    # torchrun's agent may keep its store across a restart, with the addresses of earlier ranks.
    store = dist.PrefixStore(f"restart_{os.environ.get(RESTARTS, '0')}", store)
    store.set_timeout(timeout)
    return store, rank, size


def _wait_for_all(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """Waits for all ranks to start, longer than torch would; PeerError names those that did not."""
    store.set(f"started/{rank}", "")
    if store.add("started", 1) == size:
        store.set("all_started", "")
    try:
        store.wait(["all_started"], timeout)
    except dist.DistStoreError as error:
        missing = [other for other in range(size) if not store.check([f"started/{other}"])]
        message = (
            f"ranks {missing} did not start within {timeout.total_seconds():g} s of rank {rank}"
        )
        raise PeerError(message, missing[0] if missing else None) from error


def stop_process_group() -> None:
    """Leaves the job. A later `World` in this process joins it again."""
    heartbeat.leave()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
