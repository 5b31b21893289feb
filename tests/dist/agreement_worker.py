"""One rank of the agreement test: what `World.all_agree` does with failures, and what it carries.

The last case ends the job as a failure would: rank 1 fails while rank 0 waits for it elsewhere.
"""

from __future__ import annotations

import pickle
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from hybridrl.errors import UserError
from hybridrl.parallel import waiting_room
from hybridrl.parallel.groups import PeerError, World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform


def columns(rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rank)
    return {
        "tokens": rng.integers(0, 9, 1000 * rank + 3),
        "flags": rng.random(5) < 0.5,
        "empty": np.zeros(0, dtype=np.float32),
        "logps": rng.random(7).astype(np.float32),
    }


def raised(world: World, on_ranks: tuple[int, ...], error: Exception, delay_s: float) -> str:
    """Lets these ranks fail, and the others come `delay_s` later; returns what this one got."""
    try:
        with world.all_agree("the part"):
            if world.rank in on_ranks:
                raise error
            time.sleep(delay_s)
    except (UserError, PeerError, ValueError) as caught:
        return f"{type(caught).__name__}: {caught}"
    return ""


def check_keys_are_removed(world: World) -> None:
    """Agreements for which somebody waits leave nothing in the job's store."""
    store = dist.distributed_c10d._get_default_store()
    before = store.num_keys()
    for _ in range(4):
        with world.all_agree("waiting"):
            time.sleep(0.6 * world.rank)
    for _ in range(3):  # all have left those before
        with world.all_agree("going on"):
            pass
    world.arrive("the end")
    assert world.rank or store.num_keys() <= before + 1, (before, store.num_keys())
    world.arrive("the count")


def check_one_sided_values(world: World) -> None:
    """What one rank tells comes once, not once for every rank."""
    for source in range(2):
        with world.all_agree("telling") as agreement:
            if world.rank == source:
                agreement.value = columns(source)
        assert agreement.values[1 - source] is None
        assert np.array_equal(agreement.values[source]["tokens"], columns(source)["tokens"])


def check_what_is_told(world: World) -> None:
    with world.all_agree("telling") as agreement:
        agreement.value = (world.rank, columns(world.rank) if world.rank else None)
    (zero, nothing), (one, found) = agreement.values
    assert (zero, nothing, one) == (0, None, 1)
    for name, column in columns(1).items():
        assert found[name].dtype == column.dtype and np.array_equal(found[name], column)
        assert found[name].flags.aligned and found[name].flags.writeable
    with world.all_agree("telling nothing") as agreement:
        pass
    assert agreement.values == [None, None]


def check_stop(world: World) -> None:
    """A signal that reached one rank is known to all after the next exchange, not later."""
    world.gather_objects(None)
    assert world.stop_signal == 0
    if world.rank == 1:
        world.heartbeat.stop_signal = 15
    world.gather_objects(None)
    assert world.stop_signal == 15
    world.forget_stop()
    world.gather_objects(None)


def check_failures(world: World) -> None:
    own = world.rank == 1
    for delay_s in (0.0, 1.5):
        got = raised(world, (1,), ValueError("mine"), delay_s)
        peers = "PeerError: rank 1 failed in the part: ValueError: mine"
        assert got == ("ValueError: mine" if own else peers), got
    mistake = UserError("key", 3, "4", "Set it.")
    assert raised(world, (1,), mistake, 0.0) == f"UserError: {mistake}"
    assert raised(world, (0, 1), ValueError(world.rank), 0.0) == f"ValueError: {world.rank}"
    assert raised(world, (), mistake, 0.0) == ""
    # A rank that comes when the failed one has left, but is still there.
    began = time.monotonic()
    got = raised(world, (1,), ValueError("mine"), waiting_room.PATIENCE_S + 2)
    assert time.monotonic() - began < waiting_room.PATIENCE_S + 4
    assert got == ("ValueError: mine" if own else peers), got


def check_stuck_peer(world: World, other: dist.ProcessGroup, out: Path) -> None:
    try:
        with world.all_agree("the part"):
            if world.rank == 1:
                raise ValueError("alone")
            dist.all_reduce(torch.ones(1), group=other)
    except (PeerError, ValueError) as caught:
        (out / f"{world.rank}").write_bytes(pickle.dumps((time.time(), str(caught))))
        raise SystemExit(3) from caught


def check_layouts(platform: Platform, rank: int) -> None:
    """Ranks that would make different groups find out before they wait for each other."""
    order = ("tp-cp-ep-dp-pp", "dp-tp-cp-ep-pp")[rank]
    try:
        Mesh(World(platform, 60), TrainLayout(2, tp=2, order=order))
    except RuntimeError as error:
        assert "the training layout differs between rank 0 and ranks [1]" in str(error)
        assert "dp-tp-cp-ep-pp" in str(error)
    else:
        raise AssertionError("different layouts were taken")


def main() -> None:
    waiting_room.PATIENCE_S = 3.0
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 60)
    stop_process_group()  # as a Trainer that is closed does before another in the same processes
    start_process_group(platform, 60)
    check_layouts(platform, dist.get_rank())
    world = World(platform, 60)
    other = dist.new_group(backend="gloo")
    check_what_is_told(world)
    check_one_sided_values(world)
    check_keys_are_removed(world)
    check_stop(world)
    check_failures(world)
    Path(sys.argv[1], f"passed_{world.rank}").touch()
    check_stuck_peer(World(platform, 60), other, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
