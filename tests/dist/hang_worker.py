"""One rank of the test of hangs: who is slow, who stands still, and who waits somewhere else.

hang_worker.py FOLDER CASE. `cases`: rank 1 is slow, then in an endless loop until it is told of,
twice, over gloo then in a slow receive that others wait for, then in another collective than the
others, then stopped. `first`: rank 0, which judges and
keeps the store, is busy in native code that holds the interpreter, then stopped. `usual`: as
`cases`, with the limits of a run, and nobody slow. Where there are GPUs, collectives of tensors are
NCCL's, and ranks wait for their results.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import gloo_thread
import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.parallel import heartbeat, progress
from hybridrl.parallel.groups import PeerError, World
from hybridrl.parallel.watch import observe_hangs
from hybridrl.platform import Platform
from hybridrl.services.launch.rank_log import write_stacks_on_signal
from hybridrl.services.liveness import hang_reports


class Case:
    """The step that this rank says to be in, and the page of it."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder, self.step = world, folder, 1
        # Of another name each: a phase that has paused for long is given twice that.
        world.heartbeat.phase = lambda: f"case {self.step}, step {self.step}"

    @property
    def page(self) -> Path:
        return self.folder / "hangs" / f"step_{self.step}.txt"

    def begin(self, step: int) -> None:
        self.world.arrive("the case before")
        self.step = step
        if self.world.rank == 0:
            (self.folder / f"began_{step}").touch()

    def ones(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self.world.platform.device)

    @staticmethod
    def wait_for(collective: Callable[..., object], tensor: Tensor, **options: Any) -> None:
        collective(tensor, **options)
        tensor.sum().item()


def slow(case: Case) -> None:
    """A rank whose rounds are counted is waited for, longer than one that stands still."""
    if case.world.rank == 1:
        for _ in range(16):
            time.sleep(hang_reports.HANG_S / 10)
            progress.advance()
    case.world.arrive("a slow rank")
    assert not case.page.parent.exists(), "a slow rank was told of"


def slow_transfer(case: Case, group: Any) -> None:
    """Two ranks receive from each other what is sent only once that was told of."""
    rank = case.world.rank
    if rank < 2:
        other = 1 - rank

        def send() -> None:
            # Often: a rank that has received while its peer still waits would be told of instead.
            while not case.page.exists():
                time.sleep(0.005)
            dist.send(torch.ones(4), other)

        sender = threading.Thread(target=send)
        sender.start()
        time.sleep(2 * heartbeat.BEAT_S)  # until all know that rank 2 waits
        dist.recv(torch.empty(4), other)
        sender.join()
    case.wait_for(dist.all_reduce, case.ones(2), group=group)


def spin(page: Path) -> None:
    while not page.exists():
        pass


def stop_after(case: Case) -> None:
    """Stops this process once its waiting has been told of."""
    while not case.page.exists():
        time.sleep(0.1)
    case.step += 1
    (case.folder / f"began_{case.step}").touch()
    time.sleep(3 * heartbeat.BEAT_S)
    os.kill(os.getpid(), signal.SIGSTOP)


def cases(case: Case) -> None:
    slow(case)
    usual(case)


def usual(case: Case) -> None:
    is_odd = case.world.rank == 1
    case.begin(2)
    if is_odd:
        spin(case.page)
    case.world.arrive("a rank in an endless loop")
    groups = [dist.new_group(group_desc=name) for name in ("GRADS", "EXPERTS")]
    for group in groups:  # NCCL connects ranks at a group's first use
        case.wait_for(dist.all_reduce, case.ones(2), group=group)
    case.begin(3)
    if is_odd:
        spin(case.page)
    case.wait_for(dist.all_reduce, case.ones(3, 4), group=groups[0])
    if case.world.platform.is_cpu:  # NCCL's peers are known, and take one call at a time
        case.begin(4)
        slow_transfer(case, groups[0])
    case.begin(5)
    if is_odd:
        threading.Thread(target=stop_after, args=[case]).start()
        case.wait_for(dist.broadcast, case.ones(7).long(), src=0, group=groups[1])
    case.wait_for(dist.all_reduce, case.ones(5, 6), group=groups[0])


def first(case: Case) -> None:
    is_first = case.world.rank == 0
    if is_first:
        time.sleep(5 * heartbeat.BEAT_S)  # the others have read its step
        until_page = f"for i in $(seq 300); do sleep 0.1; [ -e {case.page} ] && exit; done"
        ctypes.PyDLL(None).system(until_page.encode())  # PyDLL: holds the interpreter
    case.world.arrive("a rank in native code")
    case.begin(2)
    try:
        if is_first:
            time.sleep(5 * heartbeat.BEAT_S)  # the others have read its step
            os.kill(os.getpid(), signal.SIGSTOP)
        case.world.arrive("a stopped rank")
    except PeerError as error:
        (case.folder / f"said_{case.world.rank}").write_text(str(error))
        time.sleep(heartbeat.GRACE_S)  # the other one says it too
        raise


def main() -> None:
    gloo_thread.part()
    if sys.argv[2] != "usual":
        heartbeat.BEAT_S, heartbeat.SILENT_S, heartbeat.NOTE_CALLS_S = 0.2, 1.6, 1.25
        hang_reports.HANG_S = 2.5
        heartbeat.GRACE_S = 4.0 if sys.argv[2] == "first" else 1.0
    write_stacks_on_signal()
    observe_hangs(hang_reports.HangReports)
    platform = Platform.detect()
    platform.activate()
    dist.init_process_group(platform.backend, timeout=timedelta(seconds=120))
    case = Case(World(platform, 120.0), Path(sys.argv[1]))
    {"cases": cases, "first": first, "usual": usual}[sys.argv[2]](case)


if __name__ == "__main__":
    main()
