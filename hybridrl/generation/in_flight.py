"""Keeps track of the groups in flight in a run with a lag, between steps and within a step.

Collective: all ranks make the same calls and know all groups. Each rank stores the samples of its
replica. At the beginning of a step, groups are assigned to replicas, and the tokens of each group
are sent to the replica that continues it. An interrupted step restarts from its beginning, and
discards the samples that it had generated: otherwise a resumed run would train on other samples
than an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.contracts.prompts import Prompt
from hybridrl.data.prompts import PromptSource
from hybridrl.generation.episodes import OpenResponse
from hybridrl.generation.responses import OpenAgent
from hybridrl.generation.sampler_metrics import lag_metrics, queue_metrics
from hybridrl.generation.saved_rollouts import (
    SavedRollouts,
    merge_states,
    rollout_state,
)
from hybridrl.generation.schedule import Group, Runs, Schedule, assign_replicas
from hybridrl.generation.spread import ResponseLengths
from hybridrl.parallel.groups import World
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.rollout.engine import Completion, Request, SamplingParams

Sample = Completion | Request | OpenResponse | OpenAgent
States = tuple[tuple[Runs, ...], tuple[bool, ...]]
"""Versions of the tokens of a group's samples, and whether each sample is finished."""


@dataclass(frozen=True)
class Pool:
    """Snapshot of the groups in flight; replaced, never modified."""

    groups: tuple[Group, ...] = ()  # ascending by number, identical on all ranks
    # Samples of this rank's replica; on rank 0 also those without a replica.
    samples: Mapping[int, Sample] = field(default_factory=dict)
    next_number: int = 0  # number that the next new group will receive
    # For each step, the position in the data before the step took its prompts.
    cursors: Mapping[int, Mapping[str, int | str]] = field(default_factory=dict)
    # State of the expected response lengths.
    response_lengths: Mapping[str, float] = field(default_factory=dict)

    def with_states(self, known: Mapping[int, States]) -> Pool:
        """Returns a pool with the states of groups, by number, that replicas reported."""
        groups = (
            replace(group, runs=known[group.number][0], is_done=known[group.number][1])
            for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    def rollouts(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Returns this rank's samples with the given numbers, as JSON values for a checkpoint."""
        own = [self.samples[number] for number in numbers if number in self.samples]
        whole = [sample for sample in own if isinstance(sample, Completion)]
        requests = [sample for sample in own if isinstance(sample, Request)]
        turns = [sample for sample in own if isinstance(sample, OpenResponse)]
        requests += [sample.request for sample in turns if sample.request is not None]
        return rollout_state(whole, requests, [sample.turns for sample in turns], {})

    def table(self) -> dict[str, Any]:
        """Returns the groups, without their samples, as JSON values for a checkpoint."""
        return {
            "groups": [[g.number, g.born, g.place, len(g.is_done)] for g in self.groups],
            "next_number": self.next_number,
            "cursors": {str(step): cursor for step, cursor in self.cursors.items()},
        }


class InFlight:
    """Keeps track of the groups in flight. With `has_agents`, responses stay on their replica."""

    def __init__(
        self,
        *,
        schedule: Schedule,
        world: World,
        layout: RolloutLayout,
        replica: ReplicaGroup,
        samples_per_prompt: int,
        sampling: SamplingParams,
        lengths: ResponseLengths,
        has_agents: bool = False,
    ) -> None:
        self._schedule, self._world, self._layout = schedule, world, layout
        self._replica, self._samples_per_prompt = replica, samples_per_prompt
        self._sampling, self._lengths, self._has_agents = sampling, lengths, has_agents
        place = layout.assignment[world.rank]
        self._own_replica = None if place is None else place[0]
        self.pool = Pool()
        self._began: Pool | None = None  # pool at the beginning of the current step
        self._step = -1
        self._cursor: Mapping[str, int | str] | None = None  # position before the last `take`
        self._left: dict[int, int] = {}  # number of unfinished samples on this replica, by group
        # Number of groups that the current round and the next round complete.
        self._room = self._next_room = schedule.per_step
        self._taken, self._num_dropped = list[Group](), 0  # of the current step
        self._num_prompts = 0  # prompts whose generation began in the current step
        self._lag: dict[str, float] = {}

    def take(self, source: PromptSource, per_step: int) -> list[Prompt]:
        """Returns the new prompts that the next round needs to complete `per_step` groups."""
        self._next_room = per_step
        return self._take(source, self._schedule.num_new(len(self.pool.groups), room=per_step))

    def take_ahead(self, source: PromptSource) -> list[Prompt]:
        """Returns the new prompts whose generation begins while the policy trains."""
        return self._take(source, self._schedule.num_new(len(self.pool.groups), is_ahead=True))

    def _take(self, source: PromptSource, num: int) -> list[Prompt]:
        self._cursor = source.state()
        return source.take(num)

    def begin_round(self, step: int, num_new: int) -> bool:
        """Begins a step, or a further round of it, with `num_new` prompts. Returns whether the
        round is the step's first. Raises ValueError if the round could not end even if all
        responses were complete.
        """
        self._room, self._next_room = self._next_room, self._schedule.per_step
        is_first = self._began is None or step != self._step
        if is_first:
            self._taken, self._num_dropped = [], 0
            self.drop_late(step - 1)  # the previous step may have failed before `end_step`
            self.pool = replace(self.pool, response_lengths=self._lengths.state())
            self._began = self.pool
        born = [group.born for group in self.pool.groups] + [step] * num_new
        held = self._schedule.by_deadline(born, step)
        if not self._schedule.may_end(held, held, self._room):
            raise ValueError(
                f"step {step} got {num_new} prompts in addition to {len(born) - num_new} in "
                f"flight, but trains on {self._room} groups, and each of the next "
                f"{self._schedule.max_lag} steps on {self._schedule.per_step}. "
                "Pass exactly the prompts that `take` returned to `generate`."
            )
        self._step = step
        return is_first

    def assign(
        self, prompts: Sequence[Prompt], greedy: bool
    ) -> list[tuple[Group, dict[int, Sample | None]]]:
        """Assigns all groups and new prompts to replicas, and sends each group's samples there.
        Returns this replica's groups, oldest first, with their samples by number. Collective.
        """
        pool, num = self.pool, self._samples_per_prompt + greedy
        # The prompts of one step are consecutive in the data, so one position is enough.
        first = self._num_prompts if self._step in pool.cursors else 0
        self._num_prompts = first + len(prompts)
        new = [
            Group(
                number=pool.next_number + i,
                born=self._step,
                place=first + i,
                prompt=prompt,
                replica=None,
                runs=((),) * num,
                is_done=(False,) * num,
            )
            for i, prompt in enumerate(prompts)
        ]
        groups, longest = (*pool.groups, *new), self._sampling.max_new_tokens
        lengths = self._lengths.expected([group.prompt for group in groups], float(longest))
        expected = {g.number: length for g, length in zip(groups, lengths, strict=True)}
        replica_of = assign_replicas(
            groups, expected, longest, self._layout.replicas, moves=not self._has_agents
        )
        samples = self._exchange_samples(groups, replica_of)
        cursors = dict(pool.cursors)
        if new and self._cursor is not None:
            cursors.setdefault(self._step, self._cursor)
        assigned = tuple(replace(group, replica=replica_of[group.number]) for group in groups)
        self.pool = replace(
            pool, groups=assigned, cursors=cursors, next_number=pool.next_number + len(new)
        )
        mine = [group for group in assigned if group.replica == self._own_replica]
        self._left = {group.number: group.is_done.count(False) for group in mine}
        return [(group, {n: samples.get(n) for n in self.sample_ids(group)}) for group in mine]

    def sample_ids(self, group: Group) -> list[int]:
        """Returns the sample numbers of a group, the greedy sample last."""
        first = group.number * self._samples_per_prompt
        numbers = [*range(first, first + self._samples_per_prompt), -1 - group.number]
        return numbers[: len(group.is_done)]

    def _exchange_samples(
        self, groups: Sequence[Group], replica_of: Mapping[int, int]
    ) -> Mapping[int, Sample]:
        """Returns the samples that this replica continues; others send theirs. Collective."""
        sent: dict[int, list[Sample]] = {}
        kept: dict[int, Sample] = {}
        for group in groups:
            own = self._samples_of(group)
            target = replica_of[group.number]
            if target == self._own_replica:
                kept |= own  # empty if another replica has the samples
            if not own or not self._is_reporter(group) or group.replica == target:
                continue
            for rank in self._layout.ranks:
                if rank != self._world.rank and self._layout.place(rank)[0] == target:
                    sent.setdefault(rank, []).extend(own.values())
        for arrived in self._world.exchange_objects(sent):
            kept |= {sample.request_id: sample for sample in arrived or ()}
        return kept

    def _samples_of(self, group: Group) -> dict[int, Sample]:
        samples = self.pool.samples
        return {number: samples[number] for number in self.sample_ids(group) if number in samples}

    def _is_reporter(self, group: Group) -> bool:
        """Whether this rank sends a group's samples: their replica's first rank, or else rank 0."""
        if group.replica is None:
            return self._world.rank == 0
        return self._replica.is_first and group.replica == self._own_replica

    def finish_sample(self, group: int) -> bool:
        """Counts a finished sample. Returns whether its group is now complete."""
        self._left[group] -= 1
        return not self._left[group]

    def num_complete(self) -> list[int]:
        """Returns the complete groups by deadline; zeros except on a replica's first rank."""
        whole = [g.born for g in self.pool.groups if self._left.get(g.number) == 0]
        return self._schedule.by_deadline(whole if self._replica.is_first else [], self._step)

    def num_unfinished(self) -> int:
        """Returns the number of unfinished samples; 0 except on the first rank of a replica."""
        return sum(self._left.values()) if self._replica.is_first else 0

    def may_end(self, complete: Sequence[int]) -> bool:
        """Whether the round may end, given the sum of `num_complete` over all replicas."""
        held = self._schedule.by_deadline([g.born for g in self.pool.groups], self._step)
        return self._schedule.may_end(complete, held, self._room)

    def leave_engine(self, samples: Mapping[int, Sample]) -> dict[int, States] | None:
        """Stores the samples. A replica's first rank returns group states for `note_states`."""
        self.pool = replace(self.pool, samples=samples)
        if not self._replica.is_first:
            return None
        found = {}
        for group in self.pool.groups:
            if group.number in self._left:
                own = [samples[number] for number in self.sample_ids(group)]
                is_done = tuple(isinstance(sample, Completion) for sample in own)
                found[group.number] = tuple(sample.runs for sample in own), is_done
        return found

    def note_states(self, reports: Sequence[Mapping[int, States] | None]) -> None:
        known = {n: state for report in reports if report for n, state in report.items()}
        self.pool = self.pool.with_states(known)

    def end_round(self) -> list[Group]:
        """Removes from the pool the groups that the round takes, and returns these groups."""
        taken, left, late = self._schedule.choose(self.pool.groups, self._step, self._room)
        self._taken += taken
        self._lag = lag_metrics(self._taken, self._num_dropped, self._step)
        # Keep late groups, because a further round of the step may take them.
        self._keep(sorted([*left, *late], key=lambda group: group.number))
        return taken

    def drop_late(self, step: int | None = None) -> None:
        """Drops groups that are too old after step `step`, by default the current one."""
        step = self._step if step is None else step
        _, left, late = self._schedule.choose(self.pool.groups, step, room=0)
        if late:
            self._num_dropped += sum(len(group.is_done) for group in late)
            self._keep(left)
            if self._taken:
                self._lag = lag_metrics(self._taken, self._num_dropped, step)

    def _keep(self, groups: Sequence[Group]) -> None:
        kept = {number for group in groups for number in self.sample_ids(group)}
        born = {group.born for group in groups}
        self.pool = replace(
            self.pool,
            groups=tuple(groups),
            samples={n: sample for n, sample in self.pool.samples.items() if n in kept},
            cursors={step: at for step, at in self.pool.cursors.items() if step in born},
        )

    def end_step(self) -> None:
        """Ends a step after training. Groups that it did not take remain in flight."""
        self.drop_late()
        self._began = None

    def rewind(self) -> None:
        """Restores the state at the beginning of the current step, if there is one."""
        if self._began is not None:
            self.pool, self._began = self._began, None
            self._lengths.load_state(self.pool.response_lengths)

    def metrics(self) -> dict[str, float]:
        return self._lag | queue_metrics(self.pool.groups)

    def state(self) -> dict[str, Any]:
        """Returns the groups at the step's beginning, with samples only on rank 0. Collective."""
        pool = self._began or replace(self.pool, response_lengths=self._lengths.state())
        reported = [group for group in pool.groups if self._is_reporter(group)]
        mine = pool.rollouts([number for group in reported for number in self.sample_ids(group)])
        sent = {0: mine} if reported else {}
        parts = [part for part in self._world.exchange_objects(sent) if part is not None]
        return {
            **merge_states(parts),
            "response_lengths": pool.response_lengths,
            "in_flight": pool.table(),
        }

    def load_state(self, state: Mapping[str, Any], source: PromptSource | None) -> None:
        """Continues from a checkpoint; drops samples with other sampling parameters. Collective.
        Only rank 0 needs the samples. `source` must be at the saved position; without it, no
        samples continue.
        """
        self._began, self.pool = None, Pool()
        if state.get("in_flight") is None or source is None:
            return
        pool = restored_pool(state, source, self.sample_ids, self._sampling)
        known = {group.number: (group.runs, group.is_done) for group in pool.groups}
        known = self._world.broadcast_object(known if self._world.rank == 0 else None, 0)
        self.pool = pool.with_states(known)


def restored_pool(
    state: Mapping[str, Any],
    source: PromptSource,
    sample_ids: Callable[[Group], list[int]],
    sampling: SamplingParams,
) -> Pool:
    """Restores the pool from a checkpoint, without samples of other sampling parameters."""
    saved, table = SavedRollouts(state), state["in_flight"]
    cursors = {int(step): cursor for step, cursor in table["cursors"].items()}
    prompts = _retake_prompts(source, table["groups"], cursors)
    groups, samples = list[Group](), dict[int, Sample]()
    for number, born, place, num in table["groups"]:
        empty = Group(
            number=number,
            born=born,
            place=place,
            prompt=prompts[born, place],
            replica=None,
            runs=((),) * num,
            is_done=(False,) * num,
        )
        own: list[Sample | None] = []
        for sample_id in sample_ids(empty):
            how = sampling.for_sample(sample_id)
            found = saved.find(saved.step, sample_id, empty.prompt, how)
            open_response = found.turns and OpenResponse(found.turns, found.request)
            own.append(found.whole or open_response or found.request)
        runs = tuple(() if sample is None else sample.runs for sample in own)
        is_done = tuple(isinstance(sample, Completion) for sample in own)
        groups.append(replace(empty, runs=runs, is_done=is_done))
        samples |= {sample.request_id: sample for sample in own if sample is not None}
    return Pool(tuple(groups), samples, table["next_number"], cursors)


def _retake_prompts(
    source: PromptSource,
    groups: Sequence[Sequence[int]],
    cursors: Mapping[int, Mapping[str, int | str]],
) -> dict[tuple[int, int], Prompt]:
    """Returns the prompts of groups by step and place. Does not change the position of `source`."""
    present = source.state()
    found: dict[tuple[int, int], Prompt] = {}
    for step, cursor in cursors.items():
        num = 1 + max(place for _, born, place, _ in groups if born == step)
        source.load_state(cursor)
        found |= {(step, place): prompt for place, prompt in enumerate(source.take(num))}
    source.load_state(present)
    return found
