"""What is under way between two steps of a run with a lag."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.contracts.prompts import Prompt
from hybridrl.data.prompts import PromptSource
from hybridrl.generation.episodes import OpenResponse, restored
from hybridrl.generation.in_flight import Group, Runs
from hybridrl.generation.saved_rollouts import (
    done_fits,
    of_sample,
    request_fits,
    rollout_state,
    saved_sampling,
    turns_fit,
)
from hybridrl.rollout.engine import Completion, Request, SamplingParams

Sample = Completion | Request | OpenResponse
States = tuple[tuple[Runs, ...], tuple[bool, ...]]
"""Of the samples of a group: which weights made how many tokens, and whether it is finished."""


@dataclass(frozen=True)
class Pool:
    """What is under way between two steps; replaced, never changed.

    Args:
        groups: in the order of their numbers, the same on all ranks.
        samples: of this rank's replica, by number; on rank 0 those of groups without a replica too.
        next_number: of the next group.
        cursors: where the data stood before the prompts of a step were taken, by step.
        response_lengths: what responses to the prompts are expected to be like.
    """

    groups: tuple[Group, ...] = ()
    samples: Mapping[int, Sample] = field(default_factory=dict)
    next_number: int = 0
    cursors: Mapping[int, Mapping[str, int | str]] = field(default_factory=dict)
    response_lengths: Mapping[str, float] = field(default_factory=dict)

    def told(self, known: Mapping[int, States]) -> tuple[Group, ...]:
        """Returns all groups as their replicas tell of them, by number."""
        return tuple(
            replace(group, runs=known[group.number][0], is_done=known[group.number][1])
            for group in self.groups
        )

    def without(self, left: Sequence[Group], sample_ids: Callable[[Group], list[int]]) -> Pool:
        """Returns the pool with these groups alone.

        Args:
            left: they.
            sample_ids: returns the numbers of a group's samples.
        """
        kept = {one for group in left for one in sample_ids(group)}
        born = {group.born for group in left}
        return replace(
            self,
            groups=tuple(left),
            samples={one: sample for one, sample in self.samples.items() if one in kept},
            cursors={step: at for step, at in self.cursors.items() if step in born},
        )

    def rollouts(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Returns the samples of these numbers that are here for a checkpoint; JSON."""
        own = [self.samples[one] for one in numbers if one in self.samples]
        whole = [one for one in own if isinstance(one, Completion)]
        begun = [one for one in own if isinstance(one, Request)]
        turns = [one for one in own if isinstance(one, OpenResponse)]
        begun += [one.request for one in turns if one.request is not None]
        return rollout_state(whole, begun, [one.turns for one in turns], {})

    def table(self) -> dict[str, Any]:
        """Returns the groups for a checkpoint, without samples and lengths; JSON."""
        return {
            "groups": [[g.number, g.born, g.place, len(g.is_done)] for g in self.groups],
            "next_number": self.next_number,
            "cursors": {str(step): cursor for step, cursor in self.cursors.items()},
        }


def known_states(told: Sequence[Mapping[int, States] | None]) -> dict[int, States]:
    """Returns what ranks tell of groups, by number."""
    return {number: state for part in told if part for number, state in part.items()}


def restored_pool(
    state: Mapping[str, Any],
    source: PromptSource,
    sample_ids: Callable[[Group], list[int]],
    sampling: SamplingParams,
) -> Pool:
    """Returns the pool of a checkpoint: `Pool.table` as "in_flight", and `Pool.rollouts`, without
    the samples that were drawn in another way than the run draws now.

    Args:
        source: of the run's prompts, where it stood then, and is left.
        sample_ids: returns the numbers of a group's samples.
        sampling: how the run draws responses now.
    """
    saved = state["in_flight"]
    samples = _samples(state, sampling)
    cursors = {int(step): cursor for step, cursor in saved["cursors"].items()}
    prompts = _taken_again(source, saved["groups"], cursors)
    groups = []
    for number, born, place, num in saved["groups"]:
        empty = Group(number, born, place, prompts[born, place], None, ((),) * num, ())
        empty = replace(empty, is_done=(False,) * num)
        own = [samples.get(one) for one in sample_ids(empty)]
        runs = tuple(() if one is None else one.runs for one in own)
        is_done = tuple(isinstance(one, Completion) for one in own)
        groups.append(replace(empty, runs=runs, is_done=is_done))
    return Pool(tuple(groups), samples, saved["next_number"], cursors)


def _samples(state: Mapping[str, Any], sampling: SamplingParams) -> dict[int, Sample]:
    """Returns the samples of a checkpoint that may go on, by number."""
    began, found = saved_sampling(state), dict[int, Sample]()
    turns_of = {turns["sample_id"]: turns for turns in state["episodes"]}
    requests = {one["request_id"]: Request.from_dict(one) for one in state["requests"]}
    for number in requests.keys() | turns_of.keys():
        request, turns = requests.get(number), turns_of.get(number)
        how = of_sample(sampling, number)
        if request is not None and not request_fits(request, how, is_turn=turns is not None):
            continue
        if turns is None:
            found[number] = requests[number]
        elif request is not None or turns_fit(began and of_sample(began, number), how):
            found[number] = OpenResponse(turns, request)
    for done in map(restored, state["completions"]):
        number = done.request_id
        if done_fits(done, began and of_sample(began, number), of_sample(sampling, number)):
            found[number] = done
    return found


def _taken_again(
    source: PromptSource,
    groups: Sequence[Sequence[int]],
    cursors: Mapping[int, Mapping[str, int | str]],
) -> dict[tuple[int, int], Prompt]:
    """Returns the prompts of groups by step and place; the source is left where it stands."""
    present = source.state()
    found: dict[tuple[int, int], Prompt] = {}
    for step, cursor in cursors.items():
        num = 1 + max(place for _, born, place, _ in groups if born == step)
        source.load_state(cursor)
        found |= {(step, place): prompt for place, prompt in enumerate(source.take(num))}
    source.load_state(present)
    return found
