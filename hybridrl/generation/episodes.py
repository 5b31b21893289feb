"""Manages multi-turn responses, in which the policy and its environment take turns.

Token in, token out: the request for a turn contains the prompt and all tokens so far, which are
never decoded and encoded again. The training inputs are therefore exactly the engine's inputs. Owns
the unfinished responses; the sampler owns the engine, and the stages own the environments.

Who waits for whom: only the first rank of a replica runs environments, and sends their answers to
the other ranks. All ranks of the replica must call `advance`, or `end_turns` and `answer_due`, in
the same order. `advance` processes answers as they arrive, so that the engine can continue with
other responses while an environment works. `answer_due` makes the order of completion independent
of time: it waits for the answers that were requested before its last call, and processes only
these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.config.environment import EnvironmentConfig
from hybridrl.contracts.batch import Prompt
from hybridrl.contracts.blobs import Blobs, blobs_from_json, blobs_to_json
from hybridrl.contracts.prompts import Content
from hybridrl.contracts.response_contents import with_contents, without_contents
from hybridrl.environments.base import Answer, EnvironmentCall
from hybridrl.environments.chat import ObservationEncoder, text_of_turn
from hybridrl.environments.stage import EnvironmentRunners
from hybridrl.errors import UserError
from hybridrl.generation.responses import End, Response
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.rewards.base import TextDecoder
from hybridrl.rewards.outcome import WHERE, ScorerFailure
from hybridrl.rollout.engine import Completion, Request, SamplingParams, request_seed

LONGEST_WAIT_S = 1.0  # maximum wait for an environment between checks for a stop request
# Keys that cannot collide with the notes of an environment.
RESPONSES, TURNS, TRUNCATED = "environment/#responses", "environment/#turns", "environment/#cut_"
NO_VERSION = -1  # temporary version of observations before the policy's first turn


@dataclass
class _Episode:
    step: int
    sample_id: int
    prompt: Prompt
    sampling: SamplingParams
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    observed: list[bool] = field(default_factory=list)
    # Tokens and text of each turn.
    actions: list[tuple[Sequence[int], str]] = field(default_factory=list)
    num_turns: int = 0
    # Items are [version of the weights, number of tokens]. Observations belong to the run of the
    # preceding turn.
    runs: list[list[int]] = field(default_factory=list)
    reward: float = 0.0
    failure: tuple[str, str] | None = None
    notes: Counter[str] = field(default_factory=Counter)
    waits: bool = True  # whether it waits for the environment
    blobs: Blobs = field(default_factory=dict)
    # Images in observations, at their places among the tokens of prompt and response.
    contents: tuple[Content, ...] = ()

    def add_turn(self, done: Completion) -> None:
        self._add(done.tokens, done.logps, is_observed=False)
        for version, count in done.runs:
            if self.runs and self.runs[-1][0] in (version, NO_VERSION):
                self.runs[-1] = [version, self.runs[-1][1] + count]
            else:
                self.runs.append([version, count])
        self.blobs = done.blobs
        self.num_turns += 1

    def add_observed(self, tokens: Sequence[int], contents: Sequence[Content] = ()) -> None:
        before = len(self.prompt.tokens) + len(self.tokens)
        self.contents += tuple(replace(one, start=before + one.start) for one in contents)
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
        """Number of tokens that can still be added."""
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
            blobs=with_contents(self.blobs, self.contents),
            versions=tuple((v, count) for v, count in self.runs) if len(self.runs) > 1 else (),
        )


_SAVED = (
    *("tokens", "logps", "observed", "actions", "num_turns"),
    *("runs", "reward", "failure", "notes", "waits"),
)


@dataclass(frozen=True)
class OpenResponse:
    """An unfinished response that another replica or process can continue. `turns` is an entry of
    `Episodes.state`, possibly through JSON; never modified. `request` is the request for the
    current turn; None if the response waits for its environment.
    """

    turns: Mapping[str, Any]
    request: Request | None = None

    @property
    def request_id(self) -> int:
        number: int = self.turns["sample_id"]
        return number

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        whole = tuple((version, count) for version, count in self.turns["runs"])
        return whole if self.request is None else whole + self.request.runs


class Episodes:
    """Manages the unfinished responses on one replica, independently of time (`answer_due`)."""

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
        self._stages = EnvironmentRunners(config) if replica.is_first else None
        self._open: dict[int, _Episode] = {}
        self._plays: dict[int, Future[list[Answer]]] = {}  # filled only on the first rank
        self._due: list[int] = []  # responses that were waiting at the last call of `answer_due`

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
        """Begins a response, or continues `saved`, an entry from `state`. The engine may have a
        request for its turn. `sampling.max_new_tokens` limits the tokens of all turns and
        observations.
        """
        episode = _Episode(step, sample_id, prompt, sampling)
        if saved is not None:
            if "runs" not in saved:  # an old checkpoint with only one version per response
                runs = [[saved["version"], len(saved["tokens"])]] if saved["tokens"] else []
                saved = {**saved, "runs": runs}
            for name in _SAVED:
                setattr(episode, name, deepcopy(saved[name]))
            episode.notes = Counter(saved["notes"])
            episode.failure = saved["failure"] and tuple(saved["failure"])
            episode.blobs, episode.contents = without_contents(blobs_from_json(saved))
        self._open[sample_id] = episode
        if episode.waits:
            self._ask(episode)
            self._due.append(sample_id)

    def start_round(self, is_evaluation: bool, live: Collection[int] = ()) -> list[Request]:
        """Drops the responses that an earlier round or evaluation left; returns no requests."""
        self.forget()
        return []

    def leave_engine(self, begun: Mapping[int, Request]) -> dict[int, Request | OpenResponse]:
        """Returns and drops all unfinished responses; `begun` are the engine's, by sample."""
        found: dict[int, Request | OpenResponse] = dict(begun)
        for turns in self.state():
            number = turns["sample_id"]
            found[number] = OpenResponse(turns, begun.get(number))
        self.forget()
        return found

    def take_stopped(self) -> Collection[int]:
        """Returns no requests, because environments do not stop them."""
        return ()

    def advance(
        self, completions: Sequence[Completion], blocks: bool
    ) -> tuple[list[Response], list[Request]]:
        """Processes turns of the policy and answers from environments. Returns the responses that
        ended, and requests for further turns. `blocks` waits for an answer if no response can
        continue without one.
        """
        responses = self.end_turns(completions)
        answered, requests = self._continue(self._answers(blocks and not responses))
        return responses + answered, requests

    def end_turns(self, completions: Sequence[Completion]) -> list[Response]:
        """Requests answers to finished turns; returns the responses that need no answer."""
        ended = [self._end_turn(done) for done in completions]
        responses = [response for response in ended if response is not None]
        for response in responses:
            del self._open[response.request_id]
        return responses

    def answer_due(self, gives_up: Callable[[], bool]) -> tuple[list[Response], list[Request]]:
        """Processes the answers requested before the last call, or at a response's beginning.

        Waits for these answers, and leaves later ones to the next call, so that the result does not
        depend on how long environments take. Polls `gives_up`; if true, the wait ends without
        answers.
        """
        answers: list[tuple[int, Answer]] | UserError = []
        if self._stages is not None and self._wait_for(self._due, gives_up):
            answers = self._results(self._due)
        found = self._continue(self._broadcast(answers) if self._due else [])
        self._due = [number for number, episode in self._open.items() if episode.waits]
        return found

    def _wait_for(self, numbers: Sequence[int], gives_up: Callable[[], bool]) -> bool:
        plays = [self._plays[number] for number in numbers]
        while wait(plays, LONGEST_WAIT_S).not_done:
            if gives_up():
                return False
        return True

    def _continue(
        self, answers: Sequence[tuple[int, Answer]]
    ) -> tuple[list[Response], list[Request]]:
        responses, requests = list[Response](), list[Request]()
        for sample_id, answer in answers:
            found = self._take_answer(self._open[sample_id], answer)
            if isinstance(found, Request):
                requests.append(found)
            else:
                responses.append(found)
                del self._open[sample_id]
        return responses, requests

    def finish(self) -> None:
        """Closes the environments of responses that ended early. No response may be unfinished."""
        if self._stages is not None:
            self._stages.clear()

    def forget(self) -> None:
        self._open, self._plays, self._due = {}, {}, []
        self.finish()

    def state(self) -> list[dict[str, Any]]:
        """Returns the unfinished responses as JSON values, without the requests in the engine."""
        return [
            {
                "sample_id": episode.sample_id,
                "blobs": blobs_to_json(with_contents(episode.blobs, episode.contents)),
                **{name: getattr(episode, name) for name in _SAVED},
            }
            for episode in self._open.values()
        ]

    @staticmethod
    def counts(responses: Iterable[Completion]) -> dict[str, int]:
        """Returns this rank's counts of events, whose sums over ranks `metrics` receives."""
        found: Counter[str] = Counter()
        for response in responses:
            assert isinstance(response, Response)
            found.update({f"environment/{note}": count for note, count in response.notes.items()})
            found.update({RESPONSES: 1, TURNS: response.num_turns})
            found.update({TRUNCATED + end: response.ended == end for end in ("turns", "tokens")})
        return dict(found)

    @staticmethod
    def metrics(counts: Mapping[str, int]) -> dict[str, float]:
        """Returns mean turns, shares of responses at a limit of turns or tokens, and notes."""
        num = counts.get(RESPONSES, 0)
        if not num:
            return {name: float(count) for name, count in counts.items()}
        ends = {n.removeprefix(TRUNCATED): c for n, c in counts.items() if n.startswith(TRUNCATED)}
        shares = {f"environment/truncated_{end}": count / num for end, count in ends.items()}
        rest = {name: float(count) for name, count in counts.items() if "#" not in name}
        return {**rest, **shares, "environment/turns_mean": counts[TURNS] / num}

    def close(self) -> None:
        if self._stages is not None:
            self._stages.close()

    def _ask(self, episode: _Episode) -> None:
        episode.waits = True
        if self._stages is not None:
            prompt, key = episode.prompt, (episode.step, episode.sample_id)
            play = EnvironmentCall(
                key, prompt.asked, prompt.columns_with_text, list(episode.actions)
            )
            self._plays[episode.sample_id] = self._stages.play(play, episode.sample_id)

    def _answers(self, blocks: bool) -> Sequence[tuple[int, Answer]]:
        if not self.is_waiting:
            return []
        answers: list[tuple[int, Answer]] | UserError = []
        if self._stages is not None:
            if blocks:
                wait(self._plays.values(), LONGEST_WAIT_S, FIRST_COMPLETED)
            answers = self._results([number for number, play in self._plays.items() if play.done()])
        return self._broadcast(answers)

    def _results(self, ready: Sequence[int]) -> list[tuple[int, Answer]] | UserError:
        """Returns the environments' answers, or the error that all ranks must raise."""
        try:
            answers = [(number, self._plays.pop(number).result()[0]) for number in ready]
        except UserError as error:
            return error
        # Do not send the user's exception, because it may not be picklable.
        return [
            (number, replace(answer, cause=None) if isinstance(answer, ScorerFailure) else answer)
            for number, answer in answers
        ]

    def _broadcast(
        self, answers: list[tuple[int, Answer]] | UserError
    ) -> Sequence[tuple[int, Answer]]:
        received: list[tuple[int, Answer]] | UserError = self._replica.broadcast_object(answers)
        if isinstance(received, UserError):
            raise received
        return received

    def _end_turn(self, done: Completion) -> Response | None:
        episode = self._open[done.request_id]
        episode.add_turn(done)
        if episode.failure is not None:
            return episode.response("failure")
        if done.finish_reason == "length":  # truncated: the environment is not called
            return episode.response("tokens")
        text = text_of_turn(self._tokenizer, done.tokens)
        episode.actions.append((list(done.tokens), text))
        self._ask(episode)
        return None

    def _take_answer(self, episode: _Episode, answer: Answer) -> Response | Request:
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
            elif len(observed.tokens) < episode.room:
                episode.add_observed(*observed)
            elif is_first:
                got = f"returned {len(observed.tokens)} tokens at the start of {WHERE}"
                expected = f"fewer than rollout.max_new_tokens = {episode.room}"
                answer = ScorerFailure(got, expected)
            else:
                return episode.response("tokens")
        if isinstance(answer, ScorerFailure):
            answer.log()
            episode.failure = (answer.got, answer.expected)
            if episode.actions:
                return episode.response("failure")
            # A response needs at least one token from the policy, so the policy takes one last
            # turn.
        return self._request(episode)

    def _request(self, episode: _Episode) -> Request:
        longest = min(episode.room, self._config.max_turn_tokens or episode.room)
        turn = len(episode.actions)
        seed = request_seed(self._seed, episode.step, episode.sample_id, turn)
        prompt = (*episode.prompt.tokens, *episode.tokens)
        sampling = replace(episode.sampling, max_new_tokens=longest)
        # Keep the blobs from earlier turns, even if the engine computes these positions again.
        return Request(
            episode.sample_id,
            prompt,
            seed,
            sampling,
            blobs=episode.blobs,
            contents=episode.prompt.contents + episode.contents,
        )
