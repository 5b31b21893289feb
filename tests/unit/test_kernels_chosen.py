"""The logits of chosen columns and the largest of a shard, against dense matrices and autograd."""

from __future__ import annotations

import pytest
import torch
from hybridrl.kernels import reference

from hybridrl import ops

TOKENS, HIDDEN, VOCABULARY, CHOSEN = 37, 12, 23, 5
ROUNDING = 1e-5  # fp32 products and sums of 12 terms


@pytest.fixture(params=["one chunk", "many chunks"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "many chunks":
        monkeypatch.setattr(reference, "CHUNK_TOKENS", 4)
        monkeypatch.setattr(reference, "CHUNK_BYTES", 3 * 4 * CHOSEN * HIDDEN)


def tensors(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, weights, and columns of which some lie in another shard and some repeat."""
    generator = torch.Generator().manual_seed(1)
    hidden_TD = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    weight_VD = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
    columns_TK = torch.randint(-3, VOCABULARY, (TOKENS, CHOSEN), generator=generator).clamp(min=-1)
    return hidden_TD, weight_VD, columns_TK


def dense(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, columns_TK: torch.Tensor
) -> torch.Tensor:
    logits_TV = hidden_TD.double() @ weight_VD.double().T / 1.7
    return logits_TV.gather(1, columns_TK.clamp(min=0)).masked_fill(columns_TK < 0, 0.0)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chosen_logits_are_those_of_the_whole_matrix(dtype: torch.dtype) -> None:
    hidden_TD, weight_VD, columns_TK = tensors(dtype)
    found_TK = ops.vocab_chosen(hidden_TD, weight_VD, columns_TK, 1.7)
    assert found_TK.dtype == torch.float32
    expected_TK = dense(hidden_TD, weight_VD, columns_TK).float()
    # Products of bf16 numbers are exact in fp32 too.
    torch.testing.assert_close(found_TK, expected_TK, rtol=ROUNDING, atol=ROUNDING)
    assert (columns_TK < 0).any() and (found_TK[columns_TK < 0] == 0).all()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("adds", [False, True])
def test_their_gradients_are_autograds_and_repeat_themselves(adds: bool) -> None:
    hidden_TD, weight_VD, columns_TK = tensors()
    grad_TK = torch.randn(TOKENS, CHOSEN, generator=torch.Generator().manual_seed(2))
    leaves = [x.double().requires_grad_() for x in (hidden_TD, weight_VD)]
    dense(*leaves, columns_TK).backward(grad_TK.double())
    before_VD = torch.full_like(weight_VD, 0.5)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        given = before_VD.clone() if adds else None
        found = ops.vocab_chosen_backward(hidden_TD, weight_VD, columns_TK, 1.7, grad_TK, given)
        assert given is None or found[1] is given
        return found

    grad_hidden, grad_weight = run()
    expected = leaves[1].grad + (0.5 if adds else 0.0)
    torch.testing.assert_close(grad_hidden, leaves[0].grad.float(), rtol=ROUNDING, atol=ROUNDING)
    torch.testing.assert_close(grad_weight, expected.float(), rtol=ROUNDING, atol=ROUNDING)
    assert all(map(torch.equal, run(), (grad_hidden, grad_weight)))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("count", [1, 5, VOCABULARY, VOCABULARY + 4])
def test_the_largest_logits_are_found_and_a_small_shard_says_so(count: int) -> None:
    hidden_TD, weight_VD, _ = tensors()
    logits_TK, columns_TK = ops.vocab_top(hidden_TD, weight_VD, count)
    assert logits_TK.shape == columns_TK.shape == (TOKENS, count)
    num = min(count, VOCABULARY)
    expected = (hidden_TD @ weight_VD.T).topk(num)
    assert torch.equal(columns_TK[:, :num], expected.indices)
    torch.testing.assert_close(logits_TK[:, :num], expected.values, rtol=ROUNDING, atol=ROUNDING)
    assert (columns_TK[:, num:] == -1).all() and (logits_TK[:, num:] == reference.LOWEST).all()


def test_no_token_and_no_column_give_nothing() -> None:
    hidden_TD, weight_VD, columns_TK = tensors()
    for hidden, weight in ((hidden_TD[:0], weight_VD), (hidden_TD, weight_VD[:0])):
        columns = torch.full_like(columns_TK[: len(hidden)], -1)
        assert not ops.vocab_chosen(hidden, weight, columns, 1.0).any()
        grads = ops.vocab_chosen_backward(
            hidden, weight, columns, 1.0, torch.ones(columns.shape), None
        )
        assert [g.shape for g in grads] == [hidden.shape, weight.shape]
        assert not any(g.any() for g in grads)
        assert (ops.vocab_top(hidden, weight, 3)[0].shape) == (len(hidden), 3)
