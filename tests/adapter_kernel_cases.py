"""Cases of the kernel that adds an adapter's product, a script: on CPU under TRITON_INTERPRET=1, on
a GPU as it is. The result must be that of fp64 within the rounding of its type.
"""

from __future__ import annotations

import random

import torch
from hybridrl.kernels import adapters, reference

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of the largest element: A x and the sum are each rounded to the type.
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
if DEVICE.type == "cpu":  # the interpreter multiplies the bits of bfloat16 matrices as integers
    del BOUNDS[torch.bfloat16]


def case(num_tokens: int, num_inputs: int, sizes: list[int], rank: int, dtype: torch.dtype) -> None:
    """Compares one layer; a third of its tokens use no adapter, or another one."""
    x = torch.randn(num_tokens, num_inputs, device=DEVICE).to(dtype)
    wide = torch.randn(num_tokens, sum(sizes) + 5, device=DEVICE).to(dtype)
    y = wide[:, : sum(sizes)]  # rows do not follow each other in memory
    a = (torch.randn(len(sizes) * rank, num_inputs, device=DEVICE) / num_inputs**0.5).to(dtype)
    bs = [(torch.randn(size, rank, device=DEVICE) / rank**0.5).to(dtype) for size in sizes]
    slots = torch.tensor([(0, 0, 0, 0, -1, 1)[i % 6] for i in range(num_tokens)], device=DEVICE)
    wanted = y.double()
    reference.add_adapter(wanted, x.double(), a.double(), [b.double() for b in bs], slots, 0)
    rest, idle = wide[:, sum(sizes) :].clone(), y[slots != 0].clone()
    adapters.add_adapter(y, x, a, bs, slots, 0)
    error = float((y.double() - wanted).abs().max() / wanted.abs().max())
    assert error < BOUNDS[dtype], (num_tokens, num_inputs, sizes, rank, dtype, error)
    assert torch.equal(wide[:, sum(sizes) :], rest) and torch.equal(y[slots != 0], idle)


def main() -> None:
    torch.manual_seed(0)
    rng = random.Random(0)
    num_cases = 60 if DEVICE.type == "cuda" else 12  # the interpreter is slow
    for _ in range(num_cases):
        sizes = [rng.choice([8, 64, 130, 300]) for _ in range(rng.randint(1, 3))]
        shape = rng.choice([1, 5, 70, 300]), rng.choice([16, 96]), sizes, rng.choice([1, 8, 32, 80])
        case(*shape, rng.choice(list(BOUNDS)))
    print(f"{num_cases} cases of adding an adapter on {DEVICE}")


if __name__ == "__main__":
    main()
