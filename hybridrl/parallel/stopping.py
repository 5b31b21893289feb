"""SIGINT and SIGTERM during training: all ranks save where they are, and end.

A handler only notes the signal. Ranks tell each other with whatever they exchange anyway
(`World.stop_signal`), and the heartbeat brings it to ranks that got none, so that all leave a step
at the same place: `StopAsked`. A step that has changed no weights is left in the middle, and its
responses are saved, whole and begun ones; one that has is finished first.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hybridrl.config.own_code import contained
from hybridrl.parallel.groups import World

SIGNALS = (signal.SIGINT, signal.SIGTERM)
# Within this time a second signal is the first one's copy: terminals, torchrun and schedulers send
# it to the launcher and to the ranks, and the launcher passes it on.
SAME_SIGNAL_S = 3.0


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


def check_stop(world: World) -> None:
    """Raises StopAsked if a rank was asked to stop before the last exchange of values; all ranks
    call it at the same place, with no exchange between some ranks and others.
    """
    if world.stop_signal:
        raise StopAsked(world.stop_signal)


@contextmanager
def stops_on_signals(world: World, save: Callable[[StopAsked], None]) -> Iterator[None]:
    """Notes SIGINT and SIGTERM for `StopAsked`, in the main thread; a second one ends the process.

    Elsewhere signals do what they did before: Python calls handlers in the main thread only. What
    users' code raises to end the process (sys.exit) is no stop, but an error of its own.

    Args:
        world: whose ranks stop together.
        save: called at a stop, while further signals are still noted.

    Raises:
        KeyboardInterrupt, SystemExit: after a stop, as of `StopAsked.end`.
    """
    world.forget_stop()
    before = _note_signals(world) if _is_main_thread() else {}
    try:
        with contained():
            yield
    except StopAsked as stop:
        save(stop)
        raise stop.end() from None
    finally:
        for number, handler in before.items():
            # None: of a library in C, which Python cannot set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        world.forget_stop()


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _note_signals(world: World) -> dict[signal.Signals, Any]:
    """Sets the handlers; returns those before."""
    first: list[float] = []

    def note(number: int, frame: FrameType | None) -> None:
        first.append(time.monotonic())
        if first[-1] - first[0] > SAME_SIGNAL_S:
            if number == signal.SIGINT and "RANK" not in os.environ:  # a notebook's process stays
                raise KeyboardInterrupt
            os._exit(128 + number)
        world.heartbeat.stop_signal = world.heartbeat.stop_signal or number

    return {number: signal.signal(number, note) for number in SIGNALS}
