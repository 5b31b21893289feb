"""Multi-token prediction (MTP): a layer after the last one that predicts the token after the next.

The layer reads the model's final hidden state at a position and the embedding of the next token
(DeepSeek-AI 2024, "DeepSeek-V3", section 2.2, for one further token):

    x_t = layer(fc([norm(embedding of token t + 1); norm(hidden state t)]))
    log p(token t + 2) = log softmax(head(norm(x_t)))

Engines use it to draft tokens for speculative decoding. The layer's loss does not change the model
itself: hidden states, embedding and head are constants here, so that only the layer's own
parameters have gradients. A rank on the last pipeline stage computes the whole layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl.models.megatron.attention import PackedSequences


class NextTokenLayer(MegatronModule):
    """The layer; input and output (S, 1, D), S split by sequence parallelism.

    Attributes:
        coefficient: Coefficient of the loss.
        num_step_targets: Number of response tokens in the update over all ranks, by which the loss
            is divided.
        loss: Sum of the losses of this rank's targets since `clear`, before the division, and the
            number of these targets, (2,) fp32; None if there were none.
    """

    def __init__(
        self, config: TransformerConfig, layer: ModuleSpec, norm: Any, vp_stage: int | None = None
    ) -> None:
        super().__init__(config=config)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        self.group: dist.ProcessGroup = groups.tp
        self.coefficient, self.num_step_targets = 0.0, 1
        self.loss: torch.Tensor | None = None
        hidden, eps = config.hidden_size, config.layernorm_epsilon
        self.embedding_norm, self.hidden_norm, self.final_norm = (
            norm(config=config, hidden_size=hidden, eps=eps) for _ in range(3)
        )
        device = torch.cuda.current_device()
        self.fc = torch.nn.Linear(
            2 * hidden, hidden, bias=False, dtype=config.params_dtype, device=device
        )
        # Each rank computes its own positions, so Megatron must sum the gradients over the ranks.
        self.fc.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.layer = build_module(layer, config=config, pg_collection=groups, vp_stage=vp_stage)

    def clear(self) -> None:
        self.loss = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        tokens_S: torch.Tensor,
        embedding_VD: torch.Tensor,
        rotary: torch.Tensor,
        packed: PackedSequences,
    ) -> torch.Tensor:
        """Returns the normalized hidden states for the head, (S, 1, D).

        Args:
            hidden_states: The model's final hidden states, normalized, (S, 1, D).
            embedding_VD: This rank's rows of the embedding.
        """
        with torch.no_grad():
            embedded_SD = self._embedded(tokens_S.roll(-1), embedding_VD)
            if self.config.sequence_parallel:
                embedded_SD = embedded_SD.chunk(self.group.size())[self.group.rank()]
        parts = (
            self.embedding_norm(embedded_SD[:, None]),
            self.hidden_norm(hidden_states.detach()),
        )
        joined = self.fc(torch.cat(parts, -1))
        output, _ = self.layer(
            joined, attention_mask=None, rotary_pos_emb=rotary, packed_seq_params=packed
        )
        normed: torch.Tensor = self.final_norm(output)
        return normed

    def _embedded(self, tokens_S: torch.Tensor, embedding_VD: torch.Tensor) -> torch.Tensor:
        rows_S = tokens_S - self.group.rank() * embedding_VD.size(0)
        is_own_S = (rows_S >= 0) & (rows_S < embedding_VD.size(0))
        found_SD = embedding_VD[rows_S * is_own_S] * is_own_S[:, None]
        if self.group.size() > 1:
            dist.all_reduce(found_SD, group=self.group)
        return found_SD

    def loss_of(self, logp_N: torch.Tensor, is_target_N: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a micro-batch, and adds it to `loss`."""
        total = -(logp_N * is_target_N).sum()
        found = torch.stack((total.detach(), is_target_N.sum().float()))
        self.loss = found if self.loss is None else self.loss + found
        return self.coefficient * total / self.num_step_targets


def target_rows(
    rows_N: torch.Tensor, cu_seqlens: torch.Tensor, num_positions: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the positions whose second next token is predicted, and which of them count.

    Args:
        rows_N: Positions whose next token is a response token.
        cu_seqlens: Start of each sequence, followed by the number of positions.

    Returns:
        For each of `rows_N`, the position before it, and whether that is in the same sequence.
    """
    is_start_S = torch.zeros(num_positions + 1, dtype=torch.bool, device=rows_N.device)
    is_start_S[cu_seqlens.to(rows_N.device).long()] = True
    return (rows_N - 1) % num_positions, ~is_start_S[rows_N]


def next_token_layers(chunks: Iterable[torch.nn.Module]) -> Iterator[NextTokenLayer]:
    for chunk in chunks:
        yield from (part for part in chunk.modules() if isinstance(part, NextTokenLayer))
