"""From sampled tokens to rewards: decodes responses, has them scored, settles what failed.

A reward is the weighted sum of its scorers. One may run in place, in threads or in processes
(functions.py says which); then `begin` hands it a sample as soon as that is generated, and `score`
waits for what is still under way. What a scorer does wrong becomes a BatchError that names the
function, its file and line, and the sample, or, if `reward.on_error` says so, is counted: never a
zero that nobody sees. Every rank scores the samples it is given; making one rank's error known to
the others is the caller's business.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, as_completed
from functools import partial
from itertools import chain
from typing import Protocol

import torch

from hybridrl.config.environment import EnvironmentConfig
from hybridrl.config.reward import SERVED, RewardConfig, ScorerConfig
from hybridrl.contracts.batch import BatchError, Producer, Prompt, RolloutBatch, ScoredBatch
from hybridrl.errors import DataError, UserError
from hybridrl.rewards.functions import (
    NOT_CALLED,
    TURNS,
    OfTurns,
    RewardFunction,
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
"""A sample: its number and its response's tokens."""


class TextDecoder(Protocol):
    """What is used of a tokenizer here; any transformers tokenizer fits."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """Returns the text of these tokens."""
        ...


class Part:
    """One scorer of the sum.

    Args:
        name: in metrics.
        function: that scores.
        config: how it is run; None: in place, of weight 1.
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
        self._begun: dict[Key, Future[list[Outcome]]] = {}

    @property
    def is_in_place(self) -> bool:
        """Whether the calling thread scores."""
        return self._pool is None

    @property
    def can_begin(self) -> bool:
        """Whether single samples can be scored beside the calling thread."""
        return not self.is_in_place and not self.is_batched

    def begin(self, sample: int, tokens: tuple[int, ...], job: Job) -> None:
        """Hands over one sample."""
        assert self._pool is not None
        self._begun[sample, tokens] = self._pool.submit(job)

    def start(self, keys: Sequence[Key], job: Job) -> list[Future[list[Outcome]]]:
        """Hands over these samples, of which some may have begun, and forgets all others.

        Returns:
            What comes of each sample, or of all at once; nothing if it scores in place.
        """
        begun, self._begun = self._begun, {}
        if self._pool is None:
            return []
        if self.is_batched:
            return [self._pool.submit(job)]
        futures = []
        for key, *arguments in zip(keys, *job, strict=True):
            one: Job = tuple([argument] for argument in arguments)  # type: ignore[assignment]
            futures.append(begun.pop(key) if key in begun else self._pool.submit(one))
        self._begun = begun
        self.forget()
        return futures

    def forget(self) -> None:
        """Gives up samples that have begun."""
        begun, self._begun = self._begun, {}
        for late in begun.values():
            late.cancel()

    def close(self) -> None:
        """Ends its processes and threads."""
        if self._pool is not None:
            self._pool.close()


class PartOfTurns(Part):
    """What the environment gave for the turns of each response.

    Args:
        name: in metrics.
        weight: None: its rewards count nothing, its failures do.
        environment: how messages call it.
    """

    def __init__(self, name: str, weight: float | None, environment: str) -> None:
        super().__init__(name, OfTurns())
        self.weight, self.is_counted = weight or 0.0, weight is not None
        self.producer = Producer.of(OfTurns, f"environment {environment!r}")
        self.ended: dict[int, Outcome] = {}

    @property
    def is_in_place(self) -> bool:
        """No: it is known already."""
        return False

    @property
    def can_begin(self) -> bool:
        """No."""
        return False

    def start(self, keys: Sequence[Key], job: Job) -> list[Future[list[Outcome]]]:
        """Returns what was told of these samples, and forgets it."""
        known: Future[list[Outcome]] = Future()
        known.set_result([self.ended.pop(sample) for sample, _ in keys])
        return [known]


class Scorer:
    """Scores batches.

    Args:
        config: names the functions.
        tokenizer: decodes responses; special tokens are left out of the text.
        function: Function from Python to use instead, called as functions.py says, or several,
            whose scores are added; their names are those of their metrics.
        fewest: samples of a group that can be compared with each other.
        environment: that takes part in responses, if it names one.

    Raises:
        UserError: `config` names no function.
    """

    def __init__(
        self,
        config: RewardConfig,
        tokenizer: TextDecoder,
        function: RewardFunction | Sequence[RewardFunction] | None = None,
        fewest: int = 2,
        environment: EnvironmentConfig | None = None,
    ) -> None:
        self._config, self._tokenizer, self._fewest = config, tokenizer, fewest
        environment = environment or EnvironmentConfig()
        self._pieces: dict[int, str] = {}
        self._sees_all = environment.reward_sees == "response"
        if function is not None:
            self.parts = _given_parts([function] if callable(function) else function)
        else:
            called = [x for x in config.scorers().items() if x[1].function not in NOT_CALLED]
            self.parts = [Part(name, find_reward(one), one) for name, one in called]
        weights = {n: s.weight for n, s in config.scorers().items() if s.function == TURNS}
        self._turns: PartOfTurns | None = None
        if environment.name is not None:
            name = next(iter(weights), TURNS)
            weight = None if function is not None else weights.get(name)
            self._turns = PartOfTurns(name, weight, environment.name)
            self.parts.append(self._turns)
        self.name = " + ".join([part.name for part in self.parts] or [SERVED])
        self._producer = self.parts[0].producer if self.parts else Producer.here(SERVED)
        self._counts = dict.fromkeys(self._count_names(), 0)

    @property
    def drops(self) -> bool:
        """Whether samples that have no score are left out."""
        return self._config.on_error == "drop"

    def responses(self, batch: RolloutBatch) -> list[str]:
        """Returns the text of each sample's response, observations too, without special tokens."""
        return [self._text(tokens) for tokens, _ in _responses(batch)]

    def pieces(self, batch: RolloutBatch) -> list[list[str]]:
        """Returns the text of each token of each sample's response alone, "" of special tokens."""
        return [[self._piece(token) for token in tokens] for tokens, _ in _responses(batch)]

    def begin(
        self,
        sample: int,
        prompt: Prompt,
        tokens: Sequence[int],
        observed: Sequence[bool] | None = None,
    ) -> None:
        """Has a finished sample scored while others are still generated, where a scorer can."""
        parts = [part for part in self.parts if part.can_begin]
        if parts:
            tokens = self._seen(tokens, observed)
            job = ([prompt.asked], [self._text(tokens)], [prompt.columns_with_text])
            for part in parts:
                part.begin(sample, tuple(tokens), job)

    def end_episode(self, sample: int, outcome: Outcome) -> None:
        """Takes in what the environment gave for all turns of a sample, or why nothing."""
        if self._turns is not None:
            self._turns.ended[sample] = outcome

    def score(self, batch: RolloutBatch) -> ScoredBatch | None:
        """Returns the batch with its rewards; its parts are the scores by scorer, unweighted.

        Args:
            batch: of whole groups, which a batched scorer may want to see.

        Returns:
            The samples, but for those that `reward.on_error` drops, with the rest of a group that
            has too few left to compare; None if there are none left.

        Raises:
            BatchError: a scorer failed, and `reward.on_error` is 'stop'; at the first failure,
                without waiting for the other samples.
            DataError: likewise, if it was for what the row has.
        """
        tokens = [self._seen(*response) for response in _responses(batch)]
        keys = list(zip(batch.sample_ids_B.tolist(), map(tuple, tokens), strict=True))
        prompts, texts = batch.prompts, [self._text(one) for one in tokens]
        job = ([p.asked for p in prompts], texts, [p.columns_with_text for p in prompts])
        total_B, scores = torch.zeros(batch.num_samples, dtype=torch.float64), {}
        failed: set[int] = set()
        unturned: list[int] = []
        for part, found in zip(self.parts, self._outcomes(keys, job), strict=True):
            failed |= self._settle(part, batch, found)
            if isinstance(part, PartOfTurns) and not part.is_counted:
                unturned = [i for i, one in enumerate(found) if isinstance(one, ScorerFailure)]
                continue
            scores[part.name] = torch.tensor([self._number(x) for x in found], dtype=torch.float64)
            total_B += part.weight * scores[part.name]
        # What is left of a response whose environment failed says nothing.
        total_B[unturned] = self._config.error_value
        floats = {name: score_B.float() for name, score_B in scores.items()}
        scored = batch.scored(total_B.float(), floats, self._producer)
        if not failed or not self.drops:
            return scored
        rest = _comparable(batch.group_B.tolist(), failed, self._fewest)
        return scored.select(rest) if rest else None

    def take_counts(self) -> dict[str, int]:
        """Returns, since the last call, the samples with an error or a note of each scorer, by the
        metric's name.
        """
        counts, self._counts = self._counts, dict.fromkeys(self._count_names(), 0)
        return counts

    def forget(self) -> None:
        """Gives up samples whose scoring has begun."""
        for part in self.parts:
            part.forget()

    def close(self) -> None:
        """Ends all processes and threads that score."""
        for part in self.parts:
            part.close()

    def nothing_left(self) -> UserError:
        """Returns the error of a step whose every response was dropped."""
        return UserError(
            f"reward {self.name!r}",
            "no score for any response of a step, all dropped",
            f"at least {self._fewest} scores for a prompt that has as many responses",
            "Look into logs/rank_N.log for the scorer's errors, or set reward.on_error=stop.",
        )

    def _outcomes(self, keys: Sequence[Key], job: Job) -> list[list[Outcome]]:
        """Returns what each scorer made of the samples; where a failure stops the run, what there
        is when the first is known, with a number for what is not.

        A function gets the row's prompt, the response's text and the row's other columns, once a
        sample, or once with lists of all where it is batched, and returns a float a sample.
        """
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
            found or list(chain.from_iterable(map(_known, futures)))
            for found, futures in zip(here, started, strict=True)
        ]

    def _settle(self, part: Part, batch: RolloutBatch, found: Sequence[Outcome]) -> set[int]:
        """Counts what failed and was noted; returns the failed samples, or raises the first."""
        failed = {i for i, outcome in enumerate(found) if isinstance(outcome, ScorerFailure)}
        if failed:
            first = min(failed)
            failure = found[first]
            assert isinstance(failure, ScorerFailure)
            got = failure.got.replace(WHERE, f"sample {int(batch.sample_ids_B[first])}")
            if self._config.on_error == "stop" and isinstance(failure.cause, DataError):
                raise failure.cause
            # Of a step's failures the first one's traceback is enough.
            error = BatchError(part.producer, "reward_B", got, failure.expected, failure.log())
            if self._config.on_error == "stop":
                raise error from failure.cause or failure.reported()
            logger.warning("%d of %d samples failed; the first: %s", len(failed), len(found), error)
        self._counts[f"reward/{part.name}/errors"] += len(failed)
        for outcome in found:
            if isinstance(outcome, Noted) and outcome.note in part.notes:
                self._counts[f"reward/{part.name}/{outcome.note}"] += 1
        return failed

    def _number(self, outcome: Outcome) -> float:
        if isinstance(outcome, ScorerFailure):
            return self._config.error_value
        return float(outcome)

    def _count_names(self) -> list[str]:
        return [f"reward/{p.name}/{what}" for p in self.parts for what in ("errors", *p.notes)]

    def _seen(self, tokens: Sequence[int], observed: Sequence[bool] | None) -> Sequence[int]:
        """Returns the part of a response that reward functions get."""
        if self._sees_all or observed is None or True not in observed:
            return tokens
        return tokens[len(observed) - list(reversed(observed)).index(True) :]

    def _text(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def _piece(self, token: int) -> str:
        if token not in self._pieces:  # as many as the vocabulary has, at most
            self._pieces[token] = self._text([token])
        return self._pieces[token]


def _has_failed(found: Sequence[Outcome]) -> bool:
    return any(isinstance(outcome, ScorerFailure) for outcome in found)


def _known(future: Future[list[Outcome]]) -> list[Outcome]:
    is_known = future.done() and not future.cancelled()
    return future.result() if is_known else [0.0]


def _comparable(groups: Sequence[int], failed: set[int], fewest: int) -> list[int]:
    """Returns the samples that did not fail, but for those of a group that fell below `fewest`."""
    before = Counter(groups)
    left = Counter(group for i, group in enumerate(groups) if i not in failed)
    return [
        i
        for i, group in enumerate(groups)
        if i not in failed and (left[group] >= fewest or left[group] == before[group])
    ]


def _responses(batch: RolloutBatch) -> list[tuple[list[int], list[bool] | None]]:
    """Returns the response of each sample on this rank, and which of its tokens were observed."""
    prompt_lengths_H, ends = batch.of_held(batch.prompt_lengths_B), batch.offsets[1:]
    starts = (batch.offsets[:-1] + prompt_lengths_H).tolist()
    bounds = [slice(*bound) for bound in zip(starts, ends.tolist(), strict=True)]
    tokens, observed_T = batch.tokens_T.tolist(), batch.observed_T
    observed = None if observed_T is None else observed_T.tolist()
    return [(tokens[one], None if observed is None else observed[one]) for one in bounds]


def _given_parts(functions: Sequence[RewardFunction]) -> list[Part]:
    """Returns a part for each function of a user's script.

    Raises:
        UserError: there is none, one is no function, or two have one name.
    """
    allowed = "a function f(prompt, response, columns), or a list of such with different names"
    if not functions:
        raise UserError("reward", "an empty list", allowed, "Leave it out to use the section.")
    for function in functions:
        if not callable(function):
            raise UserError("reward", type(function).__name__, allowed, "Give the function itself.")
    names = [_name_of(function) for function in functions]
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        remedy = "Give each a __name__ of its own: its metrics have it."
        raise UserError("reward", f"{repeated[0]} twice", allowed, remedy)
    return [Part(name, function) for name, function in zip(names, functions, strict=True)]


def _name_of(function: RewardFunction) -> str:
    named = function if hasattr(function, "__name__") else type(function)
    return str(named.__name__)
