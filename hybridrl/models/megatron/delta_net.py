"""Gated delta net as a Megatron self-attention, and attention with a gate on its output.

Megatron's own gated delta net (0.16.1, ssm/gated_delta_net.py) supports neither packed sequences
nor hosts without a GPU, and version 0.19 supports no shared prompts. This class computes packed
sequences, resets the state at each sequence's start, and continues a shared prompt: the state and
the last convolution inputs at the end of a prompt are the start of each of its samples, and their
gradients flow back to the prompt.

Tensor parallelism: each rank holds some key heads and their value heads, so it needs no
communication between the two projections. Sequence parallelism is as in attention. Every rank
computes whole sequences, so context parallelism is not supported.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from hybridrl import ops
from hybridrl.models.megatron.attention import (
    ContinuedSequence,
    GatherKeys,
    PackedSequences,
    Readers,
)
from hybridrl.models.megatron.delta_rule import (
    DeltaInputs,
    DeltaRule,
    Sequences,
    causal_convolution,
    delta_rule,
)
from hybridrl.models.megatron.norm import RMSNorm
from hybridrl.models.mixers import DeltaShape


class Stage:
    """Sequences of a micro-batch that are computed in one call: all that continue no prompt, or all
    that continue one.

    Args:
        spans: (start, length) of each sequence.

    Attributes:
        sequences: Boundaries in the order of the stage.
        index_T: Packed index of each of the stage's tokens.
    """

    def __init__(self, spans: list[tuple[int, int]], device: torch.device) -> None:
        self.sequences = Sequences([length for _, length in spans], device)
        parts = [torch.arange(start, start + length) for start, length in spans]
        self.index_T = torch.cat(parts).to(device)


def tokens_before(spans: list[ContinuedSequence], count: int) -> torch.Tensor:
    """Returns the packed indices of the `count` tokens before each sequence, (N, count); the number
    of packed tokens stands for a token before the sample.
    """
    column, num_tokens = torch.arange(-count, 0), sum(length for *_, length in spans)
    rows = [
        torch.where(shared + column >= 0, prefix + shared + column, num_tokens)
        for prefix, shared, _, _ in spans
    ]
    return torch.stack(rows)


class History(NamedTuple):
    """Packed tokens with those before each sequence, for the convolution in torch.

    Args:
        index_E: For each sequence, the packed indices of the tokens before it, and then of the
            sequence. The number of packed tokens stands for a token before the sample.
        readers: For each packed token, and for the one before all samples, its places in `index_E`.
        row_T: For each packed token, its row in the convolution of `index_E`.
    """

    index_E: torch.Tensor
    readers: Readers
    row_T: torch.Tensor

    @staticmethod
    def of(spans: list[ContinuedSequence], kernel: int, device: torch.device) -> History:
        """Lays out sequences for a convolution that reads `kernel` positions."""
        num_tokens, num_rows = sum(length for *_, length in spans), 0
        index, row_T = [], torch.empty(num_tokens, dtype=torch.int64)
        before_NP = tokens_before(spans, kernel - 1)
        for before_P, (_, _, start, length) in zip(before_NP, spans, strict=True):
            index += [before_P, torch.arange(start, start + length)]
            row_T[start : start + length] = torch.arange(num_rows, num_rows + length)
            num_rows += kernel - 1 + length
        index_E = torch.cat(index)
        readers = Readers.of(index_E, num_tokens + 1).to(device)
        return History(index_E.to(device), readers, row_T.to(device))


class Places(NamedTuple):
    """Places of packed tokens in their sequences, for the convolution's kernels.

    Args:
        number_T, since_T, left_T: Index of each token's sequence, and its number of tokens before
            and after the token, int32.
        before_M: Packed indices of the tokens before the sequences, (N * (kernel - 1),); None if no
            sequence continues a prompt.
        is_prompt_M1: Whether each of these tokens belongs to a prompt; the others are before the
            sample, and zero.
        readers: For each packed token, its places in `before_M`.
        num_before: Number of tokens before each sequence.
    """

    number_T: torch.Tensor
    since_T: torch.Tensor
    left_T: torch.Tensor
    before_M: torch.Tensor | None
    is_prompt_M1: torch.Tensor
    readers: Readers
    num_before: int

    @staticmethod
    def of(spans: list[ContinuedSequence], kernel: int, device: torch.device) -> Places:
        """Lays out sequences for a convolution that reads `kernel` positions."""
        num_tokens = sum(length for *_, length in spans)
        places_3T = torch.empty(3, num_tokens, dtype=torch.int32)
        for number, (_, _, start, length) in enumerate(spans):
            own = places_3T[:, start : start + length]
            own[0], own[1] = number, torch.arange(length)
            own[2] = torch.arange(length - 1, -1, -1)
        before_M = tokens_before(spans, kernel - 1).flatten()
        is_prompt_M, continues = before_M < num_tokens, any(span[1] for span in spans)
        # Tokens before the sample have an index that no token has; their rows become zero.
        readers = Readers.of(before_M, num_tokens).to(device)
        before_M = before_M.clamp(max=num_tokens - 1).to(device)
        is_prompt_M1 = is_prompt_M[:, None].to(device)
        number_T, since_T, left_T = places_3T.to(device)
        before = before_M if continues else None
        return Places(number_T, since_T, left_T, before, is_prompt_M1, readers, kernel - 1)

    def before(self, channels_TC: torch.Tensor) -> torch.Tensor | None:
        """Returns the tokens before each sequence, (N, kernel - 1, C); None if all are zero."""
        if self.before_M is None:
            return None
        rows_MC = GatherKeys.apply(channels_TC, self.before_M, self.readers) * self.is_prompt_M1
        return rows_MC.unflatten(0, (-1, self.num_before))


class Recurrence:
    """Order in which packed sequences are computed, and what each continues; shared by all layers.

    Attributes:
        first: Sequences that continue no prompt.
        second: Sequences that continue a prompt; None if there are none.
        prompts_N: For each sequence in `second`, the index of its prompt in `first`.
        readers_P: For each sequence in `first`, the sequences in `second` that continue it.
        place_T: For each packed token, its index in the two stages' concatenated tokens.
    """

    def __init__(self, packed: PackedSequences, kernel: int, device: torch.device) -> None:
        if packed.shared is not None:
            spans = packed.shared.sequences
        else:
            bounds = packed.cu_seqlens_q.tolist()  # one sync point per micro-batch, as in attention
            spans = [ContinuedSequence(a, 0, a, b - a) for a, b in pairwise(bounds)]
        spans = [span for span in spans if span[3]]
        alone = [span for span in spans if not span[1]]
        continued = [span for span in spans if span[1]]
        self.first = Stage([(start, length) for _, _, start, length in alone], device)
        self.second = None
        order = [self.first.index_T]
        if continued:
            self.second = Stage([(start, length) for _, _, start, length in continued], device)
            order.append(self.second.index_T)
            # A sample continues the state after all tokens of its prompt.
            prompt_of = {(one[2], one[3]): number for number, one in enumerate(alone)}
            prompts = torch.tensor([prompt_of[one[0], one[1]] for one in continued])
            self.readers_P = Readers.of(prompts, len(alone)).to(device)
            self.prompts_N = prompts.to(device)
        self.place_T = torch.cat(order).argsort()
        self._spans, self._kernel, self._device = spans, kernel, device

    @cached_property
    def history(self) -> History:
        return History.of(self._spans, self._kernel, self._device)

    @cached_property
    def places(self) -> Places:
        return Places.of(self._spans, self._kernel, self._device)


class GatedDeltaNet(MegatronModule):
    """Gated delta net; input and output (S, 1, D), S split by sequence parallelism.

    Attributes:
        rule: Implementation of the recurrence; delta_kernels.py selects it.
        has_kernels: Whether kernels compute the convolution.
    """

    takes_shared_prompts = True

    def __init__(
        self,
        config: TransformerConfig,
        sizes: DeltaShape,
        layer_number: int,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise ValueError("a gated delta net cannot be split by context parallelism")
        self.sizes = sizes
        self.rule: DeltaRule = delta_rule
        self.has_kernels = False
        self.group = (pg_collection or ProcessGroupCollection.use_mpu_process_groups()).tp
        tp, hidden = self.group.size(), config.hidden_size
        self.value_heads, self.keys = sizes.value_heads // tp, sizes.keys // tp
        self.values, self.channels = sizes.values // tp, sizes.convolved // tp
        column = partial(
            ColumnParallelLinear,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
            tp_group=self.group,
        )
        self.linear_qkvz = column(hidden, sizes.convolved + sizes.values)
        self.linear_ba = column(hidden, 2 * sizes.value_heads)
        self.conv_weight = self._parameter(self.channels, 1, sizes.kernel)
        self.A_log = self._parameter(self.value_heads, dtype=torch.float32)
        self.dt_bias = self._parameter(self.value_heads)
        device = torch.cuda.current_device()
        # Unlike a model's other norms, this one never multiplies by 1 + its weight.
        self.out_norm = RMSNorm(
            sizes.value_dim, config.layernorm_epsilon, dtype=config.params_dtype, device=device
        )
        # Each rank normalizes its own heads, so Megatron must sum the gradients over the ranks.
        self.out_norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.linear_out = RowParallelLinear(
            sizes.values,
            hidden,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_group=self.group,
        )

    def _parameter(self, *shape: int, dtype: torch.dtype | None = None) -> torch.nn.Parameter:
        """Returns a parameter that is sharded along dim 0."""
        device = torch.cuda.current_device()
        dtype = dtype or self.config.params_dtype
        parameter = torch.nn.Parameter(torch.zeros(shape, dtype=dtype, device=device))
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=0, stride=1)
        return parameter

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        packed_seq_params: PackedSequences | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns the output, (S, 1, D), and None for its bias.

        Args:
            hidden_states: (S, 1, D), normalized; this tensor-parallel rank's part of the sequence.
        """
        if packed_seq_params is None:
            raise ValueError("a gated delta net needs packed sequences")
        order = self._order(packed_seq_params, hidden_states.device)
        projected, _ = self.linear_qkvz(hidden_states)
        steps, _ = self.linear_ba(hidden_states)
        channels_TC, gate_TV = projected[:, 0].split((self.channels, self.values), -1)
        beta_TG, decay_TG = steps[:, 0].float().chunk(2, -1)
        decay_TG = -self.A_log.exp() * F.softplus(decay_TG + self.dt_bias.float())
        mixed_TC = self._convolved(channels_TC, order)
        output_TGV = self._recurred(mixed_TC, decay_TG, beta_TG.sigmoid(), order)
        normed_TGV = self.out_norm(output_TGV)
        gated = normed_TGV * F.silu(gate_TV.float()).view_as(normed_TGV)
        output: tuple[torch.Tensor, torch.Tensor | None] = self.linear_out(
            gated.to(hidden_states.dtype).flatten(1)[:, None]
        )
        return output

    def _order(self, packed: PackedSequences, device: torch.device) -> Recurrence:
        """Returns the order of computation, which all layers of a micro-batch share."""
        key = ("recurrence", self.sizes.kernel)
        if key not in packed.derived:
            packed.derived[key] = Recurrence(packed, self.sizes.kernel, device)
        found: Recurrence = packed.derived[key]
        return found

    def _convolved(self, channels_TC: torch.Tensor, order: Recurrence) -> torch.Tensor:
        """Returns the convolved queries, keys and values, (T, C) in the model's data type."""
        weight_CK = self.conv_weight[:, 0]
        if self.has_kernels:
            places = order.places
            before_NPC = places.before(channels_TC)
            return ops.causal_convolution(channels_TC, weight_CK, places[:3], before_NPC)
        history = order.history
        with_zero = F.pad(channels_TC, (0, 0, 0, 1))
        history_EC = GatherKeys.apply(with_zero, history.index_E, history.readers)
        convolved = causal_convolution(history_EC, weight_CK)
        return convolved.index_select(0, history.row_T).to(channels_TC.dtype)

    def _recurred(
        self,
        mixed_TC: torch.Tensor,
        decay_TG: torch.Tensor,
        beta_TG: torch.Tensor,
        order: Recurrence,
    ) -> torch.Tensor:
        """Returns the recurrence's output, (T, value heads, value size) fp32."""
        query, key, value = mixed_TC.split((self.keys, self.keys, self.values), -1)
        tokens = DeltaInputs(
            query.unflatten(-1, (-1, self.sizes.key_dim)),
            key.unflatten(-1, (-1, self.sizes.key_dim)),
            value.unflatten(-1, (-1, self.sizes.value_dim)),
            decay_TG,
            beta_TG,
        )
        first, second = order.first, order.second
        continues = second is not None
        output, states = self.rule(
            tokens.rows(first.index_T), first.sequences, wants_states=continues
        )
        if second is not None:
            # The gradients of a prompt's samples are summed in a fixed order.
            states = GatherKeys.apply(states, order.prompts_N, order.readers_P)
            continued, _ = self.rule(tokens.rows(second.index_T), second.sequences, states)
            output = torch.cat((output, continued))
        return output.index_select(0, order.place_T)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: Any = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Returns the sharded tensors; parts of a fused parameter are separate tensors, so that a
        checkpoint can be loaded at another tensor-parallel size.
        """
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        own = {"conv_weight": self.conv_weight, "A_log": self.A_log, "dt_bias": self.dt_bias}
        found |= make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            dict.fromkeys(own, 0),
            sharded_offsets,
            tp_group=self.group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )
        qkv = {"query": self.keys, "key": self.keys, "value": self.values}
        sections = {
            "linear_qkvz": (self.linear_qkvz, {**qkv, "gate": self.values}),
            "linear_ba": (self.linear_ba, {"beta": self.value_heads, "decay": self.value_heads}),
        }
        for name, (linear, parts) in sections.items():
            weight, adapter = (f"{prefix}{name}.{kind}" for kind in ("weight", "lora_b"))
            found[weight] = in_parts(found[weight], parts)
            if (rows := getattr(linear, "lora_rows", None)) is not None:
                found[adapter] = in_parts(found[adapter], _adapted(parts, rows.tolist()))
        found[f"{prefix}conv_weight"] = in_parts(found[f"{prefix}conv_weight"], qkv)
        return found


def in_parts(whole: ShardedTensor, parts: Mapping[str, int]) -> ShardedTensorFactory:
    """Returns a checkpoint's description of a tensor whose parts are sharded separately.

    Args:
        whole: Description of the tensor, sharded along dim 0 as if it had no parts.
        parts: Number of rows of each part on this rank, by the suffix of its key.
    """
    described = dataclasses.replace(whole, data=None)

    def build(key: str, data: torch.Tensor, replica_id: Any, *_: Any) -> list[ShardedTensor]:
        own = dataclasses.replace(
            described, key=key, data=data, dtype=data.dtype, replica_id=replica_id
        )
        found, start = [], 0
        for name, size in parts.items():
            for piece in own.narrow(0, start, size):
                piece.key = f"{piece.key}.{name}"
                found.append(piece)
            start += size
        return found

    return ShardedTensorFactory(whole.key, whole.data, build, torch.cat, whole.replica_id)


def _adapted(parts: dict[str, int], rows: list[int]) -> dict[str, int]:
    """Returns how many of a layer's adapted output rows are in each of its parts."""
    counts, start = {}, 0
    for name, size in parts.items():
        if count := sum(start <= row < start + size for row in rows):
            counts[name] = count
        start += size
    return counts


def set_rule(chunks: Iterable[torch.nn.Module], rule: DeltaRule, has_kernels: bool) -> None:
    for chunk in chunks:
        for part in chunk.modules():
            if isinstance(part, GatedDeltaNet):
                part.rule, part.has_kernels = rule, has_kernels


class GatedAttention(SelfAttention):
    """Self-attention whose output is multiplied by the sigmoid of a gate.

    Megatron's own product is compiled by torch.compile (0.16.1, `_apply_output_gate`), which takes
    longer than a small model's step and needs a compiler on hosts without a GPU.
    """

    def _apply_output_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(gate.contiguous().view(x.shape))
