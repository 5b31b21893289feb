"""What users' code must not do to the process that it runs in, by dotted path: rewards, an
environment, a tool, an algorithm.
"""

from __future__ import annotations

import os
import struct
import sys
from collections.abc import Mapping
from numbers import Real
from typing import Any

from hybridrl.environments.base import Observation, Turn
from hybridrl.rewards.outcome import Noted


class OwnEnd(BaseException):
    """No Exception."""


class Mute(Exception):
    """Has no text."""

    def __str__(self) -> str:
        raise SystemExit(0)


class Unshown:
    """Has a text that cannot be had, and one that is too long."""

    def __repr__(self) -> str:
        raise SystemExit(0)


class Wordy(str):
    """Has a text of 10 MB."""

    def __repr__(self) -> str:
        return "x\n" * 5_000_000


class NoFloat(int):
    """Is a number that ends the process."""

    def __float__(self) -> float:
        raise SystemExit(0)


Real.register(Unshown)


def write_everywhere(data: bytes) -> None:
    """Writes into every file descriptor of the process."""
    for file in range(3, 64):
        try:
            os.write(file, data)
        except OSError:
            continue


def does(prompt: str, response: str, columns: Mapping[str, object]) -> Any:
    """Does what the response says."""
    word = response.strip()
    found = {
        "digits": 10**5000,
        "unshown": Unshown(),
        "no float": NoFloat(),
        "note": Noted(1.0, "unheard of"),
    }
    if word in found:
        return found[word]
    if word == "exit":
        sys.exit(0)
    if word == "interrupt":
        raise KeyboardInterrupt
    if word == "own end":
        raise OwnEnd("of all")
    if word == "mute":
        raise Mute
    if word == "wordy":
        raise ValueError("x\n" * 5_000_000)
    if word == "end process":
        os._exit(0)
    if word == "rubbish":
        write_everywhere(b"rubbish, of more than 8 bytes")
    if word == "huge":
        write_everywhere(struct.pack("<Q", 1 << 62))
    if word == "no number":
        write_everywhere(framed(b'{"job": 0, "outcomes": [{"value": 1' + b"0" * 400 + b"}]}"))
    if word == "wrong":
        write_everywhere(framed(b'{"job": 0, "outcomes": 5}'))
    if word == "two answers":
        write_everywhere(framed(b'{"job": 2, "outcomes": [{"value": 3.0}]}'))
    return 1.0


def framed(data: bytes) -> bytes:
    """Returns the data as a worker sends it."""
    return struct.pack("<Q", len(data)) + data


class World:
    """An environment that does what its prompt says."""

    def __init__(self) -> None:
        self.word = ""

    def reset(self, prompt: str, columns: Mapping[str, object]) -> Observation:
        self.word = prompt
        return None

    def step(self, tokens: Any, text: str) -> Any:
        if self.word == "wordy":
            return Turn(Unshown())  # type: ignore[arg-type]
        if self.word == "token":
            return Turn([10**5000])
        if self.word == "reward":
            return Turn("1", 10**5000)
        return Turn("1", does("", self.word, {}))

    def close(self) -> None:
        sys.exit(0)


def tool(word: str) -> str:
    """Does what it is told."""
    return str(does("", word, {}))


class Algorithm:
    """Ends the process in its loss."""

    name = "ends"

    @property
    def needs(self) -> Any:
        """None but the usual."""
        from hybridrl.algorithms.base import Needs  # torch, which the other code does without

        return Needs()

    def advantages(self, batch: Any) -> Any:
        sys.exit(0)

    def denominator(self, batch: Any) -> float:
        return 1.0

    def loss(self, *arguments: Any) -> Any:
        return None
