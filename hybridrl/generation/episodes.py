"""Responses of several turns: what the policy samples and what its environment answers, in turn.

Token in, token out: a turn's request is the prompt and every token so far, those sampled as they
were sampled, those observed as they were encoded once. So what is trained on is what the engine was
fed. Owns the responses under way; the engine is the sampler's, the environments are the stages'.

Who waits for whom: of a replica's ranks the first alone has environments, and tells the others what
they answered. All its ranks call `advance`, or `end_turns` and `answer_due`, alike. `advance` takes
answers as they come: while an environment thinks, the engine goes on with other responses. Where
what is finished when must not depend on time, `answer_due` takes those that were asked for before
its last call, and waits for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybridrl.config.environment import EnvironmentConfig
from hybridrl.contracts.batch import Prompt, Rollout
from hybridrl.contracts.blobs import Blobs, blobs_from_json, blobs_to_json
from hybridrl.environments.base import Answer, Play
from hybridrl.environments.chat import ObservationEncoder, text_of_turn
from hybridrl.environments.stage import Stages
from hybridrl.errors import UserError
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.rewards.base import TextDecoder
from hybridrl.rewards.outcome import WHERE, Outcome, ScorerFailure
from hybridrl.rollout.engine import (
    Completion,
    Request,
    SamplingParams,
    request_seed,
    versions_from_json,
)

LONGEST_WAIT_S = 1.0  # for an environment; then it is asked whether ranks are to stop
NO_VERSION = -1  # of what an environment gave before the policy's first turn, until that has one
End = Literal["done", "turns", "tokens", "failure"]


@dataclass(frozen=True)
class Response(Completion):
    """A finished response of several turns, observations among its tokens.

    Args:
        observed: Whether the environment gave each token.
        num_turns: Turns of the policy.
        ended: What ended it: the environment; max_turns; its tokens; a failure of the environment.
        failure: What the environment did and should have done.
        notes: How often the environment noted each word.
    """

    observed: tuple[bool, ...] = ()
    num_turns: int = 1
    ended: End = "done"
    reward: float = 0.0
    failure: tuple[str, str] | None = None
    notes: Mapping[str, int] = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        """What the environment's rewards add up to, or why there are none."""
        return self.reward if self.failure is None else ScorerFailure(*self.failure)


def restored(fields: Mapping[str, Any]) -> Completion:
    """Returns a completion or response from what `saved_fields` made of it, after a trip through
    JSON.
    """
    names = {"tokens", "logps", "observed", "failure"} & set(fields)
    made: dict[str, Any] = {name: fields[name] and tuple(fields[name]) for name in names}
    made["blobs"] = blobs_from_json(fields)
    made["versions"] = versions_from_json(fields)
    kind = Response if "observed" in fields else Completion
    given = {name: value for name, value in fields.items() if name != "experts"}
    return kind(**{**given, **made})


@dataclass
class _Episode:
    """A response under way; `actions` are tokens and text of its turns, `waits` whether the last
    of them (or the beginning) is with the environment, `runs` which weights made how many of its
    tokens, [version, number]: what is observed counts with the turn before it.
    """

    step: int
    sample_id: int
    prompt: Prompt
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    observed: list[bool] = field(default_factory=list)
    actions: list[tuple[Sequence[int], str]] = field(default_factory=list)
    num_turns: int = 0
    runs: list[list[int]] = field(default_factory=list)
    reward: float = 0.0
    failure: tuple[str, str] | None = None
    notes: Counter[str] = field(default_factory=Counter)
    waits: bool = True
    blobs: Blobs = field(default_factory=dict)

    def add_turn(self, done: Completion) -> None:
        """Adds what the policy sampled."""
        self._add(done.tokens, done.logps, is_observed=False)
        for version, count in done.runs:
            if self.runs and self.runs[-1][0] in (version, NO_VERSION):
                self.runs[-1] = [version, self.runs[-1][1] + count]
            else:
                self.runs.append([version, count])
        self.blobs = done.blobs
        self.num_turns += 1

    def add_observed(self, tokens: Sequence[int]) -> None:
        """Adds what the environment gave."""
        self._add(tokens, [0.0] * len(tokens), is_observed=True)
        if self.runs:
            self.runs[-1][1] += len(tokens)
        elif tokens:
            self.runs.append([NO_VERSION, len(tokens)])

    def _add(self, tokens: Sequence[int], logps: Sequence[float], is_observed: bool) -> None:
        self.tokens += tokens
        self.logps += logps
        self.observed += [is_observed] * len(tokens)

    @property
    def room(self) -> int:
        """Tokens that may follow."""
        return self.sampling.max_new_tokens - len(self.tokens)

    def response(self, ended: End) -> Response:
        return Response(
            self.sample_id,
            tuple(self.tokens),
            tuple(self.logps),
            "stop" if ended == "done" else "length",
            self.runs[0][0],
            tuple(self.observed),
            self.num_turns,
            ended,
            self.reward,
            self.failure,
            dict(self.notes),
            blobs=self.blobs,
            versions=tuple((v, count) for v, count in self.runs) if len(self.runs) > 1 else (),
        )


_SAVED = (
    *("tokens", "logps", "observed", "actions", "num_turns"),
    *("runs", "reward", "failure", "notes", "waits"),
)


@dataclass(frozen=True)
class OpenResponse:
    """A response under way, for another replica or another process to go on with.

    Args:
        turns: From `Episodes.state`, perhaps after a trip through JSON; not changed.
        request: Turn that the engine has; None: it waits for its environment.
    """

    turns: Mapping[str, Any]
    request: Request | None = None

    @property
    def request_id(self) -> int:
        """The number of the sample."""
        number: int = self.turns["sample_id"]
        return number

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Which weights made how many of its tokens so far."""
        whole = tuple((version, count) for version, count in self.turns["runs"])
        return whole if self.request is None else whole + self.request.runs


class Episodes:
    """The responses of one replica that are under way.

    Raises:
        UserError: There is no such environment.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        replica: ReplicaGroup,
        tokenizer: TextDecoder,
        encoder: ObservationEncoder,
        seed: int,
    ) -> None:
        self._config, self._replica, self._seed = config, replica, seed
        self._tokenizer, self._encoder = tokenizer, encoder
        self._stages = Stages(config) if replica.is_first else None
        self._open: dict[int, _Episode] = {}
        self._plays: dict[int, Future[list[Answer]]] = {}  # of the first rank
        self._asked: list[int] = []  # those that waited when `answer_due` was last called

    @property
    def is_waiting(self) -> bool:
        """Whether a response waits for its environment."""
        return any(episode.waits for episode in self._open.values())

    def begin(
        self,
        step: int,
        sample_id: int,
        prompt: Prompt,
        sampling: SamplingParams,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins a response, or goes on with one of `state`, which may be with the engine; the
        `max_new_tokens` of `sampling` count all turns and observations.
        """
        episode = _Episode(step, sample_id, prompt, sampling)
        if saved is not None:
            if "runs" not in saved:  # a checkpoint of before responses had several versions
                runs = [[saved["version"], len(saved["tokens"])]] if saved["tokens"] else []
                saved = {**saved, "runs": runs}
            for name in _SAVED:
                setattr(episode, name, deepcopy(saved[name]))
            episode.notes = Counter(saved["notes"])
            episode.failure = saved["failure"] and tuple(saved["failure"])
            episode.blobs = blobs_from_json(saved)
        self._open[sample_id] = episode
        if episode.waits:
            self._ask(episode)
            self._asked.append(sample_id)

    def advance(
        self, completions: Sequence[Completion], blocks: bool
    ) -> tuple[list[Response], list[Request]]:
        """Takes in turns that the policy ended and what environments answered; returns responses
        that ended, and the requests of further turns.

        Args:
            blocks: Whether to wait for an answer, if no response can go on without.
        """
        responses = self.end_turns(completions)
        answered, requests = self._go_on(self._answers(blocks and not responses))
        return responses + answered, requests

    def end_turns(self, completions: Sequence[Completion]) -> list[Response]:
        """Takes in turns that the policy ended, and asks the environments for what comes next;
        returns responses that ended without an answer.
        """
        ended = [self._turn_ended(done) for done in completions]
        responses = [response for response in ended if response is not None]
        for response in responses:
            del self._open[response.request_id]
        return responses

    def answer_due(self, gives_up: Callable[[], bool]) -> tuple[list[Response], list[Request]]:
        """Takes in the answers to questions that environments had when this was last called, or
        when their responses began, and waits for those that are missing. Answers to later questions
        are left for the next call. So which answers a call takes in does not depend on how long
        environments think. Returns what `advance` does.

        Args:
            gives_up: Asked now and then; true ends the wait, and there are no answers.
        """
        answers: list[tuple[int, Answer]] | UserError = []
        if self._stages is not None and self._are_there(self._asked, gives_up):
            answers = self._results(self._asked)
        found = self._go_on(self._told(answers) if self._asked else [])
        self._asked = [one for one, episode in self._open.items() if episode.waits]
        return found

    def _are_there(self, asked: Sequence[int], gives_up: Callable[[], bool]) -> bool:
        plays = [self._plays[one] for one in asked]
        while wait(plays, LONGEST_WAIT_S).not_done:
            if gives_up():
                return False
        return True

    def _go_on(self, answers: Sequence[tuple[int, Answer]]) -> tuple[list[Response], list[Request]]:
        """Returns the responses that end with these answers, and the requests of further turns."""
        responses, requests = list[Response](), list[Request]()
        for sample_id, answer in answers:
            found = self._answered(self._open[sample_id], answer)
            if isinstance(found, Request):
                requests.append(found)
            else:
                responses.append(found)
                del self._open[sample_id]
        return responses, requests

    def finish(self) -> None:
        """Ends the environments of responses that ended otherwise; none is under way."""
        if self._stages is not None:
            self._stages.clear()

    def forget(self) -> None:
        """Gives up all responses under way."""
        self._open, self._plays, self._asked = {}, {}, []
        self.finish()

    def state(self) -> list[dict[str, Any]]:
        """Returns the responses under way, for JSON; a turn's request is the engine's."""
        return [
            {
                "sample_id": one.sample_id,
                "blobs": blobs_to_json(one.blobs),
                **{name: getattr(one, name) for name in _SAVED},
            }
            for one in self._open.values()
        ]

    def close(self) -> None:
        """Ends all processes."""
        if self._stages is not None:
            self._stages.close()

    def _ask(self, episode: _Episode) -> None:
        episode.waits = True
        if self._stages is not None:
            prompt, key = episode.prompt, (episode.step, episode.sample_id)
            play = Play(key, prompt.asked, prompt.columns_with_text, list(episode.actions))
            self._plays[episode.sample_id] = self._stages.play(play, episode.sample_id)

    def _answers(self, blocks: bool) -> Sequence[tuple[int, Answer]]:
        """Returns what environments answered since the last call, on all ranks of the replica."""
        if not self.is_waiting:
            return []
        answers: list[tuple[int, Answer]] | UserError = []
        if self._stages is not None:
            if blocks:
                wait(self._plays.values(), LONGEST_WAIT_S, FIRST_COMPLETED)
            answers = self._results([one for one, play in self._plays.items() if play.done()])
        return self._told(answers)

    def _results(self, ready: Sequence[int]) -> list[tuple[int, Answer]] | UserError:
        """Returns what is there of these responses; an error for all of the replica to raise."""
        try:
            return [(one, _plain(self._plays.pop(one).result()[0])) for one in ready]
        except UserError as error:
            return error

    def _told(self, answers: list[tuple[int, Answer]] | UserError) -> Sequence[tuple[int, Answer]]:
        """Returns the first rank's answers on all ranks of the replica."""
        told: list[tuple[int, Answer]] | UserError = self._replica.broadcast_object(answers)
        if isinstance(told, UserError):
            raise told
        return told

    def _turn_ended(self, done: Completion) -> Response | None:
        episode = self._open[done.request_id]
        episode.add_turn(done)
        if episode.failure is not None:
            return episode.response("failure")
        if done.finish_reason == "length":  # cut off, and so nothing to answer
            return episode.response("tokens")
        text = text_of_turn(self._tokenizer, done.tokens)
        episode.actions.append((list(done.tokens), text))
        self._ask(episode)
        return None

    def _answered(self, episode: _Episode, answer: Answer) -> Response | Request:
        episode.waits = False
        if not isinstance(answer, ScorerFailure):
            episode.reward += answer.reward
            episode.notes.update(answer.notes)
            if answer.done:
                return episode.response("done")
            if len(episode.actions) == self._config.max_turns:
                return episode.response("turns")
            observed = self._encoder(answer.observation)
            is_first = not episode.actions
            if isinstance(observed, ScorerFailure):
                answer = observed
            elif len(observed) < episode.room:
                episode.add_observed(observed)
            elif is_first:
                got = f"returned {len(observed)} tokens at the start of {WHERE}"
                expected = f"fewer than rollout.max_new_tokens = {episode.room}"
                answer = ScorerFailure(got, expected)
            else:
                return episode.response("tokens")
        if isinstance(answer, ScorerFailure):
            answer.log()
            episode.failure = (answer.got, answer.expected)
            if episode.actions:
                return episode.response("failure")
            # Without a token of the policy it would be no response; its first turn is its last.
        return self._request(episode)

    def _request(self, episode: _Episode) -> Request:
        """Returns the request of the next turn."""
        longest = min(episode.room, self._config.max_turn_tokens or episode.room)
        turn = len(episode.actions)
        seed = request_seed(self._seed, episode.step, episode.sample_id, turn)
        prompt = (*episode.prompt.tokens, *episode.tokens)
        sampling = replace(episode.sampling, max_new_tokens=longest)
        # What earlier turns recorded stays, also where their positions are computed anew.
        return Request(episode.sample_id, prompt, seed, sampling, blobs=episode.blobs)


def _plain(answer: Answer) -> Answer:
    """Returns an answer that can travel: without what the user's code raised."""
    return replace(answer, cause=None) if isinstance(answer, ScorerFailure) else answer


def episode_counts(responses: Iterable[Completion]) -> dict[str, int]:
    """Returns what `episode_metrics` is made of, to be added up over ranks."""
    found: Counter[str] = Counter()
    for one in responses:
        assert isinstance(one, Response)
        found.update({f"environment/{note}": count for note, count in one.notes.items()})
        found.update({RESPONSES: 1, TURNS: one.num_turns})
        found.update({TRUNCATED + end: one.ended == end for end in ("turns", "tokens")})
    return dict(found)


# No note of an environment can be one of these.
RESPONSES, TURNS, TRUNCATED = "environment/#responses", "environment/#turns", "environment/#cut_"


def episode_metrics(counts: Mapping[str, int]) -> dict[str, float]:
    """Returns `environment/turns_mean`, the shares of responses that were cut off by max_turns and
    by their tokens, and how often each word was noted.
    """
    num = counts.get(RESPONSES, 0)
    if not num:
        return {name: float(count) for name, count in counts.items()}
    ends = {n.removeprefix(TRUNCATED): c for n, c in counts.items() if n.startswith(TRUNCATED)}
    shares = {f"environment/truncated_{end}": count / num for end, count in ends.items()}
    rest = {name: float(count) for name, count in counts.items() if "#" not in name}
    return {**rest, **shares, "environment/turns_mean": counts[TURNS] / num}


def as_rollout(done: Completion, prompt: Prompt) -> Rollout:
    """Returns a completion or response as the data contract has it."""
    observed = done.observed if isinstance(done, Response) else None
    reason, version = done.finish_reason, done.version
    parts = prompt, done.tokens, done.logps, reason, version, observed
    return Rollout(done.request_id, *parts, blobs=done.blobs, versions=done.versions)
