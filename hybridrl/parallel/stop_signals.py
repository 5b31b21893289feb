"""Defines the signals that ask a run to save and stop. Does not import torch."""

from __future__ import annotations

import signal
from types import FrameType

# Signals that are treated as SIGTERM. Schedulers send SIGUSR1 shortly before the time limit. The
# system sends SIGHUP when a terminal closes.
STAND_FOR_SIGTERM = (signal.SIGUSR1, signal.SIGHUP)


def noted_signals() -> list[signal.Signals]:
    """Returns the signals that a run handles, without SIGHUP if it is ignored (nohup)."""
    signals = [signal.SIGINT, signal.SIGTERM, *STAND_FOR_SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signals.remove(signal.SIGHUP)
    return signals


def leave_stop_signals_to_the_rank() -> None:
    """Makes this process continue after stop signals, which reach all processes of a job.

    The rank that started it decides when it ends. Programs that it starts do not inherit a handler,
    unlike SIG_IGN.
    """
    for number in noted_signals():
        signal.signal(number, _no_action)


def _no_action(number: int, frame: FrameType | None) -> None:
    """Does nothing on a signal."""


def meaning(number: int) -> int:
    """Returns SIGINT or SIGTERM: the signal for which `number` stands."""
    return signal.SIGTERM if number in STAND_FOR_SIGTERM else number


def may_be_second(number: int) -> bool:
    """Whether this signal, if it follows another one, asks the run to end immediately.

    Shells and the system send SIGHUP several times when a terminal is closed.
    """
    return number != signal.SIGHUP
