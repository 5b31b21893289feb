"""What every rollout engine offers: submit, step, collect, and `generate` on top.

Owns the request and completion types, the protocol `RolloutEngine` and the seeds of requests; owns
no model and imports no torch. The invariant: the response to a request depends on its prompt, its
seed, its sampling parameters and the weights, and not on what else is in the batch (beyond float
rounding). So an unfinished request, saved with the tokens it has, continues anywhere.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from hybridrl.contracts.blobs import Array, Blobs, blobs_from_json
from hybridrl.contracts.routed_experts import ROUTED_EXPERTS
from hybridrl.rollout.common.stops import TokenTexts

FinishReason = Literal["stop", "length"]
Versions = tuple[tuple[int, int], ...]
"""Runs of tokens of one version of the weights, in order: (version, number of tokens)."""


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn, and when a response ends.

    Args:
        temperature: logits are divided by it; 0 takes the most probable token.
        top_p: the fewest most probable tokens whose probability reaches this are kept; 1 keeps all.
        top_k: this many most probable tokens are kept, before `top_p`; 0 keeps all.
        max_new_tokens: longest response, the stop token included.
        stop_token_ids: a response ends after one of these, which stays its last token.
        stop_strings: a response also ends after the token with which its text has one of these.
        min_new_tokens: none of `stop_token_ids` is drawn before a response has as many.
        repetition_penalty: logits of tokens of prompt and response are divided by it where they are
            positive, else multiplied (Keskar et al. 2019, arXiv 1909.05858, section 4.1); 1: off.
        presence_penalty: is taken from the logits of tokens of the response; 0: off.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 256
    stop_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> SamplingParams:
        """Rebuilds sampling parameters from `dataclasses.asdict` after a trip through JSON."""
        lists = {name: tuple(fields.get(name, ())) for name in ("stop_token_ids", "stop_strings")}
        return SamplingParams(**{**fields, **lists})

    @property
    def looks_back(self) -> bool:
        """Whether the next token's distribution depends on more than the model's logits for it."""
        are_penalties = self.repetition_penalty != 1 or self.presence_penalty != 0
        return are_penalties or self.min_new_tokens > 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k} must be 0 (off) or more")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens} must be 1 or more")
        if not self.repetition_penalty > 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0")


@dataclass(frozen=True)
class Request:
    """One response to generate, or to continue.

    Args:
        request_id: unique among the requests that an engine holds.
        prompt: the token ids of the prompt, one at least.
        seed: drives the sampling of this request alone; see `request_seed`.
        tokens, logps: the response so far, empty for a new request.
        version: the weights that made the first of `tokens`; None while there is none.
        blobs: What was recorded for prompt and response so far, by name; it stays as it is.
        versions: which weights made which of `tokens`, where more than one made them; empty: all
            are of `version`.
    """

    request_id: int
    prompt: tuple[int, ...]
    seed: int
    sampling: SamplingParams
    tokens: tuple[int, ...] = ()
    logps: tuple[float, ...] = ()
    version: int | None = None
    blobs: Blobs = field(default_factory=dict, compare=False)
    versions: Versions = ()

    def __post_init__(self) -> None:
        name = f"request {self.request_id}"
        if not self.prompt:
            raise ValueError(f"{name} has an empty prompt")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"{name} has seed {self.seed}, which is not an unsigned 64-bit number")
        if len(self.tokens) != len(self.logps):
            raise ValueError(
                f"{name} has {len(self.tokens)} tokens but {len(self.logps)} log-probabilities"
            )
        if bool(self.tokens) != (self.version is not None):
            raise ValueError(f"{name} has tokens {self.tokens} but version {self.version}")
        check_versions(name, len(self.tokens), self.version, self.versions)
        if self.tokens and finish_reason(self.tokens, self.sampling) is not None:
            raise ValueError(f"{name} is finished already, with tokens {self.tokens}")

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Request:
        """Rebuilds a request from what `saved_fields` made of it, after a trip through JSON."""
        sequences = {name: tuple(fields[name]) for name in ("prompt", "tokens", "logps")}
        made: dict[str, Any] = {
            **sequences,
            "sampling": SamplingParams.from_dict(fields["sampling"]),
            "blobs": blobs_from_json(fields),
            "versions": versions_from_json(fields),
        }
        given = {name: value for name, value in fields.items() if name != "experts"}
        return Request(**{**given, **made})

    @property
    def runs(self) -> Versions:
        """Which weights made which of `tokens`, in every case."""
        return version_runs(self)


@dataclass(frozen=True)
class Completion:
    """A finished response.

    Args:
        tokens: the response, the stop token included when there is one.
        logps: of each token, its log-probability under the distribution that it was really drawn
            from (after temperature, top-k and top-p); at temperature 0, under the model's own
            distribution (temperature 1). Penalties and least lengths are a part of both.
        finish_reason: "stop" (ended by a stop token) or "length" (`max_new_tokens` reached).
        version: the weights that made the first token, so the oldest that took part.
        blobs: Of prompt and response, by name, as contracts/blobs.py declares them.
        versions: which weights made which of `tokens`, where more than one made them; empty: all
            are of `version`.
    """

    request_id: int
    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    finish_reason: FinishReason
    version: int
    blobs: Blobs = field(default_factory=dict, compare=False, kw_only=True)
    versions: Versions = field(default=(), kw_only=True)

    def __post_init__(self) -> None:
        check_versions(f"response {self.request_id}", len(self.tokens), self.version, self.versions)

    @property
    def runs(self) -> Versions:
        """Which weights made which of `tokens`, in every case."""
        return version_runs(self)


class Holding(NamedTuple):
    """Bytes of an engine on this rank's device; `stays`: also while the policy trains."""

    num_bytes: int
    stays: bool = False
    is_shared: bool = False


class RolloutEngine(Protocol):
    """Generates responses to requests, a step at a time.

    Every tensor-parallel rank of one replica makes the same calls; replicas are independent.

    Attributes:
        token_texts: finds stop strings; to be set before requests that have some are submitted.
    """

    token_texts: TokenTexts | None

    @property
    def version(self) -> int:
        """The version given by the last `finish_update` of the weights; -1 before the first."""
        ...

    @property
    def has_unfinished(self) -> bool:
        """Whether a submitted request is not finished yet."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests; costs no computation. Raises ValueError if an id is held already."""
        ...

    def step(self) -> None:
        """Takes in queued requests where there is room and advances every running one."""
        ...

    def collect(self) -> list[Completion]:
        """Returns, once, what finished since the last call, in the order in which it finished."""
        ...

    def pending(self) -> list[Request]:
        """Returns the unfinished requests with their tokens; any engine can continue them."""
        ...

    def clear(self) -> None:
        """Drops all requests, and responses that were not collected; not during a step."""
        ...

    def memory(self) -> Mapping[str, Holding]:
        """Returns what the engine holds of this rank's device during rollout, by what it is for."""
        ...

    def close(self) -> None:
        """Gives memory and process groups back; the engine is not used any more."""
        ...


def check_versions(name: str, num: int, first: int | None, versions: Versions) -> None:
    """Raises ValueError unless `versions` is empty, or says of each of `num` tokens, from the
    version `first` on, which one made it.
    """
    if not versions:
        return
    numbers, counts = zip(*versions, strict=True)
    ascends = all(a < b for a, b in itertools.pairwise(numbers))
    if sum(counts) != num or min(counts) < 1 or numbers[0] != first or not ascends:
        raise ValueError(f"{name} has {num} tokens from version {first} on, but runs {versions}")


def version_runs(response: Request | Completion) -> Versions:
    """Returns which weights made which tokens of a response, also where it was one version."""
    if response.versions or response.version is None:
        return response.versions
    return ((response.version, len(response.tokens)),)


def versions_from_json(fields: Mapping[str, Any]) -> Versions:
    """Returns `versions` of saved fields; those of older checkpoints have none."""
    return tuple((version, count) for version, count in fields.get("versions", ()))


def finish_reason(tokens: Sequence[int], sampling: SamplingParams) -> FinishReason | None:
    """Returns why the response `tokens` ends after its last token, or None if it goes on."""
    if tokens[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(tokens) >= sampling.max_new_tokens else None


def request_seed(run_seed: int, step: int, sample_id: int, turn: int = 0) -> int:
    """Returns the seed of a turn of a sample, 63 bits: the same in every process and after every
    restart.
    """
    named = f"{run_seed}/{step}/{sample_id}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(named.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generate(
    engine: RolloutEngine,
    requests: Sequence[Request],
    on_progress: Callable[[int, int], None] | None = None,
) -> list[Completion]:
    """Runs requests to their end on an idle engine, and returns their completions in order.
    `on_progress` is called with (finished, all) whenever requests finish.
    """
    if engine.has_unfinished or engine.collect():
        raise RuntimeError("generate() needs an idle engine; collect what was submitted earlier")
    engine.submit(requests)
    done: dict[int, Completion] = {}
    while engine.has_unfinished:
        engine.step()
        finished = engine.collect()
        done.update((completion.request_id, completion) for completion in finished)
        if finished and on_progress is not None:
            on_progress(len(done), len(requests))
    return [done[request.request_id] for request in requests]


class RunningRequest:
    """A request inside an engine that decodes token by token, with the tokens it has so far."""

    __slots__ = ("_num_recorded", "_recorded", "_runs", "_texts", "logps", "request", "tokens")

    def __init__(self, request: Request, texts: TokenTexts | None = None) -> None:
        if request.sampling.stop_strings and texts is None:
            raise ValueError(f"request {request.request_id} has stop strings, and no texts to look")
        self.request, self._texts = request, texts
        self.tokens = list(request.tokens)
        self.logps = list(request.logps)
        self._runs = [[version, count] for version, count in request.runs]
        # By name the parts of what is recorded, each of further positions.
        self._recorded: dict[str, list[Array]] = {n: [one] for n, one in request.blobs.items()}
        self._num_recorded = {name: len(one) for name, one in request.blobs.items()}

    def num_recorded(self, name: str = ROUTED_EXPERTS) -> int:
        """Returns how many positions have a row of a blob."""
        return self._num_recorded.get(name, 0)

    def record(self, start: int, rows: Array, name: str = ROUTED_EXPERTS) -> None:
        """Keeps a blob's rows of positions from `start` on that have none yet; `start` is at most
        `num_recorded`.
        """
        num = self.num_recorded(name)
        if start > num:
            raise ValueError(
                f"request {self.request.request_id} has {name} of {num} positions, and gets those "
                f"from {start} on"
            )
        if len(kept := rows[num - start :]):
            self._recorded.setdefault(name, []).append(kept.copy())
            self._num_recorded[name] = num + len(kept)

    @property
    def blobs(self) -> dict[str, Array]:
        """What is recorded up to the token before the last one, by name.

        An engine may have recorded more: of tokens that are under way.
        """
        drawn = len(self.request.prompt) + len(self.tokens) - 1 if self.tokens else 0
        found = {}
        for name, parts in self._recorded.items():
            if len(parts) > 1:
                parts[:] = [np.concatenate(parts)]
            # These stay whatever weights continue: a token was drawn after them, or the request
            # came with them.
            given = len(self.request.blobs.get(name, ()))
            if num := max(given, drawn):
                found[name] = parts[0][:num]
        return found

    def drop_unsettled(self) -> None:
        """Forgets the rows of positions after which no token was drawn: the weights change, and
        those positions are computed again.
        """
        settled = self.blobs
        self._recorded = {name: [rows] for name, rows in settled.items()}
        self._num_recorded = {name: len(rows) for name, rows in settled.items()}

    def append(self, token: int, logp: float, version: int) -> Completion | None:
        """Adds a token made by the weights `version`; returns the completion if it is the last."""
        if self._runs and self._runs[-1][0] == version:
            self._runs[-1][1] += 1
        else:
            self._runs.append([version, 1])
        self.tokens.append(token)
        self.logps.append(logp)
        sampling = self.request.sampling
        reason = finish_reason(self.tokens, sampling)
        if sampling.stop_strings and reason != "stop" and self._texts is not None:
            reason = "stop" if self._texts.ends(self.tokens, sampling.stop_strings) else reason
        if reason is None:
            return None
        return Completion(
            self.request.request_id,
            tuple(self.tokens),
            tuple(self.logps),
            reason,
            self._runs[0][0],
            blobs=self.blobs,
            versions=self._versions,
        )

    def extend(
        self, tokens: Sequence[int], logps: Sequence[float], version: int
    ) -> Completion | None:
        """Adds tokens made by the weights `version`, one at least; returns the completion if the
        last of them ends the response. Raises RuntimeError if an earlier one does.
        """
        sampling, length = self.request.sampling, len(self.tokens) + len(tokens)
        earlier = tokens[:-1]
        if length > sampling.max_new_tokens or not set(sampling.stop_token_ids).isdisjoint(earlier):
            raise RuntimeError(
                f"request {self.request.request_id} has tokens after its end: {list(tokens)}"
            )
        if earlier:
            self.append(earlier[0], logps[0], version)
            self._runs[-1][1] += len(earlier) - 1
            self.tokens += earlier[1:]
            self.logps += logps[1:-1]
        return self.append(tokens[-1], logps[-1], version)

    def so_far(self) -> Request:
        """Returns the request with the tokens it has, ready to be saved or submitted again."""
        return replace(
            self.request,
            tokens=tuple(self.tokens),
            logps=tuple(self.logps),
            version=self._runs[0][0] if self._runs else None,
            blobs=self.blobs,
            versions=self._versions,
        )

    @property
    def _versions(self) -> Versions:
        is_one = len(self._runs) < 2
        return () if is_one else tuple((version, count) for version, count in self._runs)


def new_rows(
    held: Iterable[RunningRequest], requests: Sequence[Request], texts: TokenTexts | None = None
) -> list[RunningRequest]:
    """Returns rows for `requests`. Raises ValueError if one has the id of another, held or new."""
    ids = {row.request.request_id for row in held}
    for request in requests:
        if request.request_id in ids:
            raise ValueError(f"request id {request.request_id} is held already")
        ids.add(request.request_id)
    return [RunningRequest(request, texts) for request in requests]
