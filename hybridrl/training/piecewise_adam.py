"""AdamW that keeps 6 bytes of state per parameter and updates the parameters in pieces.

The moments are bf16 and are computed in fp32. The fp32 master of a bf16 weight is the weight itself
plus a 16-bit remainder (checkpoint/fp32_remainders.py), so masters lose nothing. The state is on
the device or in page-locked host memory. In host memory, pieces pass through the device while
others are updated (staging.py), so that the device holds the state of at most NUM_SLOTS pieces.

Megatron's distributed optimizer holds this optimizer in place of Megatron's Adam and gives it the
shards of the bf16 weights, with their gradients in `decoupled_grad`. Invariant: an element's new
value does not depend on the pieces or on where the state is, because every operation rounds each
element separately, and no two operations are fused.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybridrl.checkpoint.fp32_remainders import join_, remainder_of, split_
from hybridrl.checkpoint.optimizer_kinds import MOMENTS, REMAINDER
from hybridrl.training.staging import HostState, Staging
from hybridrl.training.step_counts import StepCounts

PIECE_ELEMENTS = 1 << 24  # a multiple of ALIGNED_ELEMENTS
ALIGNED_ELEMENTS = 256  # each piece's state begins at a multiple of this


@dataclass(frozen=True)
class _Segment:
    """Elements of a parameter's shard that are part of a piece."""

    parameter: Tensor
    begin: int
    end: int

    @property
    def weight(self) -> Tensor:
        return self.parameter[self.begin : self.end]

    @property
    def gradient(self) -> Tensor:
        found: Tensor = self.parameter.decoupled_grad  # type: ignore[attr-defined]  # Megatron's
        return found[self.begin : self.end]


@dataclass(frozen=True)
class _Piece:
    """Segments of parameters of one group, whose states are stored from `begin` to `end`."""

    group: int
    dtype: torch.dtype
    segments: tuple[_Segment, ...]
    begin: int
    end: int


class PiecewiseAdam(StepCounts):
    """AdamW on shards of parameters; the interface is that of a torch optimizer.

    Args:
        param_groups: Megatron's parameter groups, which contain flat bf16 or fp32 shards.

    Attributes:
        param_groups: The groups, with the step count `step` once a step was taken.
        state: Views of each parameter's states, by name.
        gradient_scale: Factor by which the next step multiplies gradients, to clip them.
        piece_elements: Maximum number of elements in a piece.

    Raises UserError if the host has too little memory for the state.
    """

    def __init__(
        self,
        param_groups: list[dict[str, Any]],
        device: torch.device,
        on_host: bool,
        num_ranks: int = 1,
    ) -> None:
        super().__init__(param_groups)
        self.on_host, self.device = on_host, device
        self.gradient_scale, self.piece_elements = 1.0, PIECE_ELEMENTS
        begins, num_elements = _places(param_groups)
        self._states: dict[str, Tensor] = {}
        names = (*MOMENTS, REMAINDER)
        if on_host:
            self._memory = HostState(packed_bytes(param_groups), device, num_ranks)
            parts = self._memory.bytes.chunk(len(names)) if num_elements else ()
        else:
            parts = tuple(
                torch.zeros(2 * num_elements, dtype=torch.uint8, device=device) for _ in names
            )
        for name, part in zip(names, parts, strict=False):
            self._states[name] = part.view(torch.int16 if name == REMAINDER else torch.bfloat16)
        self.state: dict[Tensor, dict[str, Tensor]] = {
            parameter: {
                name: self._states[name][begin : begin + parameter.numel()]
                for name in state_names(parameter.dtype)
            }
            for parameter, begin in begins.items()
        }
        self._begins = begins

    @property
    def state_bytes(self) -> int:
        return sum(states.nbytes for states in self._states.values())

    @torch.no_grad()
    def step(self) -> None:
        """Updates all parameters with `decoupled_grad`; a state on the host is then complete."""
        self.count_step()
        pieces = list(self._pieces())
        states = [self._states_of(piece) for piece in pieces]
        work = _Scratch(max((one.end - one.begin for one in pieces), default=0), self.device)
        staged = Staging(states, self.device) if self.on_host else states
        # The staging comes first, because it ends only when it is asked for one more piece.
        for state, piece in zip(staged, pieces, strict=True):
            work.update(piece, self.param_groups[piece.group], state, self.gradient_scale)

    def _pieces(self) -> Iterator[_Piece]:
        for number, group in enumerate(self.param_groups):
            for dtype in sorted({one.dtype for one in group["params"]}, key=str):
                found: list[_Segment] = []
                begin = end = -1
                for parameter in (one for one in group["params"] if one.dtype == dtype):
                    place, taken = self._begins[parameter], 0
                    while taken < parameter.numel():
                        is_next = found and place + taken == end
                        if not is_next or end - begin == self.piece_elements:
                            if found:
                                yield _Piece(number, dtype, tuple(found), begin, end)
                            found, begin = [], place + taken
                            end = begin
                        size = min(parameter.numel() - taken, self.piece_elements - (end - begin))
                        found.append(_Segment(parameter, taken, taken + size))
                        taken, end = taken + size, end + size
                if found:
                    yield _Piece(number, dtype, tuple(found), begin, end)

    def _states_of(self, piece: _Piece) -> list[Tensor]:
        return [self._states[name][piece.begin : piece.end] for name in state_names(piece.dtype)]

    @torch.no_grad()
    def set_scaled_state(self, parameter: Tensor, name: str, value: Tensor) -> None:
        """Sets a state of a parameter. The name is transformer-engine's, which Megatron calls.

        Args:
            parameter: Shard of a parameter, with its final weight.
            name: A moment, `remainder`, or `master_param`, from which the remainder is computed.
            value: The new value; moments and masters may be fp32.
        """
        if name != "master_param":
            self.state[parameter][name].copy_(value)
        elif parameter.dtype == torch.float32:
            parameter.copy_(value)
        else:
            master = value.to(device=parameter.device, dtype=torch.float32)
            self.state[parameter][REMAINDER].copy_(remainder_of(master, parameter))


def packed_bytes(param_groups: Sequence[Mapping[str, Any]]) -> int:
    return 2 * len((*MOMENTS, REMAINDER)) * _places(param_groups)[1]


def state_names(dtype: torch.dtype) -> tuple[str, ...]:
    return MOMENTS if dtype == torch.float32 else (*MOMENTS, REMAINDER)


class _Scratch:
    """Computes updates in fp32, in memory for one piece."""

    def __init__(self, num_elements: int, device: torch.device) -> None:
        like = {"dtype": torch.float32, "device": device}
        self._bits = torch.empty(num_elements, dtype=torch.int32, device=device)
        self._weight = torch.empty(num_elements, dtype=torch.bfloat16, device=device)
        self._moments = [torch.empty(num_elements, **like) for _ in MOMENTS]  # type: ignore[call-overload]
        self._gradient, self._change = (torch.empty(num_elements, **like) for _ in range(2))  # type: ignore[call-overload]

    def update(
        self, piece: _Piece, group: Mapping[str, Any], state: Sequence[Tensor], scale: float
    ) -> None:
        """Updates a piece's weights and its state on the device, in the order of `state_names`."""
        size = piece.end - piece.begin
        gradient, change = self._gradient[:size], self._change[:size]
        exp_avg, exp_avg_sq = (
            found[:size].copy_(own) for found, own in zip(self._moments, state, strict=False)
        )
        _gather(gradient, [one.gradient for one in piece.segments])
        if scale != 1.0:
            gradient.mul_(scale)
        if piece.dtype == torch.float32:
            master = _gather(self._bits[:size].view(torch.float32), _weights(piece))
        else:
            weight, remainder = self._weight[:size], state[2]
            master = join_(self._bits[:size], _gather(weight, _weights(piece)), remainder)
        adamw(master, gradient, exp_avg, exp_avg_sq, change, group)
        state[0].copy_(exp_avg)
        state[1].copy_(exp_avg_sq)
        if piece.dtype == torch.float32:
            weight = master
        else:
            split_(master, weight, remainder)
        begin = 0
        for own in _weights(piece):
            own.copy_(weight[begin : begin + own.numel()])
            begin += own.numel()


def adamw(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    change: Tensor,
    group: Mapping[str, Any],
) -> None:
    """Takes one AdamW step in place ("Decoupled Weight Decay Regularization", algorithm 2).

    Fused operations such as addcmul are avoided, because on a CPU their rounding depends on an
    element's position.

    Args:
        master, exp_avg, exp_avg_sq: fp32 weights and moments.
        gradient, change: fp32 gradient and scratch memory; both are overwritten.
        group: Options: lr, betas, eps, weight_decay and the step count, which starts at 1.
    """
    (beta1, beta2), step, rate = group["betas"], group["step"], group["lr"]
    torch.mul(gradient, 1 - beta1, out=change)
    exp_avg.mul_(beta1).add_(change)
    gradient.mul_(gradient).mul_(1 - beta2)
    exp_avg_sq.mul_(beta2).add_(gradient)
    if group["weight_decay"]:
        master.mul_(1 - rate * group["weight_decay"])
    divisor = torch.sqrt(exp_avg_sq, out=gradient)
    divisor.div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    torch.div(exp_avg, divisor, out=change)
    master.sub_(change.mul_(rate / (1 - beta1**step)))


def _weights(piece: _Piece) -> list[Tensor]:
    return [segment.weight for segment in piece.segments]


def _gather(place: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Copies tensors one after another into `place`, which they fill; returns `place`."""
    begin = 0
    for part in parts:
        place[begin : begin + part.numel()].copy_(part)
        begin += part.numel()
    return place


def _places(param_groups: Sequence[Mapping[str, Any]]) -> tuple[dict[Tensor, int], int]:
    """Returns where each parameter's state begins, sorted by group and type, and the total size."""
    begins: dict[Tensor, int] = {}
    end = 0
    for group in param_groups:
        for dtype in sorted({one.dtype for one in group["params"]}, key=str):
            for parameter in (one for one in group["params"] if one.dtype == dtype):
                begins[parameter] = end
                end += parameter.numel()
            end = -(-end // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS
    return begins, end
