"""Manages responses of agents: programs that request turns of the policy over HTTP.

A response is an episode of an agent. It ends when the program ends, and consists of the program's
conversations, with exactly the tokens that the engine received and sampled (agents/forest.py).

Who waits for whom: only the first rank of a replica has an endpoint and runs programs. Between
engine steps this rank sends the new requests and the responses that ended to the other ranks of its
replica. All ranks of the replica must call `advance` in the same order. Programs act in real time:
the order of their requests, and therefore the samples of a step, can differ between two runs. If a
process was killed, or a run is resumed, unfinished episodes begin again. If new weights arrive,
episodes continue: their requests wait, and each token records the version of the weights that
sampled it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.agents.backend import TurnRequest
from hybridrl.agents.host import AgentHost, Assignment, Finished
from hybridrl.agents.host_pool import HostPool
from hybridrl.agents.host_process import HostProcess
from hybridrl.agents.task_images import prompt_with_images
from hybridrl.contracts.batch import Prompt
from hybridrl.contracts.response_contents import with_contents
from hybridrl.data.images import ImageTokens
from hybridrl.errors import UserError, error_text, failure_text
from hybridrl.generation.admission import Admission
from hybridrl.generation.responses import AgentResponse, AgentSequence, End, OpenAgent
from hybridrl.parallel import progress
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.rewards.outcome import WHERE
from hybridrl.rollout.engine import Completion, Request, SamplingParams, request_seed

Host = AgentHost | HostProcess | HostPool
LONGEST_WAIT_S = 1.0  # maximum wait for a program between checks for a stop request
SHORT_WAIT_S = 0.005  # the same if other replicas wait for this one between engine steps
# The ranks of a replica exchange events in every engine step if fewer than REQUESTS_PER_STEP
# requests are in the engine, in every second step with up to twice as many, and so on up to
# MAX_STEPS. A broadcast takes about 0.1 ms. With many requests, new ones wait for each other
# anyway.
REQUESTS_PER_STEP, MAX_STEPS = 32, 4
NO_TURN = (f"requested no turn of the policy for {WHERE}", "an agent that requests a turn")
# Failures of episodes that reached a limit before a turn had finished.
EARLY_LIMITS = {
    "tokens": (
        f"sent a request that does not fit into the context for {WHERE}, before any turn",
        "a prompt shorter than data.max_prompt_tokens + rollout.max_new_tokens; raise one of them",
    ),
    "turns": (
        f"reached agent.max_turns for {WHERE} before a turn had finished",
        "an agent that waits for its turns; or raise agent.max_turns",
    ),
}
NO_ROWS = (
    f"chose none of the rows of {WHERE} (agent.rows)",
    "a function that returns at least one of the rows that it receives",
)
# Keys that cannot collide with the counts of sessions.
_EPISODES, _TURNS, _SEQUENCES = "agent/#episodes", "agent/#turns", "agent/#sequences"
_ENDS, _MILLISECONDS = "agent/#ended_", "agent/milliseconds"
NO_REPORT = (
    f"reported no reward for {WHERE}",
    "a reward in the file HYBRIDRL_RESULT or as the function's result, or a reward.function",
)


@dataclass
class _Episode:
    """An unfinished response; `key` is unique in the process."""

    key: int
    step: int
    sample_id: int
    prompt: Prompt
    sampling: SamplingParams
    is_evaluation: bool


@dataclass(frozen=True)
class _News:
    """Events that all ranks of a replica process together: new requests and ended responses, both
    with the keys of their episodes; requests for which no program waits; an error to raise on all
    ranks.
    """

    requests: tuple[tuple[int, Request], ...] = ()
    stopped: tuple[int, ...] = ()
    responses: tuple[tuple[int, AgentResponse], ...] = ()
    error: Exception | None = None


@dataclass
class _LastTurn:
    """A turn that is sampled for an episode without rows, because a response needs a token."""

    key: int
    finished: Finished
    prompt: Prompt = field(repr=False)


class AgentEpisodes:
    """Manages the unfinished responses of agents on one replica, in real time.

    Args:
        host: Endpoint and programs; None except on the first rank of the replica.
        waits_s: Maximum time in seconds that `advance` waits in training if no response can
            continue without a program.
        needs_report: Whether an episode without a reported reward has failed.
        images: How the model's tokens contain images; None if it reads only text.
    """

    def __init__(
        self,
        replica: ReplicaGroup,
        host: Host | None,
        seed: int,
        waits_s: float = LONGEST_WAIT_S,
        needs_report: bool = True,
        images: ImageTokens | None = None,
    ) -> None:
        self._replica, self._host, self._seed = replica, host, seed
        self._waits_s, self._needs_report, self._images = waits_s, needs_report, images
        self._is_evaluation = False
        self._next_key = 0
        self._open: dict[int, _Episode] = {}  # by key, for training and evaluations
        # Requests of training that were in the engine when it was emptied.
        self._paused: dict[int, Request] = {}
        # Episode key of each unfinished request that was passed to the engine.
        self._owners: dict[int, int] = {}
        self._stopped: tuple[int, ...] = ()
        self._num_steps = 0  # since events were last exchanged
        # The following are used on the first rank only.
        self._admission = Admission()
        # Requests that arrived while an evaluation uses the engine, or that wait for others.
        self._held: list[TurnRequest] = []
        self._ended: list[Finished] = []  # kept while an evaluation uses the engine
        self._last_turns: dict[int, _LastTurn] = {}  # by request
        self._last_numbers = itertools.count(-1, -1)  # turns of programs have numbers from 0 on
        self._error: Exception | None = None  # raised on all ranks by the next `advance`
        self._sleep()

    @property
    def is_waiting(self) -> bool:
        """Whether an episode of the current round is unfinished."""
        return any(one.is_evaluation == self._is_evaluation for one in self._open.values())

    def start_round(self, is_evaluation: bool, live: Collection[int] = ()) -> list[Request]:
        """Begins a round of generation. Returns the requests of the episodes that continue: those
        of `live` samples. In an evaluation, episodes of training wait.
        """
        self._is_evaluation = is_evaluation
        wanted = set(live)
        for key, one in list(self._open.items()):
            if one.is_evaluation or not (is_evaluation or one.sample_id in wanted):
                self._end(key)
        if self._host is not None:
            with self._noted_error():
                self._host.wake(is_evaluation)
        if is_evaluation:
            return []
        paused, self._paused = self._paused, {}
        return list(paused.values())

    def begin(
        self,
        step: int,
        sample_id: int,
        prompt: Prompt,
        sampling: SamplingParams,
        saved: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins an episode unless the sample has a running one; ignores `saved`."""
        if any(
            one.sample_id == sample_id and one.is_evaluation == self._is_evaluation
            for one in self._open.values()
        ):
            return
        key, self._next_key = self._next_key, self._next_key + 1
        episode = _Episode(key, step, sample_id, prompt, sampling, self._is_evaluation)
        self._open[key] = episode
        if self._host is not None:
            columns = prompt.columns_with_text
            with self._noted_error():
                asked = prompt_with_images(prompt, self._images)
                self._host.begin(Assignment(key, step, sample_id, asked, columns))

    def advance(
        self, completions: Sequence[Completion], blocks: bool
    ) -> tuple[list[AgentResponse], list[Request]]:
        """Passes finished turns to the programs and collects their requests. Returns the responses
        that ended, and requests for further turns. `blocks` waits for a program if no response can
        continue without one. All ranks of the replica raise an error of the first rank, such as a
        UserError if the user's function for `agent.rows` returned something wrong.
        """
        if not self.is_waiting and not completions:
            return [], []
        turns = [done for done in completions if done.request_id >= 0]
        if self._host is not None and turns:
            self._admission.note_lengths(len(done.tokens) for done in turns)
            with self._noted_error():
                self._host.finish(turns)
        for done in completions:
            self._owners.pop(done.request_id, None)
        self._num_steps += 1
        is_due = blocks or len(turns) < len(completions)
        if not is_due and self._num_steps < self._steps_between_events():
            return [], []
        num_steps, self._num_steps = self._num_steps, 0
        news = _News()
        if self._host is not None:
            last = [done for done in completions if done.request_id < 0]
            with self._noted_error():
                news = self._collected(self._host, last, blocks, num_steps)
            if self._error is not None:
                news = _News(error=_sendable(self._error))
        news = self._replica.broadcast_object(news)
        if news.error is not None:
            raise self._error or news.error
        self._stopped = tuple(n for n in news.stopped if n not in self._paused)
        for number in news.stopped:
            self._owners.pop(number, None)
            self._paused.pop(number, None)
        for key, _ in news.responses:
            del self._open[key]
        for key, request in news.requests:
            self._owners[request.request_id] = key
        if news.requests or news.responses:
            progress.advance()
        responses = [response for _, response in news.responses]
        return responses, [request for _, request in news.requests]

    def take_stopped(self) -> Collection[int]:
        """Returns the requests in the engine for which no program waits any more, each once."""
        stopped, self._stopped = self._stopped, ()
        return stopped

    def leave_engine(self, begun: Mapping[int, Request]) -> dict[int, OpenAgent]:
        """Keeps `begun`, the requests removed from the engine, for the next round. Returns the
        unfinished episodes by sample. Raises an error of the host on all ranks of the replica.
        """
        if not self._is_evaluation:
            self._paused = dict(begun)
        self._sleep()
        runs: dict[int, Counter[int]] = {}
        if self._host is not None:
            with self._noted_error():
                runs = self._host.versions(self._open)
        error = None if self._error is None else _sendable(self._error)
        runs, error = self._replica.broadcast_object((runs, error))
        if error is not None:
            raise self._error or error
        return {
            one.sample_id: OpenAgent(one.sample_id, tuple(sorted(runs.get(key, {}).items())))
            for key, one in self._open.items()
            if not one.is_evaluation
        }

    def finish(self) -> None:
        """Called when a round has ended; without a lag, no episode is left then."""
        self._sleep()

    def forget(self) -> None:
        """Ends all episodes, even after an error; the next `advance` raises the host's errors."""
        for key in list(self._open):
            self._end(key)
        self._paused, self._owners = {}, {}
        self._sleep()

    def state(self) -> list[dict[str, Any]]:
        """Returns nothing, because unfinished episodes begin again in another process."""
        return []

    @staticmethod
    def counts(responses: Iterable[Completion]) -> dict[str, int]:
        """Returns this rank's counts of events in responses, whose sums `metrics` receives."""
        found: Counter[str] = Counter()
        for response in responses:
            assert isinstance(response, AgentResponse)
            found.update({f"agent/{name}": count for name, count in response.notes.items()})
            found.update({_EPISODES: 1, _TURNS: response.num_turns})
            found.update({_SEQUENCES: len(response.sequences)})
            for end in ("turns", "tokens", "failure"):
                found[_ENDS + end] += response.ended == end
        return dict(found)

    @staticmethod
    def metrics(counts: Mapping[str, int]) -> dict[str, float]:
        """Returns `agent/turns_mean`, `agent/sequences_mean`, `agent/seconds_mean`, the shares
        `agent/failed` and `agent/truncated_NAME`, and how often each event occurred.
        """
        num = counts.get(_EPISODES, 0)
        rest = {n: float(c) for n, c in counts.items() if "#" not in n and n != _MILLISECONDS}
        if not num:
            return rest
        return {
            **rest,
            "agent/turns_mean": counts[_TURNS] / num,
            "agent/sequences_mean": counts[_SEQUENCES] / num,
            "agent/seconds_mean": counts[_MILLISECONDS] / 1000 / num,
            "agent/failed": counts[_ENDS + "failure"] / num,
            "agent/truncated_turns": counts[_ENDS + "turns"] / num,
            "agent/truncated_tokens": counts[_ENDS + "tokens"] / num,
        }

    def close(self) -> None:
        if self._host is not None:
            self._host.close()

    def _end(self, key: int) -> None:
        del self._open[key]
        owned = {number for number, owner in self._owners.items() if owner == key}
        self._paused = {n: one for n, one in self._paused.items() if n not in owned}
        self._owners = {n: owner for n, owner in self._owners.items() if n not in owned}
        if self._host is None:
            return
        with self._noted_error():
            self._host.end(key)
        self._held = [turn for turn in self._held if turn.sample_key != key]
        self._ended = [one for one in self._ended if one.key != key]
        self._last_turns = {n: one for n, one in self._last_turns.items() if one.key != key}

    def _sleep(self) -> None:
        if self._host is not None:
            with self._noted_error():
                self._host.sleep()

    @contextmanager
    def _noted_error(self) -> Iterator[None]:
        """Keeps an error for `advance` or `leave_engine`, where other ranks wait."""
        try:
            yield
        except Exception as error:  # raised by `advance` and `leave_engine`
            self._error = self._error or error

    def _has_events(self) -> bool:
        """Whether turns or results wait to be processed in this kind of round."""
        keys = [turn.sample_key for turn in self._held] + [one.key for one in self._ended]
        episodes = [self._open.get(key) for key in keys]
        return any(one is None or one.is_evaluation == self._is_evaluation for one in episodes)

    @property
    def _num_in_engine(self) -> int:
        return len(self._owners) - len(self._paused)

    def _steps_between_events(self) -> int:
        """Returns the engine steps between exchanges of events, the same on the replica's ranks."""
        if self._replica.num_ranks == 1:
            return 1
        return min(MAX_STEPS, 1 + self._num_in_engine // REQUESTS_PER_STEP)

    def _collected(
        self, host: Host, last: Sequence[Completion], blocks: bool, num_steps: int
    ) -> _News:
        """Returns the events since the last call, on the first rank of the replica. `last` are
        completions of `_last_turn` requests. With `blocks`, the engine is empty.
        """
        responses = []
        for done in last:
            if (substitute := self._last_turns.pop(done.request_id, None)) is not None:
                response = self._response_without_turn(substitute, done)
                responses.append((substitute.key, response))
        if blocks and not responses and not self._has_events():
            host.wait(LONGEST_WAIT_S if self._is_evaluation else self._waits_s)
        arrivals = host.take()
        requests = []
        ended, self._ended = [*self._ended, *host.take_finished()], []
        for finished in ended:
            episode = self._open.get(finished.key)
            if episode is None:
                continue
            if episode.is_evaluation != self._is_evaluation:
                self._ended.append(finished)
            elif finished.result.rows:
                responses.append((finished.key, self._response(episode, finished)))
            else:
                requests.append((episode.key, self._last_turn(episode, finished)))
        over = {key for key, _ in responses} | {one.key for one in self._last_turns.values()}
        held, self._held = [*self._held, *arrivals.requests], []
        own: list[tuple[_Episode, TurnRequest]] = []
        for turn in held:
            if turn.request_id in arrivals.aborted:  # its program went away in the meantime
                continue
            episode = self._open.get(turn.sample_key)
            if episode is None or episode.key in over:
                host.abort(turn.request_id)
            elif episode.is_evaluation != self._is_evaluation:
                self._held.append(turn)
            else:
                own.append((episode, turn))
        if blocks or self._admission.is_due(len(own), self._num_in_engine, num_steps):
            requests += [(episode.key, self._request(episode, turn)) for episode, turn in own]
        else:
            self._held += [turn for _, turn in own]
        # Turns of an episode that ended are stopped now, because their aborts may arrive later than
        # the last call of the round.
        unwanted = {*arrivals.aborted}
        unwanted |= {n for n, key in self._owners.items() if key in over}
        unwanted -= self._last_turns.keys()
        stopped = tuple(number for number in self._owners if number in unwanted)
        return _News(tuple(requests), stopped, tuple(responses))

    def _request(self, episode: _Episode, turn: TurnRequest) -> Request:
        seed = request_seed(self._seed, episode.step, episode.sample_id, turn.turn)
        return turn_request(turn, episode.sampling, seed)

    def _last_turn(self, episode: _Episode, finished: Finished) -> Request:
        """Returns a request for a single token, because a response needs at least one."""
        number = next(self._last_numbers)
        self._last_turns[number] = _LastTurn(episode.key, finished, episode.prompt)
        seed = request_seed(self._seed, episode.step, episode.sample_id)
        at_least = min(episode.sampling.min_new_tokens, 1)
        sampling = replace(episode.sampling, max_new_tokens=1, min_new_tokens=at_least)
        prompt = episode.prompt
        return Request(number, prompt.tokens, seed, sampling, contents=prompt.contents)

    def _response_without_turn(self, last: _LastTurn, done: Completion) -> AgentResponse:
        sequence = AgentSequence(
            context=last.prompt.tokens,
            tokens=done.tokens,
            logps=done.logps,
            observed=(False,) * len(done.tokens),
            finish_reason=done.finish_reason,
            versions=done.runs,
            blobs=with_contents({}, last.prompt.contents),
        )
        failure = last.finished.failure or _reason(last.finished)
        response = _joined(self._open[last.key], last.finished, (sequence,), failure)
        return replace(response, is_substitute=True)

    def _response(self, episode: _Episode, finished: Finished) -> AgentResponse:
        sequences = tuple(
            AgentSequence(
                context=row.prompt,
                tokens=row.tokens,
                logps=row.logps,
                observed=row.observed,
                finish_reason=row.finish_reason,
                versions=row.versions,
                blobs=with_contents({}, row.contents),
            )
            for row in finished.result.rows
        )
        failure = finished.failure
        is_whole = failure is None and finished.limit is None
        if is_whole and finished.reward is None and self._needs_report:
            failure = NO_REPORT
        return _joined(episode, finished, sequences, failure)


def turn_request(turn: TurnRequest, run: SamplingParams, seed: int) -> Request:
    """Returns the request for a turn; the run's sampling parameters replace missing ones."""
    sampling = replace(
        run,
        max_new_tokens=turn.max_new_tokens,
        min_new_tokens=min(run.min_new_tokens, turn.max_new_tokens),
        stop_token_ids=(*run.stop_token_ids, *turn.stop_token_ids),
        stop_strings=(*run.stop_strings, *turn.stop_strings),
        temperature=run.temperature if turn.temperature is None else turn.temperature,
        top_p=run.top_p if turn.top_p is None else turn.top_p,
    )
    return Request(turn.request_id, turn.tokens, seed, sampling, contents=turn.contents)


def _sendable(error: Exception) -> Exception:
    """Returns an error to send to other ranks, because only UserErrors are sure to be picklable."""
    if isinstance(error, UserError):
        return error
    return RuntimeError(f"the replica's first rank {failure_text(error)}: {error_text(error)}")


def _reason(finished: Finished) -> tuple[str, str]:
    if finished.result.num_turns:
        return NO_ROWS
    return NO_TURN if finished.limit is None else EARLY_LIMITS[finished.limit]


def _joined(
    episode: _Episode,
    finished: Finished,
    sequences: tuple[AgentSequence, ...],
    failure: tuple[str, str] | None,
) -> AgentResponse:
    last = sequences[-1]
    ended: End = "done" if failure is None else "failure"
    if failure is None and finished.limit is not None:
        ended = finished.limit
    return AgentResponse(
        episode.sample_id,
        last.tokens,
        last.logps,
        last.finish_reason,
        min(version for one in sequences for version, _ in one.versions),
        last.observed,
        finished.result.num_turns,
        ended,
        finished.reward or 0.0,
        failure,
        {**finished.result.counts, "milliseconds": round(1000 * finished.seconds)},
        sequences=sequences,
    )
