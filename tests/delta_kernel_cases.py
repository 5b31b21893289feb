"""Cases of the gated delta rule's kernels, a script: on CPU under TRITON_INTERPRET=1, on a GPU as
it is. Outputs, states and all gradients must be those of the rule in torch and fp64.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from hybridrl.kernels import delta_rule as kernels

from hybridrl import ops
from hybridrl.models.megatron.attention import PackedSequences, SharedPrompts
from hybridrl.models.megatron.delta_kernels import kernel_rule
from hybridrl.models.megatron.delta_net import Recurrence
from hybridrl.models.megatron.delta_rule import (
    DeltaInputs,
    Sequences,
    causal_convolution,
    delta_rule,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# Norm of an error, relative to the norm of the reference: inputs, intermediate values and products
# are rounded to the type.
BOUNDS = {torch.float32: 3e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
NAMES = ("query", "key", "value", "decay", "beta", "state")
LENGTHS = (1, 16, 63, 64, 65, 130)


def case(
    keys: int,
    values: int,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    decay: float,
    lengths: tuple[int, ...] = LENGTHS,
    has_states: bool = True,
    alike: float = 0.0,
) -> None:
    """Compares one call; `alike` is the share of all keys that is the same."""
    tokens = sum(lengths)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE)

    key = (1 - alike) * noise(tokens, keys, key_dim) + alike * noise(1, keys, key_dim)
    inputs = [
        noise(tokens, keys, key_dim).to(dtype),
        key.to(dtype),
        noise(tokens, values, value_dim).to(dtype),
        -decay * noise(tokens, values).abs(),
        noise(tokens, values).sigmoid(),
        noise(len(lengths), values, key_dim, value_dim),
    ]
    weights = noise(tokens, values, value_dim), noise(*inputs[-1].shape)
    sequences = Sequences(lengths, DEVICE)
    found = []
    for rule, kind in ((delta_rule, torch.float64), (kernel_rule, None)):
        own = [one.clone().to(kind or one.dtype).requires_grad_() for one in inputs]
        output, final = rule(
            DeltaInputs(*own[:5]), sequences, own[5] if has_states else None, has_states
        )
        loss = (output * weights[0]).sum()
        if has_states:
            assert final is not None
            loss = loss + (final * weights[1]).sum()
        taken = own if has_states else own[:5]
        found.append([output, *((final,) if has_states else ()), *torch.autograd.grad(loss, taken)])
    names = ("output", *(("final",) if has_states else ()), *NAMES[: len(taken)])
    errors = {
        name: float((own.detach().double() - exact.detach()).norm() / exact.detach().norm())
        for name, exact, own in zip(names, *found, strict=True)
    }
    shown = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    what = f"{keys}/{values} heads of {key_dim}/{value_dim}, {dtype}, decay {decay}, alike {alike}"
    print(f"{what}: {shown}", flush=True)
    assert all(error < BOUNDS[dtype] for error in errors.values()), f"{what}: {shown}"


def convolution_case(kernel: int, channels: int, dtype: torch.dtype) -> None:
    """Prompts of 2 and 70 tokens, shorter and longer than the kernel, with samples of 1 to 40
    tokens, and a sample without a prompt.
    """
    lengths, prefixes = (2, 1, 4, 70, 40, 33), (-1, 0, 0, -1, 3, -1)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    shared_lengths = tuple(0 if prefix < 0 else lengths[prefix] for prefix in prefixes)
    positions = torch.zeros(sum(lengths))
    shared = SharedPrompts(tuple(bounds.tolist()), prefixes, shared_lengths, positions)
    for given in (shared, None):
        order = Recurrence(PackedSequences.of(bounds, 70, given), kernel, DEVICE)
        wide = torch.randn(sum(lengths), channels + 8, device=DEVICE).to(dtype)
        weight = torch.randn(channels, kernel, device=DEVICE).to(dtype)
        of_output = torch.randn(sum(lengths), channels, device=DEVICE).to(dtype)
        found = []
        for kind in (torch.float64, dtype):
            own = [one.clone().to(kind).requires_grad_() for one in (wide, weight)]
            inputs = own[0][:, :channels]  # whose rows do not follow each other in memory
            if kind == dtype:
                before = order.places.before(inputs)
                output = ops.causal_convolution(inputs, own[1], order.places[:3], before)
            else:
                rows = torch.nn.functional.pad(inputs, (0, 0, 0, 1))[order.history.index_E]
                output = causal_convolution(rows, own[1])[order.history.row_T]
            found.append([output, *torch.autograd.grad(output, own, of_output.to(kind))])
        errors = [
            float((own.detach().double() - exact.detach()).norm() / exact.detach().norm())
            for exact, own in zip(*found, strict=True)
        ]
        shown = ", ".join(f"{error:.1e}" for error in errors)
        print(f"convolution of {channels} channels, {dtype}: {shown}", flush=True)
        assert all(error < BOUNDS[dtype] for error in errors), shown


def grid_case() -> None:
    """More sequences and heads than CUDA allows on the second and third axis of a grid."""
    many = SimpleNamespace(num_sequences=2000, groups=48, key_dim=128, value_dim=128)
    grid = kernels._Pass.state_grid(many)  # type: ignore[arg-type]
    assert max(grid[1:], default=1) <= 65_535, grid
    assert grid[0] < 2**31, grid


def main() -> None:
    torch.manual_seed(0)
    grid_case()
    convolution_case(4, 150, torch.float32 if DEVICE.type == "cpu" else torch.bfloat16)
    if DEVICE.type == "cpu":
        case(1, 2, 16, 32, torch.float32, 0.1, (1, 63, 64, 130))
        case(2, 2, 32, 16, torch.float32, 2.0, (1, 70), alike=0.9)
        case(1, 1, 128, 128, torch.float16, 0.05, (100,), has_states=False)
    else:
        for decay in (0.01, 0.1, 2.0):
            case(4, 8, 128, 128, torch.bfloat16, decay, (*LENGTHS, 1000))
        case(4, 4, 128, 128, torch.bfloat16, 0.05, (300, 7), alike=0.9)
        case(4, 8, 128, 128, torch.float16, 0.1, has_states=False)
        case(2, 4, 64, 64, torch.bfloat16, 0.1)
        case(16, 48, 16, 16, torch.bfloat16, 0.1, (1,) * 1400)  # one grid of 67,200 programs
        if "--all-sizes" in sys.argv:
            for size in (16, 32, 64, 256):
                case(2, 4, size, 128, torch.bfloat16, 0.1)
                case(2, 4, 128, size, torch.bfloat16, 0.1)
    print("all cases of the gated delta rule are right")


if __name__ == "__main__":
    main()
