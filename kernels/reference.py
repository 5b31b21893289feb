"""The meaning of every kernel in plain PyTorch: fp32 accumulation, no launch parameters, no
collectives.

Shapes: T tokens, D hidden size, V this rank's vocabulary columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

# Tokens whose logits are held at once: 1024 x 152k x 4 bytes = 0.6 GB at the largest vocabularies.
CHUNK_TOKENS = 1024
LOWEST = -1e30


class VocabStats(NamedTuple):
    """What one vocabulary shard knows of its tokens' softmax, each (T,) fp32.

    max_T: largest logit; sum_T: sum of exp(logit - max); weighted_T: sum of exp(logit - max) *
    (logit - max); target_T: the target's logit, 0 where the target lies in another shard.
    """

    max_T: torch.Tensor
    sum_T: torch.Tensor
    weighted_T: torch.Tensor
    target_T: torch.Tensor


def _logits(hidden_TD: torch.Tensor, weight_VD: torch.Tensor, temperature: float) -> torch.Tensor:
    return (hidden_TD @ weight_VD.T).float() / temperature


def vocab_stats(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor, temperature: float
) -> VocabStats:
    """Computes the softmax statistics of one vocabulary shard without keeping its logits.

    Args:
        hidden_TD: last hidden states.
        weight_VD: output weights of this shard, padding columns removed.
        target_T: the target's column in this shard, -1 where another shard holds it; int64.
        temperature: divides the logits.
    """
    if weight_VD.size(0) == 0:
        zeros = torch.zeros(hidden_TD.size(0), device=hidden_TD.device)
        return VocabStats(zeros + LOWEST, zeros, zeros, zeros)
    parts = []
    for hidden, target in zip(
        hidden_TD.split(CHUNK_TOKENS), target_T.split(CHUNK_TOKENS), strict=True
    ):
        logits = _logits(hidden, weight_VD, temperature)
        largest = logits.amax(-1)
        chosen = logits.gather(1, target.clamp(min=0)[:, None])[:, 0] * (target >= 0)
        shifted = logits - largest[:, None]
        exp = shifted.exp()
        parts.append((largest, exp.sum(-1), (exp * shifted).sum(-1), chosen))
    return VocabStats(*(torch.cat(column) for column in zip(*parts, strict=True)))


def vocab_backward(
    hidden_TD: torch.Tensor,
    weight_VD: torch.Tensor,
    target_T: torch.Tensor,
    temperature: float,
    log_sum_exp_T: torch.Tensor,
    entropy_T: torch.Tensor,
    grad_logp_T: torch.Tensor,
    grad_entropy_T: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes this shard's part of the gradients of log-probability and entropy.

    With z the logits, p = softmax(z), H the entropy: d logp / dz_j = [j is target] - p_j and
    dH / dz_j = -p_j (log p_j + H).

    Returns:
        Gradient of hidden_TD (to be summed over shards) and of weight_VD.
    """
    grad_hidden = torch.zeros_like(hidden_TD)
    grad_weight = torch.zeros(weight_VD.shape, dtype=torch.float32, device=weight_VD.device)
    if weight_VD.size(0) == 0:
        return grad_hidden, grad_weight.to(weight_VD.dtype)
    for start in range(0, hidden_TD.size(0), CHUNK_TOKENS):
        rows = slice(start, start + CHUNK_TOKENS)
        hidden, target = hidden_TD[rows], target_T[rows]
        log_p = _logits(hidden, weight_VD, temperature) - log_sum_exp_T[rows, None]
        p = log_p.exp()
        grad = p * (log_p + entropy_T[rows, None]) * -grad_entropy_T[rows, None]
        grad -= p * grad_logp_T[rows, None]
        mine = (target >= 0).to(grad.dtype) * grad_logp_T[rows]
        grad.scatter_add_(1, target.clamp(min=0)[:, None], mine[:, None])
        grad /= temperature
        grad = grad.to(hidden.dtype)
        grad_hidden[rows] = grad @ weight_VD
        grad_weight += grad.T @ hidden
    return grad_hidden, grad_weight.to(weight_VD.dtype)


class RectangleCopies:
    """A fixed list of copies between tensors, each cast to its destination's type.

    Args:
        pairs: (source, destination) views of equal shapes; destinations do not overlap.
        device: that runs the copies; not used here.
        lanes: what each is read through; not used here.
        programs: most at once; not used here.
    """

    num_launches = 0
    table_bytes = 0

    def __init__(
        self,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        device: torch.device,
        lanes: Sequence[int] | None = None,
        programs: int | None = None,
    ) -> None:
        self._pairs = list(pairs)

    def run(self) -> None:
        """Copies everything."""
        for source, dest in self._pairs:
            dest.copy_(source)
