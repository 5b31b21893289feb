"""Cases of the kernel that adds an adapter's product, a script: on CPU under TRITON_INTERPRET=1, on
a GPU as it is. The result must be that of fp64 within the rounding of its type.
"""

from __future__ import annotations

import random

import torch
from hybridrl.kernels import adapters, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of the largest element: the sum is rounded to the type.
BOUNDS = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
if DEVICE.type == "cpu":  # the interpreter multiplies the bits of bfloat16 matrices as integers
    del BOUNDS[torch.bfloat16]


def case(num_tokens: int, sizes: list[int], rank: int, dtype: torch.dtype) -> None:
    """Compares one layer; a third of its tokens use no adapter, or another one."""
    wide = torch.randn(num_tokens, sum(sizes) + 5, device=DEVICE).to(dtype)
    y = wide[:, : sum(sizes)]  # rows do not follow each other in memory
    down = torch.randn(num_tokens, len(sizes) * rank, device=DEVICE).to(dtype)
    bs = [(torch.randn(size, rank, device=DEVICE) / rank**0.5).to(dtype) for size in sizes]
    slots = torch.tensor([(0, 0, 0, 0, -1, 1)[i % 6] for i in range(num_tokens)], device=DEVICE)
    wanted = y.double()
    reference.add_up(wanted, down.double(), [b.double() for b in bs], slots, 0)
    rest, idle = wide[:, sum(sizes) :].clone(), y[slots != 0].clone()
    adapters.add_up(y, down, bs, slots, 0)
    error = float((y.double() - wanted).abs().max() / wanted.abs().max())
    assert error < BOUNDS[dtype], (num_tokens, sizes, rank, dtype, error)
    assert torch.equal(wide[:, sum(sizes) :], rest) and torch.equal(y[slots != 0], idle)


def main() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    num_cases = 24 if DEVICE.type == "cuda" else 12  # each compiles, and the interpreter is slow
    for _ in range(num_cases):
        sizes = [rng.choice([8, 64, 130, 300]) for _ in range(rng.randint(1, 3))]
        num_tokens, rank = rng.choice([1, 5, 70, 300]), rng.choice([1, 8, 32, 80])
        case(num_tokens, sizes, rank, rng.choice(list(BOUNDS)))
    print(f"{num_cases} cases of adding an adapter on {DEVICE}")


if __name__ == "__main__":
    main()
