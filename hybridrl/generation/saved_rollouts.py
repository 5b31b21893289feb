"""Converts a step's finished and unfinished responses for a checkpoint, and finds them again. A
response is continued only with the prompt and sampling parameters with which it started; otherwise
it is generated again. A script, or a new attempt at a failed step, may pass other prompts or
parameters.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hybridrl.contracts.batch import Prompt
from hybridrl.contracts.blobs import blobs_from_json, blobs_to_json
from hybridrl.contracts.prompts import Content
from hybridrl.contracts.response_contents import without_contents
from hybridrl.generation.responses import completion_from_json
from hybridrl.rollout.engine import Completion, Request, SamplingParams

# Keys of the saved state under which samples are stored. Only rank 0 has the samples of all
# replicas.
SAMPLES = ("completions", "requests", "episodes", "prompts")


class SavedSample(NamedTuple):
    """One response: finished, or the request and the turns that continue it."""

    whole: Completion | None = None
    request: Request | None = None
    turns: Mapping[str, Any] | None = None


class SavedRollouts:
    """Finds responses in the result of `Sampler.state`, which was converted to JSON and back."""

    def __init__(self, state: Mapping[str, Any] | None = None) -> None:
        self._state = state = state or {}
        self.step: int = state.get("step", -1)
        self._whole = {entry["request_id"]: entry for entry in state.get("completions", ())}
        self._requests = {entry["request_id"]: entry for entry in state.get("requests", ())}
        self._turns = {entry["sample_id"]: entry for entry in state.get("episodes", ())}
        # Old checkpoints have no digests; for them, only the step number is compared.
        self._digests: Mapping[str, str] = state.get("prompts", {})
        self._sampling = saved_sampling(state)

    def find(
        self, step: int, sample_id: int, prompt: Prompt, sampling: SamplingParams
    ) -> SavedSample:
        """Returns the saved data for a sample if the step, prompt and sampling parameters match."""
        if step != self.step:
            return SavedSample()
        digest = prompt_digest(prompt.tokens, prompt.contents)
        if self._digests.get(str(sample_id), digest) != digest:
            return SavedSample()
        whole, turns = self._whole.get(sample_id), self._turns.get(sample_id)
        began = self._sampling and self._sampling.for_sample(sample_id)
        if whole is not None:
            done = completion_from_json(whole)
            return SavedSample(whole=done) if done_fits(done, began, sampling) else SavedSample()
        if sample_id in self._requests:
            request = Request.from_dict(self._requests[sample_id])
            seen = () if turns is None else without_contents(blobs_from_json(turns))[1]
            request = dataclasses.replace(request, contents=prompt.contents + seen)
            fits = request_fits(request, sampling, is_turn=turns is not None)
            return SavedSample(request=request, turns=turns) if fits else SavedSample()
        return SavedSample(turns=turns) if turns_fit(began, sampling) else SavedSample()

    def select(self, sample_ids: Collection[int]) -> dict[str, Any]:
        wanted = set(sample_ids)
        prompts = {n: self._digests[n] for n in map(str, wanted) if n in self._digests}
        return {
            **self._state,
            "completions": [entry for number, entry in self._whole.items() if number in wanted],
            "requests": [entry for number, entry in self._requests.items() if number in wanted],
            "episodes": [entry for number, entry in self._turns.items() if number in wanted],
            "prompts": prompts,
        }


def without_sample_data(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the saved state without the samples; all ranks receive this part."""
    return {name: type(value)() if name in SAMPLES else value for name, value in state.items()}


def made_otherwise(state: Mapping[str, Any], exact_with: str | None) -> bool:
    """Whether saved samples may have other log-probabilities than `exact_with` would compute."""
    has_samples = any(state.get(name) for name in SAMPLES)
    return exact_with is not None and has_samples and state.get("exact_with") != exact_with


def saved_sampling(state: Mapping[str, Any]) -> SamplingParams | None:
    """Returns the sampling parameters in `Sampler.state`; None for an old checkpoint's."""
    saved = state.get("sampling")
    return None if saved is None else SamplingParams.from_dict(saved)


def done_fits(done: Completion, began: SamplingParams | None, sampling: SamplingParams) -> bool:
    """Whether `sampling` could have produced a finished response: the parameters `began` with which
    it was sampled (None if unknown) are equal, or differ only in a length limit and the response
    reached neither limit.
    """
    if began is None or not _same_but_for_length(began, sampling):
        return False
    is_as_long = began.max_new_tokens == sampling.max_new_tokens
    ended = done.finish_reason == "stop" and len(done.tokens) <= sampling.max_new_tokens
    return is_as_long or ended


def request_fits(request: Request, sampling: SamplingParams, is_turn: bool) -> bool:
    """Whether an unfinished response may continue; a single turn may have a lower limit."""
    limit, most = request.sampling.max_new_tokens, sampling.max_new_tokens
    fits = limit <= most if is_turn else limit == most
    return fits and _same_but_for_length(request.sampling, sampling)


def turns_fit(began: SamplingParams | None, sampling: SamplingParams) -> bool:
    """Whether a response that waits for its environment may continue with these parameters."""
    if began is None or not _same_but_for_length(began, sampling):
        return False
    return began.max_new_tokens <= sampling.max_new_tokens


def _same_but_for_length(one: SamplingParams, other: SamplingParams) -> bool:
    return dataclasses.replace(one, max_new_tokens=other.max_new_tokens) == other


def prompt_digest(tokens: Sequence[int], contents: Sequence[Content] = ()) -> str:
    digest = hashlib.sha256(np.asarray(tokens, dtype=np.int64).tobytes())
    for content in contents:
        digest.update(content.key.encode())
    return digest.hexdigest()[:16]


def rollout_state(
    whole: Collection[Completion],
    requests: Collection[Request],
    turns: Sequence[Mapping[str, Any]],
    digests: Mapping[int, str],
) -> dict[str, Any]:
    """Returns one replica's part of the state that SavedRollouts reads, as JSON values."""
    return {
        "completions": [saved_fields(done) for done in whole],
        "requests": [saved_fields(request) for request in requests],
        "episodes": list(turns),
        "prompts": {str(sample_id): digest for sample_id, digest in digests.items()},
    }


def saved_fields(sample: Completion | Request) -> dict[str, Any]:
    plain: Any = dataclasses.replace(sample, blobs={})
    if isinstance(sample, Request):  # not saved: the run's prompts contain them
        plain = dataclasses.replace(plain, contents=())
    found = dataclasses.asdict(plain)
    found.pop("contents", None)
    for sequence in found.get("sequences", ()):
        sequence["blobs"] = blobs_to_json(sequence["blobs"])
    return found | {"blobs": blobs_to_json(sample.blobs)}


def merge_states(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    lists = ("completions", "requests", "episodes")
    found: dict[str, Any] = {n: [entry for part in parts for entry in part[n]] for n in lists}
    return found | {"prompts": {k: v for part in parts for k, v in part["prompts"].items()}}
