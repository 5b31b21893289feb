"""One rank of a transition in whose middle another dies, for each transport.

lost_rank_worker.py KIND - - RANKS_PER_NODE
"""

from __future__ import annotations

import datetime
import os
import re
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from job_world import job_world
from reshard_worker import DEVICE, Engine, tensors_of
from weight_cases import Case

from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.transports import packed
from hybridrl.hybrid_engine.transports.transport import TransportError
from hybridrl.models.family import ModelShape
from hybridrl.models.sources import FullWeights
from hybridrl.parallel.failure import PeerError
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.parallel.peer_memory import PeerMemory, allocate

LOST = 2
TIMEOUT_S = 20.0


class Dying:
    """Stands for what all ranks wait in, and ends the process of one the second time."""

    def __init__(self, real: Any, rank: int) -> None:
        self.real, self.rank, self.calls = real, rank, 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls == 2 and self.rank == LOST:
            os._exit(0)
        return self.real(*args, **kwargs)


def in_peer_memory(
    tensors: dict[str, torch.Tensor], rank: int
) -> tuple[PeerMemory, dict[str, torch.Tensor]]:
    size = sum(tensor.nbytes for tensor in tensors.values())
    memory = allocate(max(job_world().gather_objects(size)), DEVICE, TIMEOUT_S, job_world())
    moved, start = {}, 0
    for name, tensor in tensors.items():
        place = memory.of(rank)[start : start + tensor.nbytes]
        moved[name] = place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        start += tensor.nbytes
    return memory, moved


def main() -> None:
    kind = sys.argv[1]
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        dist.init_process_group("nccl", timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = ModelShape(4, 16, 8, 4, 4, 32, 300)
    case = Case(shape, TrainLayout(world, tp=world), RolloutLayout.consecutive(world, 1), "hf")
    trained = tensors_of(case.trained(case.weights(), rank), torch.float32)
    peers = None
    if kind == "peer":
        peers, trained = in_peer_memory(trained, rank)
    engine = Engine(case.targets()[rank], torch.float32)
    hybrid = HybridEngine(
        FullWeights(case.sources(), trained),
        engine,
        job_world(),
        staging_bytes=6000,
        peer_memory=peers,
        timeout_s=TIMEOUT_S,
    )
    if peers is None:
        packed.dist.batch_isend_irecv = Dying(dist.batch_isend_irecv, rank)
    else:
        peers.barrier = Dying(peers.barrier, rank)
    began = time.monotonic()
    try:
        hybrid.to_rollout(5)
    except PeerError as error:
        found = error
    else:
        raise AssertionError("half of the weights were taken for all")
    assert time.monotonic() - began < TIMEOUT_S + 10
    if found.is_lost:  # the heartbeat's verdict came before a connection broke
        assert found.culprit == LOST, found
    else:  # gloo's rings break one after the other: some may have seen it before and ended
        assert isinstance(found, TransportError)
        assert f"weight version 5 did not arrive on rank {rank}" in str(found), found
        assert re.search(rf"ranks \[.*{LOST}.*\].* have ended", str(found)), found
    assert engine.calls == ["begin"], engine.calls  # never told that its weights are complete
    os._exit(0)  # the group is broken


if __name__ == "__main__":
    main()
