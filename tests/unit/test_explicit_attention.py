"""Attention from explicit products, against transformers' attention with sinks and with a cap."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as with_sinks

from hybridrl.models.megatron import explicit_attention as module

SCALE, CAP = 0.3, 1.5


def _inputs() -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = (2, 4, 7, 8), (2, 2, 9, 8), (2, 2, 9, 8), (4,)
    found = [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]
    position_Q, key_K = torch.arange(2, 9)[:, None], torch.arange(9)
    mask = (key_K <= position_Q) & (key_K > position_Q - 4)
    return [one.float().requires_grad_() for one in found], mask[None, None]


@pytest.mark.parametrize("most", [1 << 27, 2 * 4 * 9 * 2])
@pytest.mark.parametrize("has_sinks", [True, False])
def test_explicit_attention_equals_that_of_transformers(
    has_sinks: bool, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where queries are processed in blocks of two, and products computed again."""
    monkeypatch.setattr(module, "MAX_PRODUCTS", most)
    (query, key, value, sinks), mask = _inputs()
    options = {"sinks": sinks} if has_sinks else {"cap": CAP}
    found = module.explicit_attention(query, key, value, mask, SCALE, **options)
    (query_2, key_2, value_2, sinks_2), _ = _inputs()
    added = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    part = SimpleNamespace(num_key_value_groups=2, sinks=sinks_2, training=False)
    if has_sinks:
        expected, _ = with_sinks(part, query_2, key_2, value_2, added, scaling=SCALE, dropout=0.0)
    else:
        expected, _ = capped(part, query_2, key_2, value_2, added, scaling=SCALE, softcap=CAP)
    torch.testing.assert_close(found, expected.transpose(1, 2), rtol=0, atol=1e-6)
    weight = torch.arange(found.numel()).view(found.shape) % 5 - 1.5
    (found * weight).sum().backward()
    (expected.transpose(1, 2) * weight).sum().backward()
    pairs = [(query, query_2), (key, key_2), (value, value_2)]
    for one, other in pairs + [(sinks, sinks_2)] * has_sinks:
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-5)
