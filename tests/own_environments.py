"""Environments as users write them, for processes to import; and a tokenizer of numbers."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hybridrl.environments.base import Observation, Turn
from hybridrl.errors import UserError

SPECIAL = range(1, 12)  # 1 ends a turn


class Numbers:
    """A tokenizer whose tokens are numbers: "7 9" is the tokens 7 and 9."""

    def __call__(self, text: list[str], *, add_special_tokens: bool) -> dict[str, list[list[int]]]:
        assert not add_special_tokens
        return {"input_ids": [[int(word) for word in one.split()] for one in text]}

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = False) -> str:
        return " ".join(str(t) for t in token_ids if t not in SPECIAL or not skip_special_tokens)


class Sums:
    """Answers a turn with what it remembers of all turns; is done when the sum is divisible by 3.

    Its memory is the object's own: what it answers shows whether it saw every turn once.
    """

    def __init__(self, start: str | None = None, longest: int = 3) -> None:
        self.start, self.longest = start, longest
        self.total, self.turns = 0, 0

    def reset(self, prompt: str, columns: Mapping[str, object]) -> Observation:
        self.total = len(prompt)
        return self.start

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        assert [*map(int, text.split()), 1] == list(tokens)
        self.total, self.turns = self.total + sum(tokens), self.turns + 1
        seen = [10 + self.turns, 20 + self.total % 70][: self.longest]
        observation = seen if self.turns % 2 else " ".join(map(str, seen))
        notes = ["even"] * (self.total % 2 == 0)
        return Turn(observation, self.total / 64, self.total % 3 == 0, notes)


class Pictures:
    """Answers the first turn with a text, the second with a picture; the third is the last."""

    def reset(self, prompt: Any, columns: Mapping[str, object]) -> Observation:
        self.turns = 0
        return None

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        from PIL import Image

        self.turns += 1
        content: Any = "red"
        if is_second := self.turns == 2:
            image = Image.new("RGB", (32, 32), (9 * len(tokens) % 256, 80, 160))
            content = [{"type": "image", "image": image}, {"type": "text", "text": "blue"}]
        messages = [{"role": "tool", "content": content}]
        notes = ["picture"] * is_second
        return Turn(messages, 0.25 * len(tokens), self.turns == 3, notes)


class Counts:
    """Answers with the number of letters read; done if divisible by 3. Turns differ in time."""

    def reset(self, prompt: str, columns: Mapping[str, object]) -> Observation:
        self.total, self.clock = len(prompt), random.SystemRandom()
        return "1" if self.total % 2 else None

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        time.sleep(0.02 * self.clock.random())
        self.total += len(text)
        return Turn(str(self.total), self.total / 64, self.total % 3 == 0, ["read"])


class Stuck(Counts):
    """Counts, but takes half a minute for a turn while the file `path` is there."""

    def __init__(self, path: str) -> None:
        self.path = path

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        time.sleep(30 if os.path.exists(self.path) else 0)
        return super().step(tokens, text)


class Faulty(Sums):
    """Sums, but for prompts whose column `fault` says what goes wrong in their second turn."""

    def reset(self, prompt: str, columns: Mapping[str, object]) -> Observation:
        self.fault = columns["fault"]
        if self.fault == "reset":
            raise RuntimeError("no such world")
        return super().reset(prompt, columns)

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        answer = super().step(tokens, text)._replace(done=self.turns == 4)
        return answer if self.turns < 2 else self.spoilt(answer)

    def spoilt(self, answer: Turn):
        if self.fault == "hang":
            time.sleep(60)
        if self.fault == "exit":
            os._exit(3)
        if self.fault == "raise":
            raise ZeroDivisionError("no answer")
        bad = {
            "nan": Turn("1", float("nan")),
            "text": "nothing",
            "object": Turn(object()),  # type: ignore[arg-type]
            "token": Turn([5, 1000]),
            "negative": Turn([-1]),
            "note": Turn("1", notes=["Not a word"]),
        }
        return bad.get(str(self.fault), answer)


class Slow(Sums):
    """Takes 0.3 s a turn, or, where `fault` is hang, for ever."""

    def reset(self, prompt: str, columns: Mapping[str, object]) -> Observation:
        self.fault = columns["fault"]
        return super().reset(prompt, columns)

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        time.sleep(60 if self.fault == "hang" else 0.3)
        return super().step(tokens, text)._replace(done=False)


class ByProcess(Sums):
    """Answers otherwise in every process, as what looks at clocks or files does."""

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        answer = super().step(tokens, text)
        return answer._replace(observation=[20 + os.getpid() % 70, 3], done=self.turns == 3)


class Mistaken(Sums):
    """Says itself what the user did wrong."""

    def step(self, tokens: Sequence[int], text: str) -> Turn:
        raise UserError("environment.options.map", "nothing", "a map", "Set it.")


def num_words(prompt: str, response: str, columns: Mapping[str, object]) -> float:
    """A reward that tells how much of a response it saw."""
    return float(len(response.split()))
