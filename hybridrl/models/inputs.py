"""What a model reads beside tokens and their positions.

A family, or a part of a model such as its routers, gives an `ExtraInputs`. The planner of batches
then keeps the blobs that it names and lets it make the model's inputs of each micro-batch; every
layer finds these in `packed_seq_params.model_inputs`, and the embedding in `embed`. Nothing between
the batch and the model knows what they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrl.contracts.batch import Prompt, RolloutBatch
from hybridrl.contracts.micro_batch import MicroBatch, ModelTensor

PREDICTS = "predicts"
"""The model input of every micro-batch: (S,) bool, which positions predict a response token."""


class ExtraInputs:
    """The extra inputs of one model; each method here is that of a model that has none.

    Attributes:
        blobs: Names of the blobs that it reads; a batch's others move nowhere.
        needed_by: What asks for these blobs, for messages.
        changes_embeddings: Whether `embed` does something.
        num_position_rows: Number R of positions of each token; 0: `positions` is not asked.
    """

    blobs: tuple[str, ...] = ()
    needed_by = "the model"
    changes_embeddings = False
    num_position_rows = 0

    def prepare(self, micro: MicroBatch, batch: RolloutBatch) -> Mapping[str, ModelTensor]:
        """Returns the model's inputs of a micro-batch; on the host, before it is cut for context
        parallelism and moved to the device.

        Args:
            micro: The whole micro-batch, whose `model_inputs` are its blobs.
            batch: The batch that its samples are from.

        Raises:
            BatchError: The blobs do not fit the model.
        """
        return {}

    def positions(self, prompt: Prompt, num_tokens: int) -> Tensor:
        """Returns the positions of a sample's tokens, (num_tokens, R) int64."""
        return torch.arange(num_tokens)[:, None]

    def embed(self, model: Any, embedded_S1D: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns the embeddings of this context-parallel rank's positions, changed.

        Args:
            model: The first stage's GPTModel.
            embedded_S1D: Embeddings of the tokens, before sequence parallelism cuts them.
            inputs: Of `prepare`, on the device.
        """
        return embedded_S1D
