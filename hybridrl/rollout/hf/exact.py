"""Makes a transformers model compute the same bits as the trainer, or only logits in float32.

Exact mode replaces products, norms and attention by the operations that the trainer then uses too
(models/megatron/exact.py). All other operations work element by element.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from hybridrl import ops
from hybridrl.errors import ModelError

ATTENTION = "hybridrl_exact"  # name of the attention in transformers' table


def compute_exactly(model: Any) -> None:
    """Replaces the operations of a model; ModelError if a module with parameters has none."""
    for name, part in model.named_modules():
        kind = type(part).__name__
        if part is model.lm_head:
            part.forward = partial(_logits, part)
        elif isinstance(part, torch.nn.Linear):
            part.forward = partial(_linear, part)  # type: ignore[method-assign]
        elif kind.endswith("RMSNorm"):
            part.forward = partial(_norm, part, kind.startswith("Gemma"))
        elif kind == "Qwen3MoeTopKRouter":
            part.forward = partial(_route, part)
        elif kind == "Qwen3MoeExperts":
            part.forward = partial(_experts, part)
        elif not isinstance(part, torch.nn.Embedding) and [*part.parameters(recurse=False)]:
            raise ModelError(
                "numerics.match",
                "exact",
                f"close with {kind} ({name})",
                "Set numerics.match=close.",
            )
    AttentionInterface.register(ATTENTION, _attention)
    model.set_attn_implementation(ATTENTION)


def _linear(linear: Any, x: Tensor) -> Tensor:
    found = ops.invariant_linear(x.reshape(-1, x.size(-1)), linear.weight, linear.bias)
    return found.view(*x.shape[:-1], -1)


def _route(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (logits, weights, experts) as Megatron does, in float32."""
    rows = hidden.reshape(-1, router.hidden_dim).float()
    logits_TE = ops.invariant_linear(rows, router.weight.float(), None)
    scores_TE = logits_TE if router.norm_topk_prob else logits_TE.softmax(-1)
    scores_TK, experts_TK = scores_TE.topk(router.top_k, dim=1)
    weights_TK = scores_TK.softmax(-1) if router.norm_topk_prob else scores_TK
    return logits_TE, weights_TK.to(hidden.dtype), experts_TK


def _experts(experts: Any, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Adds up experts in the order of their indices, as models/megatron/exact.py does."""
    result_TD = torch.zeros_like(hidden_TD)
    for number in experts_TK.unique().tolist():
        token_R, place_R = (experts_TK == number).nonzero(as_tuple=True)
        widened = ops.invariant_linear(hidden_TD[token_R], experts.gate_up_proj[number], None)
        activated = ops.invariant_swiglu(widened)
        output_RD = ops.invariant_linear(activated, experts.down_proj[number], None)
        result_TD.index_add_(0, token_R, output_RD * weights_TK[token_R, place_R, None])
    return result_TD


def _logits(head: Any, hidden: Tensor) -> Tensor:
    rows = hidden.reshape(-1, hidden.size(-1))
    return ops.invariant_logits(rows, head.weight).view(*hidden.shape[:-1], -1)


def _norm(norm: Any, is_centered: bool, x: Tensor) -> Tensor:
    eps = norm.eps if is_centered else norm.variance_epsilon
    return ops.invariant_rms_norm(x, norm.weight, eps, is_centered)[0]


def _attention(
    module: Any,
    query_BHQD: Tensor,
    key_BHSD: Tensor,
    value_BHSD: Tensor,
    attention_mask: Tensor,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attends as transformers' attention functions do; the mask is boolean, (B, 1, Q, S)."""
    result = ops.invariant_attention(
        query_BHQD, key_BHSD, value_BHSD, attention_mask[:, 0], scaling
    )
    return result.transpose(1, 2), None


def compute_wide_logits(model: Any) -> None:
    """Makes a model's output layer return float32 logits that were never rounded to another type.
    Logits of about 20 that are rounded to bfloat16 are wrong by up to 0.06 nats.
    """
    head = model.lm_head
    if head.weight.dtype != torch.float32:
        head.forward = partial(_wide_product, head)


def _wide_product(head: torch.nn.Linear, hidden: Tensor) -> Tensor:
    weight_VD = head.weight  # read in every call, because updates may replace the parameter
    logits = ops.wide_logits(hidden.flatten(0, -2), weight_VD)
    return logits.view(*hidden.shape[:-1], -1)
