"""Groups of a run with a lag that are under way: between steps, and while a step generates.

Collective: all ranks call alike and know all groups; each rank keeps the samples of its replica,
finished and begun. At the beginning of a step groups are dealt to replicas, and tokens travel to
where they go on. A step that is interrupted is taken again from its beginning: what it generated is
dropped, or its samples would differ from those of an uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.contracts.prompts import Prompt
from hybridrl.data.prompts import PromptSource
from hybridrl.generation.episodes import OpenResponse, restored
from hybridrl.generation.sampler_metrics import lag_metrics, queue_metrics
from hybridrl.generation.saved_rollouts import (
    done_fits,
    joined,
    of_sample,
    request_fits,
    rollout_state,
    saved_sampling,
    turns_fit,
)
from hybridrl.generation.schedule import Group, Runs, Schedule, deal
from hybridrl.generation.spread import ResponseLengths
from hybridrl.parallel.groups import World
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.rollout.engine import Completion, Request, SamplingParams

Sample = Completion | Request | OpenResponse
States = tuple[tuple[Runs, ...], tuple[bool, ...]]
"""The versions of the tokens of a group's samples, and whether each sample is finished."""


@dataclass(frozen=True)
class Pool:
    """Groups under way at one moment; replaced, never changed.

    Args:
        groups: In the order of their numbers, the same on all ranks.
        samples: Samples of this rank's replica by number; on rank 0 also those of groups without a
            replica.
        cursors: Place in the data before the prompts of a step were taken, by step.
    """

    groups: tuple[Group, ...] = ()
    samples: Mapping[int, Sample] = field(default_factory=dict)
    next_number: int = 0
    cursors: Mapping[int, Mapping[str, int | str]] = field(default_factory=dict)
    response_lengths: Mapping[str, float] = field(default_factory=dict)

    def with_states(self, known: Mapping[int, States]) -> Pool:
        """Returns the pool with the states that replicas report of their groups, by number."""
        groups = (
            replace(group, runs=known[group.number][0], is_done=known[group.number][1])
            for group in self.groups
        )
        return replace(self, groups=tuple(groups))

    def rollouts(self, numbers: Sequence[int]) -> dict[str, Any]:
        """Returns the samples of these numbers that are here, for a checkpoint; JSON."""
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


class InFlight:
    """Keeps the groups under way.

    Args:
        lengths: Expected lengths of responses; the sampler's own.

    Attributes:
        pool: Present groups and samples.
    """

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
    ) -> None:
        self._schedule, self._world, self._layout = schedule, world, layout
        self._replica, self._samples_per_prompt = replica, samples_per_prompt
        self._sampling, self._lengths = sampling, lengths
        place = layout.assignment[world.rank]
        self._own_replica = None if place is None else place[0]
        self.pool = Pool()
        self._began: Pool | None = None  # at the beginning of the step under way
        self._step = -1
        self._cursor: Mapping[str, int | str] | None = None  # before the last `take`
        self._left: dict[int, int] = {}  # unfinished samples of this replica, by group
        # Groups that the present round completes, and that the next one completes.
        self._room = self._next_room = schedule.per_step
        self._taken, self._num_dropped = list[Group](), 0  # in the step under way
        self._num_prompts = 0  # of the step under way
        self._lag: dict[str, float] = {}

    def take(self, source: PromptSource, per_step: int) -> list[Prompt]:
        """Returns the prompts to begin, so that the next round completes `per_step` groups."""
        self._next_room = per_step
        return self._take(source, self._schedule.num_new(len(self.pool.groups), room=per_step))

    def take_ahead(self, source: PromptSource) -> list[Prompt]:
        """Returns the prompts to begin while the policy trains."""
        return self._take(source, self._schedule.num_new(len(self.pool.groups), is_ahead=True))

    def _take(self, source: PromptSource, num: int) -> list[Prompt]:
        self._cursor = source.state()
        return source.take(num)

    def begin_round(self, step: int, num_new: int) -> bool:
        """Begins a step, or a further round of it, with a number of new prompts; returns whether it
        is the step's first round.

        Raises:
            ValueError: The round would never end, even if all prompts were answered.
        """
        self._room, self._next_room = self._next_room, self._schedule.per_step
        is_first = self._began is None or step != self._step
        if is_first:
            self._taken, self._num_dropped = [], 0
            self.drop_late(step - 1)  # of a step that nobody ended
            self.pool = replace(self.pool, response_lengths=self._lengths.state())
            self._began = self.pool
        born = [group.born for group in self.pool.groups] + [step] * num_new
        held = self._schedule.by_deadline(born, step)
        if not self._schedule.may_end(held, held, self._room):
            raise ValueError(
                f"step {step} was given {num_new} prompts beside {len(born) - num_new} under way, "
                f"of which it completes {self._room}, and each later step "
                f"{self._schedule.per_step}, within {self._schedule.max_lag} steps. Give "
                "`generate` the prompts of `take`."
            )
        self._step = step
        return is_first

    def deal(
        self, prompts: Sequence[Prompt], greedy: bool
    ) -> list[tuple[Group, dict[int, Sample | None]]]:
        """Deals all groups and new prompts to replicas and brings begun samples there; returns this
        replica's groups with their samples by number, the oldest group first. Collective.
        """
        pool, num = self.pool, self._samples_per_prompt + greedy
        # Prompts of one step follow each other in the data: one cursor is enough.
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
        expected = {group.number: one for group, one in zip(groups, lengths, strict=True)}
        replica_of = deal(groups, expected, longest, self._layout.replicas)
        samples = self._moved(groups, replica_of)
        cursors = dict(pool.cursors)
        if new and self._cursor is not None:
            cursors.setdefault(self._step, self._cursor)
        dealt = tuple(replace(group, replica=replica_of[group.number]) for group in groups)
        self.pool = replace(
            pool, groups=dealt, cursors=cursors, next_number=pool.next_number + len(new)
        )
        mine = [group for group in dealt if group.replica == self._own_replica]
        self._left = {group.number: group.is_done.count(False) for group in mine}
        return [
            (group, {one: samples.get(one) for one in self.sample_ids(group)}) for group in mine
        ]

    def sample_ids(self, group: Group) -> list[int]:
        """Returns the numbers of a group's samples, the greedy one's last."""
        first = group.number * self._samples_per_prompt
        numbers = [*range(first, first + self._samples_per_prompt), -1 - group.number]
        return numbers[: len(group.is_done)]

    def _moved(
        self, groups: Sequence[Group], replica_of: Mapping[int, int]
    ) -> Mapping[int, Sample]:
        """Returns the samples of the groups that this rank's replica goes on with; the first rank
        of each replica sends those that leave it. Collective.
        """
        sent: dict[int, list[Sample]] = {}
        kept: dict[int, Sample] = {}
        for group in groups:
            own = self._samples_of(group)
            target = replica_of[group.number]
            if target == self._own_replica:
                kept |= own  # nothing, if another replica has them
            if not own or not self._reports(group) or group.replica == target:
                continue
            for rank in self._layout.ranks:
                if rank != self._world.rank and self._layout.place(rank)[0] == target:
                    sent.setdefault(rank, []).extend(own.values())
        for arrived in self._world.exchange_objects(sent):
            kept |= {sample.request_id: sample for sample in arrived or ()}
        return kept

    def _samples_of(self, group: Group) -> dict[int, Sample]:
        samples = self.pool.samples
        return {one: samples[one] for one in self.sample_ids(group) if one in samples}

    def _reports(self, group: Group) -> bool:
        """Whether this rank sends a group's samples to others: the first of the replica that has
        them, or rank 0 for those that came from a checkpoint.
        """
        if group.replica is None:
            return self._world.rank == 0
        return self._replica.is_first and group.replica == self._own_replica

    def finish_sample(self, group: int) -> bool:
        """Counts a finished sample; returns whether its group is complete now."""
        self._left[group] -= 1
        return not self._left[group]

    def num_complete(self) -> list[int]:
        """Returns the complete groups of this replica by deadline, on its first rank."""
        whole = [g.born for g in self.pool.groups if self._left.get(g.number) == 0]
        return self._schedule.by_deadline(whole if self._replica.is_first else [], self._step)

    def num_unfinished(self) -> int:
        """Returns the unfinished samples of this replica, on its first rank."""
        return sum(self._left.values()) if self._replica.is_first else 0

    def may_end(self, complete: Sequence[int]) -> bool:
        """Returns whether the round may end with these `num_complete` of all replicas together."""
        held = self._schedule.by_deadline([g.born for g in self.pool.groups], self._step)
        return self._schedule.may_end(complete, held, self._room)

    def leave_engine(self, samples: Mapping[int, Sample]) -> dict[int, States] | None:
        """Keeps this replica's samples, which no engine has any more; returns the states of its
        groups, on its first rank, for `note_states` of all ranks.
        """
        self.pool = replace(self.pool, samples=samples)
        if not self._replica.is_first:
            return None
        found = {}
        for group in self.pool.groups:
            if group.number in self._left:
                own = [samples[one] for one in self.sample_ids(group)]
                is_done = tuple(isinstance(one, Completion) for one in own)
                found[group.number] = tuple(one.runs for one in own), is_done
        return found

    def note_states(self, reports: Sequence[Mapping[int, States] | None]) -> None:
        """Takes in what the ranks reported of all groups."""
        known = {number: state for one in reports if one for number, state in one.items()}
        self.pool = self.pool.with_states(known)

    def end_round(self) -> list[Group]:
        """Takes the groups of the round out of the pool and returns them."""
        taken, left, late = self._schedule.choose(self.pool.groups, self._step, self._room)
        self._taken += taken
        self._lag = lag_metrics(self._taken, self._num_dropped, self._step)
        # A further round of the step may still take those that are late.
        self._keep(sorted([*left, *late], key=lambda group: group.number))
        return taken

    def drop_late(self, step: int | None = None) -> None:
        """Drops what no step after this one may learn from.

        Args:
            step: Step; None: the present one.
        """
        step = self._step if step is None else step
        _, left, late = self._schedule.choose(self.pool.groups, step, room=0)
        if late:
            self._num_dropped += sum(len(group.is_done) for group in late)
            self._keep(left)
            if self._taken:
                self._lag = lag_metrics(self._taken, self._num_dropped, step)

    def _keep(self, groups: Sequence[Group]) -> None:
        kept = {one for group in groups for one in self.sample_ids(group)}
        born = {group.born for group in groups}
        self.pool = replace(
            self.pool,
            groups=tuple(groups),
            samples={one: sample for one, sample in self.pool.samples.items() if one in kept},
            cursors={step: at for step, at in self.pool.cursors.items() if step in born},
        )

    def end_step(self) -> None:
        """Ends the step: its samples were learned from, and the others stay under way."""
        self.drop_late()
        self._began = None

    def rewind(self) -> None:
        """Goes back to the beginning of the step under way, if there is one."""
        if self._began is not None:
            self.pool, self._began = self._began, None
            self._lengths.load_state(self.pool.response_lengths)

    def metrics(self) -> dict[str, float]:
        """Returns how old the samples of the step are, dropped and replaced ones included, and how
        many are under way for later steps.
        """
        return self._lag | queue_metrics(self.pool.groups)

    def state(self) -> dict[str, Any]:
        """Returns what was under way at the beginning of the step, with the samples of all replicas
        on rank 0 and none on others; JSON. Collective.
        """
        pool = self._began or replace(self.pool, response_lengths=self._lengths.state())
        reported = [group for group in pool.groups if self._reports(group)]
        mine = pool.rollouts([one for group in reported for one in self.sample_ids(group)])
        sent = {0: mine} if reported else {}
        parts = [part for part in self._world.exchange_objects(sent) if part is not None]
        return {
            **joined(parts),
            "response_lengths": pool.response_lengths,
            "in_flight": pool.table(),
        }

    def load_state(self, state: Mapping[str, Any], source: PromptSource | None) -> None:
        """Goes on from a checkpoint, without samples that were drawn in another way than the run
        draws now. Collective; rank 0 alone needs the samples.

        Args:
            state: State of a checkpoint, after a trip through JSON.
            source: Prompts of the run, where they stood then; None: nothing goes on.
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
    """Returns the pool of a checkpoint, without the samples that were drawn in another way than
    `sampling`; leaves `source` where it stands.
    """
    saved = state["in_flight"]
    samples = _restored_samples(state, sampling)
    cursors = {int(step): cursor for step, cursor in saved["cursors"].items()}
    prompts = _taken_again(source, saved["groups"], cursors)
    groups = []
    for number, born, place, num in saved["groups"]:
        empty = Group(
            number=number,
            born=born,
            place=place,
            prompt=prompts[born, place],
            replica=None,
            runs=((),) * num,
            is_done=(False,) * num,
        )
        own = [samples.get(one) for one in sample_ids(empty)]
        runs = tuple(() if one is None else one.runs for one in own)
        is_done = tuple(isinstance(one, Completion) for one in own)
        groups.append(replace(empty, runs=runs, is_done=is_done))
    return Pool(tuple(groups), samples, saved["next_number"], cursors)


def _restored_samples(state: Mapping[str, Any], sampling: SamplingParams) -> dict[int, Sample]:
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
    """Returns the prompts of groups by step and place; leaves the source where it stands."""
    present = source.state()
    found: dict[tuple[int, int], Prompt] = {}
    for step, cursor in cursors.items():
        num = 1 + max(place for _, born, place, _ in groups if born == step)
        source.load_state(cursor)
        found |= {(step, place): prompt for place, prompt in enumerate(source.take(num))}
    source.load_state(present)
    return found
