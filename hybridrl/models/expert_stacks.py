"""Finds stacks: one matrix, or bias, of each expert that a rank holds in a layer. No torch.

In Megatron, each expert's matrix is a parameter; inference engines store a layer's matrices as one
tensor (experts, rows, columns). If the trainer's matrices are equally spaced in memory, they
already form such a tensor. This module decides which parameters form a stack, and in which order
Megatron's wrapper must receive them so that its buffers contain stacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import lcm, prod

from hybridrl.models.boxes import Shape
from hybridrl.parallel.layout import TrainLayout

# Names of experts that are separate modules, and of experts in transformer-engine's grouped layer.
_NAMES = (
    re.compile(
        r"(?P<mixture>.*\.mlp\.experts)\.local_experts\.(?P<place>\d+)\."
        r"(?P<matrix>.*)\.(?P<kind>weight|bias)"
    ),
    re.compile(r"(?P<mixture>.*\.mlp\.experts)\.(?P<matrix>.*)\.(?P<kind>weight)(?P<place>\d+)"),
)


def place_in_stack(name: str) -> tuple[str, int] | None:
    for pattern in _NAMES:
        if found := pattern.fullmatch(name):
            stack = f"{found['mixture']}.{found['matrix']}"
            is_bias = found["kind"] == "bias"
            return f"{stack}.bias" if is_bias else stack, int(found["place"])
    return None


def are_consecutive_in_stack(names: Sequence[str]) -> bool:
    places = [place_in_stack(name) for name in names]
    first = places[0]
    return first is not None and places == [(first[0], first[1] + i) for i in range(len(names))]


def stacks_are_even(shapes: Mapping[str, Shape], layout: TrainLayout, has_buckets: bool) -> bool:
    """Whether the experts of a stack are certain to be equally spaced in Megatron's buffers.

    If gradients are reduced during the backward pass, a buffer has several buckets. Megatron pads
    each bucket to a multiple of its data-parallel size and of 128 (param_and_grad_buffer.py,
    0.16.1), and a bucket may end inside a stack. If the size of every parameter is such a multiple,
    there is no padding. If the result is False, stacks may still be evenly spaced, because buffers
    with fewer than 40 million elements have a single bucket.

    Args:
        has_buckets: Whether buffers have several buckets; False with `train.fuse_param_gather`.
    """
    if not has_buckets or layout.dp * layout.cp == 1:
        return True
    # With ep = 1, experts share one buffer with all other parameters.
    own = layout.ep > 1
    divisor = lcm(layout.edp if own else layout.dp * layout.cp, 128)
    sizes = (prod(s) for name, s in shapes.items() if not own or place_in_stack(name))
    return all(size % divisor == 0 for size in sizes)


def ordered_by_stack(names: Sequence[str]) -> list[str]:
    """Returns a chunk's parameters in the order in which Megatron's wrapper must receive them.

    Megatron's buffers store parameters in reverse order, so the reverse of the result must contain
    each stack contiguously and in ascending order.
    """
    stacks: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        if place := place_in_stack(name):
            stacks.setdefault(place[0], []).append((place[1], name))
    found: list[str] = []
    for name in names:
        place = place_in_stack(name)
        if place is None:
            found.append(name)
        elif place[0] in stacks:  # the first member of a stack
            found += [expert for _, expert in sorted(stacks.pop(place[0]), reverse=True)]
    return found
