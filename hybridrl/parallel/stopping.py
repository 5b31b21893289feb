"""SIGINT, SIGTERM, SIGUSR1 and SIGHUP in training: all ranks save where they are, and end.

A handler only notes the signal. Ranks tell each other with whatever they exchange anyway
(`World.stop_signal`), and the heartbeat brings it to ranks that got none, so that all leave a step
at the same place: `StopAsked`. A step that has changed no weights is left in the middle, and its
responses are saved, whole and begun ones; one that has is finished first.

SIGUSR1, by which schedulers say that a machine is about to be taken away, SIGHUP of a terminal that
is closed, and a file (`Notice`) have the effect of SIGTERM. A thread looks for the file, and ends a
process that does not come to save in time: nothing else can call back a phase that does not end.
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

# Within this time a second signal is the first one's copy: terminals, torchrun and schedulers send
# it to the launcher and to the ranks, and the launcher passes it on.
SAME_SIGNAL_S = 3.0
LOOK_S = 0.5  # between looks at the clock and for the file


class StopAsked(Exception):
    """Some rank was asked to stop; raised on all ranks at the same place.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"stopped by {signal.Signals(number).name}")

    def end(self) -> BaseException:
        """Returns what ends the process as the signal would have: KeyboardInterrupt for SIGINT,
        SystemExit with 128 + the signal's number for others.
        """
        if self.number == signal.SIGINT:
            return KeyboardInterrupt(str(self))
        return SystemExit(128 + self.number)


@dataclass(frozen=True)
class Notice:
    """How a run is asked to stop beside signals, and how long it has to begin saving.

    Args:
        grace_s: from the signal until a rank begins to save; a process that does not get there
            ends. Saving may take longer.
        file: stands for SIGTERM once it is there, and is removed. Rank 0 looks for it.
    """

    grace_s: float
    file: Path


def check_stop(world: World) -> None:
    """Raises StopAsked if a rank was asked to stop before the last exchange of values; all ranks
    call it at the same place, with no exchange between some ranks and others.
    """
    if world.stop_signal:
        raise StopAsked(world.stop_signal)


@contextmanager
def stops_on_signals(
    world: World, save: Callable[[StopAsked], None], notice: Notice
) -> Iterator[None]:
    """Notes signals for `StopAsked`, in the main thread; a second one ends the process.

    Elsewhere signals do what they did before: Python calls handlers in the main thread only. What
    users' code raises to end the process (sys.exit) is no stop, but an error of its own.

    Args:
        world: whose ranks stop together.
        save: called at a stop, while further signals are still noted.
        notice: how else they are asked, and how long they have.

    Raises:
        KeyboardInterrupt, SystemExit: after a stop, as of `StopAsked.end`.
    """
    world.forget_stop()
    before = _note_signals(world) if _is_main_thread() else {}
    is_saving = threading.Event()
    parts = world, notice, is_saving
    threading.Thread(target=_look, args=parts, name="stop", daemon=True).start()
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
            # None: of a library in C, which Python cannot set again. (Of faulthandler's it says
            # that there is none.)
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        world.forget_stop()


def _look(world: World, notice: Notice, is_saving: threading.Event) -> None:
    """Looks for the file, and at the clock once a signal has come, until the ranks save."""
    since: float | None = None
    while not is_saving.wait(LOOK_S):
        # Not Path.exists, which raises where a file system does not answer for a while (ESTALE).
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
    """Ends this process: a phase did not end in time. Checkpoints that are there stay whole."""
    if "RANK" not in os.environ:  # a notebook's process is the user's
        return
    said = (
        f"hybridrl: {signal.Signals(number).name}: phase '{world.heartbeat.phase()}' did not end "
        f"within run.grace_s={grace_s:g}; nothing was saved, the newest checkpoint stands"
    )
    if world.rank == 0:
        say(said)
    else:
        failure.log(said)
    failure.end()
    os._exit(128 + number)


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _note_signals(world: World) -> dict[signal.Signals, Any]:
    """Sets the handlers; returns those before."""
    first: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        first.append(time.monotonic())
        is_second = may_be_second(number) and first[-1] - first[0] > SAME_SIGNAL_S
        number = meaning(number)
        if is_second:
            if number == signal.SIGINT and "RANK" not in os.environ:  # a notebook's process stays
                raise KeyboardInterrupt
            os._exit(128 + number)
        world.heartbeat.stop_signal = world.heartbeat.stop_signal or number

    return {number: signal.signal(number, note) for number in noted_signals()}
