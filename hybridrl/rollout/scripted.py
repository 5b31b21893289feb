"""A rollout engine that replays scripted responses, for tests and runs without real sampling.

It queues requests, adds one token per step and accepts weight updates, but never reads weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import torch
from torch import Tensor

from hybridrl.models.weights import RankLayout, hf_layout, hf_shapes
from hybridrl.rollout.build import EngineInputs
from hybridrl.rollout.common.sampling import uniforms
from hybridrl.rollout.engine import QueuedEngine, Request

Response = tuple[Sequence[int], Sequence[float]]
Script = Callable[[Request], Response]
"""Returns the tokens of a request's complete response and their log-probabilities. Tokens after a
stop token or after the maximum length are ignored.
"""


def build(inputs: EngineInputs) -> ScriptedEngine:
    """Builds this rank's engine, which draws all tokens with equal probability."""
    shape = inputs.family.shape(inputs.hf_config)
    script, shapes = uniform_script(shape.vocab_size), hf_shapes(inputs.family, shape)
    return ScriptedEngine(script, shapes, inputs.dtype, inputs.rollout.max_batch)


class ScriptedEngine(QueuedEngine):
    """Implements `RolloutEngine` and `WeightTarget` without a model.

    Args:
        script: Source of the responses; may depend only on the request's prompt, seed and id.
        shapes: Shapes of the HF tensors that the engine receives, by name.
        max_batch: Maximum number of requests that advance together.
    """

    name = "scripted"

    def __init__(
        self,
        script: Script,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype = torch.float32,
        max_batch: int = 256,
    ) -> None:
        super().__init__()
        self._script = script
        self._responses: dict[int, Response] = {}  # of unfinished requests, by id
        self._tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in shapes.items()}
        self._max_batch = max_batch

    def layout(self) -> RankLayout:
        return hf_layout({name: tuple(tensor.shape) for name, tensor in self._tensors.items()})

    def tensors(self) -> Mapping[str, Tensor]:
        return self._tensors

    def submit(self, requests: Sequence[Request]) -> None:
        responses = {request.request_id: self._script(request) for request in requests}
        super().submit(requests)
        self._responses |= responses

    def clear(self) -> None:
        super().clear()
        self._responses.clear()

    def step(self) -> None:
        self._check_weights()
        for number, row in list(islice(self._rows.items(), self._max_batch)):
            tokens, logps = self._responses[number]
            position = len(row.tokens)
            if position >= len(tokens):
                raise ValueError(
                    f"the script of request {number} ends after {len(tokens)} tokens without a "
                    f"stop token; max_new_tokens is {row.request.sampling.max_new_tokens}"
                )
            completion = row.append(tokens[position], logps[position], self._version)
            if completion is not None:
                del self._responses[number]
                self._finish(completion)


def uniform_script(vocab_size: int) -> Script:
    """Returns a script that draws all tokens with equal probability, by the request's seed."""

    def answer(request: Request) -> Response:
        length = request.sampling.max_new_tokens
        draws = uniforms([request.seed] * length, range(length))
        return (draws * vocab_size).astype(int).tolist(), [-math.log(vocab_size)] * length

    return answer
