"""One rank of the heartbeat's test: who is waited for, and what is said of one that is stopped.

heartbeat_worker.py FOLDER. Rank 1 is late, then busy in native code that holds the interpreter, and
stops in the end; rank 0 waits for it, rank 2 sits in a collective that nothing can call back.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import gloo_thread
import torch
import torch.distributed as dist

from hybridrl.parallel import heartbeat
from hybridrl.parallel.descriptors import OTHERS, num_needed
from hybridrl.parallel.groups import PeerError, World
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.platform import Platform

TIMEOUT_S, LATE_S = 2.0, 3.0


def check_descriptors(world: World, layouts: list[TrainLayout], found: int) -> None:
    """What a rank needs is what its groups take, and two clients of the store. Megatron-Core 0.16
    makes three groups fewer for a layout than is counted.
    """
    of_groups = num_needed(world.size, layouts, is_cpu=True)
    of_groups -= OTHERS + 2 * world.size
    of_server = 2 * world.size if world.rank == 0 else 0
    of_newer = sum(4 + 4 + each.etp * each.ep * each.pp + 3 for each in layouts)
    assert (
        of_groups + 2 - of_newer <= found <= of_groups + 2 + of_server + 10 * (world.rank == 0)
    ), found


def check_late_ranks(world: World) -> None:
    """Who comes later than a collective may take is waited for, in every group."""
    is_late = world.rank == 1
    time.sleep(LATE_S * is_late)
    assert world.gather_objects(world.rank) == [0, 1, 2]
    time.sleep(LATE_S * is_late)
    world.arrive("the test")
    replica = ReplicaGroup(RolloutLayout.consecutive(3, 3), world.rank, world.heartbeat)
    time.sleep(LATE_S * replica.is_first)
    assert replica.broadcast_object(world.rank) == 0
    assert replica.is_any(is_late) and not replica.is_any(False)
    with world.all_agree("reading", is_unbounded=True):
        time.sleep(LATE_S * is_late)
        dist.all_reduce(torch.ones(1))


def check_busy_rank(world: World) -> None:
    """A rank without a beat is not lost while its process runs."""
    if world.rank == 1:
        ctypes.PyDLL(None).usleep(int(2 * heartbeat.SILENT_S * 1e6))
    world.arrive("the library")


def check_signals(world: World) -> None:
    """All ranks hear of one rank's signal, and agree on it at the next exchange of values."""
    own = world.heartbeat
    if world.rank == 2:
        own.stop_signal = signal.SIGTERM
    assert world.stop_signal == 0
    deadline = time.monotonic() + 10
    while not own.stop_signal and time.monotonic() < deadline:
        time.sleep(0.05)
    assert own.stop_signal == signal.SIGTERM, f"rank {world.rank} heard of no signal"
    world.arrive("the signal")  # an exchange of nothing
    assert world.stop_signal == 0
    assert world.gather_objects("x" * world.rank) == ["", "x", "xx"]
    assert world.stop_signal == signal.SIGTERM
    time.sleep(3 * heartbeat.BEAT_S)  # beats with the signal are read
    world.arrive("reading it")
    world.forget_stop()
    time.sleep(5 * heartbeat.BEAT_S)  # beats from before are read too
    assert own.stop_signal == world.stop_signal == 0


def stop_here() -> None:
    time.sleep(5 * heartbeat.BEAT_S)  # the last beat tells where the rank is
    os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    gloo_thread.part()  # `check_descriptors` counts those of a run
    heartbeat.BEAT_S, heartbeat.SILENT_S = 0.2, 1.6
    heartbeat.GRACE_S = 4.0  # rank 2 ends after rank 0 has said all
    folder = Path(sys.argv[1])
    platform = Platform.detect()
    platform.activate()
    before = len(os.listdir("/proc/self/fd"))
    # A script's own group, not `start_process_group`: heartbeats begin with the World.
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    time.sleep(LATE_S * (dist.get_rank() == 1))  # others beat already
    world = World(platform, TIMEOUT_S)
    layouts = [TrainLayout(3)]
    mesh = Mesh(world, layouts[0])
    check_descriptors(world, layouts, len(os.listdir("/proc/self/fd")) - before)
    layouts += [TrainLayout(2, tp=2)]
    Mesh(world, layouts[1], [0, 1], [mesh])
    if world.rank < 2:
        check_descriptors(world, layouts, len(os.listdir("/proc/self/fd")) - before)
    check_late_ranks(world)
    check_busy_rank(world)
    check_signals(world)
    world.heartbeat.phase = lambda: "testing, step 3"
    other = dist.new_group(backend="gloo")  # of half an hour
    (folder / f"passed_{world.rank}").touch()
    (folder / f"began_{world.rank}").write_text(str(time.time()))
    if world.rank == 1:
        stop_here()
    if world.rank == 2:
        dist.all_reduce(torch.ones(1), group=other)
    try:
        world.arrive("the stop")
    except PeerError as error:
        (folder / "said").write_text(str(error))
        assert error.culprit == 1 and error.is_lost
        time.sleep(60)  # until rank 2 has ended


if __name__ == "__main__":
    main()
