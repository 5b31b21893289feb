"""Model inputs other than tokens and their positions.

A family, or a part of a model such as its routers, provides an `ExtraInputs`. The batch planner
keeps the blobs that this object names, and calls the object to create the inputs for each
micro-batch. All layers can read these inputs in `packed_seq_params.model_inputs`; the embedding
receives them through `embed`. Code between the batch and the model does not interpret these inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hybridrl.contracts.batch import RolloutBatch
from hybridrl.contracts.micro_batch import MicroBatch, ModelTensor
from hybridrl.contracts.prompts import Content

PREDICTS = "predicts"
"""Model input in every micro-batch: (S,) bool, true where a response token is predicted."""


class ExtraInputs:
    """Extra inputs of a model; this base class provides none.

    Attributes:
        blobs: Names of the blobs in a batch that the model reads; other blobs are not sent to
            ranks.
        needs_blobs: Whether every batch that is trained must have these blobs.
        needed_by: Feature that needs these blobs, for error messages.
        changes_embeddings: Whether `embed` changes the embeddings.
        num_position_rows: Number R of positions per token; 0 if the model does not use `positions`.
    """

    blobs: tuple[str, ...] = ()
    needs_blobs = True
    needed_by = "the model"
    changes_embeddings = False
    num_position_rows = 0

    def prepare(self, micro: MicroBatch, batch: RolloutBatch) -> Mapping[str, ModelTensor]:
        """Returns the model's inputs for a micro-batch.

        Runs on the host, before the micro-batch is split for context parallelism and moved to the
        device.

        Raises BatchError if the blobs do not fit the model.
        """
        return {}

    def positions(self, batch: RolloutBatch, index: int, num_tokens: int) -> Tensor:
        """Returns the positions of the tokens of a batch's sample, (num_tokens, R) int64."""
        return torch.arange(num_tokens)[:, None]

    def probe(
        self, tokens: tuple[int, ...], seed: int, max_tokens: int
    ) -> tuple[tuple[int, ...], tuple[Content, ...]]:
        """Returns tokens and contents of a prompt with these inputs, to compare engine and trainer;
        by default the given tokens without contents.

        Args:
            max_tokens: Maximum number of tokens of the prompt. If the contents do not fit, the
                result has none.
        """
        return tokens, ()

    def embed(self, model: Any, embedded_S1D: Tensor, inputs: dict[str, Any]) -> Tensor:
        """Returns the embeddings for this context-parallel rank's positions, after any changes.

        Args:
            embedded_S1D: Embeddings of the tokens, before sequence parallelism splits them.
            inputs: Inputs that `prepare` returned, on the device. What this method adds to them
                reaches the layers of this stage, even when they are recomputed.
        """
        return embedded_S1D
