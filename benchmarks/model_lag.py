"""Predicts the time of a step with a lag, from lengths of responses and from what a step of the
engines and training take, by the rules that runs follow (generation/in_flight.py). No GPU.

One replica decodes all that is under way; lengths are those of bench_step.py's tailed workload. A
step of the engine takes --base-ms and --sample-ms for each sample. By default these are of
Qwen2.5-7B with tensor parallel size 2 on two H200: 1,024 steps for 512 such responses take 5.84 s,
and the same tokens at the rate of 512 at once 2.45 s.

    python benchmarks/model_lag.py --out benchmarks/results/lag_model.json

Left out: prefill of what goes on with new weights, transfers, rewards.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from case_record import command_of, commit
from step_case import response_lengths

from hybridrl.contracts.prompts import Prompt
from hybridrl.generation.in_flight import (
    Group,
    Limits,
    choose,
    count_by_deadline,
    may_end,
    num_new,
)
from hybridrl.generation.lagged import STEPS_BETWEEN_ENDS

PROMPTS, SAMPLES, LONGEST = 64, 8, 1024
STEPS, WARMUPS = 12, 4
TRAIN_S = (1.5, 3.0, 6.0, 9.0)
SHARES = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5)
IN_FLIGHT = (1.5, 2.0)


@dataclass(frozen=True)
class Engine:
    """What a step of the engine takes, milliseconds."""

    base_ms: float
    sample_ms: float


class Run:
    """A run on a clock of its own.

    Args:
        engine: that decodes.
        train_s: seconds of the training part of a step.
        limits: of what is under way; None: no lag.
    """

    def __init__(self, engine: Engine, train_s: float, limits: Limits | None) -> None:
        self._engine, self._train_s, self._limits = engine, train_s, limits
        workload = {"workload": "tailed", "prompts": PROMPTS, "samples": SAMPLES}
        self._lengths = response_lengths({**workload, "response_tokens": LONGEST})
        self._groups: list[Group] = []
        self._left: dict[int, list[int]] = {}
        self._next, self.now_s = 0, 0.0

    def _begin(self, step: int, num: int) -> None:
        for number in range(self._next, self._next + num):
            ids = range(number * SAMPLES, (number + 1) * SAMPLES)
            self._left[number] = [self._lengths[one % len(self._lengths)] for one in ids]
            prompt = Prompt(number, "", (0,))
            self._groups.append(Group(number, step, 0, prompt, 0, (), (False,) * SAMPLES))
        self._next += num

    def _tokens_left(self) -> np.ndarray[Any, Any]:
        return np.array([self._left[group.number] for group in self._groups])

    def _unfinished(self) -> int:
        return int((self._tokens_left() > 0).sum())

    def _decode(self) -> None:
        """Takes the engine's steps up to the next look."""
        left = self._tokens_left()
        for taken in range(STEPS_BETWEEN_ENDS):
            if num := int((left > taken).sum()):
                self.now_s += (self._engine.base_ms + self._engine.sample_ms * num) / 1e3
        rest = np.maximum(left - STEPS_BETWEEN_ENDS, 0).tolist()
        self._left |= {group.number: one for group, one in zip(self._groups, rest, strict=True)}

    def _decode_until(self, is_enough: Callable[[], bool]) -> None:
        """Decodes up to the look after that at which there is enough: what a look counts is read at
        the next one, but for the first (looks.py).
        """
        if is_enough():
            return
        self._decode()
        while not is_enough():
            self._decode()
        self._decode()

    def _may_end(self, step: int) -> bool:
        assert self._limits is not None
        self._groups = [
            replace(one, is_done=tuple(left == 0 for left in self._left[one.number]))
            for one in self._groups
        ]
        whole = [one.born for one in self._groups if one.is_complete]
        born: Sequence[int] = [one.born for one in self._groups]
        counts = (count_by_deadline(found, step, self._limits) for found in (whole, born))
        return may_end(*counts, self._limits)

    def step(self, step: int) -> None:
        """Takes a step."""
        limits = self._limits
        if limits is None:
            self._begin(step, PROMPTS)
            while self._unfinished():
                self._decode()
            self._groups = []
            self.now_s += self._train_s
            return
        self._begin(step, num_new(len(self._groups), limits))
        self._decode_until(lambda: self._may_end(step))
        _, self._groups, _ = choose(self._groups, step, limits)
        trained_s = self.now_s + self._train_s
        if limits.ahead_until is not None:
            self._begin(step, num_new(len(self._groups), limits, is_ahead=True))
            enough = limits.ahead_until
            self._decode_until(lambda: self._unfinished() <= enough)
        self.now_s = max(self.now_s, trained_s)


def step_s(engine: Engine, train_s: float, limits: Limits | None) -> float:
    """Returns the mean seconds of a step, after the first ones."""
    run, began_s = Run(engine, train_s, limits), 0.0
    for step in count():
        if step == WARMUPS:
            began_s = run.now_s
        if step == WARMUPS + STEPS:
            return (run.now_s - began_s) / STEPS
        run.step(step)
    raise AssertionError


def main() -> int:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n", 1)[0].split()))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base-ms", type=float, default=5.19)
    parser.add_argument("--sample-ms", type=float, default=0.00275)
    given = parser.parse_args()
    engine, cases = Engine(given.base_ms, given.sample_ms), list[dict[str, Any]]()
    for train_s in TRAIN_S:
        cases.append({"train_s": train_s, "lag": 0, "step_s": step_s(engine, train_s, None)})
        for lag in (1, 2):
            for times in IN_FLIGHT:
                sizes = lag, PROMPTS, int(times * PROMPTS)
                found: dict[str, float] = {
                    f"{share:g}": step_s(
                        engine,
                        train_s,
                        Limits(*sizes, ahead_until=int(share * PROMPTS * SAMPLES)),
                    )
                    for share in SHARES
                }
                shared = step_s(engine, train_s, Limits(*sizes))
                case = {"train_s": train_s, "lag": lag, "in_flight": sizes[2]}
                cases.append({**case, "not_ahead_s": shared, "step_s_by_unfinished": found})
                print(
                    {**case, "not_ahead_s": round(shared, 2)},
                    [*map("{:.2f}".format, found.values())],
                )
    report = {
        "benchmark": "model of steps with a lag",
        "command": command_of(sys.argv),
        "commit": commit(),
        "workload": {"prompts": PROMPTS, "samples": SAMPLES, "longest": LONGEST},
        "engine_ms": {"base": engine.base_ms, "sample": engine.sample_ms},
        "cases": cases,
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
