"""Heads on the last pipeline stage: compute per-token log-probabilities or values.

The rest of the trainer never sees logits. Only this module deals with vocabulary padding,
vocabulary parallelism and temperature: the softmax ignores padded columns, statistics are combined
over the tensor-parallel group, and the backward pass recomputes logits chunk by chunk instead of
storing them. The head computes only positions that predict a response token, because no other
statistics are needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl import ops
from hybridrl.contracts.likely_tokens import LIKELY_TOKENS
from hybridrl.contracts.micro_batch import MicroBatch
from hybridrl.models.family import Scales
from hybridrl.models.inputs import ExtraInputs
from hybridrl.models.likely_inputs import IS_SUPPORT
from hybridrl.models.megatron.attached_loss import AttachedLoss
from hybridrl.models.megatron.attention import PackedSequences
from hybridrl.models.megatron.mtp import NextTokenLayer, target_rows
from hybridrl.models.megatron.packed_exactly import RotaryRows

Logps = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
MAX_LOGITS_BYTES = 1 << 28  # of the whole logits in exact mode


@dataclass(frozen=True)
class HeadInput:
    """Input to the vocabulary head for the S positions of a micro-batch.

    Args:
        tokens: Target token at each position, (S,), or the target and K further tokens, (S, 1 + K),
            int64.
        rows_N: Positions for which the head is computed, ascending.
        is_support: Whether the softmax is computed only over the given tokens; -1 stands for none.
        is_for_gradients: Whether the further tokens are only needed in passes with gradients.
    """

    tokens: torch.Tensor
    rows_N: torch.Tensor
    temperature: float
    is_support: bool = False
    is_for_gradients: bool = False

    @staticmethod
    def of(micro: MicroBatch, rows_N: torch.Tensor, temperature: float) -> HeadInput:
        likely = micro.model_inputs.get(LIKELY_TOKENS)
        if likely is None:
            return HeadInput(micro.labels, rows_N, temperature)
        is_support = IS_SUPPORT in micro.model_inputs
        return HeadInput(likely.value, rows_N, temperature, is_support, is_for_gradients=True)


class TokenStats(NamedTuple):
    """Log-probability of the target, and entropy, at each packed position: nats, (S,) fp32.

    Positions that were not computed have zeros and no gradient. If further tokens were given, or
    the most likely tokens were requested, `chosen_SK` contains these tokens and `chosen_logp_SK`
    their log-probabilities.
    """

    logp_S: torch.Tensor
    entropy_S: torch.Tensor
    chosen_logp_SK: torch.Tensor | None = None
    chosen_SK: torch.Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of the statistics; Megatron's schedule reads it for models with experts."""
        return self.logp_S.device


class _TokenStatsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        target_N: torch.Tensor,
        rows_N: torch.Tensor,
        temperature: float,
        cap: float,
        num_columns: int,
        group: dist.ProcessGroup,
        exact_N: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden_ND, shard_VD = hidden_SD.index_select(0, rows_N), weight_VD[:num_columns]
        local = ops.vocab_stats(hidden_ND, shard_VD, target_N, temperature, cap)
        largest = local.max_T.clone()
        is_shared = group.size() > 1 and rows_N.numel() > 0  # all ranks have the same rows
        if is_shared:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shift = local.max_T - largest
        scale = shift.exp()
        combined = torch.stack(
            (local.sum_T * scale, (local.weighted_T + local.sum_T * shift) * scale, local.target_T)
        )
        if is_shared:
            dist.all_reduce(combined, group=group)
        total, weighted, target_logit = combined
        log_sum = total.log()
        entropy = log_sum - weighted / total
        ctx.save_for_backward(hidden_ND, weight_VD, target_N, rows_N, largest, log_sum, entropy)
        ctx.temperature, ctx.cap, ctx.num_columns = temperature, cap, num_columns
        ctx.num_positions = hidden_SD.size(0)
        ctx.set_materialize_grads(False)
        logp = target_logit - largest - log_sum
        if exact_N is not None:
            logp = exact_N
        return _at_rows(logp, rows_N, len(hidden_SD)), _at_rows(entropy, rows_N, len(hidden_SD))

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logp_S: torch.Tensor | None, grad_entropy_S: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, target_N, rows_N, largest, log_sum, entropy = ctx.saved_tensors
        main_grad_VD = _main_grad(weight_VD)
        grad_logp, grad_entropy = (
            None if grad_S is None else grad_S.index_select(0, rows_N)
            for grad_S in (grad_logp_S, grad_entropy_S)
        )
        grad_hidden, grad_shard = ops.vocab_backward(
            hidden_ND,
            weight_VD[: ctx.num_columns],
            target_N,
            ctx.temperature,
            largest,
            log_sum,
            entropy,
            torch.zeros_like(entropy) if grad_logp is None else grad_logp,
            grad_entropy,
            None if main_grad_VD is None else main_grad_VD[: ctx.num_columns],
            ctx.cap,
            ctx.needs_input_grad[1],
        )
        is_added = main_grad_VD is not None
        grad_weight = _placeholder(weight_VD) if is_added else _padded(grad_shard, weight_VD)
        grad_hidden = _at_rows(grad_hidden, rows_N, ctx.num_positions)
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


class _ChosenLogits(torch.autograd.Function):
    """Computes the logits of K columns at each position, (N, K) fp32, over all shards.

    `is_alone` tells whether no other function computes gradients of the same weight.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        columns_NK: torch.Tensor,
        rows_N: torch.Tensor,
        temperature: float,
        cap: float,
        num_columns: int,
        group: dist.ProcessGroup,
        is_alone: bool,
    ) -> torch.Tensor:
        hidden_ND, shard_VD = hidden_SD.index_select(0, rows_N), weight_VD[:num_columns]
        logits_NK = ops.vocab_chosen(hidden_ND, shard_VD, columns_NK, temperature, cap)
        if group.size() > 1 and rows_N.numel() > 0:
            dist.all_reduce(logits_NK, group=group)
        ctx.save_for_backward(hidden_ND, weight_VD, columns_NK, rows_N)
        ctx.temperature, ctx.cap, ctx.num_columns = temperature, cap, num_columns
        ctx.num_positions, ctx.is_alone = hidden_SD.size(0), is_alone
        return logits_NK

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_NK: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_ND, weight_VD, columns_NK, rows_N = ctx.saved_tensors
        main_grad_VD = _main_grad(weight_VD)
        grad_hidden, grad_shard = ops.vocab_chosen_backward(
            hidden_ND,
            weight_VD[: ctx.num_columns],
            columns_NK,
            ctx.temperature,
            grad_NK,
            None if main_grad_VD is None else main_grad_VD[: ctx.num_columns],
            ctx.cap,
            ctx.needs_input_grad[1],
        )
        grad_hidden = _at_rows(grad_hidden, rows_N, ctx.num_positions)
        if main_grad_VD is None:
            grad_weight = _padded(grad_shard, weight_VD)
        else:  # otherwise _TokenStatsFunction returns the placeholder
            grad_weight = _placeholder(weight_VD) if ctx.is_alone else None
        return grad_hidden, grad_weight, None, None, None, None, None, None, None


def _over_support(
    logits_NK: torch.Tensor, tokens_NK: torch.Tensor, rows_N: torch.Tensor, num_positions: int
) -> TokenStats:
    """Returns statistics of the softmax over given tokens, the first of which are the targets."""
    is_none_NK = tokens_NK < 0
    logp_NK = logits_NK.masked_fill(is_none_NK, -torch.inf).log_softmax(-1)
    entropy_N = -(logp_NK.exp() * logp_NK.masked_fill(is_none_NK, 0.0)).sum(-1)
    stats = [_at_rows(part_N, rows_N, num_positions) for part_N in (logp_NK[:, 0], entropy_N)]
    if not torch.is_grad_enabled() or logp_NK.size(1) == 1:
        return TokenStats(*stats)
    chosen = [_at_rows(part, rows_N, num_positions) for part in (logp_NK[:, 1:], tokens_NK[:, 1:])]
    return TokenStats(*stats, *chosen)


def _padded(grad_shard: torch.Tensor | None, weight_VD: torch.Tensor) -> torch.Tensor | None:
    if grad_shard is None:
        return None
    missing = weight_VD.size(0) - grad_shard.size(0)
    return torch.nn.functional.pad(grad_shard, (0, 0, 0, missing)) if missing else grad_shard


def _at_rows(part: torch.Tensor, rows_N: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Returns a tensor with the rows of `part` at their positions, and zeros elsewhere."""
    return part.new_zeros(num_positions, *part.shape[1:]).index_copy_(0, rows_N, part)


def _main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Returns the fp32 buffer in which Megatron accumulates the weight's gradient, or None."""
    if not hasattr(weight, "grad_added_to_main_grad"):  # not wrapped, or the weight is frozen
        return None
    main_grad: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]  # Megatron's
    return main_grad if main_grad.dtype == torch.float32 else None


def _placeholder(weight: torch.Tensor) -> torch.Tensor:
    """Returns a placeholder for a gradient that main_grad already contains; marks the weight.

    Megatron's hook on the weight runs only if autograd passes a gradient, but ignores its values if
    the weight is marked. The weight itself serves as placeholder: autograd passes it through
    unchanged and the hook discards it, so this needs no memory. Embeddings that are tied on a
    single stage are marked `zero_out_wgrad`: autograd adds the lookup's gradient to the
    placeholder, and the hook uses the sum, so the placeholder must be zero.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return weight.new_zeros(()).expand(weight.shape)
    return weight.detach()


class PackedModel(GPTModel):
    """Megatron's GPTModel for packed sequences with shared prompts and padding masks.

    If sequences share a prompt, rotary angles are selected by position. The padding mask, (1, S),
    is split for sequence parallelism on every pipeline stage; Megatron itself splits it only on the
    first stage.

    Attributes:
        scales: Constant factors in the model.
        extra_inputs: Inputs other than tokens, which may change the embeddings before sequence
            parallelism splits them; None if there are none.
        rotates_in_attention: Whether attention itself rotates queries and keys (exact.py).
    """

    scales = Scales()
    extra_inputs: ExtraInputs | None = None
    rotates_in_attention = False

    def _preprocess(  # type: ignore[override]
        self,
        *args: Any,
        packed_seq_params: PackedSequences | None = None,
        padding_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Any, ...]:
        extra = self.extra_inputs
        if extra is not None and extra.changes_embeddings and self.pre_process:
            assert packed_seq_params is not None  # all forward passes use packed sequences
            kwargs["decoder_input"] = self._embedded(extra, packed_seq_params, **kwargs)
        found = super()._preprocess(*args, packed_seq_params=packed_seq_params, **kwargs)
        is_scaled = kwargs.get("decoder_input") is not None
        if self.scales.embedding != 1 and found[0] is not None and not is_scaled:
            found = (found[0] * self.scales.embedding, *found[1:])
        if padding_mask is not None:
            group = self.pg_collection.tp
            if self.config.sequence_parallel:
                padding_mask = padding_mask.chunk(group.size(), dim=1)[group.rank()]
            found = (*found[:5], padding_mask, *found[6:])
        if self.rotates_in_attention and packed_seq_params is not None:
            embedded, angles_LD, *rest = found
            rows = RotaryRows.of(angles_LD, kwargs["position_ids"][0], self.config.params_dtype)
            packed_seq_params.derived[RotaryRows] = rows
            return (embedded, None, *rest)
        if packed_seq_params is None:
            return found
        embedded, angles_LD, *rest = found
        shared = packed_seq_params.shared
        if self.position_embedding_type == "mrope":  # one row of angles per packed position
            row_S = packed_seq_params.angle_rows
        else:
            row_S = None if shared is None else shared.angle_positions
        return found if row_S is None else (embedded, angles_LD.index_select(0, row_S), *rest)

    def _embedded(
        self,
        extra: ExtraInputs,
        packed: PackedSequences,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        **_: Any,
    ) -> torch.Tensor:
        """Returns this rank's shard of the changed embeddings, which their layer does not split."""
        embedded_S1D = self.embedding(input_ids=input_ids, position_ids=position_ids)
        if self.scales.embedding != 1:
            embedded_S1D = embedded_S1D * self.scales.embedding
        embedded_S1D = extra.embed(self, embedded_S1D, packed.model_inputs)
        if self.config.sequence_parallel:
            return scatter_to_sequence_parallel_region(embedded_S1D, group=self.pg_collection.tp)
        return embedded_S1D


class LanguageModel(PackedModel):
    """Megatron's GPTModel that returns TokenStats for given target tokens.

    Args:
        num_tokens: Size of the actual vocabulary; the softmax ignores the padded columns beyond it.

    Attributes:
        num_top: Number of most likely tokens to find at each position.
        exact_logps: Computes log-probabilities with the bits of an engine (exact.py); takes whole
            logits, (N, V) fp32, which it may change, targets and the temperature. None for the
            usual way.
        predictor: Layer that predicts the token after the next, if it is trained; last stage only.
    """

    exact_logps: Logps | None = None

    def __init__(self, *, num_tokens: int, logits_cap: float = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_tokens, self.logits_cap = num_tokens, logits_cap
        self.num_top = 0
        self.predictor: NextTokenLayer | None = None

    def output_weight(self) -> torch.Tensor:
        """Returns this rank's rows of the output weight, including padding; last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _exact(
        self,
        hidden_ND: torch.Tensor,
        weight_VD: torch.Tensor,
        token_N: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        """Returns log-probabilities of tokens of the whole vocabulary, (N,) fp32, as the engine
        computes them: over whole rows of logits. Collective over the tensor-parallel group.
        """
        assert self.exact_logps is not None
        group = self.pg_collection.tp
        num_rows = max(1, MAX_LOGITS_BYTES // (4 * group.size() * len(weight_VD)))
        found = [hidden_ND.new_zeros(0, dtype=torch.float32)]
        for rows_ND, target in zip(hidden_ND.split(num_rows), token_N.split(num_rows), strict=True):
            logits_NV = ops.invariant_logits(rows_ND, weight_VD)
            if group.size() > 1:
                parts = [torch.empty_like(logits_NV) for _ in range(group.size())]
                dist.all_gather(parts, logits_NV, group=group)
                logits_NV = torch.cat(parts, 1)
            whole_NV = logits_NV[:, : self.num_tokens]
            found.append(self.exact_logps(whole_NV, target, temperature))
        return torch.cat(found)

    def _postprocess(  # type: ignore[override]  # GPTModel passes further arguments
        self,
        hidden_states: torch.Tensor,
        labels: HeadInput,
        input_ids: torch.Tensor,
        rotary_pos_emb: torch.Tensor,
        packed_seq_params: PackedSequences,
        **_: Any,
    ) -> torch.Tensor | TokenStats:
        if not self.post_process:
            return hidden_states
        if self.predictor is not None and self.training and torch.is_grad_enabled():
            loss = self._mtp_loss(
                self.predictor,
                hidden_states,
                labels.rows_N,
                input_ids[0],
                rotary_pos_emb,
                packed_seq_params,
            )
            hidden_states = AttachedLoss.apply(hidden_states, loss)
        rows_N = labels.rows_N
        group, weight = self.pg_collection.tp, self.output_weight()
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        start = group.rank() * weight.size(0)
        num_columns = min(max(self.num_tokens - start, 0), weight.size(0))
        temperature = labels.temperature * self.scales.logits
        hidden_SD = hidden_states.flatten(0, 1)
        head = (temperature, self.logits_cap, num_columns, group)
        tokens_NC = labels.tokens.view(hidden_SD.size(0), -1).index_select(0, rows_N)
        if labels.is_for_gradients and not (labels.is_support or torch.is_grad_enabled()):
            tokens_NC = tokens_NC[:, :1]
        if self.num_top:
            top_NK = self._likeliest(hidden_SD.detach()[rows_N], weight.detach()[:num_columns])
            tokens_NC = torch.cat((tokens_NC[:, :1], top_NK), 1)
        columns_NC = tokens_NC - start
        columns_NC = columns_NC.masked_fill((columns_NC < 0) | (columns_NC >= num_columns), -1)
        if labels.is_support:
            logits_NC = _ChosenLogits.apply(hidden_SD, weight, columns_NC, rows_N, *head, True)
            return _over_support(logits_NC, tokens_NC, rows_N, hidden_SD.size(0))
        target_N = columns_NC[:, 0].contiguous()  # the kernels need contiguous targets
        exact_N = None
        if self.exact_logps is not None:
            hidden_ND = hidden_SD.detach().index_select(0, rows_N)
            exact_N = self._exact(hidden_ND, weight.detach(), tokens_NC[:, 0], temperature)
        stats = _TokenStatsFunction.apply(hidden_SD, weight, target_N, rows_N, *head, exact_N)
        if tokens_NC.size(1) == 1:
            return TokenStats(*stats)
        logits_NC = _ChosenLogits.apply(hidden_SD, weight, columns_NC, rows_N, *head, False)
        # The softmax uses the same denominator for all columns.
        logp_N = stats[0].index_select(0, rows_N)
        chosen_NK = logits_NC[:, 1:] - logits_NC[:, :1] + logp_N[:, None]
        chosen = (
            _at_rows(part, rows_N, hidden_SD.size(0)) for part in (chosen_NK, tokens_NC[:, 1:])
        )
        return TokenStats(*stats, *chosen)

    def _mtp_loss(
        self,
        predictor: NextTokenLayer,
        hidden_states: torch.Tensor,
        rows_N: torch.Tensor,
        tokens_S: torch.Tensor,
        rotary: torch.Tensor,
        packed: PackedSequences,
    ) -> torch.Tensor:
        """Returns the loss of the token after the next, with gradients of the layer alone."""
        group, weight = self.pg_collection.tp, self.output_weight().detach()
        embedding = self.embedding.word_embeddings.weight if self.pre_process else weight
        hidden_states = predictor(hidden_states, tokens_S, embedding.detach(), rotary, packed)
        gather = copy_to_tensor_model_parallel_region
        if self.config.sequence_parallel:
            gather = gather_from_sequence_parallel_region
        hidden_SD = gather(hidden_states, group=group).flatten(0, 1)
        rows_N, is_target_N = target_rows(rows_N, packed.cu_seqlens_q, tokens_S.numel())
        start = group.rank() * weight.size(0)
        num_columns = min(max(self.num_tokens - start, 0), weight.size(0))
        column_N = tokens_S.roll(-2).index_select(0, rows_N) - start
        column_N = column_N.masked_fill((column_N < 0) | (column_N >= num_columns), -1)
        # The tokens are drafts for any temperature, so they are predicted at temperature 1.
        head = (self.scales.logits, self.logits_cap, num_columns, group, None)
        logp_S, _ = _TokenStatsFunction.apply(hidden_SD, weight, column_N, rows_N, *head)
        return predictor.loss_of(logp_S.index_select(0, rows_N), is_target_N)

    def _likeliest(self, hidden_ND: torch.Tensor, shard_VD: torch.Tensor) -> torch.Tensor:
        group = self.pg_collection.tp
        start = group.rank() * self.output_weight().size(0)
        logits_NK, columns_NK = ops.vocab_top(hidden_ND, shard_VD, self.num_top)
        if group.size() == 1 or hidden_ND.size(0) == 0:
            return columns_NK
        found = []
        for part_NK in (logits_NK, columns_NK + start):
            parts = [torch.empty_like(part_NK) for _ in range(group.size())]
            dist.all_gather(parts, part_NK.contiguous(), group=group)
            found.append(torch.cat(parts, 1))
        return found[1].gather(1, found[0].topk(self.num_top).indices)


class ValueHead(MegatronModule):
    """Linear layer with one output per token; replicated on tensor-parallel ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(
            torch.zeros(
                1, config.hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device()
            )
        )

    def forward(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Returns the value at each position, (S,) fp32."""
        return (hidden_SD @ self.weight.T).flatten().float()


class ValueModel(PackedModel):
    """Megatron's GPTModel with a value head instead of a vocabulary head."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.post_process:
            self.output_layer = ValueHead(self.config)

    def _postprocess(  # type: ignore[override]
        self, hidden_states: torch.Tensor, **_: Any
    ) -> torch.Tensor:
        if not self.post_process:
            return hidden_states
        if self.config.sequence_parallel:
            # Every rank computes the same head for the same tokens, so each rank's slice of the
            # gradient is already complete.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return self.output_layer(hidden_states.flatten(0, 1))
