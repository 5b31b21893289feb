"""Predicts the generation of a step with a lag on shared ranks under other rules than those that
runs follow, with replicas and with prefill: what could make it shorter, and what cannot. No GPU.

The workload is the one of bench_step.py's tailed 7B/tp2/tp1: two replicas, 32 prompts x 8 samples,
up to 1,024 tokens. A step of an engine takes --base-ms and --sample-ms for each sample of the
replica that has most, a token that is computed again --prefill-ms. The first two are of three cases
that were measured on H200s: 512 steps with 64 and with 128 samples a replica take 3.04 and 3.56 s,
1,024 steps of the tailed lengths 5.98 s. The rest of a step, --rest-s, is the measured one.

    python benchmarks/model_lag_rules.py --out benchmarks/results/lag_rules_model.json
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
    deal,
    may_end,
    num_new,
)
from hybridrl.generation.lagged import STEPS_BETWEEN_ENDS

PROMPTS, LONGEST, PROMPT_TOKENS, REPLICAS = 32, 1024, 256, 2
STEPS, WARMUPS = 16, 6


@dataclass(frozen=True)
class Costs:
    """What an engine takes, milliseconds."""

    base_ms: float
    sample_ms: float
    prefill_ms: float


@dataclass(frozen=True)
class Rule:
    """How a run goes on.

    Args:
        limits: of what is under way; None: no lag.
        every_other: all that may be under way begins in every other step, nothing in between.
        keeps_cache: unfinished samples stay on their replica, and their keys and values too.
    """

    limits: Limits | None
    every_other: bool = False
    keeps_cache: bool = False


class Run:
    """A run on a clock of its own, of generation alone.

    Args:
        costs: of the engines.
        rule: that it follows.
        samples: responses to each prompt.
    """

    def __init__(self, costs: Costs, rule: Rule, samples: int) -> None:
        self._costs, self._rule, self._samples = costs, rule, samples
        self._limits = rule.limits or Limits(1, PROMPTS, PROMPTS)
        workload = {"workload": "tailed", "prompts": PROMPTS, "samples": samples}
        lengths = response_lengths({**workload, "response_tokens": LONGEST})
        self._lengths = np.array(lengths).reshape(PROMPTS, samples)
        self._groups: list[Group] = []
        self._left: dict[int, np.ndarray[Any, Any]] = {}
        self._next, self.now_s, self.num_steps, self.prefill_s = 0, 0.0, 0, 0.0
        self.num_tokens = self.num_old = 0

    def _begin(self, step: int) -> None:
        num = num_new(len(self._groups), self._limits)
        if self._rule.every_other:
            num = max(0, 2 * PROMPTS - len(self._groups)) if step % 2 == 0 else 0
        for number in range(self._next, self._next + num):
            self._left[number] = self._lengths[number % PROMPTS].copy()
            prompt = Prompt(number, "", (0,) * PROMPT_TOKENS)
            empty = (((),) * self._samples, (False,) * self._samples)
            self._groups.append(Group(number, step, 0, prompt, None, *empty))
        self._next += num

    def _told(self, group: Group, replica: int | None) -> Group:
        """Returns a group as it is now."""
        left = self._left[group.number]
        have = self._lengths[group.number % PROMPTS] - left
        runs = tuple(((group.born, int(count)),) if count else () for count in have)
        given = (group.number, group.born, group.place, group.prompt, replica)
        return Group(*given, runs, tuple(bool(one == 0) for one in left))

    def _deal(self) -> None:
        """Deals groups to replicas, and lets these compute what is kept."""
        mean = float(self._lengths.mean())
        expected = {group.number: mean for group in self._groups}
        before = {group.number: group.replica for group in self._groups}
        # Where a cache is kept, only what is new is dealt.
        staying = {n for n, one in before.items() if one is not None and self._rule.keeps_cache}
        dealt = deal(self._groups, expected, LONGEST, REPLICAS)
        dealt |= {n: one for n, one in before.items() if n in staying and one is not None}
        tokens = [0] * REPLICAS
        for group in self._groups:
            if group.open_lengths and group.number not in staying:
                tokens[dealt[group.number]] += PROMPT_TOKENS + sum(group.open_lengths)
        took_s = self._costs.prefill_ms * max(tokens) / 1e3
        self.now_s, self.prefill_s = self.now_s + took_s, self.prefill_s + took_s
        self._groups = [self._told(group, dealt[group.number]) for group in self._groups]

    def _decode(self) -> None:
        """Takes the engines' steps up to the next look."""
        for _ in range(STEPS_BETWEEN_ENDS):
            num = [0] * REPLICAS
            for group in self._groups:
                num[group.replica or 0] += int((self._left[group.number] > 0).sum())
            if not any(num):
                return
            costs = self._costs
            self.now_s += (costs.base_ms + costs.sample_ms * max(num)) / 1e3
            self.num_steps += 1
            for group in self._groups:
                self._left[group.number] = np.maximum(self._left[group.number] - 1, 0)

    def _may_end(self, step: int) -> bool:
        whole = [one.born for one in self._groups if not self._left[one.number].any()]
        born = [one.born for one in self._groups]
        counts = (count_by_deadline(found, step, self._limits) for found in (whole, born))
        return may_end(*counts, self._limits)

    def step(self, step: int) -> None:
        """Takes the generation of a step."""
        self._begin(step)
        self._deal()
        old = {
            g.number: sum(count for (_, count), *_ in filter(None, g.runs)) for g in self._groups
        }
        if self._rule.limits is None:
            while any(self._left[group.number].any() for group in self._groups):
                self._decode()
        if not self._may_end(step):  # what a look counts is read at the next one (looks.py)
            self._decode()
            while not self._may_end(step):
                self._decode()
            self._decode()
        self._groups = [self._told(group, group.replica) for group in self._groups]
        taken, self._groups, _ = choose(self._groups, step, self._limits)
        self.num_tokens += int(sum(self._lengths[one.number % PROMPTS].sum() for one in taken))
        self.num_old += sum(old[group.number] for group in taken if group.born < step)


def predicted(costs: Costs, rule: Rule, samples: int, rest_s: float) -> dict[str, float]:
    """Returns means of a step, after the first ones."""
    run = Run(costs, rule, samples)
    for step in range(WARMUPS + STEPS):
        if step == WARMUPS:
            began = run.now_s, run.num_steps, run.prefill_s
            run.num_tokens = run.num_old = 0
        run.step(step)
    after = run.now_s, run.num_steps, run.prefill_s
    took_s, num, prefill_s = ((a - b) / STEPS for a, b in zip(after, began, strict=True))
    return {
        "generation_s": round(took_s, 3),
        "engine_steps": round(num, 1),
        "prefill_s": round(prefill_s, 3),
        "tokens_of_older_weights": round(run.num_old / run.num_tokens, 3),
        "step_s": round(took_s + rest_s, 2),
    }


def rules() -> Iterator[tuple[str, Rule]]:
    """Yields the rules by name."""

    def lag(max_lag: int, times: float) -> Limits:
        return Limits(max_lag, PROMPTS, int(times * PROMPTS))

    yield "no lag", Rule(None)
    for times in (1.5, 1.625, 1.75, 2.0):
        yield f"lag 1, in_flight {times:g} x", Rule(lag(1, times))
    yield "lag 1, 2 x begun in every other step", Rule(lag(1, 2), every_other=True)
    for times in (1.5, 1.75, 2.0):
        yield f"lag 1, in_flight {times:g} x, cache kept", Rule(lag(1, times), keeps_cache=True)
    for times in (1.5, 2.0, 3.0):
        yield f"lag 2, in_flight {times:g} x", Rule(lag(2, times))
    yield "lag 2, in_flight 3 x, cache kept", Rule(lag(2, 3.0), keeps_cache=True)


def bound(costs: Costs, samples: int, max_lag: int, rest_s: float) -> dict[str, float]:
    """Returns what no rule falls below: a longest response has the engine's steps of `max_lag` + 1
    steps, and each token is decoded once, in evenly loaded replicas; without any prefill.
    """
    workload = {"workload": "tailed", "prompts": PROMPTS, "samples": samples}
    tokens = sum(response_lengths({**workload, "response_tokens": LONGEST})) / REPLICAS
    num = LONGEST / (max_lag + 1)
    took_s = (costs.base_ms * num + costs.sample_ms * tokens) / 1e3
    return {
        "generation_s": round(took_s, 3),
        "engine_steps": num,
        "step_s": round(took_s + rest_s, 2),
    }


def table(costs: Costs, samples: int, rest_s: float, show: Callable[[str], None]) -> dict[str, Any]:
    """Returns the predictions of all rules."""
    found: dict[str, Any] = {}
    for name, rule in rules():
        found[name] = predicted(costs, rule, samples, rest_s)
        show(f"{samples:2} samples  {name:40} {found[name]}")
    for max_lag in (1, 2):
        name = f"lag {max_lag}, bound"
        found[name] = bound(costs, samples, max_lag, rest_s)
        show(f"{samples:2} samples  {name:40} {found[name]}")
    return found


def main() -> int:
    """Writes the table."""
    parser = argparse.ArgumentParser(description=" ".join(__doc__.split("\n\n", 1)[0].split()))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--base-ms", type=float, default=5.0)
    parser.add_argument("--sample-ms", type=float, default=0.014)
    parser.add_argument("--prefill-ms", type=float, default=0.017)
    parser.add_argument("--rest-s", type=float, default=6.2)
    given = parser.parse_args()
    costs = Costs(given.base_ms, given.sample_ms, given.prefill_ms)
    report = {
        "benchmark": "model of rules of a lag on shared ranks",
        "command": command_of(sys.argv),
        "commit": commit(),
        "workload": {"prompts": PROMPTS, "longest": LONGEST, "replicas": REPLICAS},
        "engine_ms": vars(costs),
        "rest_s": given.rest_s,
        "measured": {
            "no lag": {"generation_s": 5.98},
            "lag 1, in_flight 1.5 x": {"generation_s": 4.26},
        },
        "by_samples": {
            str(samples): table(costs, samples, given.rest_s, print) for samples in (8, 16)
        },
    }
    given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
