"""Scores sampled responses: decodes them, calls the scorers and handles failures.

A reward is the weighted sum of its scorers. A scorer runs in place, in threads or in processes
(functions.py decides); there, `begin` submits a sample as soon as it is generated. If a scorer
fails, a BatchError names the function, its file and line, and the sample, or the failure is only
counted (`reward.on_error`); it is never silently scored as zero. Each rank scores its own samples,
and the caller must inform the other ranks of an error.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, as_completed
from functools import partial
from itertools import chain
from typing import Protocol

import torch

from hybridrl.config.agent import AgentConfig
from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.reward import SERVED, RewardConfig, ScorerConfig
from hybridrl.contracts.batch import BatchError, Producer, Prompt, RolloutBatch, ScoredBatch
from hybridrl.errors import DataError, UserError
from hybridrl.rewards.functions import (
    NOT_CALLED,
    REPORTED,
    TURNS,
    RewardFunction,
    TurnRewards,
    find_reward,
    where,
)
from hybridrl.rewards.outcome import (
    MAX_WAITING,
    WHERE,
    Job,
    Noted,
    Outcome,
    ScorerFailure,
    call_reward,
)
from hybridrl.rewards.pool import Pool, Scoring
from hybridrl.rewards.traits import traits_of

logger = logging.getLogger(__name__)
Key = tuple[int, tuple[int, ...]]
"""Key of a sample: its number and the tokens of its response."""


class TextDecoder(Protocol):
    """The tokenizer interface used here. Any transformers tokenizer implements it."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of the tokens."""


class Part:
    """One scorer in the weighted sum, with its name in metrics. Without `config`, it runs in place
    with weight 1.
    """

    def __init__(
        self, name: str, function: RewardFunction, config: ScorerConfig | None = None
    ) -> None:
        self.name, self.function = name, function
        self.weight = 1.0 if config is None else config.weight
        self.producer = Producer.of(function, f"reward {name!r}")
        traits = traits_of(function)
        self.is_batched, self.notes = traits.batched, traits.notes
        self._pool: Pool[Outcome] | None = None
        place = "here" if config is None else where(config, function)
        if config is not None and place == "process":
            most = MAX_WAITING if traits.is_async and not traits.batched else 1
            self._pool = Pool(partial(Scoring, config), config.workers, name, most)
        elif config is not None and place == "thread":
            self._pool = Pool(lambda: partial(call_reward, function), config.workers, name)
        self._pending: dict[Key, Future[list[Outcome]]] = {}
        self.is_in_place = self._pool is None
        self.can_begin = not self.is_in_place and not self.is_batched

    def begin(self, sample: int, tokens: tuple[int, ...], job: Job) -> None:
        assert self._pool is not None
        self._pending[sample, tokens] = self._pool.submit(job)

    def start(self, keys: Sequence[Key], job: Job) -> list[Future[list[Outcome]]]:
        """Submits samples that are not yet submitted, and cancels all other submitted ones.

        Returns one future per sample, a single one if the function is batched, and none if it runs
        in place.
        """
        pending, self._pending = self._pending, {}
        if self._pool is None:
            return []
        if self.is_batched:
            return [self._pool.submit(job)]
        futures = []
        for key, *arguments in zip(keys, *job, strict=True):
            single: Job = tuple([argument] for argument in arguments)  # type: ignore[assignment]
            futures.append(pending.pop(key) if key in pending else self._pool.submit(single))
        self._pending = pending
        self.forget()
        return futures

    def forget(self) -> None:
        pending, self._pending = self._pending, {}
        for future in pending.values():
            future.cancel()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()


class TurnPart(Part):
    """Rewards for turns, from an environment or an agent (`source`); ignored without a weight."""

    def __init__(self, name: str, weight: float | None, source: str) -> None:
        super().__init__(name, TurnRewards())
        self.weight, self.is_counted = weight or 0.0, weight is not None
        self.producer = Producer(source)
        self.ended: dict[int, Outcome] = {}
        self.is_in_place = False

    def start(self, keys: Sequence[Key], job: Job) -> list[Future[list[Outcome]]]:
        future: Future[list[Outcome]] = Future()
        future.set_result([self.ended.pop(sample) for sample, _ in keys])
        return [future]


class Scorer:
    """Scores batches.

    Args:
        tokenizer: Tokenizer that decodes responses to text without special tokens.
        function: Reward function to use instead of the configured functions, or several functions
            whose scores are added (interface: see functions.py), named as in metrics.
        environment, agent: Sections of the environment or agent that took part in the responses;
            None without one.

    Raises:
        UserError: `config` names an unknown function or has wrong settings.
    """

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: TextDecoder,
        function: RewardFunction | Sequence[RewardFunction] | None = None,
        min_samples: int = 2,
        environment: EnvironmentConfig | None = None,
        agent: AgentConfig | None = None,
    ) -> None:
        self._config, self._tokenizer, self._min_samples = config, tokenizer, min_samples
        environment, agent = environment or EnvironmentConfig(), agent or AgentConfig()
        self._piece = functools.cache(lambda token: self._text([token]))
        self._sees_all = "response" in (environment.reward_sees, agent.reward_sees)
        if function is not None:
            self.parts = _script_parts([function] if callable(function) else function)
        else:
            called = [x for x in config.scorers().items() if x[1].function not in NOT_CALLED]
            self.parts = [Part(name, find_reward(one), one) for name, one in called]
        self._turns: TurnPart | None = None
        self._has_agents = agent.is_on
        if environment.name is not None or agent.is_on:
            own = REPORTED if agent.is_on else TURNS
            weights = {n: s.weight for n, s in config.scorers().items() if s.function == own}
            name = next(iter(weights), own)
            weight = None if function is not None else weights.get(name)
            source = "agent" if agent.is_on else f"environment {environment.name!r}"
            self._turns = TurnPart(name, weight, source)
            self.parts.append(self._turns)
        self.name = " + ".join([part.name for part in self.parts] or [SERVED])
        self._producer = self.parts[0].producer if self.parts else Producer.here(SERVED)
        self._counts = dict.fromkeys(self._count_names(), 0)

    @property
    def drops(self) -> bool:
        """Whether samples without a score may be dropped."""
        has_untrainable = self._has_agents and self._config.on_error == "value"
        return self._config.on_error == "drop" or has_untrainable

    def responses(self, batch: RolloutBatch) -> list[str]:
        """Returns the text of each response, including observations but no special tokens."""
        return [self._text(tokens) for tokens, _ in _responses(batch)]

    def contexts(self, batch: RolloutBatch) -> list[str]:
        """Returns the text before each response, without special tokens."""
        starts, sizes = batch.offsets[:-1], batch.of_held(batch.prompt_lengths_B)
        tokens = batch.tokens_T
        return [
            self._text(tokens[start : start + size].tolist())
            for start, size in zip(starts.tolist(), sizes.tolist(), strict=True)
        ]

    def pieces(self, batch: RolloutBatch) -> list[list[str]]:
        """Returns the text of each token in each response. Special tokens have an empty text."""
        return [[self._piece(token) for token in tokens] for tokens, _ in _responses(batch)]

    def begin(
        self,
        sample: int,
        prompt: Prompt,
        tokens: Sequence[int],
        observed: Sequence[bool] | None = None,
    ) -> None:
        """Submits a finished sample to the scorers that can run during generation."""
        parts = [part for part in self.parts if part.can_begin]
        if parts:
            tokens = self._seen(tokens, observed)
            job = ([prompt.asked], [self._text(tokens)], [prompt.columns_with_text])
            for part in parts:
                part.begin(sample, tuple(tokens), job)

    def end_episode(self, sample: int, outcome: Outcome) -> None:
        if self._turns is not None:
            self._turns.ended[sample] = outcome

    def score(self, batch: RolloutBatch, trains: bool = True) -> ScoredBatch | None:
        """Adds rewards to a batch of complete groups, with the scorers' unweighted scores as parts.
        If a sample consists of several sequences, scorers receive the response in its last one.

        `trains` says whether the policy is trained on the samples.

        Returns:
            The scored samples, or None if none remains. Failed samples are removed with
            `reward.on_error=drop`. Samples to train on that contain nothing trainable are always
            removed.
            Groups with too few samples for a comparison are removed as a whole.

        Raises:
            BatchError: A scorer failed and `reward.on_error` is 'stop'; raised at the first
                failure.
            DataError: The row caused the failure; raised instead of BatchError.
        """
        whole, ways = batch, batch.sequences
        if ways.counts_E is not None:
            batch = batch.select(ways.last_E)
        tokens = [self._seen(*response) for response in _responses(batch)]
        keys = list(zip(batch.sample_ids_B.tolist(), map(tuple, tokens), strict=True))
        prompts, texts = batch.prompts, [self._text(one) for one in tokens]
        job = ([p.asked for p in prompts], texts, [p.columns_with_text for p in prompts])
        total_B, scores = torch.zeros(batch.num_samples, dtype=torch.float64), {}
        without_turns: list[int] = []
        dropped: set[int] = set()
        for part, found in zip(self.parts, self._outcomes(keys, job), strict=True):
            failed = self._settle(part, batch, found)
            dropped |= {i for i in failed if self._is_dropped(found[i], trains)}
            if isinstance(part, TurnPart) and not part.is_counted:
                without_turns = [i for i, one in enumerate(found) if isinstance(one, ScorerFailure)]
                continue
            scores[part.name] = torch.tensor([self._number(x) for x in found], dtype=torch.float64)
            total_B += part.weight * scores[part.name]
        # If the environment or the agent failed, other scores for this response are meaningless.
        total_B[without_turns] = self._config.error_value
        floats = {name: ways.of_sequences(score_B.float()) for name, score_B in scores.items()}
        scored = whole.scored(ways.of_sequences(total_B.float()), floats, self._producer)
        if not dropped:
            return scored
        rest = _comparable(batch.group_B.tolist(), dropped, self._min_samples)
        is_left_B = torch.zeros(batch.num_samples, dtype=torch.bool)
        is_left_B[rest] = True
        return scored.select(ways.of_sequences(is_left_B).nonzero()[:, 0]) if rest else None

    def take_counts(self) -> dict[str, int]:
        """Returns the numbers of errors and notes since the last call, by metric name."""
        counts, self._counts = self._counts, dict.fromkeys(self._count_names(), 0)
        return counts

    def forget(self) -> None:
        for part in self.parts:
            part.forget()

    @property
    def counts_turns(self) -> bool:
        """Whether rewards from the environment or the agent are part of the reward."""
        return self._turns is not None and self._turns.is_counted

    def close(self) -> None:
        for part in self.parts:
            part.close()

    def nothing_left(self) -> UserError:
        return UserError(
            f"reward {self.name!r}",
            "no score for any response of a step",
            f"at least {self._min_samples} scores for one prompt",
            "Read the scorer's errors in logs/rank_N.log, or set reward.on_error=stop.",
        )

    def _outcomes(self, keys: Sequence[Key], job: Job) -> list[list[Outcome]]:
        """Returns all samples' outcomes for each scorer, or up to a failure that stops the run."""
        stops = self._config.on_error == "stop"
        started = [part.start(keys, job) for part in self.parts]
        waiting = list(chain.from_iterable(started))
        try:
            here = [
                call_reward(part.function, job, stops) if part.is_in_place else []
                for part in self.parts
            ]
            has_failed = stops and any(_has_failed(found) for found in here)
            ended = as_completed(waiting)
            while not has_failed and (future := next(ended, None)) is not None:
                has_failed = _has_failed(future.result()) and stops
        finally:
            for future in waiting:
                future.cancel()
        return [
            found or list(chain.from_iterable(map(_result_if_done, futures)))
            for found, futures in zip(here, started, strict=True)
        ]

    def _settle(self, part: Part, batch: RolloutBatch, found: Sequence[Outcome]) -> set[int]:
        """Counts failures and notes. Returns the failed samples, or raises the first failure."""
        failed = {i for i, outcome in enumerate(found) if isinstance(outcome, ScorerFailure)}
        if failed:
            first = min(failed)
            failure = found[first]
            assert isinstance(failure, ScorerFailure)
            got = failure.got.replace(WHERE, f"sample {int(batch.sample_ids_B[first])}")
            if self._config.on_error == "stop" and isinstance(failure.cause, DataError):
                raise failure.cause
            # Only the traceback of the first failure is logged.
            error = BatchError(part.producer, "reward_B", got, failure.expected, failure.log())
            if self._config.on_error == "stop":
                raise error from failure.cause or failure.reported()
            logger.warning("%d of %d samples failed; the first: %s", len(failed), len(found), error)
        self._counts[f"reward/{part.name}/errors"] += len(failed)
        for outcome in found:
            if isinstance(outcome, Noted) and outcome.note in part.notes:
                self._counts[f"reward/{part.name}/{outcome.note}"] += 1
        return failed

    def _is_dropped(self, outcome: Outcome, trains: bool) -> bool:
        is_untrainable = isinstance(outcome, ScorerFailure) and outcome.is_untrainable
        return self._config.on_error == "drop" or (trains and is_untrainable)

    def _number(self, outcome: Outcome) -> float:
        if isinstance(outcome, ScorerFailure):
            return self._config.error_value
        return float(outcome)

    def _count_names(self) -> list[str]:
        return [f"reward/{p.name}/{what}" for p in self.parts for what in ("errors", *p.notes)]

    def _seen(self, tokens: Sequence[int], observed: Sequence[bool] | None) -> Sequence[int]:
        if self._sees_all or observed is None or True not in observed:
            return tokens
        return tokens[len(observed) - list(reversed(observed)).index(True) :]

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)


def _has_failed(found: Sequence[Outcome]) -> bool:
    return any(isinstance(outcome, ScorerFailure) for outcome in found)


def _result_if_done(future: Future[list[Outcome]]) -> list[Outcome]:
    is_known = future.done() and not future.cancelled()
    return future.result() if is_known else [0.0]


def _comparable(groups: Sequence[int], failed: set[int], min_samples: int) -> list[int]:
    before = Counter(groups)
    left = Counter(group for i, group in enumerate(groups) if i not in failed)
    return [
        i
        for i, group in enumerate(groups)
        if i not in failed and (left[group] >= min_samples or left[group] == before[group])
    ]


def _responses(batch: RolloutBatch) -> list[tuple[list[int], list[bool] | None]]:
    prompt_lengths_H, ends = batch.of_held(batch.prompt_lengths_B), batch.offsets[1:]
    starts = (batch.offsets[:-1] + prompt_lengths_H).tolist()
    bounds = [slice(*bound) for bound in zip(starts, ends.tolist(), strict=True)]
    tokens, observed_T = batch.tokens_T.tolist(), batch.observed_T
    observed = None if observed_T is None else observed_T.tolist()
    return [(tokens[one], None if observed is None else observed[one]) for one in bounds]


def _script_parts(functions: Sequence[RewardFunction]) -> list[Part]:
    allowed = "a function f(prompt, response, columns), or a list of them with different names"
    if not functions:
        raise UserError(
            "reward", "an empty list", allowed, "Remove the list to use the section reward."
        )
    for function in functions:
        if not callable(function):
            raise UserError("reward", type(function).__name__, allowed, "Pass the function itself.")
    names = [str(getattr(f, "__name__", type(f).__name__)) for f in functions]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        remedy = "Give each function a different __name__, which names its metrics."
        raise UserError("reward", f"{repeated[0]} twice", allowed, remedy)
    return [Part(name, function) for name, function in zip(names, functions, strict=True)]
