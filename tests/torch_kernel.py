"""The reference of attention with log-sum-exps, in torch (prefix_attention.py, `Kernel`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hybridrl.models.megatron.prefix_attention import Call


@dataclass(frozen=True)
class TorchKernel:
    """Explicit products of one sequence after another, in the inputs' data type."""

    scale: float

    def forward(
        self, query_TNH: torch.Tensor, key_TGH: torch.Tensor, value_TGH: torch.Tensor, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output_TNH = query_TNH.new_zeros(*query_TNH.shape[:2], value_TGH.size(-1))
        wide = torch.promote_types(query_TNH.dtype, torch.float32)
        lse_TN = query_TNH.new_zeros(query_TNH.shape[:2], dtype=wide)
        for q, k in _spans(call):
            logits_NQK = self._logits(query_TNH[q], key_TGH[k], call)
            lse_NQ = logits_NQK.logsumexp(-1)
            weights_NQK = (logits_NQK - lse_NQ[..., None]).exp()
            value_NKH = _per_head(value_TGH[k], query_TNH.size(1)).to(wide)
            output_TNH[q] = (weights_NQK @ value_NKH).transpose(0, 1).to(output_TNH.dtype)
            lse_TN[q] = lse_NQ.T
        return output_TNH, lse_TN

    def backward(
        self,
        grad_TNH: torch.Tensor,
        query_TNH: torch.Tensor,
        key_TGH: torch.Tensor,
        value_TGH: torch.Tensor,
        output_TNH: torch.Tensor,
        lse_TN: torch.Tensor,
        call: Call,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tensors = (query_TNH, key_TGH, value_TGH)
        grads = tuple(torch.zeros_like(one, dtype=lse_TN.dtype) for one in tensors)
        num_heads, num_kv = query_TNH.size(1), key_TGH.size(1)
        for q, k in _spans(call):
            query, grad, output = (
                one[q].transpose(0, 1).to(lse_TN.dtype) for one in (query_TNH, grad_TNH, output_TNH)
            )
            key, value = (
                _per_head(one[k], num_heads).to(lse_TN.dtype) for one in (key_TGH, value_TGH)
            )
            weights = (self._logits(query_TNH[q], key_TGH[k], call) - lse_TN[q].T[..., None]).exp()
            own = (grad * output).sum(-1, keepdim=True)
            of_logits = weights * (grad @ value.transpose(1, 2) - own) * self.scale
            grads[0][q] += (of_logits @ key).transpose(0, 1)
            of_key, of_value = of_logits.transpose(1, 2) @ query, weights.transpose(1, 2) @ grad
            for total, one in ((grads[1], of_key), (grads[2], of_value)):
                total[k] += one.unflatten(0, (num_kv, -1)).sum(1).transpose(0, 1)
        query, key, value = (one.to(like.dtype) for one, like in zip(grads, tensors, strict=True))
        return query, key, value

    def _logits(self, query_QNH: torch.Tensor, key_KGH: torch.Tensor, call: Call) -> torch.Tensor:
        wide = torch.promote_types(query_QNH.dtype, torch.float32)
        key_NKH = _per_head(key_KGH, query_QNH.size(1)).to(wide)
        logits = query_QNH.transpose(0, 1).to(wide) @ key_NKH.transpose(1, 2) * self.scale
        if call.is_causal:
            ahead = torch.ones(logits.shape[1:], dtype=torch.bool, device=logits.device).triu(1)
            logits = logits.masked_fill(ahead, float("-inf"))
        return logits


def _per_head(tokens_KGH: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Returns keys or values per query head, (N, K, H)."""
    groups = num_heads // tokens_KGH.size(1)
    return tokens_KGH.transpose(0, 1).repeat_interleave(groups, 0)


def _spans(call: Call) -> list[tuple[slice, slice]]:
    rows = zip(
        call.query_starts, call.query_lengths, call.key_starts, call.key_lengths, strict=True
    )
    return [(slice(q, q + num_q), slice(k, k + num_k)) for q, num_q, k, num_k in rows]
