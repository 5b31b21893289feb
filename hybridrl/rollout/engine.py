"""Interface and base class of all rollout engines: requests, completions and seeds. No torch.

Invariant: the response to a request depends only on its prompt, its seed, its sampling parameters
and the weights, but not on the other requests in the batch (apart from float rounding). An
unfinished request that is saved with its tokens can therefore continue in any engine.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from hybridrl.contracts.blobs import KINDS, Array, Blobs, blobs_from_json
from hybridrl.contracts.likely_tokens import likely_entries
from hybridrl.contracts.prompts import Content, Prompt, Rollout
from hybridrl.contracts.routed_experts import ROUTED_EXPERTS
from hybridrl.models.adapters.slots import POLICY

# A token consists of at least one byte of text, and a UTF-8 character has at most four bytes.
_MAX_TOKENS_PER_CHARACTER = 4
FinishReason = Literal["stop", "length"]
Versions = tuple[tuple[int, int], ...]
"""For each run of consecutive tokens that the same weights generated, (version, number of tokens),
in order.
"""


@dataclass(frozen=True)
class SamplingParams:
    """Parameters that determine how tokens are drawn and when a response ends."""

    temperature: float = 1.0  # divisor of the logits; 0 takes the most probable token
    top_p: float = 1.0  # probability that kept tokens, most probable first, must reach
    top_k: int = 0  # number of most probable tokens that are kept, before `top_p`; 0 keeps all
    max_new_tokens: int = 256  # maximum length of the response, including the stop token
    stop_token_ids: tuple[int, ...] = ()  # end a response, as its last token
    stop_strings: tuple[str, ...] = ()  # end a response with the token that completes one
    min_new_tokens: int = 0  # tokens before which no `stop_token_ids` can be drawn
    # Divides positive logits, and multiplies negative logits, of tokens that occur in prompt or
    # response (Keskar et al. 2019, arXiv 1909.05858, section 4.1); 1 has no effect.
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # subtracted from logits of tokens in the response
    num_likely: int = 0  # most probable tokens to record at each position (likely_tokens.py)

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> SamplingParams:
        """Rebuilds parameters from `dataclasses.asdict` after a round trip through JSON."""
        lists = {name: tuple(fields.get(name, ())) for name in ("stop_token_ids", "stop_strings")}
        return SamplingParams(**{**fields, **lists})

    def for_sample(self, sample_id: int) -> SamplingParams:
        """Returns the parameters for a sample. A negative number means a greedy sample."""
        return self if sample_id >= 0 else replace(self, temperature=0.0)

    @property
    def needs_history(self) -> bool:
        """Whether logits depend on earlier tokens: penalties, or a minimum length."""
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
        if self.num_likely < 0:
            raise ValueError(f"num_likely={self.num_likely} must be 0 (off) or more")


class TokenTexts:
    """Finds stop strings at the end of responses, using a transformers tokenizer.

    Searches the decoded text, because a stop string may be tokenized in several ways and may end
    within a token.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def ends(self, tokens: Sequence[int], strings: Sequence[str]) -> bool:
        """Whether the last tokens contain one of the strings; must be called after each token."""
        longest = max(map(len, strings))
        # One more token, because the string may end within the last token.
        last = tokens[-(_MAX_TOKENS_PER_CHARACTER * longest + 1) :]
        text: str = self._tokenizer.decode(list(last), skip_special_tokens=False)
        return any(string in text for string in strings)


class _Versioned:
    tokens: tuple[int, ...]
    version: int | None
    versions: Versions

    @property
    def runs(self) -> Versions:
        """Weight versions that generated `tokens`, even if all tokens have the same version."""
        if self.versions or self.version is None:
            return self.versions
        return ((self.version, len(self.tokens)),)


@dataclass(frozen=True)
class Request(_Versioned):
    """A request to generate a response, or to continue one."""

    request_id: int  # number that is unique among an engine's requests
    prompt: tuple[int, ...]  # token ids of the prompt; at least one
    seed: int  # seed for drawing this request's tokens; see `request_seed`
    sampling: SamplingParams
    tokens: tuple[int, ...] = ()  # generated so far; empty for a new request
    logps: tuple[float, ...] = ()
    version: int | None = None  # of the weights that generated the first of `tokens`, if any
    blobs: Blobs = field(default_factory=dict, compare=False)  # recorded so far; never modified
    versions: Versions = ()  # of `tokens`; empty if all have `version`
    adapter: str | None = POLICY  # of LoRA; None for none. Engines without adapters ignore it
    contents: tuple[Content, ...] = ()  # images of the prompt, at their places among its tokens

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
            raise ValueError(f"{name} is already finished, with tokens {self.tokens}")

    @staticmethod
    def from_dict(fields: Mapping[str, Any]) -> Request:
        """Rebuilds a request from `saved_fields`, without the prompt's contents."""
        sequences = {name: tuple(fields[name]) for name in ("prompt", "tokens", "logps")}
        rebuilt: dict[str, Any] = {
            **sequences,
            "sampling": SamplingParams.from_dict(fields["sampling"]),
            "blobs": blobs_from_json(fields),
            "versions": versions_from_json(fields),
        }
        apart = {"experts", "contents"}
        others = {name: value for name, value in fields.items() if name not in apart}
        return Request(**{**others, **rebuilt})


def unknown_adapter(request: Request, adapters: Sequence[str]) -> Iterator[ValueError]:
    """Yields an error if a request names an adapter that an engine with adapters does not hold."""
    if adapters and request.adapter not in (None, *adapters):
        yield ValueError(
            f"request {request.request_id} names adapter {request.adapter!r}; the engine has "
            f"{', '.join(adapters)}"
        )


@dataclass(frozen=True)
class Completion(_Versioned):
    """A finished response from an engine."""

    request_id: int
    tokens: tuple[int, ...]  # response, including the stop token if there is one
    # Log-probabilities under the distribution from which tokens were drawn (after temperature,
    # top-k and top-p); for temperature 0, under the model's distribution at temperature 1, with
    # penalties and minimum lengths.
    logps: tuple[float, ...]
    finish_reason: FinishReason  # "stop" after a stop token or string, else "length"
    version: int  # weight version that generated the first token; no token has an older version
    # See contracts/blobs.py.
    blobs: Blobs = field(default_factory=dict, compare=False, kw_only=True)
    versions: Versions = field(default=(), kw_only=True)  # of `tokens`; empty if all have `version`

    def __post_init__(self) -> None:
        check_versions(f"response {self.request_id}", len(self.tokens), self.version, self.versions)

    def rollouts(self, prompt: Prompt) -> list[Rollout]:
        """Returns the response as one rollout for each of its sequences of tokens."""
        return [
            Rollout(
                sample_id=self.request_id,
                prompt=prompt,
                tokens=self.tokens,
                logps=self.logps,
                finish_reason=self.finish_reason,
                version=self.version,
                blobs=self.blobs,
                versions=self.versions,
            )
        ]


class Holding(NamedTuple):
    """Memory that an engine occupies on this rank's device."""

    num_bytes: int
    stays: bool = False  # whether the memory stays allocated while the policy trains
    is_shared: bool = False  # whether the memory belongs to the trainer


class RolloutEngine(Protocol):
    """Generates responses to requests, one step at a time.

    All tensor-parallel ranks of a replica make the same calls; replicas are independent.

    Attributes:
        token_texts: Detects stop strings; must be set before a request with stop strings is
            submitted.
    """

    token_texts: TokenTexts | None

    @property
    def version(self) -> int:
        """The version passed to the last `finish_update`; -1 before the first call."""

    @property
    def has_unfinished(self) -> bool: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests without any computation. Raises ValueError if an id is in use."""

    def step(self) -> None:
        """Starts queued requests if there is room, and advances every running request."""

    def collect(self) -> list[Completion]:
        """Returns the responses that finished since the last call, in the order they finished."""

    def pending(self) -> list[Request]:
        """Returns the unfinished requests with their tokens; any engine can continue them."""

    def clear(self) -> None:
        """Drops all requests and uncollected responses; must not be called during a step."""

    def memory(self) -> Mapping[str, Holding]:
        """Returns the engine's memory on this rank's device during rollout, by purpose."""

    def close(self) -> None:
        """Releases memory and process groups; the engine cannot be used afterwards."""


def check_versions(name: str, num: int, first: int | None, versions: Versions) -> None:
    """Raises ValueError unless `versions`, if any, covers `num` tokens, ascending from `first`."""
    if not versions:
        return
    numbers, counts = zip(*versions, strict=True)
    ascends = all(a < b for a, b in itertools.pairwise(numbers))
    if sum(counts) != num or min(counts) < 1 or numbers[0] != first or not ascends:
        raise ValueError(
            f"{name} has {num} tokens from version {first} on; versions={versions} does not match"
        )


def versions_from_json(fields: Mapping[str, Any]) -> Versions:
    """Returns the `versions` from saved fields; empty for older checkpoints, which lack them."""
    return tuple((version, count) for version, count in fields.get("versions", ()))


def finish_reason(tokens: Sequence[int], sampling: SamplingParams) -> FinishReason | None:
    """Returns why a response ends after the last of `tokens`, or None if it continues."""
    if tokens[-1] in sampling.stop_token_ids:
        return "stop"
    return "length" if len(tokens) >= sampling.max_new_tokens else None


def request_seed(run_seed: int, step: int, sample_id: int, turn: int = 0) -> int:
    """Returns the 63-bit seed for a turn of a sample, equal in all processes and after restarts."""
    named = f"{run_seed}/{step}/{sample_id}" + (f"/{turn}" if turn else "")
    digest = hashlib.blake2b(named.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def generate(engine: RolloutEngine, requests: Sequence[Request]) -> list[Completion]:
    """Runs requests on an idle engine until all are finished; returns completions in order."""
    if engine.has_unfinished or engine.collect():
        raise RuntimeError(
            "generate() needs an idle engine; collect the responses to earlier requests"
        )
    engine.submit(requests)
    done: dict[int, Completion] = {}
    while engine.has_unfinished:
        engine.step()
        done |= {completion.request_id: completion for completion in engine.collect()}
    return [done[request.request_id] for request in requests]


class RunningRequest:
    """A request and its tokens so far, inside an engine that decodes token by token."""

    __slots__ = ("_num_recorded", "_recorded", "_runs", "_texts", "logps", "request", "tokens")

    def __init__(self, request: Request, texts: TokenTexts | None = None) -> None:
        if request.sampling.stop_strings and texts is None:
            raise ValueError(
                f"request {request.request_id} has stop strings, but the engine has no token_texts"
            )
        self.request, self._texts = request, texts
        self.tokens = list(request.tokens)
        self.logps = list(request.logps)
        self._runs = [[version, count] for version, count in request.runs]
        # For each blob, the recorded rows, as arrays that cover consecutive positions.
        self._recorded: dict[str, list[Array]] = {n: [one] for n, one in request.blobs.items()}
        self._num_recorded = {name: len(one) for name, one in request.blobs.items()}

    def num_recorded(self, name: str = ROUTED_EXPERTS) -> int:
        return self._num_recorded.get(name, 0)

    def record(self, start: int, rows: Array, name: str = ROUTED_EXPERTS) -> None:
        """Appends a blob's rows from position `start`; skips rows that the blob already has."""
        num = self.num_recorded(name)
        if start > num:
            raise ValueError(
                f"request {self.request.request_id} has {name} for {num} positions, but the "
                f"next rows begin at position {start}"
            )
        if len(kept := rows[num - start :]):
            self._recorded.setdefault(name, []).append(kept.copy())
            self._num_recorded[name] = num + len(kept)

    def record_likely(self, likely: Sequence[tuple[Array, Array]]) -> None:
        """Records the likely tokens of the next tokens, before these are appended.

        Args:
            likely: For each token, the arrays of `likely_entries`.
        """
        if not (num := self.request.sampling.num_likely):
            return
        start = len(self.request.prompt) + len(self.tokens)
        for index, arrays in enumerate(likely, start):
            for name, entries in likely_entries(index, *arrays, num).items():
                self.record(self.num_recorded(name), entries, name)

    @property
    def blobs(self) -> dict[str, Array]:
        """The recorded rows before the last token; engines may have recorded later ones."""
        drawn = len(self.request.prompt) + len(self.tokens) - 1 if self.tokens else 0
        found = {}
        for name, parts in self._recorded.items():
            if len(parts) > 1:
                parts[:] = [np.concatenate(parts)]
            # These rows stay valid when weights change: they came with the request, or precede a
            # drawn token.
            given = len(self.request.blobs.get(name, ()))
            if KINDS[name].rows == "any":  # recorded with the tokens
                given = len(parts[0])
            if num := max(given, drawn):
                found[name] = parts[0][:num]
        return found

    def drop_unsettled(self) -> None:
        """Drops recorded rows for positions without a drawn token, which new weights recompute."""
        settled = self.blobs
        self._recorded = {name: [rows] for name, rows in settled.items()}
        self._num_recorded = {name: len(rows) for name, rows in settled.items()}

    def append(self, token: int, logp: float, version: int) -> Completion | None:
        """Appends a token from weights `version`; returns the completion if it is the last."""
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
        """Appends tokens; returns the completion if the last one ends the response."""
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

    def to_request(self) -> Request:
        """Returns the request with its tokens so far, which can be saved or submitted again."""
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


class QueuedEngine:
    """Base class of engines: stores requests, finished responses and the weight version.

    Implements `RolloutEngine` except `step`, and `WeightTarget` except its tensors. A subclass
    advances the requests in `_rows` in its `step` and passes each completion to `_finish`.
    Invariant: a request is in `_rows` until its completion is in `_finished`.
    """

    name: ClassVar[str]

    def __init__(self) -> None:
        self._rows: dict[int, RunningRequest] = {}  # unfinished requests in order of arrival
        self._finished: list[Completion] = []
        self._version, self._is_updating = -1, True
        self.token_texts: TokenTexts | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def has_unfinished(self) -> bool:
        return bool(self._rows)

    def submit(self, requests: Sequence[Request]) -> None:
        rows: dict[int, RunningRequest] = {}
        for request in requests:
            number = request.request_id
            if number in self._rows or number in rows:
                raise ValueError(f"request id {number} is already in use")
            rows[number] = RunningRequest(request, self.token_texts)
        self._rows |= rows

    def collect(self) -> list[Completion]:
        finished, self._finished = self._finished, []
        return finished

    def pending(self) -> list[Request]:
        return [row.to_request() for row in self._rows.values()]

    def clear(self) -> None:
        self._rows.clear()
        self._finished.clear()

    def memory(self) -> Mapping[str, Holding]:
        return {}

    def close(self) -> None:
        """Does nothing by default."""

    def begin_update(self) -> None:
        self._is_updating = True

    def sleep(self, keeps_memory: bool = False) -> None:
        self.begin_update()

    def finish_update(self, version: int) -> None:
        self._version, self._is_updating = version, False

    def _check_weights(self) -> None:
        """Raises RuntimeError unless a weight update has finished and none is in progress."""
        if self._is_updating:
            raise RuntimeError(
                f"the {self.name} engine has no complete weights: call finish_update() first"
            )

    def _finish(self, completion: Completion) -> None:
        del self._rows[completion.request_id]
        self._finished.append(completion)
