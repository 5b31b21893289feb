"""Responses of a step that a checkpoint has, whole and begun ones.

A response goes on only with the prompt and the sampling that it was made with; else it is made
again. A step may be taken with other prompts than the saved one: in a user's script, or where a
step failed after it was resumed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybridrl.contracts.batch import Prompt
from hybridrl.contracts.blobs import blobs_to_json
from hybridrl.generation.episodes import restored
from hybridrl.rollout.engine import Completion, Request, SamplingParams

# What a state has of samples; rank 0 alone has it of all replicas.
SAMPLES = ("completions", "requests", "episodes", "prompts")


class Found(NamedTuple):
    """What a checkpoint has of one response: all of it, or the request and turns to go on with."""

    whole: Completion | None = None
    request: Request | None = None
    turns: Mapping[str, Any] | None = None


class SavedRollouts:
    """Looks up responses in a result of `Sampler.state`, after a trip through JSON."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._state = state = state or {}
        self.step: int = state.get("step", -1)
        self._whole = {one["request_id"]: one for one in state.get("completions", ())}
        self._requests = {one["request_id"]: one for one in state.get("requests", ())}
        self._turns = {one["sample_id"]: one for one in state.get("episodes", ())}
        # Checkpoints of before they were kept have none; then the number of the step must do.
        self._digests: Mapping[str, str] = state.get("prompts", {})
        self._sampling = saved_sampling(state)

    def find(self, step: int, sample_id: int, prompt: Prompt, sampling: SamplingParams) -> Found:
        """Returns what there is of a sample of a step, to this prompt and sampled like this."""
        if step != self.step:
            return Found()
        digest = digest_of(prompt.tokens)
        if self._digests.get(str(sample_id), digest) != digest:
            return Found()
        whole, turns = self._whole.get(sample_id), self._turns.get(sample_id)
        began = self._sampling and of_sample(self._sampling, sample_id)
        if whole is not None:
            done = restored(whole)
            return Found(whole=done) if done_fits(done, began, sampling) else Found()
        if sample_id in self._requests:
            request = Request.from_dict(self._requests[sample_id])
            fits = request_fits(request, sampling, is_turn=turns is not None)
            return Found(request=request, turns=turns) if fits else Found()
        return Found(turns=turns) if turns_fit(began, sampling) else Found()

    def of(self, sample_ids: Collection[int]) -> dict[str, Any]:
        """Returns the state with these samples alone."""
        wanted = set(sample_ids)
        prompts = {one: self._digests[one] for one in map(str, wanted) if one in self._digests}
        return {
            **self._state,
            "completions": [one for number, one in self._whole.items() if number in wanted],
            "requests": [one for number, one in self._requests.items() if number in wanted],
            "episodes": [one for number, one in self._turns.items() if number in wanted],
            "prompts": prompts,
        }


def without_samples(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what all ranks are told of a state."""
    return {name: type(value)() if name in SAMPLES else value for name, value in state.items()}


def saved_sampling(state: Mapping[str, Any]) -> SamplingParams | None:
    """Returns how the responses of `Sampler.state` were drawn; None if the checkpoint does not say,
    so they may have been drawn in another way than the run draws now.
    """
    saved = state.get("sampling")
    return None if saved is None else SamplingParams.from_dict(saved)


def of_sample(sampling: SamplingParams, sample_id: int) -> SamplingParams:
    """Returns how a sample is drawn; one with a negative number is a group's greedy response."""
    return sampling if sample_id >= 0 else dataclasses.replace(sampling, temperature=0.0)


def done_fits(done: Completion, began: SamplingParams | None, sampling: SamplingParams) -> bool:
    """Whether `sampling` could have given a finished response: it was drawn in the same way, and
    where the bound on its length differs, it ended by itself below both. `began` is None if it is
    not known how it was drawn.
    """
    if began is None or not _same_but_for_length(began, sampling):
        return False
    is_as_long = began.max_new_tokens == sampling.max_new_tokens
    ended = done.finish_reason == "stop" and len(done.tokens) <= sampling.max_new_tokens
    return is_as_long or ended


def request_fits(request: Request, sampling: SamplingParams, is_turn: bool) -> bool:
    """Whether an unfinished response may go on; one turn of several has less room than all."""
    limit, most = request.sampling.max_new_tokens, sampling.max_new_tokens
    fits = limit <= most if is_turn else limit == most
    return fits and _same_but_for_length(request.sampling, sampling)


def turns_fit(began: SamplingParams | None, sampling: SamplingParams) -> bool:
    """Whether a response that waits for its environment may go on."""
    if began is None or not _same_but_for_length(began, sampling):
        return False
    return began.max_new_tokens <= sampling.max_new_tokens


def _same_but_for_length(one: SamplingParams, other: SamplingParams) -> bool:
    return dataclasses.replace(one, max_new_tokens=other.max_new_tokens) == other


def digest_of(tokens: Sequence[int]) -> str:
    """Returns what tells prompts apart in a checkpoint."""
    return hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes()).hexdigest()[:16]


def rollout_state(
    whole: Collection[Completion],
    requests: Collection[Request],
    turns: Sequence[Mapping[str, Any]],
    digests: Mapping[int, str],
) -> dict[str, Any]:
    """Returns a replica's part of what SavedRollouts reads, for JSON."""
    return {
        "completions": [saved_fields(done) for done in whole],
        "requests": [saved_fields(request) for request in requests],
        "episodes": list(turns),
        "prompts": {str(sample_id): digest for sample_id, digest in digests.items()},
    }


def saved_fields(one: Completion | Request) -> dict[str, Any]:
    """Returns a completion or request for JSON."""
    found = dataclasses.asdict(dataclasses.replace(one, blobs={}))
    return found | {"blobs": blobs_to_json(one.blobs)}


def joined(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the parts of all replicas as one."""
    lists = ("completions", "requests", "episodes")
    found: dict[str, Any] = {name: [one for part in parts for one in part[name]] for name in lists}
    return found | {"prompts": {k: v for part in parts for k, v in part["prompts"].items()}}
