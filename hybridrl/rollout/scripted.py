"""A rollout engine that says what a script says: for tests, and runs that need no real sampling.

Has the whole life of an engine (queue, a token a step, weight updates) but no model: the weights
that it receives are stored and never read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridrl.models.weights import RankLayout, hf_layout, hf_shapes
from hybridrl.rollout.build import EngineInputs
from hybridrl.rollout.common.sampling import uniforms
from hybridrl.rollout.common.stops import TokenTexts
from hybridrl.rollout.engine import Completion, Holding, Request, RunningRequest, new_rows

Script = Callable[[Request], tuple[Sequence[int], Sequence[float]]]
"""Given a request, returns the tokens of its whole response and their log-probabilities; what comes
after a stop token or beyond the limit is not used."""


def build(inputs: EngineInputs) -> ScriptedEngine:
    """Builds the engine of this rank, which finds all tokens equally likely."""
    shape = inputs.family.shape(inputs.hf_config)
    script, shapes = uniform_script(shape.vocab_size), hf_shapes(inputs.family, shape)
    return ScriptedEngine(script, shapes, inputs.dtype, inputs.rollout.max_batch)


class ScriptedEngine:
    """Implements `RolloutEngine` and `WeightTarget` without a model.

    Args:
        script: Answers; must be a function of the request's prompt and seed or id alone.
        shapes: HF tensors that it receives.
        max_batch: Most requests that advance together.
    """

    def __init__(
        self,
        script: Script,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype = torch.float32,
        max_batch: int = 256,
    ) -> None:
        self._script = script
        self._tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        self._max_batch = max_batch
        self._unfinished: deque[_Scripted] = deque()
        self._finished: list[Completion] = []
        self._version = -1
        self._is_updating = True
        self.token_texts: TokenTexts | None = None

    def layout(self) -> RankLayout:
        """Returns the layout of whole HF tensors under their own names."""
        return hf_layout({name: tuple(tensor.shape) for name, tensor in self._tensors.items()})

    def tensors(self) -> Mapping[str, Tensor]:
        """Returns the tensors to write."""
        return self._tensors

    def begin_update(self) -> None:
        """Stops generation."""
        self._is_updating = True

    def sleep(self, keeps_memory: bool = False) -> None:
        """Stops generation; there is no memory to give back."""
        self._is_updating = True

    def finish_update(self, version: int) -> None:
        """Allows generation with the weights `version`."""
        self._version = version
        self._is_updating = False

    @property
    def version(self) -> int:
        """The version of the weights; -1 before the first update."""
        return self._version

    @property
    def has_unfinished(self) -> bool:
        """Whether a submitted request is not finished yet."""
        return bool(self._unfinished)

    def submit(self, requests: Sequence[Request]) -> None:
        """Queues requests and asks the script for their whole responses."""
        rows = [scripted.row for scripted in self._unfinished]
        self._unfinished.extend(
            _Scripted(row, *self._script(row.request)) for row in new_rows(rows, requests)
        )

    def collect(self) -> list[Completion]:
        """Returns, once, what finished since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def pending(self) -> list[Request]:
        """Returns the unfinished requests with the tokens they have."""
        return [scripted.row.so_far() for scripted in self._unfinished]

    def clear(self) -> None:
        """Drops all requests, and responses that were not collected."""
        self._unfinished.clear()
        self._finished.clear()

    def memory(self) -> dict[str, Holding]:
        """Returns nothing: the engine computes nothing."""
        return {}

    def close(self) -> None:
        """Does nothing; there is nothing to give back."""

    def step(self) -> None:
        """Gives the first `max_batch` unfinished requests their next scripted token."""
        if self._is_updating:
            raise RuntimeError("the scripted engine waits for finish_update()")
        batch = [
            self._unfinished.popleft() for _ in range(min(self._max_batch, len(self._unfinished)))
        ]
        still_running = []
        for scripted in batch:
            completion = scripted.advance(self._version)
            if completion is None:
                still_running.append(scripted)
            else:
                self._finished.append(completion)
        self._unfinished.extendleft(reversed(still_running))


@dataclass(frozen=True)
class _Scripted:
    row: RunningRequest
    tokens: Sequence[int]
    logps: Sequence[float]

    def advance(self, version: int) -> Completion | None:
        position, request = len(self.row.tokens), self.row.request
        if position >= len(self.tokens):
            raise ValueError(
                f"the script of request {request.request_id} ends after {len(self.tokens)} tokens "
                f"without a stop token; max_new_tokens is {request.sampling.max_new_tokens}"
            )
        return self.row.append(self.tokens[position], self.logps[position], version)


def uniform_script(vocab_size: int) -> Script:
    """Returns the script of a model that finds all tokens equally likely, sampled by request seed.

    Responses end where a stop token happens to be drawn, or at the limit; top-k, top-p and
    temperature change nothing.
    """

    def answer(request: Request) -> tuple[list[int], list[float]]:
        length = request.sampling.max_new_tokens
        draws = uniforms([request.seed] * length, range(length))
        return (draws * vocab_size).astype(int).tolist(), [-math.log(vocab_size)] * length

    return answer
