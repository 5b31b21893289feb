"""Score centering: subtracts the mean score under the engine's distribution from each score.

Marek and Ryabinin 2026, "Score Centering Stabilizes Off-policy Reinforcement Learning", arXiv
2609.20807, equation 14. Tokens that the engine with distribution q drew have, under the policy p,
the mean score sum_v q_v grad log p_v, which is 0 only if q = p. The mean does not depend on the
tokens that were drawn, and what remains of it in the gradient is the same in every step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybridrl.algorithms.correction import bounded
from hybridrl.config.correction import CorrectionConfig

MIN_REST = 1e-6  # of the policy's probability outside the given tokens


def mean_score(logp_SK: Tensor, engine_logp_SK: Tensor, correction: CorrectionConfig) -> Tensor:
    """Returns a value at each position, (S,), whose gradient is the engine's mean score.

    The engine's probabilities q are known for K tokens, the head. For all other tokens, q is
    modelled by rho p, with rho = (1 - sum q) / (1 - sum p) over the head. As sum_v p_v grad log p_v
    is 0, the gradient is sum_head (q_v - rho p_v) grad log p_v. With token-level importance weights
    w, q_v becomes q_v w(p_v / q_v), and rho becomes rho w(1 / rho).

    Args:
        logp_SK: log p of the head's tokens, with a gradient.
        engine_logp_SK: log q of the head's tokens; -inf for an entry without a token.
        correction: Bounds of the importance weights, if `weight` is token.
    """
    is_head_SK = engine_logp_SK > -torch.inf
    logp_SK = logp_SK.masked_fill(~is_head_SK, 0.0)
    p_SK = logp_SK.detach().exp() * is_head_SK
    q_SK = engine_logp_SK.exp()
    rest_S = (1 - q_SK.sum(-1)).clamp(min=0.0) / (1 - p_SK.sum(-1)).clamp(min=MIN_REST)
    if correction.weight == "token":
        ratio_SK = (logp_SK.detach() - engine_logp_SK.masked_fill(~is_head_SK, 0.0)).exp()
        q_SK = q_SK * bounded(ratio_SK, correction)
        rest_S = rest_S * bounded(1 / rest_S.clamp(min=MIN_REST), correction)
    return ((q_SK - rest_S[:, None] * p_SK) * logp_SK).sum(-1)
