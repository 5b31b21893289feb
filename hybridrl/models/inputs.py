"""Inputs of a model other than tokens and their positions.

A family, or a part of a model such as its routers, provides an `ExtraInputs`. The batch planner
keeps the blobs that it names and calls it for the model's inputs of each micro-batch. Every layer
finds these in `packed_seq_params.model_inputs`; the embedding gets them through `embed`. The code
between the batch and the model does not interpret them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrl.contracts.batch import Prompt, RolloutBatch
from hybridrl.contracts.micro_batch import MicroBatch, ModelTensor

PREDICTS = "predicts"
"""Model input that every micro-batch has: (S,) bool, true where a response token is predicted."""


class ExtraInputs:
    """Extra inputs of a model; this base class has none.

    Attributes:
        blobs: Names of the batch's blobs that the model reads; others are not sent to ranks.
        needed_by: Feature that needs these blobs, for error messages.
        changes_embeddings: Whether `embed` changes the embeddings.
        num_position_rows: Number R of positions per token; 0 if `positions` is not used.
    """

    blobs: tuple[str, ...] = ()
    needed_by = "the model"
    changes_embeddings = False
    num_position_rows = 0

    def prepare(self, micro: MicroBatch, batch: RolloutBatch) -> Mapping[str, ModelTensor]:
        """Returns the model's inputs of a micro-batch.

        It runs on the host, before the micro-batch is cut for context parallelism and moved to the
        device.

        Args:
            micro: The whole micro-batch; its `model_inputs` are its blobs.
            batch: Batch that the samples come from.

        Raises:
            BatchError: The blobs do not fit the model.
        """
        return {}

    def positions(self, prompt: Prompt, num_tokens: int) -> Tensor:
        """Returns the positions of a sample's tokens, (num_tokens, R) int64."""
        return torch.arange(num_tokens)[:, None]

    def embed(self, model: Any, embedded_S1D: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the embeddings of this context-parallel rank's positions, with any changes.

        Args:
            model: GPTModel of the first pipeline stage.
            embedded_S1D: Embeddings of the tokens, before sequence parallelism cuts them.
            inputs: Result of `prepare`, on the device.
        """
        return embedded_S1D
