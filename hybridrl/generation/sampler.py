"""Generation over all replicas: prompts spread out, responses scored where they were made, and what
all must know of them told.

Collective: every rank calls with the same prompts. A replica generates the samples of whole
prompts, so a reward that looks at a group sees all of it; which, follows from how long responses
were so far (spread.py). Afterwards every rank has the same batch, in the order of the sample
numbers, with the tokens of the samples that it has scored: each rank of a replica scores its share.

Where an algorithm compares with it, the greedy response to each prompt is generated and scored as
one more sample of the group, under the number -1 - group; its reward becomes a reward part of the
group's samples, and it leaves the batch.

With an environment (episodes.py) a response has several turns: what ends in the engine goes to it,
and comes back as the request of the next turn, or as a response.

A checkpoint may be taken while a step's rollouts are under way: `state` holds what is finished and
what is begun, and after `load_state` the next `generate` of that step goes on from there, on any
number of replicas.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np

from hybridrl.contracts.batch import GREEDY, Producer, Prompt, RolloutBatch, ScoredBatch
from hybridrl.data.prompts import PromptSource
from hybridrl.errors import UserError
from hybridrl.generation.episodes import (
    Episodes,
    Response,
    as_rollout,
    episode_counts,
    episode_metrics,
)
from hybridrl.generation.gathered import compared_with_greedy, gathered_batch, table_of
from hybridrl.generation.idle import Clock, busy_of_replicas
from hybridrl.generation.saved_rollouts import (
    SavedRollouts,
    digest_of,
    joined,
    of_sample,
    rollout_state,
    without_samples,
)
from hybridrl.generation.spread import ResponseLengths, group_work, spread
from hybridrl.metrics.flops import GeneratedLengths, num_generated
from hybridrl.metrics.values import GENERATED_TOKENS
from hybridrl.parallel import progress
from hybridrl.parallel.groups import World
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.parallel.stopping import check_stop
from hybridrl.rewards.base import Scorer
from hybridrl.rollout.engine import (
    Completion,
    Request,
    RolloutEngine,
    SamplingParams,
    request_seed,
)

# Steps of the engine between two looks whether a rank of the replica is asked to stop, if it has
# several ranks: they must leave generation together, and asking takes a collective.
STEPS_BETWEEN_LOOKS = 32
DROPPED_GROUPS = "reward/dropped_groups"  # of which no sample is left
Progress = Callable[[int, int], None]


class Sampler:
    """Samples responses to prompts with this rank's engine replica and its peers.

    Args:
        world: for the collectives.
        layout: which replica this rank belongs to.
        replica: its ranks.
        engine: this rank's part of its replica.
        scorer: gives each response its reward.
        sampling: of training samples.
        samples_per_prompt: responses to each prompt.
        seed: of the run.
        episodes: with the environment, if there is one.
        reward_models: of this world: each adds its scores to a batch.
    """

    def __init__(
        self,
        world: World,
        layout: RolloutLayout,
        replica: ReplicaGroup,
        engine: RolloutEngine,
        scorer: Scorer,
        sampling: SamplingParams,
        samples_per_prompt: int,
        seed: int,
        episodes: Episodes | None = None,
        reward_models: Sequence[Callable[[ScoredBatch], ScoredBatch]] = (),
    ) -> None:
        self.episodes = episodes
        self._episode_counts: dict[str, int] = {}  # since the last `score_or_none`
        self.world, self.layout, self._replica = world, layout, replica
        self.engine, self.scorer = engine, scorer
        self.sampling, self.samples_per_prompt, self.seed = sampling, samples_per_prompt, seed
        self._step, self._next_step = -1, 0
        self._prompts: dict[int, Prompt] = {}
        self._owners: dict[int, tuple[Prompt, int]] = {}
        self._done: dict[int, Completion] = {}
        self._digests: dict[int, str] = {}  # of the step's prompts, by sample
        self._earlier: dict[int, Completion] = {}  # of earlier calls of the step
        self._saved = SavedRollouts()  # of the checkpoint that was loaded
        self._drawn = sampling  # how the responses of the current step are drawn
        self._lengths = ResponseLengths()
        self._has_greedy = False
        # Seconds that this rank's engine worked since the last `score_or_none`; and of all
        # replicas, by `generate` call of the step, their mean and the longest.
        self._busy_s = 0.0
        self._busy_of_calls: list[tuple[float, float]] = []
        self.reward_models = reward_models
        self._reward_counts: dict[str, int] = {}  # of the step, all ranks together
        # What was generated for the last step, on all replicas, with greedy responses and those
        # that were replaced or dropped; not for evaluations.
        self.generated: GeneratedLengths = {}
        self._is_evaluation = False

    def take(self, source: PromptSource, per_step: int) -> list[Prompt]:
        """Returns the prompts that the next `generate` is to be called with.

        Args:
            source: of the run's prompts.
            per_step: prompts that a step learns from.
        """
        return source.take(per_step)

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
        """Generates this replica's share: the samples of the prompts that fall to it.

        Args:
            prompts: of the whole step, the same on all ranks.
            samples_per_prompt: responses to each prompt, in place of the sampler's own.
            step: enters the seeds, so that every step samples anew; None: one more than last time.
            first_group: number of the first prompt's group; a second call of a step that goes on
                from the first one's groups (dynamic sampling) gives how many those were.
            sampling: in place of the sampler's own (evaluation is greedy).
            on_progress: called with (finished, all) of this replica.
            greedy: generates the greedy response to each prompt as well.

        Returns:
            The samples in order of their numbers; None where this replica has no prompt.

        Raises:
            StopAsked: a signal asks to stop; what was generated so far is kept, for `state`.
        """
        if step is None:
            step, self._next_step = self._next_step, self._next_step + 1
        num_samples = samples_per_prompt or self.samples_per_prompt
        with self.world.all_agree("generation"):
            self.submit(prompts, num_samples, step, first_group, sampling, greedy)
            for num_steps in itertools.count():
                if not self.has_unfinished or self._must_stop(num_steps):
                    break
                self.advance()
                if on_progress is not None:
                    on_progress(len(self._done), len(self._owners))
        check_stop(self.world)
        return self.collect()

    def _must_stop(self, num_steps: int) -> bool:
        """Whether this replica is to leave generation, after so many steps of its engine."""
        is_asked = self.world.heartbeat.stop_signal != 0
        if self.layout.tp == 1:
            return is_asked
        # An engine that is idle waits for tools, for long.
        is_due = num_steps % STEPS_BETWEEN_LOOKS == 0 or not self.engine.has_unfinished
        return is_due and self._replica.is_any(is_asked)

    @contextmanager
    def ahead(
        self, source: PromptSource, waits: AbstractContextManager[None] | None = None
    ) -> Iterator[None]:
        """Generates beside what the block does, where a run may do so: here nothing.

        Args:
            source: of the run's prompts.
            waits: surrounds the wait for generation, after the block.
        """
        yield

    def cancel(self) -> None:
        """Ends what is generated beside other work, for nobody to use."""

    def submit(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        step: int,
        first_group: int = 0,
        sampling: SamplingParams | None = None,
        greedy: bool = False,
    ) -> None:
        """Hands this replica's requests to its engine; those that a checkpoint knows go on from
        there.

        Raises:
            UserError: a greedy response is asked for, and a scorer has the name of its part.
        """
        if greedy and GREEDY in (part.name for part in self.scorer.parts):
            raise UserError(
                "reward",
                f"a scorer named {GREEDY!r}",
                "another name where greedy responses are compared with",
                "Rename that scorer.",
            )
        self._step, self._owners, self._done = step, {}, {}
        self._has_greedy = greedy
        if first_group == 0:
            self._forget_counts(step)
        self._prompts = dict(enumerate(prompts, first_group))
        if self.episodes is not None:
            self.episodes.forget()
        requests = []
        params = self._drawn = sampling or self.sampling
        num, longest = samples_per_prompt + greedy, params.max_new_tokens

        def numbers(group: int) -> list[int]:
            first = group * samples_per_prompt
            return [*range(first, first + samples_per_prompt), *[-1 - group] * greedy]

        shares = self._shares(prompts, num, first_group, longest)
        saved = self._saved_of(
            step, [[one for group in share for one in numbers(group)] for share in shares]
        )
        place = self.layout.assignment[self.world.rank]
        for group in [] if place is None else shares[place[0]]:
            digest = digest_of(self._prompts[group].tokens)
            for sample_id in numbers(group):
                self._owners[sample_id] = (self._prompts[group], group)
                how, prompt = of_sample(params, sample_id), self._prompts[group]
                self._digests[sample_id] = digest
                found = saved.find(step, sample_id, prompt, how)
                if found.whole is not None:
                    self._done[sample_id] = found.whole
                    continue
                if self.episodes is not None:
                    self.episodes.begin(step, sample_id, prompt, how, found.turns)
                if found.request is not None:
                    requests.append(found.request)
                elif self.episodes is None:
                    seed = request_seed(self.seed, step, sample_id)
                    requests.append(Request(sample_id, prompt.tokens, seed, how))
        self.engine.submit(requests)
        self._take_turns([])

    def _forget_counts(self, step: int) -> None:
        """Begins the counts of a step, or of an evaluation."""
        self._busy_of_calls, self._earlier, self._reward_counts = [], {}, {}
        self._digests = {}
        self._is_evaluation = step < 0
        if not self._is_evaluation:
            self.generated = {}

    def _saved_of(self, step: int, numbers: Sequence[Sequence[int]]) -> SavedRollouts:
        """Returns what the checkpoint that was loaded has of this replica's samples, which rank 0
        sends; collective.

        Args:
            step: of the samples.
            numbers: of the samples of each replica.
        """
        if step < 0 or step != self._saved.step:
            return SavedRollouts()
        sent: dict[int, dict[str, Any]] = {}
        if self.world.rank == 0:
            parts = [self._saved.of(of_replica) for of_replica in numbers]
            sent = {rank: parts[self.layout.place(rank)[0]] for rank in self.layout.ranks}
        return SavedRollouts(self.world.exchange_objects(sent)[0])

    def _shares(
        self, prompts: Sequence[Prompt], samples_per_prompt: int, first_group: int, longest: int
    ) -> list[list[int]]:
        """Returns the numbers of the groups that each replica generates, most work first."""
        work = [
            group_work(prompt, tokens, samples_per_prompt)
            for prompt, tokens in zip(
                prompts, self._lengths.expected(prompts, float(longest)), strict=True
            )
        ]
        return [[first_group + i for i in share] for share in spread(work, self.layout.replicas)]

    @property
    def has_unfinished(self) -> bool:
        """Whether a response of what was submitted is not finished."""
        is_waiting = self.episodes is not None and self.episodes.is_waiting
        return self.engine.has_unfinished or is_waiting

    def advance(self) -> None:
        """Lets the engine take one step, keeps what finished and has it scored meanwhile."""
        if self.engine.has_unfinished:
            began = time.perf_counter()
            self.engine.step()  # returns with the tokens, so the device is done
            self._busy_s += time.perf_counter() - began
            progress.advance()
        self._keep(self._take_turns(self.engine.collect()))

    def _keep(self, finished: Sequence[Completion]) -> None:
        """Keeps responses that ended, and has them scored meanwhile."""
        self._done |= {done.request_id: done for done in finished}
        self._begin_scoring(finished)

    def _begin_scoring(self, finished: Sequence[Completion]) -> None:
        """Has responses scored that this rank scores, while others are generated."""
        for done in finished:
            prompt, group = self._owners[done.request_id]
            if self._is_mine_to_score(group):
                observed = done.observed if isinstance(done, Response) else None
                self.scorer.begin(done.request_id, prompt, done.tokens, observed)

    def _take_turns(self, completions: Sequence[Completion]) -> Sequence[Completion]:
        """Returns the responses that ended; of the others the engine gets the next turns."""
        if self.episodes is None:
            return completions
        ended, requests = self.episodes.advance(completions, not self.engine.has_unfinished)
        self.engine.submit(requests)
        return ended

    def _is_mine_to_score(self, group: int) -> bool:
        """Whether the samples of a group are this rank's to score: each rank of a replica has its
        share of whole groups.
        """
        return group % self.layout.tp == self.layout.tp_rank(self.world.rank)

    def collect(self) -> RolloutBatch | None:
        """Returns the finished samples of what was submitted; the engine must have nothing left."""
        owners, done = self._owners, self._done
        self._earlier |= done
        self._owners, self._done = {}, {}
        self._note_episodes(done, owners)
        if not owners:
            return None
        rollouts = [
            as_rollout(done[sample_id], prompt) for sample_id, (prompt, _) in sorted(owners.items())
        ]
        groups = [group for _, (_, group) in sorted(owners.items())]
        producer = Producer.of(type(self.engine), "rollout engine")
        return RolloutBatch.from_rollouts(rollouts, groups, producer)

    def score(self, local: RolloutBatch | None) -> ScoredBatch:
        """Scores what the last `generate` gave and tells all ranks of the samples of all replicas,
        ordered by sample number; tokens stay on the rank that scored them.

        Raises:
            UserError, PeerError: the reward failed on some rank, or no response has a score; raised
                on all of them.
        """
        if (scored := self.score_or_none(local)) is None:
            raise self.scorer.nothing_left()
        return scored

    def score_or_none(self, local: RolloutBatch | None) -> ScoredBatch | None:
        """Returns what `score` does, but None, on all ranks, where no response has a score."""
        with self.world.all_agree("the reward") as agreement:
            groups = [] if local is None else local.group_B.tolist()
            rows = [i for i, group in enumerate(groups) if self._is_mine_to_score(group)]
            scored = self.scorer.score(local.select(rows)) if local is not None and rows else None
            if scored is not None and self._has_greedy:
                scored = compared_with_greedy(scored)
            mine = None if scored is None else table_of(scored)
            counts = self.scorer.take_counts() | self._episode_counts
            agreement.value = (self._clock(), mine, counts, self._lengths_of(local))
            self._episode_counts = {}
        self._note_busy([clock for clock, *_ in agreement.values])
        tables = [table for _, table, *_ in agreement.values]
        for *_, counts, lengths in agreement.values:
            self._count(counts)
            self.generated |= lengths
        if self.scorer.drops:
            left = {group for table in tables if table for group in table["group_B"].tolist()}
            self._count({DROPPED_GROUPS: len(self._prompts) - len(left)})
        if not any(tables):
            return None
        batch = gathered_batch(tables, scored, self._prompts, self.world)
        for model in self.reward_models:
            batch = model(batch)
        self._observe(batch)
        return batch

    def _lengths_of(self, local: RolloutBatch | None) -> GeneratedLengths:
        """Returns what this rank's replica has generated, if this rank is its first."""
        if local is None or self._is_evaluation or not self._replica.is_first:
            return {}
        found: GeneratedLengths = {}
        columns = local.group_B, local.prompt_lengths_B, local.lengths_B, local.response_lengths_B
        for group, prompt, *lengths in zip(*(column.tolist() for column in columns), strict=True):
            found.setdefault(group, (prompt, []))[1].append(tuple(lengths))
        return found

    def metrics(self) -> dict[str, float]:
        """Returns `generate/idle_share`, the part of the generation of the last step that replicas
        waited for the slowest, on average, `generate/tokens`, of all prompts and responses with
        their observations, the scorers' counts and what `episode_metrics` says; the same on all
        ranks.
        """
        worked = sum(mean for mean, _ in self._busy_of_calls)
        took = sum(longest for _, longest in self._busy_of_calls)
        counts = episode_metrics(self._reward_counts)
        return {
            "generate/idle_share": 1 - worked / took if took > 0 else 0.0,
            GENERATED_TOKENS: float(num_generated(self.generated)),
            **counts,
        }

    def num_errors(self) -> int:
        """Returns on how many responses a scorer failed, since the first groups of the step; the
        same on all ranks.
        """
        return sum(n for name, n in self._reward_counts.items() if name.endswith("/errors"))

    def _count(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            self._reward_counts[name] = self._reward_counts.get(name, 0) + count

    def _clock(self) -> Clock:
        """Returns how long this rank's engine worked since the last handover of samples."""
        return Clock(self._busy_s)

    def _note_busy(self, clocks: Sequence[Clock]) -> None:
        self._busy_s = 0.0
        self._busy_of_calls.append(busy_of_replicas(clocks, self.layout))

    def _observe(self, batch: ScoredBatch) -> None:
        """Takes in how long the responses to each prompt were."""
        groups, first_B, counts = np.unique(batch.group_B, return_index=True, return_counts=True)
        sums = np.add.reduceat(batch.response_lengths_B.numpy(), first_B)
        for group, total, count in zip(groups.tolist(), sums, counts, strict=True):
            self._lengths.observe(self._prompts[group], float(total / count))

    @contextmanager
    def judged_by(self, scorer: Scorer) -> Iterator[None]:
        """Has what is generated in the block scored by another scorer alone: without environment
        and reward models.
        """
        kept = self.scorer, self.reward_models, self.episodes
        self.scorer, self.reward_models, self.episodes = scorer, (), None
        try:
            yield
        finally:
            self.scorer, self.reward_models, self.episodes = kept

    @property
    def has_rollouts(self) -> bool:
        """Whether there are responses that a checkpoint would keep, on some rank."""
        return self._step >= 0

    def end_step(self) -> None:
        """Forgets the responses of a step: they were learned from."""
        self._step, self._earlier = -1, {}
        self._saved = SavedRollouts()

    def drop(self) -> None:
        """Forgets all responses, whole and begun ones, and what the engine is to generate."""
        self._step, self._earlier, self._owners, self._done = -1, {}, {}, {}
        self.engine.clear()
        self.scorer.forget()
        if self.episodes is not None:
            self.episodes.forget()

    def state(self) -> dict[str, Any]:
        """Returns the rollouts of the current step, finished and begun, until `end_step`, of all
        replicas on rank 0 and none on others; and the lengths that responses had; JSON. Collective.
        """
        mine = None
        if self._replica.is_first and self._step >= 0:
            turns = [] if self.episodes is None else self.episodes.state()
            whole = (self._earlier | self._done).values()
            mine = rollout_state(whole, self.engine.pending(), turns, self._digests)
        parts = [part for part in self.world.exchange_objects({0: mine}) if part is not None]
        return {
            "step": self._step,
            "sampling": dataclasses.asdict(self._drawn),
            **joined(parts),
            "response_lengths": self._lengths.state(),
            "next_step": self._next_step,
        }

    def load_state(self, state: Mapping[str, Any], source: PromptSource | None = None) -> None:
        """Makes the next `generate` of the saved step go on from these rollouts; what the engine
        has is dropped. Collective.

        Args:
            state: of `state`, after a trip through JSON; that of rank 0 is used.
            source: of the run's prompts, where it stood then.
        """
        is_first = self.world.rank == 0
        told = self.world.broadcast_object(without_samples(state) if is_first else None, 0)
        self._take_in(state if is_first else told, source)

    def _take_in(self, state: Mapping[str, Any], source: PromptSource | None) -> None:
        """Goes on from a state of which rank 0 alone has the samples; collective."""
        self.drop()
        self._saved = SavedRollouts(state)
        self._lengths.load_state(state.get("response_lengths", {}))
        self._next_step = int(state.get("next_step", 0))

    def _note_episodes(
        self, done: Mapping[int, Completion], owners: Mapping[int, tuple[Prompt, int]]
    ) -> None:
        """Tells the scorer what environments gave the responses that this rank scores."""
        if self.episodes is None:
            return
        self.episodes.finish()
        mine = [one for one in done.values() if self._is_mine_to_score(owners[one.request_id][1])]
        for one in mine:
            assert isinstance(one, Response)
            self.scorer.end_episode(one.request_id, one.outcome)
        self._episode_counts = episode_counts(mine)

    def close(self) -> None:
        """Ends what scores and answers in processes of its own."""
        self.scorer.close()
        if self.episodes is not None:
            self.episodes.close()
