"""Cases of the kernel that draws tokens, a script: on CPU under TRITON_INTERPRET=1, on a GPU as it
is.

A drawn token must be one whose part of the cumulative distribution, computed in fp64, holds the
row's uniform number, but for what fp32 exponentials leave open; its log-probability must be that of
fp64 within what fp32 rounds. Rows alone and in another batch must give the same bits.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from hybridrl.kernels import draws, reference

from hybridrl.rollout.common.sampling import uniforms

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Relative: a probability is an fp32 exponential of a difference of logits of some tens.
OPEN = 2e-5


def random_case(rng: random.Random, dtype: torch.dtype) -> None:
    """Draws from rows of all sharpnesses, some with columns that are never drawn."""
    num_rows = rng.choice([1, 3, 9])
    vocab = rng.choice([5, draws.WIDTH, draws.WIDTH + 1, 7 * draws.WIDTH - 5])
    wide = torch.randn(num_rows, vocab + 3) * 10 ** (2 * torch.rand(num_rows, 1) - 1)
    wide[:, :: rng.choice([2, 5])] = -torch.inf
    wide[:, vocab - 1] = wide[:, :vocab].amax(-1) - 1
    logits = wide.to(dtype).to(DEVICE)[:, :vocab]  # rows do not follow each other in memory
    temperature = torch.tensor([rng.choice([1.0, 0.7, 2.0]) for _ in range(num_rows)])
    greedy = torch.rand(num_rows) < 0.2
    temperature[greedy] = 1.0
    seeds = np.array([rng.randrange(2**64) for _ in range(num_rows)], dtype=np.uint64)
    counts = np.array([rng.randrange(5000) for _ in range(num_rows)], dtype=np.int64)
    rest = [temperature, greedy, torch.from_numpy(seeds.view(np.int64)), torch.from_numpy(counts)]
    arguments = [one.to(DEVICE) for one in rest]
    token, logp = (found.cpu() for found in draws.draw_rows(logits, *arguments))

    exact = (logits.cpu().double() / temperature[:, None].double()).log_softmax(-1)
    wanted = exact.gather(-1, token[:, None])[:, 0]
    assert bool(wanted.isfinite().all()), token
    assert torch.allclose(logp.double(), wanted, atol=1e-5, rtol=1e-6), (logp, wanted)
    ends = exact.exp().cumsum(-1).gather(-1, token[:, None])[:, 0]
    drawn = torch.from_numpy(uniforms(seeds.tolist(), counts.tolist()))
    holds = (drawn < ends + OPEN) & (drawn >= ends - wanted.exp() - OPEN)
    most = exact.gather(-1, token[:, None])[:, 0] >= exact.amax(-1) - 1e-6
    assert bool(torch.where(greedy, most, holds).all()), (drawn, ends, wanted.exp())

    row = rng.randrange(num_rows)
    alone = draws.draw_rows(logits[row : row + 1], *(one[row : row + 1] for one in arguments))
    assert int(alone[0]) == int(token[row]) and float(alone[1]) == float(logp[row])
    if dtype == torch.float32:
        plain = reference.draw_rows(logits, *arguments)
        same = (plain[0].cpu() == token).double().mean()
        assert num_rows * (1 - same) <= 1, (plain[0], token)  # at a border of two tokens


def distribution_case() -> None:
    """Draws as often as the probabilities say."""
    num_rows, weights = (
        (4000 if DEVICE.type == "cuda" else 400),
        torch.tensor([0.5, 0.0, 0.25, 0.125, 0.125]),
    )
    logits = weights.log().expand(num_rows, -1).contiguous().to(DEVICE)
    ones, none = torch.ones(num_rows), torch.zeros(num_rows, dtype=torch.bool)
    seeds, counts = torch.arange(num_rows), torch.full((num_rows,), 7)
    rest = [one.to(DEVICE) for one in (ones, none, seeds, counts)]
    token, _ = draws.draw_rows(logits, *rest)
    shares = torch.bincount(token.cpu(), minlength=5) / num_rows
    # Five standard deviations of the largest share.
    assert torch.allclose(shares, weights, atol=5 * (0.25 / num_rows) ** 0.5), shares


def not_a_number_case() -> None:
    logits = torch.zeros(2, 30)
    logits[1, 20] = torch.nan
    rest = [torch.ones(2), torch.zeros(2, dtype=torch.bool), torch.arange(2), torch.arange(2)]
    _, logp = draws.draw_rows(logits.to(DEVICE), *(one.to(DEVICE) for one in rest))
    assert logp.isfinite().tolist() == [True, False], logp


def main() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    # Narrow blocks, so that small cases have many; a GPU computes with the real ones too.
    widths = (64, draws.WIDTH) if DEVICE.type == "cuda" else (64,)
    num_each = 24 if DEVICE.type == "cuda" else 9  # the interpreter is slow
    num_cases = num_each * len(widths)
    for case in range(num_cases):
        draws.WIDTH = widths[case // num_each]
        random_case(rng, (torch.float32, torch.bfloat16, torch.float16)[case % 3])
    distribution_case()
    not_a_number_case()
    print(f"{num_cases} cases of drawing tokens on {DEVICE}")


if __name__ == "__main__":
    main()
