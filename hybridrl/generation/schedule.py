"""Rules for when prompts begin, when the generation of a step may end, and which groups it takes.

A step's number is the version of the weights that it trains. Generation with those weights gives
the step's samples. Then the policy trains, while engines stop or generate ahead:

    engines on their own ranks                    | ranks that train and generate
    generating            training                |
    generate      v=n     -                       | generate v=n
    samples  <------------> samples               | samples
    generate ahead v=n    train v=n               | train v=n
    weights  <------------> weights v=n+1         | weights v=n+1

Both sides exchange samples and weights in this order and nothing else, so neither waits for the
other within an action. A step that replaces groups repeats `generate` and `samples`, in rounds that
all ranks count in the same way.

A group is the samples of one prompt. Steps may train on it until `max_lag` steps after the one that
began it, so none of its tokens has older weights. All ranks know all groups and compute the same
answers without communication. Pure, no torch.
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
    """The samples of one prompt, in the form that all ranks know.

    Args:
        number: Number of the group in the run.
        born: Step whose weights first generated it.
        place: Position of its prompt among those that this step took from the data.
        prompt: Prompt of all its samples.
        replica: Replica that has its samples; None if rank 0 has them or there are none yet.
        runs: Runs of tokens of each sample, in the order of sample numbers.
        is_done: Whether each sample is finished.
    """

    number: int
    born: int
    place: int
    prompt: Prompt
    replica: int | None
    runs: tuple[Runs, ...]
    is_done: tuple[bool, ...]

    @property
    def is_complete(self) -> bool:
        """Whether all samples are finished."""
        return all(self.is_done)

    @property
    def open_lengths(self) -> list[int]:
        """Number of tokens so far of each unfinished sample."""
        return [
            sum(count for _, count in runs)
            for runs, is_done in zip(self.runs, self.is_done, strict=True)
            if not is_done
        ]


@dataclass(frozen=True)
class Schedule:
    """Limits on what a run generates, and when.

    Args:
        max_lag: Most steps between the weights that sampled a token and those that learn from it;
            with 0, each step generates all samples that it trains on.
        per_step: Groups that a step takes.
        in_flight: Groups in flight while a step generates.
        at_bound: Whether a step waits for groups that may not get older ("finish"), or drops them.
        ahead_until: Number of unfinished samples at which generation during training pauses; None
            if engines do not generate during training.
    """

    max_lag: int
    per_step: int
    in_flight: int
    at_bound: AtBound = "finish"
    ahead_until: int | None = None

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
        """Returns the number of groups to begin.

        Args:
            num_held: Groups in flight.
            is_ahead: Whether the present step already has its samples. Then one step fewer can
                learn from new groups, and more groups could not all be taken in time.
            room: Further groups that the step takes; the default is `per_step`.
        """
        now = 0 if is_ahead else self._room(room)
        most = self.per_step * self.max_lag + now
        return max(0, min(self.in_flight, most) - num_held)

    def by_deadline(self, born: Sequence[int], step: int) -> list[int]:
        """Returns the number of groups whose last step is this one, the next one, and so on.

        Args:
            born: Step that began each group.
            step: Present step.
        """
        found = [0] * (self.max_lag + 1)
        for birth in born:
            found[birth + self.max_lag - step] += 1
        return found

    def may_end(
        self, complete: Sequence[int], held: Sequence[int], room: int | None = None
    ) -> bool:
        """Returns whether generation may end: the step's groups are complete, and later steps can
        take the rest in time.

        The step takes complete groups, the oldest first. At most j steps' worth of groups may
        remain whose last step is at most j steps away: then taking the earliest deadline first
        keeps all of them (Liu and Layland 1973, J. ACM 20(1), 46-61, sec. 7).

        Args:
            complete, held: Numbers of complete groups and of all groups, from `by_deadline`.
            room: Further groups that the step takes; the default is `per_step`.
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
        """Returns the groups that a step takes, those that stay in flight, and those that no later
        step may learn from; a further round of this step takes the latter, or its end drops them.

        Args:
            groups: All groups, when `may_end` is true.
            step: Present step.
            room: Further groups that the step takes; the default is `per_step`.
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
"""Each step generates all samples of its prompts to their end."""


def remaining_tokens(have: int, expected: float, longest: int) -> float:
    """Returns the expected number of further tokens of a response; if it is already longer than
    expected, half of the tokens up to the limit.
    """
    return expected - have if expected > have else max(longest - have, 0) / 2


def assign_replicas(
    groups: Sequence[Group], expected: Mapping[int, float], longest: int, num_replicas: int
) -> dict[int, int]:
    """Returns the replica of each group, by number, so that the remaining work is spread evenly.
    Complete groups do not move; the others may.

    Args:
        groups: All groups.
        expected: Expected tokens of a response, by group.
        longest: Token limit of a response.
        num_replicas: Number of replicas.
    """
    found = {g.number: g.replica for g in groups if g.is_complete and g.replica is not None}
    moved = [group for group in groups if group.number not in found]
    work = []
    for group in moved:
        lengths = group.open_lengths
        new = sum(remaining_tokens(have, expected[group.number], longest) for have in lengths)
        read = len(group.prompt.tokens) + sum(lengths)
        work.append(new + PROMPT_TOKEN_WORK * read)
    for replica, indices in enumerate(spread(work, num_replicas)):
        found |= {moved[i].number: replica for i in indices}
    return found
