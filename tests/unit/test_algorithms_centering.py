"""Score centering against the dense formula in float64."""

from __future__ import annotations

import pytest
import torch

from hybridrl.algorithms.centering import mean_score
from hybridrl.config.correction import CorrectionConfig

VOCAB, POSITIONS = 11, 6
OFF = CorrectionConfig()
TRUNCATED = CorrectionConfig(weight="token", max=1.2, min=0.7)
MASKED = CorrectionConfig(weight="token", bound="mask", max=1.2, min=0.7)


def weight(ratio: torch.Tensor, correction: CorrectionConfig) -> torch.Tensor:
    if correction.weight == "none":
        return torch.ones_like(ratio)
    if correction.bound == "truncate":
        return ratio.clamp(correction.min, correction.max)
    return ratio * ((ratio >= correction.min) & (ratio <= correction.max))


@pytest.mark.parametrize("correction", [OFF, TRUNCATED, MASKED])
@pytest.mark.parametrize("num_head", [VOCAB, 4, 1])
def test_mean_score_has_the_gradient_of_the_dense_formula(
    num_head: int, correction: CorrectionConfig
) -> None:
    """d/dz sum_v m_v log p_v = m - p sum_v m_v, with m = q w(p / q) and the modelled tail of q."""
    generator = torch.Generator().manual_seed(4)
    logits_SV = torch.randn(POSITIONS, VOCAB, generator=generator, dtype=torch.float64)
    noise_SV = torch.randn(POSITIONS, VOCAB, generator=generator, dtype=torch.float64)
    q_SV = (logits_SV + 0.4 * noise_SV).softmax(-1)
    logits_SV.requires_grad_()
    logp_SV = logits_SV.log_softmax(-1)
    head_SK = q_SV.topk(num_head).indices
    # An entry without a token, whose log-probability is arbitrary.
    padding_S1 = torch.full((POSITIONS, 1), -torch.inf, dtype=torch.float64)
    engine_SK = torch.cat((q_SV.gather(1, head_SK).log(), padding_S1), 1)
    logp_SK = torch.cat((logp_SV.gather(1, head_SK), logp_SV[:, :1]), 1)
    mean_score(logp_SK, engine_SK, correction).sum().backward()
    p_SV = logp_SV.detach().exp()
    is_head_SV = torch.zeros(POSITIONS, VOCAB, dtype=torch.bool).scatter_(1, head_SK, True)
    rest_S1 = (1 - (q_SV * is_head_SV).sum(1, True)) / (1 - (p_SV * is_head_SV).sum(1, True))
    modelled_SV = torch.where(is_head_SV, q_SV, rest_S1 * p_SV)
    assert (modelled_SV.sum(1) - 1).abs().max() < 1e-12
    mass_SV = modelled_SV * weight(p_SV / modelled_SV, correction)
    expected_SV = mass_SV - p_SV * mass_SV.sum(1, keepdim=True)
    assert logits_SV.grad is not None
    torch.testing.assert_close(logits_SV.grad, expected_SV, rtol=0, atol=1e-12)
    if num_head == VOCAB and correction is OFF:
        torch.testing.assert_close(logits_SV.grad, q_SV - p_SV, rtol=0, atol=1e-12)


def test_equal_distributions_have_no_mean_score() -> None:
    logp_SK = torch.randn(3, VOCAB, dtype=torch.float64).log_softmax(-1)[:, :5].requires_grad_()
    mean_score(logp_SK, logp_SK.detach(), OFF).sum().backward()
    assert logp_SK.grad is not None and float(logp_SK.grad.abs().max()) < 1e-12
