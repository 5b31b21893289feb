"""Cases of the log-probability head's kernels, a script: on CPU under TRITON_INTERPRET=1, on a GPU
as it is.

Errors are against fp64 on the same inputs. fp32 inputs: no larger than those of a plain fp32
computation, times a factor for what another order of sums draws. bf16 inputs: log-probability and
entropy likewise, since logits stay fp32, but by a factor for what tensor cores cut; gradients,
whose logits' gradients are bf16, within what autograd through materialised bf16 logits gives.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from hybridrl.kernels import reference, token_logprobs
from hybridrl.kernels.reference import VocabStats

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FACTOR = 2.0
# What cuts bits off errs twice as far as what rounds to the nearest, and always to one side, so
# that the error grows with the number summed and not with its root. Triton's interpreter does so
# where it makes a bfloat16, as of gradients. Tensor cores do so with the last bits of each sum of
# bf16 products, as of logits, which no kernel can change: on an H200 log-probabilities are up to
# 5.3 times as far from fp64 as a plain fp32 computation's, entropies 2.3 times
# (benchmarks/results/token_logprobs_h200.json).
CUT_FACTOR = 8.0


class Head(NamedTuple):
    """Inputs of the head, and the gradients of a loss that come back to it."""

    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    target_T: torch.Tensor
    temperature: float
    grad_logp_T: torch.Tensor
    grad_entropy_T: torch.Tensor | None
    cap: float = 0.0


class Found(NamedTuple):
    """What the head gives: of the whole vocabulary, in the order of shards."""

    logp_T: torch.Tensor
    entropy_T: torch.Tensor
    grad_hidden_TD: torch.Tensor
    grad_weight_VD: torch.Tensor


def draw(rng: random.Random, dtype: torch.dtype, num_tokens: int, num_columns: int) -> Head:
    """Tokens sure of themselves or not at all, and one column with logits far from the others."""
    dim = rng.choice([8, 24, 40])
    hidden = torch.randn(num_tokens, dim) * 10 ** (torch.rand(num_tokens, 1) * 1.5 - 1)
    weight = torch.randn(num_columns, dim)
    weight[rng.randrange(num_columns)] *= 6
    tensors = (hidden.to(dtype).to(DEVICE), weight.to(dtype).to(DEVICE))
    target = torch.randint(0, num_columns, (num_tokens,)).to(DEVICE)
    grads = [torch.randn(num_tokens).to(DEVICE) for _ in range(2)]
    grads[0][rng.randrange(num_tokens)] = 0
    temperature, cap = rng.choice([1.0, 0.6, 1.7]), rng.choice([0.0, 0.0, 30.0])
    return Head(*tensors, target, temperature, grads[0], rng.choice([None, grads[1]]), cap)


def combined(shards: list[VocabStats]) -> tuple[torch.Tensor, ...]:
    """Returns maximum, logarithm of the sum, log-probability and entropy, as heads.py does."""
    largest = torch.stack([stats.max_T for stats in shards]).amax(0)
    total = torch.zeros_like(largest)
    weighted, target = total.clone(), total.clone()
    for stats in shards:
        shift = stats.max_T - largest
        total += stats.sum_T * shift.exp()
        weighted += (stats.weighted_T + stats.sum_T * shift) * shift.exp()
        target += stats.target_T
    log_sum = total.log()
    return largest, log_sum, target - largest - log_sum, log_sum - weighted / total


def ours(head: Head, cuts: list[int], main_grad_VD: torch.Tensor | None) -> Found:
    """Runs the kernels on the shards that lie between the cuts."""
    spans = [slice(a, b) for a, b in zip(cuts, cuts[1:], strict=False)]
    targets = []
    for span in spans:
        is_mine = (head.target_T >= span.start) & (head.target_T < span.stop)
        targets.append((head.target_T - span.start).masked_fill(~is_mine, -1))
    hidden, weight = head.hidden_TD, head.weight_VD
    shards = [
        token_logprobs.vocab_stats(hidden, weight[span], target, head.temperature, head.cap)
        for span, target in zip(spans, targets, strict=True)
    ]
    largest, log_sum, logp, entropy = combined(shards)
    grads = [
        token_logprobs.vocab_backward(
            hidden,
            weight[span],
            target,
            head.temperature,
            largest,
            log_sum,
            entropy,
            head.grad_logp_T,
            head.grad_entropy_T,
            None if main_grad_VD is None else main_grad_VD[span],
            head.cap,
        )
        for span, target in zip(spans, targets, strict=True)
    ]
    grad_hidden = torch.stack([grad.float() for grad, _ in grads]).sum(0)
    return Found(logp, entropy, grad_hidden, torch.cat([grad for _, grad in grads]))


def plain(head: Head, dtype: torch.dtype, logits_dtype: torch.dtype) -> Found:
    """Computes the same by autograd through logits in `logits_dtype`."""
    hidden = head.hidden_TD.to(dtype).detach().requires_grad_()
    weight = head.weight_VD.to(dtype).detach().requires_grad_()
    logits = (hidden @ weight.T).to(logits_dtype)
    if head.cap:
        logits = head.cap * torch.tanh(logits / head.cap)
    log_p = (logits / head.temperature).log_softmax(-1)
    logp = log_p.gather(1, head.target_T[:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(-1)
    loss = (logp * head.grad_logp_T.to(logits_dtype)).sum()
    if head.grad_entropy_T is not None:
        loss = loss + (entropy * head.grad_entropy_T.to(logits_dtype)).sum()
    grads = torch.autograd.grad(loss, (hidden, weight))
    return Found(logp.detach(), entropy.detach(), *grads)


def errors(found: Found, exact: Found) -> tuple[Found, Found]:
    """Returns the largest differences, and the roots of their mean squares."""
    gaps = [(one.double() - other).abs() for one, other in zip(found, exact, strict=True)]
    return Found(*(gap.amax() for gap in gaps)), Found(
        *(gap.square().mean().sqrt() for gap in gaps)
    )


def check(head: Head, cuts: list[int]) -> None:
    exact = plain(head, torch.float64, torch.float64)
    fp32 = errors(plain(head, torch.float32, torch.float32), exact)
    dtype = head.hidden_TD.dtype
    materialised = errors(plain(head, dtype, torch.float32), exact)
    is_cut = dtype == torch.bfloat16
    for main_grad in (None, torch.zeros_like(head.weight_VD, dtype=torch.float32)):
        found = errors(ours(head, cuts, main_grad), exact)
        # The largest of few rounding errors is chance, their mean square is less so.
        for chance, own, of_fp32, of_logits in zip((2, 1), found, fp32, materialised, strict=True):
            bounds = Found(*of_fp32[:2], *of_logits[2:])
            for name, error, bound, whole in zip(Found._fields, own, bounds, exact, strict=True):
                is_cut_here = is_cut and name.startswith("grad") == (DEVICE.type == "cpu")
                factor = chance * (CUT_FACTOR if is_cut_here else FACTOR)
                # The last bits of the largest value: where a plain sum happens to be exact.
                least = 2**-22 * float(whole.abs().amax())
                assert error <= factor * bound + least, (name, error, bound, head[3:], cuts)


def accumulation_case() -> None:
    """Two micro-batches in one main gradient: the sum of both, in the rows of the shard alone."""
    rng = random.Random(1)
    first, other = (draw(rng, torch.float32, 33, 500) for _ in range(2))
    other = other._replace(hidden_TD=torch.randn(33, first.weight_VD.size(1)).to(DEVICE))
    other = other._replace(weight_VD=first.weight_VD)
    alone = [ours(head, [0, 500], None).grad_weight_VD for head in (first, other)]
    main_grad = torch.full_like(first.weight_VD, 3.0)
    for head in (first, other):
        returned = ours(head, [0, 500], main_grad[:500])
        assert torch.equal(returned.grad_weight_VD, main_grad)
    wanted = alone[0] + alone[1] + 3
    largest = float(max(one.abs().amax() for one in alone))
    # fp32 rounds each sum once more; the chunks' own sums are the same.
    assert torch.allclose(main_grad, wanted, rtol=1e-6, atol=1e-6 * largest)


def far_logits_case() -> None:
    """Logits of -1e4 and one of 0, and a shard whose logits are all far below another's."""
    hidden = torch.ones(3, 8, device=DEVICE)
    weight = torch.full((400, 8), -1250.0, device=DEVICE)
    weight[37] = 0
    target = torch.tensor([37, 5, 399], device=DEVICE)
    ones = torch.ones(3, device=DEVICE)
    head = Head(hidden, weight, target, 1.0, ones, ones)
    for cuts in ([0, 400], [0, 100, 400], [0, 100, 100, 400]):
        found = ours(head, cuts, None)
        assert torch.equal(found.logp_T, torch.tensor([0.0, -1e4, -1e4], device=DEVICE))
        assert torch.equal(found.entropy_T, torch.zeros(3, device=DEVICE))
        exact = plain(head, torch.float64, torch.float64)
        for one, other in zip(found, exact, strict=True):
            assert torch.allclose(one.double(), other, rtol=1e-6, atol=1e-6)


def one_gradient_case() -> None:
    """Gradients of a plain sum: autograd gives one number for all tokens."""
    head = draw(random.Random(4), torch.float32, 9, 300)
    one, full = torch.ones((), device=DEVICE), torch.ones(9, device=DEVICE)
    for has_entropy in (False, True):
        results = [
            ours(
                head._replace(grad_logp_T=grad, grad_entropy_T=grad if has_entropy else None),
                [0, 300],
                None,
            )
            for grad in (one.expand(9), full)
        ]
        for found, wanted in zip(*results, strict=True):
            assert torch.equal(found, wanted)


def empty_case() -> None:
    """No column, or no token: nothing known, no gradient, and a main gradient as it was."""
    head = draw(random.Random(2), torch.bfloat16, 5, 40)
    none, target = head.weight_VD[:0], torch.full_like(head.target_T, -1)
    stats = token_logprobs.vocab_stats(head.hidden_TD, none, target, 1.0)
    assert torch.equal(stats.max_T, torch.full_like(stats.max_T, reference.LOWEST))
    assert not stats.sum_T.any() and not stats.weighted_T.any() and not stats.target_T.any()
    scalars = [head.grad_logp_T] * 4
    for main_grad in (None, torch.ones(0, head.weight_VD.size(1), device=DEVICE)):
        hidden, weight = token_logprobs.vocab_backward(
            head.hidden_TD, none, target, 1.0, *scalars, None, main_grad
        )
        assert hidden.dtype == torch.bfloat16 and not hidden.any()
        assert weight.shape == none.shape
    no_token = head.hidden_TD[:0], head.weight_VD, head.target_T[:0], 1.0
    assert all(len(one) == 0 for one in token_logprobs.vocab_stats(*no_token))
    main_grad = torch.ones_like(head.weight_VD, dtype=torch.float32)
    for given in (None, main_grad):
        scalars = [head.grad_logp_T[:0]] * 4
        hidden, weight = token_logprobs.vocab_backward(*no_token, *scalars, None, given)
        assert hidden.shape == no_token[0].shape and weight.shape == head.weight_VD.shape
        assert not weight.any() if given is None else weight is main_grad
    assert torch.equal(main_grad, torch.ones_like(main_grad))


def widths_case() -> None:
    """Chunks are wide enough for a GPU, and their scratch is bounded whatever the batch."""
    width = token_logprobs._width
    assert (width(8192, 151936), width(8192, 37984), width(32768, 151936)) == (16384, 4096, 4096)
    for num_tokens in (0, 1, 300, 4096, 40_000):
        for num_columns in (1, 5_000, 50_000, 300_000):
            found = width(num_tokens, num_columns)
            assert found == 1 << (found.bit_length() - 1)
            assert found <= max(1024, 2**30 / 6 / max(num_tokens, 1))


def main() -> None:
    torch.manual_seed(0)
    widths_case()
    rng = random.Random(0)
    num_cases = 18 if DEVICE.type == "cuda" else 9  # the interpreter is slow
    token_logprobs.LEAST_BYTES, token_logprobs.LEAST_WIDTH = 0, 128  # so small cases have chunks
    for number in range(num_cases):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        num_tokens, num_columns = rng.choice([1, 7, 24]), rng.choice([3, 31, 160, 257, 555])
        inner = sorted(rng.choices(range(num_columns + 1), k=number % 3))
        check(draw(rng, dtype, num_tokens, num_columns), [0, *inner, num_columns])
    accumulation_case()
    far_logits_case()
    one_gradient_case()
    empty_case()
    print(f"{num_cases} cases of the log-probability head on {DEVICE}")


if __name__ == "__main__":
    main()
