"""Handles SIGINT, SIGTERM, SIGUSR1 and SIGHUP in training: all ranks save and end together.

Who waits for whom: a handler only records the signal. Ranks exchange it with their regular
exchanges of values (`World.stop_signal`), and heartbeats carry it to ranks that received none, so
that all ranks raise StopAsked at the same place. If the step has not changed weights yet, it is
abandoned and its finished and unfinished responses are saved; otherwise the step is finished first.

SIGUSR1 (a scheduler is about to take the machine), SIGHUP (the terminal was closed) and a file
(`Notice`) act like SIGTERM. A thread checks for the file, and ends a process that does not start
saving in time, because a phase that hangs cannot be interrupted otherwise.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hybridrl.config.own_code import contained
from hybridrl.console import say
from hybridrl.parallel import failure
from hybridrl.parallel.groups import World
from hybridrl.parallel.stop_signals import may_be_second, meaning, noted_signals

# A second signal within this time is a copy of the first: terminals, torchrun and schedulers signal
# both the launcher and the ranks, and the launcher forwards the signal.
SAME_SIGNAL_S = 3.0
LOOK_S = 0.5  # interval of checks for the file and the deadline


class StopAsked(Exception):
    """Some rank was asked to stop; raised on all ranks at the same place.

    Args:
        number: Number of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")

    def end(self) -> BaseException:
        """Returns the exception that ends the process as the signal would: KeyboardInterrupt for
        SIGINT, SystemExit with 128 + the signal's number for others.
        """
        if self.number == signal.SIGINT:
            return KeyboardInterrupt(str(self))
        return SystemExit(128 + self.number)


@dataclass(frozen=True)
class Notice:
    """A file that asks a run to stop, and the time that ranks have to start saving.

    Args:
        grace_s: Seconds from the signal until a rank must start to save; otherwise its process
            ends. Saving may take longer.
        file: File that acts like SIGTERM when it appears. Rank 0 checks for it and removes it.
    """

    grace_s: float
    file: Path


def check_stop(world: World) -> None:
    """Raises StopAsked if a rank had been asked to stop at the last exchange of values.

    All ranks call it at the same place. No exchange among only some ranks may come in between.
    """
    if world.stop_signal:
        raise StopAsked(world.stop_signal)


@contextmanager
def stops_on_signals(
    world: World, save: Callable[[StopAsked], None], notice: Notice
) -> Iterator[None]:
    """Records signals for `StopAsked` while the block runs; a second signal ends the process.

    In another thread than the main one, signals keep their handlers, since Python calls handlers
    only in the main thread. An exception by which users' code ends the process (sys.exit) is an
    error, not a stop.

    Args:
        save: Function that saves after a stop. Signals are still recorded while it runs.

    Raises:
        KeyboardInterrupt, SystemExit: The run was stopped; see `StopAsked.end`.
    """
    world.forget_stop()
    before = _note_signals(world) if _is_main_thread() else {}
    is_saving = threading.Event()
    threading.Thread(
        target=_look, args=(world, notice, is_saving), name="stop", daemon=True
    ).start()
    try:
        with contained():
            yield
    except StopAsked as stop:
        is_saving.set()
        save(stop)
        raise stop.end() from None
    finally:
        is_saving.set()
        for number, handler in before.items():
            # None stands for a handler of a C library, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        world.forget_stop()


def _look(world: World, notice: Notice, is_saving: threading.Event) -> None:
    """Checks for the file, and for the end of the grace period, until the ranks save."""
    since: float | None = None
    while not is_saving.wait(LOOK_S):
        # Path.exists would raise if a file system does not respond for a while (ESTALE).
        is_asked = world.rank == 0 and os.path.exists(notice.file)
        if is_asked and not world.heartbeat.stop_signal:
            with contextlib.suppress(OSError):
                notice.file.unlink()
            world.heartbeat.stop_signal = signal.SIGTERM
        number = world.heartbeat.stop_signal
        since = (since or time.monotonic()) if number else None
        if since is not None and time.monotonic() - since > notice.grace_s:
            _end_unsaved(number, notice.grace_s, world)


def _end_unsaved(number: int, grace_s: float, world: World) -> None:
    """Ends this process because a phase did not end in time. Existing checkpoints stay."""
    if "RANK" not in os.environ:  # the process is the user's notebook
        return
    message = (
        f"hybridrl: {signal.Signals(number).name}: phase '{world.heartbeat.phase()}' did not end "
        f"within run.grace_s={grace_s:g}; nothing was saved, and the newest checkpoint is intact"
    )
    if world.rank == 0:
        say(message)
    else:
        failure.log(message)
    failure.end()
    os._exit(128 + number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _note_signals(world: World) -> dict[signal.Signals, Any]:
    """Sets the handlers and returns the previous ones."""
    first: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        first.append(time.monotonic())
        is_second = may_be_second(number) and first[-1] - first[0] > SAME_SIGNAL_S
        number = meaning(number)
        if is_second:
            if number == signal.SIGINT and "RANK" not in os.environ:  # do not end a notebook
                raise KeyboardInterrupt
            os._exit(128 + number)
        world.heartbeat.stop_signal = world.heartbeat.stop_signal or number

    return {number: signal.signal(number, note) for number in noted_signals()}
