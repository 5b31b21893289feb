"""Prompts whose responses are generated over several steps: which ones a step takes, when its
generation may end, and which replica goes on with which. Pure, no torch.

With `steps.max_policy_lag` above 0 more prompts are under way than a step takes. A group is the
samples of one prompt. It is born with the weights that a step trains, and may be trained on until
`max_policy_lag` steps later: no token of it can be of older weights. All ranks know all groups,
and come to the same answers without asking each other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hybridrl.contracts.prompts import Prompt
from hybridrl.generation.spread import PROMPT_TOKEN_WORK, spread

Runs = tuple[tuple[int, int], ...]
"""Of one response: (version of the weights, number of tokens that it made), in order."""
AtBound = Literal["finish", "drop"]


@dataclass(frozen=True)
class Limits:
    """What bounds the groups under way.

    Args:
        max_lag: steps that may lie between a token's weights and those that learn from it.
        per_step: groups that a step takes.
        in_flight: groups that are under way while a step generates.
        at_bound: whether a step waits for what may not be older, or throws it away.
        ahead_until: generation goes on while a step trains, until at most so many samples are
            unfinished; None: it does not, since training has the ranks.
    """

    max_lag: int
    per_step: int
    in_flight: int
    at_bound: AtBound = "finish"
    ahead_until: int | None = None

    def __post_init__(self) -> None:
        most = self.per_step * (self.max_lag + 1)
        if self.max_lag < 1 or not self.per_step <= self.in_flight <= most:
            raise ValueError(f"{self}: in_flight is from per_step to per_step * (max_lag + 1)")


@dataclass(frozen=True)
class Group:
    """The samples of one prompt, as all ranks know them.

    Args:
        number: of the group in the run.
        born: the step that trains the weights with which it was submitted first.
        place: of its prompt among those that this step took from the data.
        prompt: of all its samples.
        replica: that has its samples; None: rank 0 has them, or there is nothing yet.
        runs: of each sample, in the order of their numbers.
        is_done: of each sample, whether it is finished.
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
        """Tokens so far of each sample that is not finished."""
        return [
            sum(count for _, count in runs)
            for runs, is_done in zip(self.runs, self.is_done, strict=True)
            if not is_done
        ]


def num_new(num_held: int, limits: Limits, is_ahead: bool = False, room: int | None = None) -> int:
    """Returns how many groups come to those under way.

    Args:
        num_held: groups under way.
        is_ahead: whether the step whose weights generate has its samples already: then one step
            less may learn from what is begun, and more could not all be taken in time.
        room: how many more groups the step takes; None: `per_step`, as at its beginning.
    """
    now = 0 if is_ahead else limits.per_step if room is None else room
    most = limits.per_step * limits.max_lag + now
    return max(0, min(limits.in_flight, most) - num_held)


def count_by_deadline(born: Sequence[int], step: int, limits: Limits) -> list[int]:
    """Returns how many groups have to be taken in this step, in the next, and so on up to
    `max_lag` steps from now.

    Args:
        born: the step of each.
        step: the present one.
    """
    found = [0] * (limits.max_lag + 1)
    for one in born:
        found[one + limits.max_lag - step] += 1
    return found


def may_end(
    complete: Sequence[int], held: Sequence[int], limits: Limits, room: int | None = None
) -> bool:
    """Returns whether generation of a step may end: the step's groups are complete, and what is
    left after them can be taken in time.

    The step takes complete groups, the oldest first. Of the groups whose last step is j steps from
    now or earlier at most j steps' worth may be left: then taking what has the earliest deadline
    first keeps all of them (Liu and Layland 1973, J. ACM 20(1), 46-61, sec. 7).

    Args:
        complete, held: complete groups and all groups, as of `count_by_deadline`.
        room: how many more groups the step takes; None: `per_step`, as at its beginning.
    """
    room = limits.per_step if room is None else room
    if sum(complete) < room:
        return False
    if limits.at_bound == "drop":
        return True
    left = 0
    for later, (done, known) in enumerate(zip(complete, held, strict=True)):
        taken = min(done, room)
        room -= taken
        left += known - taken
        if left > later * limits.per_step:
            return False
    return True


def choose(
    groups: Sequence[Group], step: int, limits: Limits, room: int | None = None
) -> tuple[list[Group], list[Group], list[Group]]:
    """Returns the groups that a step takes, those that stay under way, and those that no later step
    may learn from: unless a further round of this step takes them, they are thrown away at its end.

    Args:
        groups: all of them, `may_end` is true of.
        step: the present one.
        room: how many more groups the step takes; None: `per_step`, as at its beginning.
    """
    room = limits.per_step if room is None else room
    ordered = sorted(groups, key=lambda group: group.number)
    taken = [group for group in ordered if group.is_complete][:room]
    numbers = {group.number for group in taken}
    left = [group for group in ordered if group.number not in numbers]
    late = [group for group in left if group.born + limits.max_lag <= step]
    return taken, [group for group in left if group not in late], late


def remaining_tokens(have: int, expected: float, longest: int) -> float:
    """Returns how many more tokens a response is expected to get: beyond its expected length half
    of what it may still get.
    """
    return expected - have if expected > have else max(longest - have, 0) / 2


def deal(
    groups: Sequence[Group], expected: Mapping[int, float], longest: int, num_replicas: int
) -> dict[int, int]:
    """Returns the replica of each group by number, so that what is left to generate is spread
    evenly. A complete group stays where it is; one that goes on may move, its tokens only.

    Args:
        groups: all of them.
        expected: tokens of a response to each group's prompt.
        longest: tokens that a response may have.
        num_replicas: how many generate.
    """
    found = {g.number: g.replica for g in groups if g.is_complete and g.replica is not None}
    moved = [group for group in groups if group.number not in found]
    work = []
    for group in moved:
        lengths = group.open_lengths
        new = sum(remaining_tokens(have, expected[group.number], longest) for have in lengths)
        read = len(group.prompt.tokens) + sum(lengths)
        work.append(new + PROMPT_TOKEN_WORK * read)
    dealt = {number: replica for number, replica in found.items() if replica is not None}
    for replica, indices in enumerate(spread(work, num_replicas)):
        dealt |= {moved[i].number: replica for i in indices}
    return dealt


def lag_metrics(taken: Sequence[Group], num_dropped: int, step: int) -> dict[str, float]:
    """Returns how old the samples of a step are, in steps between the weights that made a token and
    those that learn from it: `lag/mean` and `lag/max` over all their tokens; `lag/token_share/N`,
    the share of those that are N steps old; `lag/mixed_share`, the share of samples that several
    versions made; `lag/dropped`, samples that were thrown away.
    """
    runs = [one for group in taken for sample in group.runs for one in sample]
    tokens = sum(count for _, count in runs)
    by_age: Counter[int] = Counter()
    for version, count in runs:
        by_age[step - version] += count
    mixed = [len(sample) > 1 for group in taken for sample in group.runs]
    return {
        "lag/mean": sum((step - version) * count for version, count in runs) / tokens,
        "lag/max": float(max(step - version for version, _ in runs)),
        "lag/mixed_share": sum(mixed) / len(mixed),
        "lag/dropped": float(num_dropped),
        **{f"lag/token_share/{age}": num / tokens for age, num in sorted(by_age.items())},
    }


def queue_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Returns what is under way for later steps: `lag/unfinished`, samples that are still to be
    generated or go on, and `lag/waiting`, samples that are finished and that no step has taken.
    """
    is_done = [one for group in groups for one in group.is_done]
    return {
        "lag/unfinished": float(is_done.count(False)),
        "lag/waiting": float(is_done.count(True)),
    }
