"""Multi-head latent attention as a Megatron self-attention; see families/latent.py.

Megatron's own MLA (0.16.1, multi_latent_attention.py) computes its own rotary angles. With its
local spec, it also splits the gradient of the shared rotary key over tensor-parallel ranks without
summing it (get_query_key_value_tensors). This class uses GPTModel's angles, like all other
attention classes, so it supports packed sequences, shared prompts and context parallelism.

Tensor parallelism: the down projection is replicated; each rank applies it to its part of the
sequence, and Megatron sums its gradients, as for norms. Up projections are sharded by head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings import apply_rotary_pos_emb
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig

from hybridrl.models.families.latent import LATENT_EPS
from hybridrl.models.megatron.attention import PackedAttention, PackedSequences
from hybridrl.models.megatron.norm import TorchNorm


@dataclass
class LatentSubmodules:
    """Classes from which latent attention is built."""

    core_attention: type = PackedAttention
    column_linear: type = ColumnParallelLinear
    row_linear: type = RowParallelLinear
    norm: type = TorchNorm


class SharedLinear(MegatronModule):
    """Linear layer without bias, replicated on all tensor-parallel ranks.

    Each rank applies it to its part of the sequence.
    """

    def __init__(self, input_size: int, output_size: int, config: MLATransformerConfig) -> None:
        super().__init__(config=config)
        device = torch.cuda.current_device()
        weight = torch.empty(output_size, input_size, dtype=config.params_dtype, device=device)
        self.weight = torch.nn.Parameter(weight)
        # Megatron sums the gradients of marked parameters over tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight)


class LatentAttention(MegatronModule):
    """Self-attention over latents; input and output (S, B, D), S split by sequence parallelism."""

    def __init__(
        self,
        config: MLATransformerConfig,
        submodules: LatentSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        self.config: MLATransformerConfig = config
        self.attn_mask_type = attn_mask_type
        self.groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.num_heads = config.num_attention_heads // self.groups.tp.size()
        self.query_dim = config.qk_head_dim + config.qk_pos_emb_head_dim
        self.rotary_magnitude = 1.0  # set by set_rotary
        # 0 if queries are projected directly from the input.
        self.query_rank: int = config.q_lora_rank or 0
        rank, heads = config.kv_lora_rank, config.num_attention_heads
        down = self.query_rank + rank + config.qk_pos_emb_head_dim
        self.linear_down_proj = SharedLinear(config.hidden_size, down, config)
        if self.query_rank:
            self.q_layernorm = self._norm(submodules, self.query_rank)
            self.linear_q_up_proj = self._up(submodules, self.query_rank, heads * self.query_dim)
        else:
            self.linear_q_proj = self._up(submodules, config.hidden_size, heads * self.query_dim)
        self.kv_layernorm = self._norm(submodules, rank)
        width = heads * (config.qk_head_dim + config.v_head_dim)
        self.linear_kv_up_proj = self._up(submodules, rank, width)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            softmax_scale=config.softmax_scale,
            k_channels=self.query_dim,
            v_channels=config.v_head_dim,
            cp_comm_type=cp_comm_type,
            pg_collection=self.groups,
        )
        self.linear_proj = build_module(
            submodules.row_linear,
            heads * config.v_head_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=self.groups.tp,
        )

    def _norm(self, submodules: LatentSubmodules, size: int) -> torch.nn.Module:
        return build_module(submodules.norm, config=self.config, hidden_size=size, eps=LATENT_EPS)

    def _up(self, submodules: LatentSubmodules, rank: int, size: int) -> torch.nn.Module:
        return build_module(
            submodules.column_linear,
            rank,
            size,
            config=self.config,
            init_method=self.config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=self.groups.tp,
        )

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_pos_emb: torch.Tensor | None = None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the attention's output, (S, B, D), and None for its bias.

        Args:
            hidden_states: (S, B, D), normalized; this tensor-parallel rank's part of the sequence.
            packed_seq_params: Boundaries of packed sequences; B must then be 1.
        """
        if rotary_pos_emb is None:
            raise ValueError("latent attention without rotary angles")
        query, key, shared_key, value = self._projected(hidden_states)
        if packed_seq_params is not None:
            query, key, shared_key, value = (
                part.squeeze(1) for part in (query, key, shared_key, value)
            )
        plain = self.config.qk_head_dim
        rotated_query, rotated_key = (
            self._rotated(part, rotary_pos_emb, packed_seq_params)
            for part in (query[..., plain:], shared_key)
        )
        query = torch.cat((query[..., :plain], rotated_query), dim=-1)
        key = torch.cat((key, rotated_key.expand(*key.shape[:-1], -1)), dim=-1)
        attended = self.core_attention(
            query,
            key,
            value.contiguous(),
            attention_mask,
            attn_mask_type=self.attn_mask_type,
            packed_seq_params=packed_seq_params,
        )
        if packed_seq_params is not None:
            attended = attended.reshape(attended.size(0), 1, -1)
        return self.linear_proj(attended)

    def _projected(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Returns query, key without positions, rotary key and value, each (S, B, N, H).

        All four contain this rank's heads for the whole sequence, except that the rotary key has a
        single head, which all heads share.
        """
        config = self.config
        sizes = self.query_rank, config.kv_lora_rank, config.qk_pos_emb_head_dim
        query_latent, latent, shared_key = self.linear_down_proj(hidden).split(sizes, dim=-1)
        if self.query_rank:
            query, _ = self.linear_q_up_proj(self.q_layernorm(query_latent.contiguous()))
        else:
            query, _ = self.linear_q_proj(hidden)
        key_value, _ = self.linear_kv_up_proj(self.kv_layernorm(latent.contiguous()))
        if config.sequence_parallel:
            # Each rank's heads compute part of the key's gradient; the gather's backward sums them.
            shared_key = gather_from_sequence_parallel_region(
                shared_key.contiguous(), tensor_parallel_output_grad=True, group=self.groups.tp
            )
        key, value = _by_head(key_value, self.num_heads).split(
            (config.qk_head_dim, config.v_head_dim), dim=-1
        )
        return _by_head(query, self.num_heads), key, shared_key.unsqueeze(-2), value

    def _rotated(
        self, part: torch.Tensor, angles: torch.Tensor, packed: PackedSequences | None
    ) -> torch.Tensor:
        """Rotates queries or keys by their angles, after pairing halves as GPTModel does."""
        halves = torch.cat((part[..., 0::2], part[..., 1::2]), dim=-1)
        rotated = apply_rotary_pos_emb(
            halves,
            angles,
            config=self.config,
            cu_seqlens=None if packed is None else packed.cu_seqlens_q,
            cp_group=self.groups.cp,
        )
        return rotated if self.rotary_magnitude == 1 else rotated * self.rotary_magnitude


def _by_head(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    return tensor.view(*tensor.shape[:-1], num_heads, -1)
