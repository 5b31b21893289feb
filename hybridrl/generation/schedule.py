"""Decides when generation for a prompt begins, when a step's generation may end, and on which
groups the step trains.

The number of a step is the version of the weights at its beginning. The step first generates its
samples with these weights. Then the policy trains, while the engines pause or generate ahead:

    engines on their own ranks                    | ranks that train and generate
    generating            training                |
    generate      v=n     -                       | generate v=n
    samples  <------------> samples               | samples
    generate ahead v=n    train v=n               | train v=n
    weights  <------------> weights v=n+1         | weights v=n+1

The two sides wait for each other only to exchange samples and then weights. A step that replaces
groups repeats `generate` and `samples` in rounds. All ranks run the same number of rounds.

A group consists of the samples for one prompt. The policy can train on a group at most `max_lag`
steps after the step that began the group, so no token comes from weights that are more than
`max_lag` steps old. All ranks know all groups and compute the same results without communication.
Pure functions; does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hybridrl.contracts.prompts import Prompt
from hybridrl.generation.spread import PROMPT_TOKEN_WORK, spread

Runs = tuple[tuple[int, int], ...]
"""The (version of the weights, number of tokens) of one response, in order."""
AtBound = Literal["finish", "drop"]


@dataclass(frozen=True)
class Group:
    """State of the samples for one prompt, known to all ranks."""

    number: int  # number of the group in the run
    born: int  # step in which generation of the group began
    place: int  # index of the prompt among the prompts that step `born` took from the data
    prompt: Prompt
    replica: int | None  # replica that stores the samples; None for rank 0, or if none exists yet
    runs: tuple[Runs, ...]  # by sample, ascending: runs of tokens from the same weights
    is_done: tuple[bool, ...]  # whether each sample is finished

    @property
    def is_complete(self) -> bool:
        return all(self.is_done)

    @property
    def open_lengths(self) -> list[int]:
        return [
            sum(count for _, count in runs)
            for runs, is_done in zip(self.runs, self.is_done, strict=True)
            if not is_done
        ]


@dataclass(frozen=True)
class Schedule:
    """Limits on what a run generates and when."""

    max_lag: int  # maximum age of a token in steps; 0 for no lag
    per_step: int  # groups that a step trains on; next: groups in flight
    in_flight: int
    at_bound: AtBound = "finish"  # wait for groups of the maximum age ("finish"), or drop them
    ahead_until: int | None = None  # unfinished samples at which engines pause in training, if any

    def __post_init__(self) -> None:
        most = self.per_step * (self.max_lag + 1)
        if self.max_lag < 0 or not self.per_step <= self.in_flight <= most:
            raise ValueError(f"{self}: in_flight must be from per_step to per_step * (max_lag + 1)")

    @property
    def carries_over(self) -> bool:
        """Whether unfinished samples continue in the next step."""
        return self.max_lag > 0

    @property
    def generates_ahead(self) -> bool:
        """Whether engines generate while the policy trains."""
        return self.ahead_until is not None

    def num_new(self, num_held: int, is_ahead: bool = False, room: int | None = None) -> int:
        """Returns the number of groups to begin now, with `num_held` in flight. With `is_ahead`,
        the step already has its samples, so new groups are for later steps. Otherwise, the step
        will still take `room` groups, by default `per_step`.
        """
        now = 0 if is_ahead else self._room(room)
        most = self.per_step * self.max_lag + now
        return max(0, min(self.in_flight, most) - num_held)

    def by_deadline(self, born: Sequence[int], step: int) -> list[int]:
        """Returns how many groups, begun in steps `born`, have their deadline at this step, at the
        next, and so on. A deadline is the last step that may train on a group.
        """
        found = [0] * (self.max_lag + 1)
        for birth in born:
            found[birth + self.max_lag - step] += 1
        return found

    def may_end(
        self, complete: Sequence[int], held: Sequence[int], room: int | None = None
    ) -> bool:
        """Whether generation may end, because the step's groups are complete and later steps can
        train on all other groups in time.

        The step takes `room` complete groups, by default `per_step`, oldest first. After that, for
        every j, at most j * `per_step` of the remaining groups may have a deadline that is at most
        j steps away. Then no remaining group misses its deadline if steps take the groups with the
        earliest deadline first (Liu and Layland 1973, J. ACM 20(1), 46-61, sec. 7). `complete` and
        `held` are results of `by_deadline` for the complete groups and for all groups.
        """
        room = self._room(room)
        if sum(complete) < room:
            return False
        if self.at_bound == "drop":
            return True
        left = 0
        for later, (done, known) in enumerate(zip(complete, held, strict=True)):
            taken = min(done, room)
            room -= taken
            left += known - taken
            if left > later * self.per_step:
                return False
        return True

    def choose(
        self, groups: Sequence[Group], step: int, room: int | None = None
    ) -> tuple[list[Group], list[Group], list[Group]]:
        """Returns the groups that the step takes, those that stay, and those too old to stay.
        `may_end` must be true. A further round may take groups that are too old for later steps;
        otherwise they are dropped when the step ends. The step still takes `room`, by default
        `per_step`.
        """
        room = self._room(room)
        ordered = sorted(groups, key=lambda group: group.number)
        taken = [group for group in ordered if group.is_complete][:room]
        numbers = {group.number for group in taken}
        left = [group for group in ordered if group.number not in numbers]
        late = [group for group in left if group.born + self.max_lag <= step]
        return taken, [group for group in left if group not in late], late

    def _room(self, room: int | None) -> int:
        return self.per_step if room is None else room


SYNCHRONOUS = Schedule(max_lag=0, per_step=1, in_flight=1)
"""Schedule without a lag: each step completes all samples for its prompts."""


def remaining_tokens(have: int, expected: float, longest: int) -> float:
    """Returns the expected number of further tokens. If there are already more than expected, this
    is half of the possible further ones.
    """
    return expected - have if expected > have else max(longest - have, 0) / 2


def assign_replicas(
    groups: Sequence[Group],
    expected: Mapping[int, float],
    longest: int,
    num_replicas: int,
    moves: bool = True,
) -> dict[int, int]:
    """Assigns each group to a replica such that the remaining work is spread evenly. Returns the
    replica for each group number. Only incomplete groups may move, and only with `moves`.
    `expected` has the tokens per response by group, of at most `longest`.
    """
    found = {
        g.number: g.replica
        for g in groups
        if g.replica is not None and (g.is_complete or not moves)
    }

    def work_of(group: Group) -> float:
        lengths = group.open_lengths
        if not lengths:
            return 0.0
        new = sum(remaining_tokens(have, expected[group.number], longest) for have in lengths)
        return new + PROMPT_TOKEN_WORK * (len(group.prompt.tokens) + sum(lengths))

    moved = [group for group in groups if group.number not in found]
    begun: dict[int, float] = {}
    for group in groups:
        if group.number in found:
            replica = found[group.number]
            begun[replica] = begun.get(replica, 0.0) + work_of(group)
    work = [work_of(group) for group in moved]
    for replica, indices in enumerate(spread(work, num_replicas, begun)):
        found |= {moved[i].number: replica for i in indices}
    return found
