"""How this process joins the job and leaves it: the store that the launcher described, and torch's
default process group in it. Every rank calls these functions in the same order.
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

# For all processes to start: they import from a disk that may be slow, and have no heartbeat yet.
START_S = 600.0
RESTARTS = "TORCHELASTIC_RESTART_COUNT"  # of torchrun's agent
# How NCCL is set unless the user says otherwise. Memory that a CUDA graph names would be registered
# with all peers: engines unmap theirs when they sleep, and NCCL 2.28 hung on blocks in peer memory.
# Chunks of point-to-point messages: at 512 KiB one of 64 MiB is cut into too few to be pipelined
# over 32 channels, and moves 148 GB/s between two H200 in place of 281.
NCCL_SETTINGS = {"NCCL_GRAPH_REGISTER": "0", "NCCL_P2P_NVL_CHUNKSIZE": "65536"}
T = TypeVar("T")
_JOB: list[tuple[dist.Store, int, int]] = []  # this process is in; empty until the first start
# Counted alike on all ranks: its process groups, and what rank 0 tells in it.
_STARTS, _BROADCASTS = itertools.count(), itertools.count()


def start_process_group(platform: Platform, timeout_s: float) -> None:
    """Joins the job that the launcher described in RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Without these variables the job is this one process. A process group that is there already, of
    the user's script or of a Trainer that was not closed, is used as it is. Processes may start
    START_S apart.

    No device is named: torch would then connect every group at once, of which Megatron and vLLM
    make dozens and use a few, and each takes 50 to 100 MB of a GPU (7.5 GB in all).
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
        # A later start in the same processes would find the addresses of this one in its keys.
        store = dist.PrefixStore(f"start_{next(_STARTS)}", store)
        _wait_for_all(store, rank, size, start)
        store.set_timeout(timeout)
    else:
        store, rank, size = dist.HashStore(), 0, 1  # one process: no port is opened
    dist.init_process_group(
        platform.backend, store=store, rank=rank, world_size=size, timeout=timeout
    )
    heartbeat.of_job(timeout_s, None)  # a World may be long in coming, and have other bounds


def from_rank_0(make: Callable[[], T]) -> T:
    """Returns what `make` gives on rank 0, which alone calls it; collective, also before
    `start_process_group`. What it returns or raises is picklable.

    Raises:
        UserError: of rank 0, on every rank.
        PeerError: rank 0 failed, or was not done START_S after this one came.
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
    """Returns the job's store, this rank and the world size. The store of the first start stays:
    rank 0 may be the one that serves it, on a socket that the launcher has bound.
    """
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
    # torchrun's agent may keep its store, with the addresses of ranks that it started before.
    store = dist.PrefixStore(f"restart_{os.environ.get(RESTARTS, '0')}", store)
    store.set_timeout(timeout)
    return store, rank, size


def _wait_for_all(store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
    """Waits in the store until all ranks have started: what connects them does not wait long.

    Raises:
        PeerError: naming those that did not.
    """
    store.set(f"started/{rank}", "")
    if store.add("started", 1) == size:
        store.set("all_started", "")
    try:
        store.wait(["all_started"], timeout)
    except dist.DistStoreError as error:
        missing = [other for other in range(size) if not store.check([f"started/{other}"])]
        said = f"ranks {missing} did not start within {timeout.total_seconds():g} s of rank {rank}"
        raise PeerError(said, missing[0] if missing else None) from error


def stop_process_group() -> None:
    """Leaves the job; a later `World` in this process starts afresh."""
    heartbeat.leave()
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
