"""Handles SIGINT, SIGTERM, SIGUSR1 and SIGHUP in training: all ranks save and end together.

Who waits for whom: a handler only records the signal. Heartbeats carry it to ranks that did not
receive it. Ranks also include it in their regular exchanges of values (`World.stop_signal`), so
that all ranks raise StopAsked at the same point. If the current step has not changed weights yet,
it is abandoned, and its finished and unfinished responses are saved. Otherwise the step is finished
first.

SIGUSR1 (a scheduler is about to reclaim the machine), SIGHUP (the terminal was closed) and a file
(`Notice`) act like SIGTERM. A thread checks for the file, and ends the process if saving does not
start in time, because a phase that hangs cannot be interrupted otherwise.
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

# A second signal within this time is considered a copy of the first, because terminals, torchrun
# and schedulers send a signal to both the launcher and the ranks, and the launcher forwards it.
SAME_SIGNAL_S = 3.0
LOOK_S = 0.5  # interval between checks for the file and the deadline


class StopAsked(Exception):
    """A rank was asked to stop by signal `number`. All ranks raise it at the same point."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")

    def end(self) -> BaseException:
        """Returns KeyboardInterrupt for SIGINT, else SystemExit with 128 plus the number."""
        if self.number == signal.SIGINT:
            return KeyboardInterrupt(str(self))
        return SystemExit(128 + self.number)


@dataclass(frozen=True)
class Notice:
    """A file that asks a run to stop like SIGTERM; rank 0 checks for it and removes it.

    If a rank does not start saving within `grace_s` seconds, its process is ended.
    """

    grace_s: float
    file: Path


def check_stop(world: World) -> None:
    """Raises StopAsked if, at the last exchange of values, any rank had been asked to stop.

    All ranks call it at the same point, with no exchange among only some ranks since then.
    """
    if world.stop_signal:
        raise StopAsked(world.stop_signal)


@contextmanager
def stops_on_signals(
    world: World, save: Callable[[StopAsked], None], notice: Notice
) -> Iterator[None]:
    """Records signals for `StopAsked` while its block runs. A second signal ends the process.

    Outside the main thread, signal handlers stay unchanged, because Python runs handlers only
    there. If user code ends the process (sys.exit), this is an error, not a stop.

    Args:
        save: Function that saves the run after a stop. Signals are still recorded while it runs.

    Raises KeyboardInterrupt or SystemExit if the run was stopped (`StopAsked.end`).
    """
    world.forget_stop()
    is_main_thread = threading.current_thread() is threading.main_thread()
    before = _note_signals(world) if is_main_thread else {}
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
            # None means that a C library had set the handler, which Python cannot restore.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        world.forget_stop()


def _look(world: World, notice: Notice, is_saving: threading.Event) -> None:
    """Checks for the file and the end of the grace period until saving starts."""
    since: float | None = None
    while not is_saving.wait(LOOK_S):
        # Path.exists would raise an error while a file system does not respond (ESTALE).
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
    """Ends this process because a phase did not end in time. Existing checkpoints remain intact."""
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


def _note_signals(world: World) -> dict[signal.Signals, Any]:
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
