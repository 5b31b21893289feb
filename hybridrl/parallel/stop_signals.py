"""Signals that ask a run to save and end, in the launcher and in ranks. No torch."""

from __future__ import annotations

import signal

# Schedulers send SIGUSR1 shortly before the time limit. The system sends SIGHUP when a terminal
# closes.
STAND_FOR_SIGTERM = (signal.SIGUSR1, signal.SIGHUP)


def noted_signals() -> list[signal.Signals]:
    """Returns the signals that a run handles, without SIGHUP if it is ignored (nohup)."""
    signals = [signal.SIGINT, signal.SIGTERM, *STAND_FOR_SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signals.remove(signal.SIGHUP)
    return signals


def meaning(number: int) -> int:
    """Returns the signal, SIGINT or SIGTERM, that `number` is treated as."""
    return signal.SIGTERM if number in STAND_FOR_SIGTERM else number


def may_be_second(number: int) -> bool:
    """Returns whether this signal, after another one, asks the run to end immediately.

    Shells and the system send SIGHUP several times when a terminal is closed.
    """
    return number != signal.SIGHUP
