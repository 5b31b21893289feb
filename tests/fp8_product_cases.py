"""Cases of the product of few tokens and FP8 weights, a script: on CPU under TRITON_INTERPRET=1, on
a GPU as it is. The result must be that of fp64 within the rounding of bf16.
"""

from __future__ import annotations

import torch
from hybridrl.kernels import fp8_linear, reference
from hybridrl.kernels.fp8_linear import Tiling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Of the largest element. The interpreter cuts bits off, a GPU rounds.
BOUND = 4e-3 if DEVICE.type == "cuda" else 8e-3
# Tokens, outputs, inputs, tiling. Programs end inside tiles, at their ends, or compute whole tiles.
CASES = [
    (3, 256, 384, Tiling(128, 128, 3, 4, 1)),
    (17, 512, 640, Tiling(64, 128, 3, 4, 1)),
    (33, 256, 1024, Tiling(256, 64, 3, 8, 2)),
    (1, 128, 128, Tiling(64, 128, 3, 4, 2)),
    (100, 1280, 256, Tiling(128, 128, 3, 8, 1)),
    (5, 256, 384, Tiling(128, 128, 3, 4, 1, False)),
]


def every_code(num_rows: int, num_columns: int) -> torch.Tensor:
    """Returns FP8 weights that contain all codes but the two NaN, in random order."""
    codes = torch.tensor([one for one in range(256) if one & 0x7F != 0x7F], dtype=torch.uint8)
    order = torch.randint(len(codes), (num_rows, num_columns))
    return codes[order].to(DEVICE).view(torch.float8_e4m3fn)


def case(tokens: int, outputs: int, inputs: int, tiling: Tiling) -> None:
    x = torch.randn(tokens, inputs + 8, device=DEVICE).bfloat16()[:, :inputs]
    weight = every_code(outputs, inputs)
    exponents = torch.randint(-15, 4, (outputs // 128, inputs // 128), device=DEVICE)
    scales = torch.ldexp(torch.ones(exponents.shape, device=DEVICE), exponents)
    wanted = reference.fp8_product(x.double().float(), weight, scales).double()
    space = fp8_linear.workspace(DEVICE)
    found = []
    for _ in range(2):
        y = torch.full((tokens, outputs), torch.nan, dtype=torch.bfloat16, device=DEVICE)
        fp8_linear.launch(x, weight, scales, y, space, tiling)
        error = float((y.double() - wanted).abs().max() / wanted.abs().max())
        assert error < BOUND, (tokens, outputs, inputs, tiling, error)
        assert not space.counts.any()
        found.append(y)
    assert torch.equal(*found)


def chosen_case(tokens: int, outputs: int, inputs: int) -> None:
    """The tiling that the table chooses, for rows that must be copied first."""
    x = torch.randn(tokens, inputs + 3, device=DEVICE).bfloat16()[:, 1 : inputs + 1]
    weight, scales = every_code(outputs, inputs), torch.ones(outputs // 128, inputs // 128)
    y = fp8_linear.product(x, weight, scales.to(DEVICE))
    wanted = reference.fp8_product(x, weight, scales.to(DEVICE))
    error = float((y.double() - wanted.double()).abs().max() / wanted.double().abs().max())
    assert error < BOUND, (tokens, outputs, inputs, error)


def refusals() -> None:
    x, scales = torch.zeros(1, 192, device=DEVICE).bfloat16(), torch.ones(1, 2, device=DEVICE)
    try:
        fp8_linear.product(x, every_code(128, 192), scales)
    except ValueError as error:
        assert "a weight of 128 x 192" in str(error)
    else:
        raise AssertionError("a part of a block was accepted")


def main() -> None:
    torch.manual_seed(0)
    for one in CASES:
        case(*one)
    for num_tokens in (2, 70):
        chosen_case(num_tokens, 384, 256)
    refusals()
    print(f"{len(CASES)} cases of products with FP8 weights on {DEVICE}")


if __name__ == "__main__":
    main()
