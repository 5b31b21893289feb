"""Generation that ends when enough prompts are answered: what is unfinished goes on in the next
step, with its weights (`steps.max_policy_lag`; partial rollouts, Kimi k1.5, arXiv 2501.12599, sec.
2.6.2).

Who waits for whom: all ranks call alike. Every few steps of their engines (looks.py) they add up
over gloo which groups are complete, and leave generation together. So where it ends follows from
the samples and not from the time, and a run repeats itself. (On another number of replicas
too, while `rollout.max_batch` holds all requests of each and its engine advances each by a token a
step, which SGLang does not where samples wait for the first one of their prompt.)

Between steps no engine has a request. Each rank keeps the samples of its own replica, finished and
begun, and what all know of them is a `Group` each (in_flight.py): whose they are, and which weights
made how many of their tokens. At the beginning of a step the groups are dealt to replicas anew, and
tokens travel to where they go on.

Where the algorithm replaces groups that teach nothing (resampling.py), `generate` is called again
for the step, and completes as many groups as were asked of `take`, by the same rule.

A step that is left in the middle is taken again as it began: what it generated is dropped, or its
samples would not be those of a run that was not stopped.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from typing import Any

from hybridrl.contracts.batch import Prompt, RolloutBatch
from hybridrl.data.prompts import PromptSource
from hybridrl.generation.episodes import OpenResponse
from hybridrl.generation.idle import Clock, WaitClock
from hybridrl.generation.in_flight import (
    Group,
    Limits,
    choose,
    count_by_deadline,
    deal,
    lag_metrics,
    may_end,
    num_new,
    queue_metrics,
)
from hybridrl.generation.looks import STEPS_BETWEEN_ENDS, Looks
from hybridrl.generation.pool import Pool, Sample, States, known_states, restored_pool
from hybridrl.generation.sampler import Progress, Sampler
from hybridrl.generation.saved_rollouts import joined, of_sample
from hybridrl.generation.timeline import Timeline
from hybridrl.parallel.stopping import check_stop
from hybridrl.rollout.engine import Completion, Request, SamplingParams, request_seed


class LaggedSampler(Sampler):
    """Samples responses that may take several steps.

    Args:
        limits: of what is under way.
        parts, named: as of Sampler.
    """

    def __init__(self, limits: Limits, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self._limits, self._pool = limits, Pool()
        self._began: Pool | None = None  # at the beginning of the step under way
        self._cursor: Mapping[str, int | str] | None = None  # before the last `take`
        self._left: dict[int, int] = {}  # unfinished samples of this replica, by group
        # Groups that the last `generate` was to complete, and that the next one is to.
        self._room = self._next_room = limits.per_step
        # Of the step under way: what it took and threw away.
        self._taken, self._num_dropped = list[Group](), 0
        self._lag: dict[str, float] = {}
        self._num_taken = 0  # prompts of the step under way
        self._waits = WaitClock()
        self.timeline = Timeline("both")

    def take(self, source: PromptSource, per_step: int) -> list[Prompt]:
        """Returns the prompts that come to those under way, so that the next `generate` completes
        `per_step` groups; arguments as of Sampler.
        """
        self._next_room, num_held = per_step, len(self._pool.groups)
        return self._take(source, num_new(num_held, self._limits, room=per_step))

    def _take(self, source: PromptSource, num: int) -> list[Prompt]:
        self._cursor = source.state()
        return source.take(num)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int | None = None,
        step: int | None = None,
        first_group: int = 0,
        sampling: SamplingParams | None = None,
        on_progress: Progress | None = None,
        greedy: bool = False,
    ) -> RolloutBatch | None:
        """Goes on with what is under way and begins with these prompts, until as many groups as
        the `take` before it was asked for are complete, without one as many as a step has;
        arguments, returns and errors as of Sampler. A second call for a step is a further round.
        Evaluations run to their end.

        Args:
            prompts: of `take`.
            samples_per_prompt, sampling: of evaluations alone.
            first_group: without a meaning: groups have numbers of the run.

        Raises:
            ValueError: with these prompts the step could never end: they are fewer than it takes,
                or more than this step and later ones can take in time.
        """
        if step is None:
            step, self._next_step = self._next_step, self._next_step + 1
        if step < 0:
            return super().generate(
                prompts,
                samples_per_prompt=samples_per_prompt,
                step=step,
                first_group=first_group,
                sampling=sampling,
                on_progress=on_progress,
                greedy=greedy,
            )
        if samples_per_prompt is not None or sampling is not None:
            raise ValueError("steps with max_policy_lag sample as the run does")
        began = time.perf_counter()
        self._begin_round(step, len(prompts))
        self.timeline.take("generate", self.engine.version)
        with self.world.all_agree("generation") as agreement:
            self._begin(prompts, step, greedy)
            looks = Looks(self.world.begin_sum_on_host, self._may_end)
            for num_steps in itertools.count():
                if looks.may_end(num_steps, self._counts):
                    break
                self._advance(num_steps, lambda: self.world.heartbeat.stop_signal != 0)
                if on_progress is not None:
                    on_progress(len(self._done), len(self._owners))
            agreement.value = self._leave_engine()
        self._waits.waited_s += time.perf_counter() - began
        check_stop(self.world)
        self._end(known_states(agreement.values))
        self.timeline.take("samples", self.engine.version)
        return self.collect()

    def _begin_round(self, step: int, num_new: int) -> None:
        """Begins a step or a further round of it with so many prompts; refuses a number with which
        it would never end, even if all were answered.
        """
        self._room, self._next_room = self._next_room, self._limits.per_step
        if self._began is not None and step == self._step:
            self.timeline.begin_round(step)
        else:
            self._begun_from(step)
            self.timeline.begin(step)
        born = [group.born for group in self._pool.groups] + [step] * num_new
        held = count_by_deadline(born, step, self._limits)
        if not may_end(held, held, self._limits, self._room):
            raise ValueError(
                f"step {step} was given {num_new} prompts beside {len(born) - num_new} under way, "
                f"of which it completes {self._room}, and each later step "
                f"{self._limits.per_step}, within {self._limits.max_lag} steps. Give `generate` "
                "the prompts of `take`."
            )

    @contextmanager
    def ahead(
        self, source: PromptSource, waits: AbstractContextManager[None] | None = None
    ) -> Iterator[None]:
        """Notes that the policy trains and gives its weights; arguments as of Sampler."""
        self.timeline.take("train", self.engine.version)
        yield
        self.timeline.take("weights", self.engine.version + 1)

    def _advance(self, num_steps: int, gives_up: Callable[[], bool]) -> None:
        """Lets the engine take a step, if it has something to do; environments answer before each
        look, what they were asked for before the last one, so that the rest does not depend on how
        long they take.

        Args:
            num_steps: that were taken.
            gives_up: whether not to wait for environments any more.
        """
        if self.has_unfinished:
            self.advance()
        if self.episodes is not None and (num_steps + 1) % STEPS_BETWEEN_ENDS == 0:
            ended, requests = self.episodes.answer_due(gives_up)
            self.engine.submit(requests)
            self._keep(ended)

    def _take_turns(self, completions: Sequence[Completion]) -> Sequence[Completion]:
        if self.episodes is None or self._is_evaluation:
            return super()._take_turns(completions)
        return self.episodes.end_turns(completions)

    def _begin(self, prompts: Sequence[Prompt], step: int, greedy: bool) -> None:
        """Deals all groups to replicas, brings begun samples there and hands them to the engine,
        the oldest first.
        """
        pool, num = self._pool, self.samples_per_prompt + greedy
        # Prompts of one step follow each other in the data: one cursor is enough.
        first = self._num_taken if step in pool.cursors else 0
        self._num_taken = first + len(prompts)
        new = [
            Group(pool.next_number + i, step, first + i, prompt, None, ((),) * num, (False,) * num)
            for i, prompt in enumerate(prompts)
        ]
        groups, longest = (*pool.groups, *new), self.sampling.max_new_tokens
        lengths = self._lengths.expected([group.prompt for group in groups], float(longest))
        expected = {group.number: one for group, one in zip(groups, lengths, strict=True)}
        replica_of = deal(groups, expected, longest, self.layout.replicas)
        place = self.layout.assignment[self.world.rank]
        mine = None if place is None else place[0]
        samples = self._moved(groups, replica_of, mine)
        cursors = dict(pool.cursors)
        if new and self._cursor is not None:
            cursors.setdefault(step, self._cursor)
        dealt = tuple(replace(group, replica=replica_of[group.number]) for group in groups)
        self._pool = replace(
            pool, groups=dealt, cursors=cursors, next_number=pool.next_number + len(new)
        )
        self._step, self._has_greedy = step, greedy
        self._owners, self._done, self._left = {}, {}, {}
        if self.episodes is not None:
            self.episodes.forget()  # evaluations may have had some
        requests = []
        for group in dealt:
            if group.replica != mine:
                continue
            self._left[group.number] = group.is_done.count(False)
            for sample_id in self._sample_ids(group):
                self._owners[sample_id] = (group.prompt, group.number)
                sample = samples.get(sample_id)
                if isinstance(sample, Completion):
                    self._done[sample_id] = sample
                elif (request := self._request(sample, sample_id, group)) is not None:
                    requests.append(request)
        self.engine.submit(requests)

    def _request(self, sample: Sample | None, sample_id: int, group: Group) -> Request | None:
        """Returns what the engine is to go on with, or to begin with; None where an environment
        comes first.
        """
        if isinstance(sample, Request):
            return sample
        how = of_sample(self.sampling, sample_id)
        if self.episodes is None:
            seed = request_seed(self.seed, group.born, sample_id)
            return Request(sample_id, group.prompt.tokens, seed, how)
        turns, request = None, None
        if isinstance(sample, OpenResponse):
            turns, request = sample.turns, sample.request
        self.episodes.begin(group.born, sample_id, group.prompt, how, turns)
        return request

    def _begun_from(self, step: int) -> None:
        """Notes where a step begins, to go back to."""
        self._forget_counts(step)
        self._taken, self._num_dropped = [], 0
        self._drop_late(step - 1)  # of a step that nobody ended
        self._pool = replace(self._pool, response_lengths=self._lengths.state())
        self._began = self._pool

    def _sample_ids(self, group: Group) -> list[int]:
        """Returns the numbers of a group's samples, the greedy one's last."""
        first = group.number * self.samples_per_prompt
        numbers = [*range(first, first + self.samples_per_prompt), -1 - group.number]
        return numbers[: len(group.is_done)]

    def _moved(
        self, groups: Sequence[Group], replica_of: Mapping[int, int], mine: int | None
    ) -> Mapping[int, Sample]:
        """Returns the samples of the groups that this rank's replica goes on with; the first rank
        of each replica sends those that leave it. Collective.
        """
        sent: dict[int, list[Sample]] = {}
        kept: dict[int, Sample] = {}
        for group in groups:
            own = self._samples_of(group)
            target = replica_of[group.number]
            if target == mine:
                kept |= own  # nothing, if another replica has them
            if not own or not self._tells_of(group) or group.replica == target:
                continue
            for rank in self.layout.ranks:
                if rank != self.world.rank and self.layout.place(rank)[0] == target:
                    sent.setdefault(rank, []).extend(own.values())
        for arrived in self.world.exchange_objects(sent):
            kept |= {sample.request_id: sample for sample in arrived or ()}
        return kept

    def _tells_of(self, group: Group) -> bool:
        """Whether it is this rank that tells others of a group's samples: the first of the replica
        that has them, or rank 0 for those that came from a checkpoint.
        """
        if group.replica is None:
            return self.world.rank == 0
        place = self.layout.assignment[self.world.rank]
        return place is not None and self._replica.is_first and place[0] == group.replica

    def _samples_of(self, group: Group) -> dict[int, Sample]:
        samples = self._pool.samples
        return {one: samples[one] for one in self._sample_ids(group) if one in samples}

    def _begin_scoring(self, finished: Sequence[Completion]) -> None:
        """Has whole groups scored meanwhile: others may move to another replica."""
        if self._is_evaluation:
            super()._begin_scoring(finished)
            return
        for done in finished:
            number = self._owners[done.request_id][1]
            self._left[number] -= 1
            if not self._left[number]:
                whole = [one for one, (_, group) in self._owners.items() if group == number]
                super()._begin_scoring([self._done[one] for one in whole])

    def _counts(self) -> list[int]:
        """Returns whether a signal asks this rank to stop, and how many groups of its replica are
        complete, by the step that must have them.
        """
        whole = [g.born for g in self._pool.groups if self._left.get(g.number) == 0]
        counted = whole if self._replica.is_first else []
        stops = self.world.heartbeat.stop_signal != 0
        return [int(stops), *count_by_deadline(counted, self._step, self._limits)]

    def _may_end(self, found: Sequence[int]) -> bool:
        """Returns whether the step's groups are complete on all replicas together, or a signal asks
        to stop.

        Args:
            found: the sum of `_counts` over all ranks.
        """
        limits = self._limits
        held = count_by_deadline([g.born for g in self._pool.groups], self._step, limits)
        return bool(found[0]) or may_end(list(found[1:]), held, limits, self._room)

    def _leave_engine(self) -> dict[int, States] | None:
        """Takes all samples out of the engine; returns of this replica's groups which weights made
        their tokens and which samples are finished, for all ranks, on its first rank.
        """
        begun = {request.request_id: request for request in self.engine.pending()}
        self.engine.clear()
        samples: dict[int, Sample] = {**begun, **self._done}
        if self.episodes is not None:
            for turns in self.episodes.state():
                number = turns["sample_id"]
                samples[number] = OpenResponse(turns, begun.get(number))
            self.episodes.forget()
        self._pool = replace(self._pool, samples=samples)
        if not self._replica.is_first:
            return None
        told = {}
        for group in self._pool.groups:
            if group.number in self._left:
                own = [samples[one] for one in self._sample_ids(group)]
                is_done = tuple(isinstance(one, Completion) for one in own)
                told[group.number] = tuple(one.runs for one in own), is_done
        return told

    def _end(self, known: Mapping[int, States]) -> None:
        """Takes the step's groups out of the pool, so that `collect` returns this replica's."""
        groups = self._pool.told(known)
        taken, left, late = choose(groups, self._step, self._limits, self._room)
        self._taken += taken
        self._lag = lag_metrics(self._taken, self._num_dropped, self._step)
        numbers = {group.number for group in taken}
        self._prompts = {group.number: group.prompt for group in taken}
        done, owners = self._done, self._owners
        self._owners = {one: owner for one, owner in owners.items() if owner[1] in numbers}
        self._done = {one: done[one] for one in self._owners}
        # A further round of the step may still take those that are late.
        kept = sorted([*left, *late], key=lambda group: group.number)
        self._pool = self._pool.without(kept, self._sample_ids)

    def _drop_late(self, step: int) -> None:
        """Throws away what no step after this one may learn from."""
        _, left, late = choose(self._pool.groups, step, self._limits, room=0)
        if late:
            self._num_dropped += sum(len(group.is_done) for group in late)
            self._pool = self._pool.without(left, self._sample_ids)
            if self._taken:
                self._lag = lag_metrics(self._taken, self._num_dropped, step)

    def _clock(self) -> Clock:
        return super()._clock() if self._is_evaluation else self._waits.take(self._busy_s)

    def metrics(self) -> dict[str, float]:
        """Returns what Sampler does, how old the samples of the last step are, those that were
        replaced among them, and how many are under way for later ones.
        """
        return super().metrics() | self._lag | queue_metrics(self._pool.groups)

    @property
    def has_rollouts(self) -> bool:
        """No: of a step under way a checkpoint has what it began with."""
        return False

    def end_step(self) -> None:
        """The samples of a step were learned from; the others stay under way."""
        self._drop_late(self._step)
        super().end_step()
        self._began = None

    def drop(self) -> None:
        """Goes back to where the step under way began, if there is one."""
        super().drop()
        if self._began is not None:
            self._pool, self._began = self._began, None
            self._lengths.load_state(self._pool.response_lengths)

    def state(self) -> dict[str, Any]:
        """Returns what is under way, as the step under way found it, its samples of all replicas on
        rank 0 and none on others; JSON. Collective.
        """
        pool = self._began or replace(self._pool, response_lengths=self._lengths.state())
        told = [group for group in pool.groups if self._tells_of(group)]
        mine = pool.rollouts([one for group in told for one in self._sample_ids(group)])
        sent = {0: mine} if told else {}
        parts = [part for part in self.world.exchange_objects(sent) if part is not None]
        return {
            "step": -1,
            "sampling": asdict(self.sampling),
            **joined(parts),
            "response_lengths": pool.response_lengths,
            "next_step": self._next_step,
            "in_flight": pool.table(),
        }

    def _take_in(self, state: Mapping[str, Any], source: PromptSource | None) -> None:
        """Goes on with what is under way in a state, if it was drawn as the run draws now."""
        self._began = None
        super()._take_in(state, source)
        if state.get("in_flight") is None or source is None:
            self._pool = Pool()
            return
        pool = restored_pool(state, source, self._sample_ids, self.sampling)
        known = {group.number: (group.runs, group.is_done) for group in pool.groups}
        known = self.world.broadcast_object(known if self.world.rank == 0 else None, 0)
        self._pool = replace(pool, groups=pool.told(known))
