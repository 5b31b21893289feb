"""The signals by which a run is asked to save and end, in the launcher and in ranks. No torch."""

from __future__ import annotations

import signal

# Schedulers send SIGUSR1 when the time is nearly over, the system SIGHUP when a terminal is closed.
STAND_FOR_SIGTERM = (signal.SIGUSR1, signal.SIGHUP)


def noted_signals() -> list[signal.Signals]:
    """Returns the signals that a run takes note of: not SIGHUP where it is ignored, since nohup
    says so.
    """
    signals = [signal.SIGINT, signal.SIGTERM, *STAND_FOR_SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signals.remove(signal.SIGHUP)
    return signals


def meaning(number: int) -> int:
    """Returns SIGINT or SIGTERM, which a signal stands for."""
    return signal.SIGTERM if number in STAND_FOR_SIGTERM else number


def may_be_second(number: int) -> bool:
    """Whether a signal that comes after another one asks the run to end immediately. Shells and the
    system send SIGHUP several times when a terminal is closed.
    """
    return number != signal.SIGHUP
