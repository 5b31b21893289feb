"""What the last pipeline stage does with hidden states: per-token log-probabilities, or values.

The rest of the trainer never sees logits. Vocabulary padding, vocabulary parallel and temperature
end here: padded columns take no part in the softmax, statistics are combined over the
tensor-parallel group, and logits are recomputed a chunk at a time in the backward pass instead of
being kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig

from hybridrl import ops


class TokenStats(NamedTuple):
    """Of each packed position: log-probability of its target and entropy of its distribution, nats,
    (S,) fp32.
    """

    logp_S: torch.Tensor
    entropy_S: torch.Tensor


class _TokenStatsFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: torch.Tensor,
        weight_VD: torch.Tensor,
        target_S: torch.Tensor,
        temperature: float,
        num_columns: int,
        group: dist.ProcessGroup,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shard_VD = weight_VD[:num_columns]
        local = ops.vocab_stats(hidden_SD, shard_VD, target_S, temperature)
        largest = local.max_T.clone()
        if group.size() > 1:
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        shift = local.max_T - largest
        scale = shift.exp()
        combined = torch.stack(
            (local.sum_T * scale, (local.weighted_T + local.sum_T * shift) * scale, local.target_T)
        )
        if group.size() > 1:
            dist.all_reduce(combined, group=group)
        total, weighted, target_logit = combined
        log_sum = total.log()
        entropy = log_sum - weighted / total
        ctx.save_for_backward(hidden_SD, weight_VD, target_S, largest, log_sum, entropy)
        ctx.temperature, ctx.num_columns = temperature, num_columns
        ctx.set_materialize_grads(False)
        return target_logit - largest - log_sum, entropy

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, grad_logp_S: torch.Tensor | None, grad_entropy_S: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        hidden_SD, weight_VD, target_S, largest, log_sum, entropy = ctx.saved_tensors
        main_grad_VD = _main_grad(weight_VD)
        grad_hidden, grad_shard = ops.vocab_backward(
            hidden_SD,
            weight_VD[: ctx.num_columns],
            target_S,
            ctx.temperature,
            largest,
            log_sum,
            entropy,
            torch.zeros_like(entropy) if grad_logp_S is None else grad_logp_S,
            grad_entropy_S,
            None if main_grad_VD is None else main_grad_VD[: ctx.num_columns],
        )
        if main_grad_VD is not None:
            grad_shard = _placeholder(weight_VD)
        elif ctx.num_columns < weight_VD.size(0):
            padding = grad_shard.new_zeros(weight_VD.size(0) - ctx.num_columns, weight_VD.size(1))
            grad_shard = torch.cat((grad_shard, padding))
        return grad_hidden, grad_shard, None, None, None, None


def _main_grad(weight: torch.Tensor) -> torch.Tensor | None:
    """Returns where Megatron's data-parallel wrapper accumulates the weight's gradient in fp32."""
    if not hasattr(weight, "grad_added_to_main_grad"):  # not wrapped
        return None
    main_grad: torch.Tensor = weight.main_grad  # type: ignore[attr-defined]  # Megatron's
    return main_grad if main_grad.dtype == torch.float32 else None


def _placeholder(weight: torch.Tensor) -> torch.Tensor:
    """Returns what autograd gets for a gradient that its main gradient has, and marks it so.

    Megatron's hook on the weight runs only where a gradient comes, and passes over a marked one,
    whose numbers do not matter then. Embeddings that are tied on one stage are `zero_out_wgrad`:
    autograd adds the lookup's gradient to this one, and the hook takes the sum.
    """
    weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
    if getattr(weight, "zero_out_wgrad", False):
        return weight.new_zeros(()).expand(weight.shape)
    return torch.empty_like(weight)


class LanguageModel(GPTModel):
    """Megatron's GPTModel whose output is TokenStats of given targets.

    Args:
        num_tokens: size of the real vocabulary; the padded columns beyond it are left out of the
            softmax.
        **kwargs: of GPTModel.
    """

    def __init__(self, *, num_tokens: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_tokens = num_tokens
        self.temperature = 1.0

    def output_weight(self) -> torch.Tensor:
        """Returns this rank's rows of the output weight, padding included; last stage only."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def _postprocess(  # type: ignore[override]  # of GPTModel's arguments only these two matter here
        self, hidden_states: torch.Tensor, labels: torch.Tensor, **_: Any
    ) -> torch.Tensor | TokenStats:
        if not self.post_process:
            return hidden_states
        group, weight = self.pg_collection.tp, self.output_weight()
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        else:
            hidden_states = copy_to_tensor_model_parallel_region(hidden_states, group=group)
        start = group.rank() * weight.size(0)
        num_columns = min(max(self.num_tokens - start, 0), weight.size(0))
        target_S = labels.flatten() - start
        target_S = target_S.masked_fill((target_S < 0) | (target_S >= num_columns), -1)
        return TokenStats(
            *_TokenStatsFunction.apply(
                hidden_states.flatten(0, 1), weight, target_S, self.temperature, num_columns, group
            )
        )


class ValueHead(MegatronModule):
    """One linear output per token, the same on every tensor-parallel rank."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = torch.nn.Parameter(
            torch.zeros(
                1,
                config.hidden_size,
                dtype=config.params_dtype,
                device=torch.cuda.current_device(),
            )
        )

    def forward(self, hidden_SD: torch.Tensor) -> torch.Tensor:
        """Returns the value of each position, (S,) fp32."""
        return (hidden_SD @ self.weight.T).flatten().float()


class ValueModel(GPTModel):
    """Megatron's GPTModel with a value head in place of the vocabulary."""

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
            # Every rank computes the same head on the same tokens, so its slice of the gradient is
            # already whole.
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.pg_collection.tp
            )
        return self.output_layer(hidden_states.flatten(0, 1))
