"""Generates and scores samples on all replicas, and sends their lengths and rewards to all ranks.

Collective: all ranks make the same calls with the same prompts. One replica generates all samples
for a prompt, so that a reward can compare the samples of a group. Prompts are assigned to replicas
by their expected response lengths (spread.py). The ranks of a replica divide the scoring among
themselves. Afterwards all ranks have the same batch in ascending order of sample numbers; each rank
has the tokens of the samples that it scored. With an environment (episodes.py), each turn that the
engine finishes is sent to the environment. The environment's answer either leads to a request for
the next turn or ends the response. With agents (agent_episodes.py), programs send the requests.

The schedule decides when groups start (schedule.py). Without a lag, each replica runs until its
share of the step is done; a checkpoint written in the meantime contains finished and unfinished
responses. With a lag, all engines stop together when enough groups are complete, and in_flight.py
keeps the other groups for the next step (partial rollouts, Kimi k1.5, arXiv 2501.12599, sec.
2.6.2). Runs are reproducible, because the end of a step is determined by the samples and not by
time. (The samples also do not depend on the number of replicas if `rollout.max_batch` is large
enough for all requests of a replica and each engine step adds one token to each request. SGLang
does not advance samples that wait for the first sample of their prompt.) Engines on separate ranks
also generate while the policy trains, on a background thread (docs/adr/0011). The main thread waits
for this thread before new weights arrive.

If the algorithm compares samples with the greedy response to their prompt, the greedy response is
an additional sample of the group with number -1 - group. The reward of the greedy sample becomes a
reward part of the other samples, and the greedy sample is removed from the batch.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from hybridrl.contracts.batch import GREEDY, Producer, Prompt, RolloutBatch, ScoredBatch
from hybridrl.data.prompts import PromptSource
from hybridrl.errors import UserError
from hybridrl.generation.agent_episodes import AgentEpisodes
from hybridrl.generation.background import BackgroundThread
from hybridrl.generation.episodes import Episodes, OpenResponse
from hybridrl.generation.in_flight import InFlight, Sample, States
from hybridrl.generation.joint_stop import STEPS_BETWEEN_SUMS, JointStop
from hybridrl.generation.responses import OpenAgent, Response
from hybridrl.generation.sample_tables import gathered_batch, table_of, with_greedy_rewards
from hybridrl.generation.sampler_metrics import EngineTimes
from hybridrl.generation.saved_rollouts import (
    SavedRollouts,
    made_otherwise,
    merge_states,
    prompt_digest,
    rollout_state,
    without_sample_data,
)
from hybridrl.generation.schedule import SYNCHRONOUS, Schedule
from hybridrl.generation.spread import ResponseLengths, group_work, spread
from hybridrl.metrics.flops import GeneratedLengths, num_generated
from hybridrl.metrics.timing import Span
from hybridrl.metrics.values import GENERATED_TOKENS
from hybridrl.parallel import progress
from hybridrl.parallel.groups import World
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.parallel.replica import EngineGroup, ReplicaGroup
from hybridrl.parallel.stopping import check_stop
from hybridrl.rewards.base import Scorer
from hybridrl.rollout.engine import Completion, Request, RolloutEngine, SamplingParams, request_seed

# Engine steps between checks for a stop signal. The ranks of a replica must leave generation
# together, so the check is a collective.
STEPS_BETWEEN_STOP_CHECKS = 32
DROPPED_GROUPS = "reward/dropped_groups"  # metric: number of groups without any sample
CANCEL_S = 60.0  # long enough for the generating thread to notice a cancellation
logger = logging.getLogger(__name__)


class Sampler:
    """Samples responses to prompts, together with the other replicas.

    Args:
        episodes: Manager of responses with several turns (environments or agents); None without
            them.
        reward_models: Reward models that add their scores to a batch.
        exact_with: Text that names the engine, type and processor whose log-probabilities serve as
            the trainer's own; None if they do not. Saved samples with another text are generated
            again.

    Attributes:
        in_flight: Groups in flight across steps; empty without a lag.
        generated: Lengths of all responses that the last step generated on all replicas. Includes
            greedy, replaced and dropped responses, but not evaluations.
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
        episodes: Episodes | AgentEpisodes | None = None,
        reward_models: Sequence[Callable[[ScoredBatch], ScoredBatch]] = (),
        schedule: Schedule = SYNCHRONOUS,
        exact_with: str | None = None,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.exact_with, self._notify = exact_with, notify
        self.world, self.layout, self._replica = world, layout, replica
        self.engine, self.scorer, self.episodes = engine, scorer, episodes
        self.sampling, self.samples_per_prompt, self.seed = sampling, samples_per_prompt, seed
        self.reward_models, self.schedule = reward_models, schedule
        self.generated: GeneratedLengths = {}
        self._step, self._next_step = -1, 0
        self._is_evaluation = self._has_greedy = False
        self._prompts: dict[int, Prompt] = {}  # prompts in the batch, by group
        self._owners: dict[int, tuple[Prompt, int]] = {}  # prompt and group, by sample
        self._done: dict[int, Completion] = {}
        self._earlier: dict[int, Completion] = {}  # responses from earlier calls in the step
        self._digests: dict[int, str] = {}  # digests of the step's prompts, by sample
        self._saved = SavedRollouts()  # from the loaded checkpoint
        self._drawn = sampling  # sampling parameters of the current step
        self._lengths = ResponseLengths()
        self.in_flight = InFlight(
            schedule=schedule,
            world=world,
            layout=layout,
            replica=replica,
            samples_per_prompt=samples_per_prompt,
            sampling=sampling,
            lengths=self._lengths,
            has_agents=isinstance(episodes, AgentEpisodes),
        )
        # Values since the last call of `score_or_none`.
        self._episode_counts: dict[str, int] = {}
        # Values of the step, over all ranks.
        self._reward_counts: dict[str, int] = {}
        self._episode_metrics = (episodes or Episodes).metrics
        self._times = EngineTimes(layout, schedule.generates_ahead)
        # State of generation during training.
        self._is_cancelled = self._is_awaited = False
        if schedule.generates_ahead:
            self._engines = EngineGroup(layout, world.rank, world.heartbeat)
            self._thread = BackgroundThread(world.platform.device)

    def take(self, source: PromptSource, per_step: int) -> list[Prompt]:
        """Returns the prompts that `generate` needs to complete `per_step` groups."""
        if self.schedule.carries_over:
            return self.in_flight.take(source, per_step)
        return source.take(per_step)

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        samples_per_prompt: int | None = None,
        step: int | None = None,
        first_group: int = 0,
        sampling: SamplingParams | None = None,
        greedy: bool = False,
    ) -> RolloutBatch | None:
        """Generates this replica's share of a step's samples.

        Without a lag, and in evaluations, generates all samples for the prompts. With a lag, the
        prompts are added to the groups in flight, and the step completes as many groups as the last
        call of `take` requested (by default, the number of groups in a step).

        Args:
            prompts: New prompts, identical on all ranks; with a lag, those that `take` returned.
            samples_per_prompt, sampling: Other values than the sampler's.
            step: Number of the step, which determines the seeds; negative for an evaluation.
                Default: the last step plus one.
            first_group: Group number of the first prompt. A further call in the same step (dynamic
                sampling) must pass the number of earlier groups. With a lag, group numbers are
                unique in the run.
            greedy: Whether to also generate the greedy response to each prompt.

        Returns:
            The samples in ascending order of their numbers; None if this replica has no prompt.

        Raises:
            StopAsked: A signal requested a stop. `state` contains the samples so far.
            ValueError: With a lag, the step could never end with these prompts, or
                `samples_per_prompt` or `sampling` was passed.
        """
        if step is None:
            step, self._next_step = self._next_step, self._next_step + 1
        if step >= 0 and self.schedule.carries_over:
            if samples_per_prompt is not None or sampling is not None:
                raise ValueError(
                    "with max_policy_lag, samples_per_prompt and sampling cannot be set per step"
                )
            self._generate_enough(prompts, step, greedy)
        else:
            with self.world.all_agree("generation"):
                self.submit(
                    prompts,
                    samples_per_prompt or self.samples_per_prompt,
                    step=step,
                    first_group=first_group,
                    sampling=sampling,
                    greedy=greedy,
                )
                for num_steps in itertools.count():
                    if not self.has_unfinished or self._must_stop(num_steps):
                        break
                    self.advance()
            check_stop(self.world)
        return self.collect()

    def _must_stop(self, num_steps: int) -> bool:
        """Whether this replica must stop after `num_steps` engine steps because of a signal."""
        is_requested = self._is_stop_requested()
        if self.layout.tp == 1:
            return is_requested
        # Check after every step if the engine is idle, because its steps then wait for
        # environments, which can take long.
        is_due = num_steps % STEPS_BETWEEN_STOP_CHECKS == 0 or not self.engine.has_unfinished
        return is_due and self._replica.is_any(is_requested)

    def _is_stop_requested(self) -> bool:
        return self.world.heartbeat.stop_signal != 0

    def _generate_enough(self, prompts: Sequence[Prompt], step: int, greedy: bool) -> None:
        began = time.perf_counter()
        if self.engine.version != step:
            raise RuntimeError(
                f"step {step} needs weights of version {step}, but the engine has version "
                f"{self.engine.version}"
            )
        if self.in_flight.begin_round(step, len(prompts)):
            self._forget_counts(step)
        self._is_evaluation = False
        with self.world.all_agree("generation") as agreement:
            self._submit_in_flight(prompts, step, greedy)
            stop = JointStop(
                self.world.begin_sum_on_host,
                lambda found: bool(found[0]) or self.in_flight.may_end(found[1:]),
            )
            for num_steps in itertools.count():
                if stop.is_reached(
                    num_steps,
                    lambda: [int(self._is_stop_requested()), *self.in_flight.num_complete()],
                ):
                    break
                self._advance_in_time(num_steps, self._is_stop_requested)
            agreement.value = self._leave_engine()
        self._times.waited_s += time.perf_counter() - began
        check_stop(self.world)
        self.in_flight.note_states(agreement.values)
        self._prompts = {group.number: group.prompt for group in self.in_flight.end_round()}
        self._owners = {n: owner for n, owner in self._owners.items() if owner[1] in self._prompts}
        self._done = {number: self._done[number] for number in self._owners}

    def submit(
        self,
        prompts: Sequence[Prompt],
        samples_per_prompt: int,
        step: int,
        first_group: int = 0,
        sampling: SamplingParams | None = None,
        greedy: bool = False,
    ) -> None:
        """Submits this replica's requests, some of which continue from the loaded checkpoint.
        Raises UserError if `greedy` is set, and a scorer has the same name as the greedy reward
        part.
        """
        if greedy and GREEDY in (part.name for part in self.scorer.parts):
            raise UserError(
                "reward",
                f"a scorer named {GREEDY!r}",
                "another name, because the algorithm compares with greedy responses",
                "Rename that scorer.",
            )
        self._step, self._owners, self._done = step, {}, {}
        self._has_greedy = greedy
        if first_group == 0:
            self._forget_counts(step)
        self._prompts = dict(enumerate(prompts, first_group))
        requests: list[Request] = []
        if self.episodes is not None:
            requests += self.episodes.start_round(is_evaluation=step < 0)
        params = self._drawn = sampling or self.sampling

        def numbers(group: int) -> list[int]:
            first = group * samples_per_prompt
            return [*range(first, first + samples_per_prompt), *[-1 - group] * greedy]

        expected = self._lengths.expected(prompts, float(params.max_new_tokens))
        work = [
            group_work(prompt, tokens, samples_per_prompt + greedy)
            for prompt, tokens in zip(prompts, expected, strict=True)
        ]
        shares = [[first_group + i for i in share] for share in spread(work, self.layout.replicas)]
        saved = self._saved_samples(
            step, [[number for group in share for number in numbers(group)] for share in shares]
        )
        place = self.layout.assignment[self.world.rank]
        for group in [] if place is None else shares[place[0]]:
            prompt = self._prompts[group]
            digest = prompt_digest(prompt.tokens, prompt.contents)
            for sample_id in numbers(group):
                self._owners[sample_id] = (prompt, group)
                self._digests[sample_id] = digest
                found = saved.find(step, sample_id, prompt, params.for_sample(sample_id))
                if found.whole is not None:
                    self._done[sample_id] = found.whole
                elif request := self._request(sample_id, step, prompt, found.request, found.turns):
                    requests.append(request)
        self.engine.submit(requests)
        self._take_turns([])

    def _request(
        self,
        sample_id: int,
        step: int,
        prompt: Prompt,
        begun: Request | None,
        turns: Mapping[str, Any] | None,
    ) -> Request | None:
        """Returns a sample's first or next request, unless its environment or agent begins."""
        sampling = self._drawn.for_sample(sample_id)
        if self.episodes is not None:
            self.episodes.begin(step, sample_id, prompt, sampling, turns)
            return begun
        seed = request_seed(self.seed, step, sample_id)
        return begun or Request(sample_id, prompt.tokens, seed, sampling, contents=prompt.contents)

    def _submit_in_flight(self, prompts: Sequence[Prompt], step: int, greedy: bool) -> None:
        """Submits all groups in flight and all new prompts to the engines. Collective."""
        self._step, self._has_greedy, self._drawn = step, greedy, self.sampling
        self._owners, self._done = {}, {}
        assigned = self.in_flight.assign(prompts, greedy)
        requests: list[Request] = []
        if self.episodes is not None:
            live = [
                n for _, own in assigned for n, one in own.items() if isinstance(one, OpenAgent)
            ]
            requests += self.episodes.start_round(is_evaluation=False, live=live)
        for group, samples in assigned:
            for sample_id, sample in samples.items():
                self._owners[sample_id] = (group.prompt, group.number)
                if isinstance(sample, Completion):
                    self._done[sample_id] = sample
                elif isinstance(sample, Request):
                    requests.append(sample)
                else:
                    begun, turns = None, None
                    if isinstance(sample, OpenResponse):
                        begun, turns = sample.request, sample.turns
                    request = self._request(sample_id, group.born, group.prompt, begun, turns)
                    requests += [] if request is None else [request]
        self.engine.submit(requests)

    def _forget_counts(self, step: int) -> None:
        self._earlier, self._reward_counts, self._digests = {}, {}, {}
        self._is_evaluation = step < 0
        self._times.begin(self._is_evaluation)
        if not self._is_evaluation:
            self.generated = {}

    def _saved_samples(self, step: int, numbers: Sequence[Sequence[int]]) -> SavedRollouts:
        """Returns the loaded checkpoint's data for this replica, from rank 0. Collective."""
        if step < 0 or step != self._saved.step:
            return SavedRollouts()
        sent: dict[int, dict[str, Any]] = {}
        if self.world.rank == 0:
            parts = [self._saved.select(replica_numbers) for replica_numbers in numbers]
            sent = {rank: parts[self.layout.place(rank)[0]] for rank in self.layout.ranks}
        return SavedRollouts(self.world.exchange_objects(sent)[0])

    @property
    def has_unfinished(self) -> bool:
        is_waiting = self.episodes is not None and self.episodes.is_waiting
        return self.engine.has_unfinished or is_waiting

    def advance(self) -> None:
        """Runs one engine step, and stores and scores the responses that finished."""
        if self.engine.has_unfinished:
            began = time.perf_counter()
            self.engine.step()  # a sync point, because it returns tokens
            self._times.busy_s += time.perf_counter() - began
            progress.advance()
        self._keep(self._take_turns(self.engine.collect()))

    def _advance_in_time(self, num_steps: int, gives_up: Callable[[], bool]) -> None:
        """Runs one engine step if the engine has work. Before each sum of counts over ranks, waits
        for environments' answers that were requested before the previous sum, unless `gives_up`
        returns true. The samples then do not depend on how long environments take. Samples of
        agents do.
        """
        if self.has_unfinished:
            self.advance()
        if not isinstance(self.episodes, Episodes):
            return
        if (num_steps + 1) % STEPS_BETWEEN_SUMS == 0:
            ended, requests = self.episodes.answer_due(gives_up)
            self.engine.submit(requests)
            self._keep(ended)

    @property
    def _carries_over(self) -> bool:
        return self.schedule.carries_over and not self._is_evaluation

    def _take_turns(self, completions: Sequence[Completion]) -> Sequence[Completion]:
        if self.episodes is None:
            return completions
        if self._carries_over and isinstance(self.episodes, Episodes):
            return self.episodes.end_turns(completions)
        ended, requests = self.episodes.advance(completions, not self.engine.has_unfinished)
        self._drop_requests(self.episodes.take_stopped())
        self.engine.submit(requests)
        return ended

    def _drop_requests(self, request_ids: Collection[int]) -> None:
        """Removes requests from the engine, in the same way on all ranks of the replica."""
        if not request_ids:
            return
        left = [one for one in self.engine.pending() if one.request_id not in request_ids]
        self.engine.clear()  # drops no response, because all were collected after the last step
        self.engine.submit(left)

    def _keep(self, finished: Sequence[Completion]) -> None:
        """Stores responses that ended, and submits them to scorers while generation continues. With
        a lag, only complete groups are submitted, because others may move to another replica.
        """
        self._done |= {done.request_id: done for done in finished}
        for done in finished:
            prompt, group = self._owners[done.request_id]
            scored = [done.request_id]
            if self._carries_over:
                scored = []
                if self.in_flight.finish_sample(group):
                    scored = [n for n, (_, number) in self._owners.items() if number == group]
            if self._is_mine_to_score(group):
                for number in scored:
                    whole = self._done[number]
                    observed = whole.observed if isinstance(whole, Response) else None
                    self.scorer.begin(number, prompt, whole.tokens, observed)

    def _is_mine_to_score(self, group: int) -> bool:
        """Whether this rank scores a group; a replica's ranks divide whole groups."""
        return group % self.layout.tp == self.layout.tp_rank(self.world.rank)

    def _leave_engine(self) -> dict[int, States] | None:
        """Removes all samples from the engine. Returns the states of this replica's groups."""
        begun = {request.request_id: request for request in self.engine.pending()}
        self.engine.clear()
        unfinished: Mapping[int, Sample] = begun
        if self.episodes is not None:
            unfinished = self.episodes.leave_engine(begun)
        return self.in_flight.leave_engine({**unfinished, **self._done})

    @contextmanager
    def ahead(
        self, source: PromptSource, waits: AbstractContextManager[None] | None = None
    ) -> Iterator[None]:
        """Generates during a `with` block, for groups in flight and new prompts, if the schedule
        allows. Collective. `waits` is active while this rank waits for a pause after the block.
        """
        if not self.schedule.generates_ahead:
            yield
            return
        try:
            self._begin_ahead(source)
            yield
        except BaseException:
            self._cancel_ahead()
            raise
        with waits or nullcontext():
            self._end_ahead()

    def _begin_ahead(self, source: PromptSource) -> None:
        self.in_flight.drop_late()
        prompts = self.in_flight.take_ahead(source)
        with self.world.all_agree("beginning to generate ahead"):
            self._submit_in_flight(prompts, self._step, self._has_greedy)
        self._is_cancelled = self._is_awaited = False
        if self.world.rank in self.layout.ranks:
            self._thread.start(self._generate_ahead, "generate ahead")

    def _generate_ahead(self) -> None:
        """Generates, on a thread, until few samples of all replicas are unfinished or one fails."""
        failure: Exception | None = None
        pause_at = self.schedule.ahead_until
        assert pause_at is not None

        def counts() -> list[int]:
            has_failed = failure is not None or self._must_end_ahead()
            return [int(has_failed), self.in_flight.num_unfinished()]

        stop = JointStop(
            self._engines.begin_sum, lambda found: bool(found[0]) or found[1] <= pause_at
        )
        for num_steps in itertools.count():
            if stop.is_reached(num_steps, counts):
                break
            try:
                if failure is None:
                    self._advance_in_time(num_steps, self._must_end_ahead)
            except Exception as error:
                failure = error
        if failure is not None:
            raise failure

    def _must_end_ahead(self) -> bool:
        """Whether to end generation during training immediately: if its samples will not be used,
        or if there was a signal and training is done. Until training is done, generation continues,
        so that a resumed run has the same samples as an uninterrupted one.
        """
        return self._is_cancelled or (self._is_awaited and self._is_stop_requested())

    def _end_ahead(self) -> None:
        began = time.perf_counter()
        self._is_awaited = True
        with self.world.all_agree("generating ahead") as agreement:
            self._thread.join(self.world.check)
            agreement.value = self._leave_engine()
        self._times.waited_s += time.perf_counter() - began
        self._times.end_ahead()
        self.in_flight.note_states(agreement.values)

    def _cancel_ahead(self) -> None:
        """Cancels generation during training; every rank with an engine must call it or exit."""
        self._is_cancelled = True
        try:
            self._thread.join(self.world.check, CANCEL_S)
        except Exception as error:  # the caller raises the error that ended the step
            logger.warning("generating ahead: %s: %s", type(error).__name__, error)

    @property
    def ahead_span(self) -> Span | None:
        """Start and end of this rank's last generation during training."""
        return self._thread.span if self.schedule.generates_ahead else None

    def collect(self) -> RolloutBatch | None:
        """Returns the finished samples for the submitted requests. The engine must be empty."""
        owners, done = self._owners, self._done
        self._earlier |= done
        self._owners, self._done = {}, {}
        self._note_episodes(done, owners)
        if not owners:
            return None
        rollouts, groups = [], []
        for sample_id, (prompt, group) in sorted(owners.items()):
            found = done[sample_id].rollouts(prompt)
            rollouts += found
            groups += [group] * len(found)
        producer = Producer.of(type(self.engine), "rollout engine")
        return RolloutBatch.from_rollouts(rollouts, groups, producer)

    def score(self, local: RolloutBatch | None) -> ScoredBatch:
        """Scores the samples of the last `generate`. Returns, on all ranks, the samples of all
        replicas in order of their numbers. Tokens stay on the rank that scored them. Raises
        UserError or PeerError on all ranks if a reward failed on any rank or no response has a
        score.
        """
        if (scored := self.score_or_none(local)) is None:
            raise self.scorer.nothing_left()
        return scored

    def score_or_none(self, local: RolloutBatch | None) -> ScoredBatch | None:
        """Returns the result of `score`, or None on all ranks if no response has a score."""
        with self.world.all_agree("the reward") as agreement:
            groups = [] if local is None else local.group_B.tolist()
            rows = [i for i, group in enumerate(groups) if self._is_mine_to_score(group)]
            scored = None
            if local is not None and rows:
                scored = self.scorer.score(local.select(rows), trains=not self._is_evaluation)
            if scored is not None and self._has_greedy:
                scored = with_greedy_rewards(scored)
            mine = None if scored is None else table_of(scored)
            counts = self.scorer.take_counts() | self._episode_counts
            clock = self._times.take(self._carries_over)
            agreement.value = (clock, mine, counts, self._lengths_of(local))
            self._episode_counts = {}
        self._times.note([clock for clock, *_ in agreement.values], self._is_evaluation)
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
        self._note_lengths(batch)
        return batch

    def _lengths_of(self, local: RolloutBatch | None) -> GeneratedLengths:
        """Returns the lengths that this replica generated, on its first rank."""
        if local is None or self._is_evaluation or not self._replica.is_first:
            return {}
        found: GeneratedLengths = {}
        columns = local.group_B, local.prompt_lengths_B, local.lengths_B, local.response_lengths_B
        # The contexts of an agent's sequences differ, so a group has no prompt that is shared.
        has_prompts = local.sequence_B is None
        for group, prompt, *lengths in zip(*(column.tolist() for column in columns), strict=True):
            found.setdefault(group, (prompt * has_prompts, []))[1].append(tuple(lengths))
        return found

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the last step, identical on all ranks.

        `generate/tokens` is the number of all tokens including observations. Other metrics are the
        counts of scorers and episodes, those of `EngineTimes.metrics` and, with a lag, `lag/*`.
        """
        return {
            **self._times.metrics(),
            GENERATED_TOKENS: float(num_generated(self.generated)),
            **self._episode_metrics(self._reward_counts),
            **(self.in_flight.metrics() if self.schedule.carries_over else {}),
        }

    def num_errors(self) -> int:
        """Returns the step's responses on which a scorer has failed; identical on all ranks."""
        return sum(n for name, n in self._reward_counts.items() if name.endswith("/errors"))

    def _count(self, counts: Mapping[str, int]) -> None:
        for name, count in counts.items():
            self._reward_counts[name] = self._reward_counts.get(name, 0) + count

    def _note_lengths(self, batch: ScoredBatch) -> None:
        samples = batch.by_sample()
        groups, first_B, counts = np.unique(samples.group_B, return_index=True, return_counts=True)
        sums = np.add.reduceat(samples.response_lengths_B.numpy(), first_B)
        for group, total, count in zip(groups.tolist(), sums, counts, strict=True):
            self._lengths.observe(self._prompts[group], float(total / count))

    @contextmanager
    def judged_by(self, scorer: Scorer) -> Iterator[None]:
        """In a `with` block, only `scorer` scores samples, no environment or reward model."""
        kept = self.scorer, self.reward_models, self.episodes
        self.scorer, self.reward_models, self.episodes = scorer, (), None
        try:
            yield
        finally:
            self.scorer, self.reward_models, self.episodes = kept

    @property
    def has_rollouts(self) -> bool:
        """Whether a checkpoint would contain responses of a step in progress."""
        return self._step >= 0 and not self.schedule.carries_over

    def end_step(self) -> None:
        self._step, self._earlier = -1, {}
        self._saved = SavedRollouts()
        self.in_flight.end_step()

    def drop(self) -> None:
        """Drops all responses of the current step, finished or not, and the engine's requests."""
        self._step, self._earlier, self._owners, self._done = -1, {}, {}, {}
        self.engine.clear()
        self.scorer.forget()
        if self.episodes is not None:
            self.episodes.forget()
        self.in_flight.rewind()

    def state(self) -> dict[str, Any]:
        """Returns the rollouts, on rank 0, and response lengths for a checkpoint. Collective.
        Without a lag, the rollouts are the responses of the current step until `end_step`; with a
        lag, those in flight at the beginning of the step.
        """
        found = {"next_step": self._next_step}
        if self.schedule.carries_over:
            sampling = dataclasses.asdict(self.sampling)
            return {**found, "step": -1, "sampling": sampling, **self.in_flight.state()}
        mine = None
        if self._replica.is_first and self._step >= 0:
            turns = [] if self.episodes is None else self.episodes.state()
            whole = (self._earlier | self._done).values()
            # An agent's requests are turns of a program that ends with this process.
            has_agents = isinstance(self.episodes, AgentEpisodes)
            pending = [] if has_agents else self.engine.pending()
            mine = rollout_state(whole, pending, turns, self._digests)
        parts = [part for part in self.world.exchange_objects({0: mine}) if part is not None]
        return {
            **found,
            "step": self._step,
            "sampling": dataclasses.asdict(self._drawn),
            "exact_with": self.exact_with,
            **merge_states(parts),
            "response_lengths": self._lengths.state(),
        }

    def load_state(self, state: Mapping[str, Any], source: PromptSource | None = None) -> None:
        """Lets the next `generate` of the saved step continue; drops requests. Collective. `state`
        is only used on rank 0. `source` has the prompts at the saved position.
        """
        is_first = self.world.rank == 0
        received = self.world.broadcast_object(without_sample_data(state) if is_first else None, 0)
        state = state if is_first else received
        self.drop()
        if made_otherwise(state, self.exact_with):
            self._notify(
                "the checkpoint's responses of the step in progress are generated again, because "
                f"{state.get('exact_with') or 'no engine in exact mode'} sampled them, and their "
                "log-probabilities are not the bits of the trainer"
            )
            state = without_sample_data(state)
        self._saved = SavedRollouts(state)
        self._lengths.load_state(state.get("response_lengths", {}))
        self._next_step = int(state.get("next_step", 0))
        if self.schedule.carries_over:
            self.in_flight.load_state(state, source)

    def _note_episodes(
        self, done: Mapping[int, Completion], owners: Mapping[int, tuple[Prompt, int]]
    ) -> None:
        """Passes environments' outcomes to the scorer for the responses that this rank scores."""
        if self.episodes is None:
            return
        self.episodes.finish()
        own = [r for r in done.values() if self._is_mine_to_score(owners[r.request_id][1])]
        for response in own:
            assert isinstance(response, Response)
            self.scorer.end_episode(response.request_id, response.outcome)
        self._episode_counts = self.episodes.counts(own)

    def close(self) -> None:
        self.scorer.close()
        if self.episodes is not None:
            self.episodes.close()
