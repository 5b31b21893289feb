"""The optimizer with a packed state: against torch's AdamW, in any pieces, on device and host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from hybridrl.checkpoint import optimizer_state
from hybridrl.checkpoint.fp32_remainders import joined, remainder_of, split_
from hybridrl.checkpoint.optimizer_kinds import MOMENTS, REMAINDER
from hybridrl.checkpoint.parameter_pieces import Cut
from hybridrl.errors import CheckpointError, UserError
from hybridrl.training import staging
from hybridrl.training.piecewise_adam import PiecewiseAdam, packed_bytes

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8}
SIZES, FP32_SIZE, SCALE = (1000, 3, 5000, 777, 64), 50, 0.7
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_masters(num: int) -> Tensor:
    """Returns finite fp32 numbers with any sign, exponent and rounding."""
    bits = torch.randint(-(2**31), 2**31, (num,), generator=torch.Generator().manual_seed(1))
    masters = bits.to(torch.int32).view(torch.float32)
    ties = (torch.arange(-40, 40) << 16 | 0x3F80_8000).to(torch.int32).view(torch.float32)
    return torch.cat([masters[masters.isfinite()], ties, torch.zeros(2), -torch.zeros(2)])


def test_a_weight_and_its_remainder_are_the_master_bit_for_bit() -> None:
    masters = random_masters(200_000)
    weight = torch.empty(len(masters), dtype=torch.bfloat16)
    remainder = torch.empty(len(masters), dtype=torch.int16)
    split_(masters.clone(), weight, remainder)
    assert torch.equal(joined(weight, remainder).view(torch.int32), masters.view(torch.int32))
    rounded = masters.bfloat16()
    differs = weight.view(torch.int16) != rounded.view(torch.int16)
    is_tie = (masters.view(torch.int32) & 0xFFFF) == 0x8000
    assert bool((differs <= is_tie).all()) and bool(differs.any())


def test_a_rounded_weight_keeps_its_value_and_loses_at_most_a_bit_of_a_tie() -> None:
    masters = random_masters(200_000)
    masters = masters[masters.abs() < 1e38]
    weight = masters.bfloat16()
    found = joined(weight, remainder_of(masters, weight)).view(torch.int32)
    lost = (found - masters.view(torch.int32)).abs()
    is_tie = (masters.view(torch.int32) & 0xFFFF) == 0x8000
    assert bool((lost <= is_tie.int()).all())


class Trained:
    """Parameters that a PiecewiseAdam and torch's AdamW train with the same gradients."""

    def __init__(self, on_host: bool, piece_elements: int) -> None:
        self.generator = torch.Generator().manual_seed(1)
        self.parameters = [self.random(size).bfloat16() for size in SIZES]
        self.parameters.append(self.random(FP32_SIZE))
        decayed = [*self.parameters[:3], self.parameters[5]]
        self.groups = [
            {"params": decayed, "weight_decay": 0.1, **OPTIONS},
            {"params": self.parameters[3:5], "weight_decay": 0.0, **OPTIONS},
        ]
        self.adam = PiecewiseAdam(self.groups, DEVICE, on_host)
        self.adam.piece_elements, self.adam.gradient_scale = piece_elements, SCALE

    def random(self, size: int) -> Tensor:
        return torch.randn(size, generator=self.generator).to(DEVICE)

    def steps(self, num: int) -> list[list[Tensor]]:
        """Takes steps; returns the gradients of each."""
        taken = []
        for _ in range(num):
            taken.append([self.random(one.numel()) for one in self.parameters])
            for parameter, gradient in zip(self.parameters, taken[-1], strict=True):
                parameter.decoupled_grad = gradient.clone()  # type: ignore[attr-defined]
            self.adam.step()
        return taken

    def masters(self) -> list[Tensor]:
        states = [
            {name: state.to(DEVICE) for name, state in self.adam.state[one].items()}
            for one in self.parameters
        ]
        return [
            joined(one, state[REMAINDER]) if REMAINDER in state else one
            for one, state in zip(self.parameters, states, strict=True)
        ]


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("piece_elements", [256, 1024, 4096])
def test_a_step_in_pieces_is_the_step_in_one_piece(on_host: bool, piece_elements: int) -> None:
    whole, pieces = Trained(False, 1 << 20), Trained(on_host, piece_elements)
    for one in (whole, pieces):
        one.steps(4)
    for own, wanted in zip(pieces.parameters, whole.parameters, strict=True):
        assert torch.equal(own, wanted)
        for name, state in whole.adam.state[wanted].items():
            assert torch.equal(pieces.adam.state[own][name].to(DEVICE), state), name
    assert pieces.adam.state_bytes == whole.adam.state_bytes
    assert 6 * sum(SIZES) <= whole.adam.state_bytes <= 6 * (sum(SIZES) + FP32_SIZE + 3 * 256)


def test_steps_are_adamws_up_to_the_rounding_of_moments() -> None:
    trained = Trained(True, 1024)
    starts = [one.float().clone().requires_grad_() for one in trained.parameters]
    adamw = torch.optim.AdamW(
        [
            {"params": [*starts[:3], starts[5]], "weight_decay": 0.1},
            {"params": starts[3:5], "weight_decay": 0.0},
        ],
        **OPTIONS,  # type: ignore[arg-type]
    )
    for gradients in trained.steps(5):
        for one, gradient in zip(starts, gradients, strict=True):
            one.grad = gradient * SCALE
        adamw.step()
    for found, wanted in zip(trained.masters(), starts, strict=True):
        # A step changes a weight by about 0.01. Rounding to 8 bits changes a moment by 1/256 at
        # most, in each of 5 steps.
        assert (found - wanted).abs().max() <= 5 * 0.01 / 128
        assert (found - wanted).abs().mean() <= 5 * 0.01 / 1024


def test_first_moments_are_rounded_to_the_nearest() -> None:
    trained = Trained(False, 1024)
    (gradients,) = trained.steps(1)
    for parameter, gradient in zip(trained.parameters, gradients, strict=True):
        first = (gradient * SCALE) * (1 - 0.9)
        assert torch.equal(trained.adam.state[parameter][MOMENTS[0]], first.bfloat16())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_states_of_a_checkpoint_are_found_by_parameter(dtype: torch.dtype) -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, dtype=dtype))
    cut = Cut(parameter, {0: slice(0, 4)}, 0)
    described = {parameter: SimpleNamespace(key="a.weight")}
    optimizer = SimpleNamespace(optimizer=torch.optim.AdamW([parameter]))

    def found(*stored: str) -> list[str]:
        names = {f"optimizer.state.{one}" for one in stored}
        return optimizer_state._names(optimizer, described, cut, names)

    moments = [f"{name}.a.weight" for name in MOMENTS]
    assert found("remainder.a.weight", *moments) == [REMAINDER, *MOMENTS]
    assert found("remainder.a.weight.query", *moments) == [REMAINDER, *MOMENTS]
    assert found("param.a.weight", "remainder.b", *moments) == ["param", *MOMENTS]
    assert found("remainder.a.weights") == ["param", *MOMENTS]  # the reader says what is missing
    if dtype == torch.float32:  # its own master, even if no other parameter has a remainder
        assert found(*moments) == [*MOMENTS]
        return
    with pytest.raises(CheckpointError, match="optimizer.state.param.a.weight"):
        found("remainder.b", *moments)


def test_a_state_that_a_host_cannot_hold_is_refused() -> None:
    own = Trained(True, 1024).adam
    assert packed_bytes(own.param_groups) == own.state_bytes
    # The ranks of the first host need 60 bytes in all; ranks of other meshes are not counted.
    staging.check_host_memory([(0, 20, 60), (0, 40, 61), (2, 30, 30)])
    for found in ([(0, 20, 60), (0, 40, 59)], [(0, 20, 60), (1, 40, 39)]):
        with pytest.raises(UserError, match="train.optimizer_memory") as caught:
            staging.check_host_memory(found)
        assert "low_precision" in str(caught.value)


def test_memory_that_the_system_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr(staging, "ReservedMemory", refuse)
    monkeypatch.setattr(staging, "page_locks", lambda: (None, None))
    with pytest.raises(UserError, match="Cannot allocate memory"):
        staging.HostState(1000, torch.device("cuda"))


class FakeStream:
    """A CUDA stream that notes whom it waits for."""

    def __init__(self, *_: object) -> None:
        self.waited: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited.append(other)

    def wait_event(self, event: object) -> None:
        self.waited.append(event)

    def record_event(self) -> SimpleNamespace:
        return SimpleNamespace(wait=lambda: None)

    def synchronize(self) -> None: ...


def test_copies_to_the_device_wait_for_the_stream_that_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    computing = FakeStream()
    current = [computing]

    @contextmanager
    def entered(stream: FakeStream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    pieces = [[torch.full((4,), float(number))] for number in range(5)]
    staged = staging.Staging(pieces, torch.device("cpu"))
    staged._is_gpu, staged._inward, staged._outward = True, FakeStream(), FakeStream()
    for (copy,) in staged:
        copy.add_(1)
    assert [float(piece[0][0]) for piece in pieces] == [1, 2, 3, 4, 5]
    assert staged._inward.waited[: staging.NUM_SLOTS] == [computing] * staging.NUM_SLOTS
    assert staged._outward.waited == [computing] * len(pieces)
