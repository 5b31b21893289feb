"""Stacks of experts: the same matrix of each of a rank's experts in a layer, in order. No torch.

Megatron keeps the matrix of each expert as a parameter; inference engines keep all of a layer in
one tensor (experts, rows, columns). If the trainer's matrices follow one another in memory at equal
distances, they already are such a tensor. Owns which parameters form a stack, and the order in
which Megatron's wrapper must receive them for its buffers to hold stacks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import lcm, prod

from hybridrl.models.boxes import Shape
from hybridrl.parallel.layout import TrainLayout

# Experts as separate modules, and in transformer-engine's grouped layer.
_NAMES = (
    re.compile(
        r"(?P<mixture>.*\.mlp\.experts)\.local_experts\.(?P<place>\d+)\.(?P<matrix>.*)\.weight"
    ),
    re.compile(r"(?P<mixture>.*\.mlp\.experts)\.(?P<matrix>.*)\.weight(?P<place>\d+)"),
)


def place_in_stack(name: str) -> tuple[str, int] | None:
    """Returns the stack of a Megatron parameter and its index there; None if it is in no stack.

    Args:
        name: Megatron's name, or the local name in a layout.
    """
    for pattern in _NAMES:
        if found := pattern.fullmatch(name):
            return f"{found['mixture']}.{found['matrix']}", int(found["place"])
    return None


def is_run(names: Sequence[str]) -> bool:
    """Whether parameters are consecutive in one stack."""
    places = [place_in_stack(name) for name in names]
    first = places[0]
    return first is not None and places == [(first[0], first[1] + i) for i in range(len(names))]


def stacks_are_even(shapes: Mapping[str, Shape], layout: TrainLayout, has_buckets: bool) -> bool:
    """Whether experts of a stack are certainly at equal distances in Megatron's buffers.

    A buffer with several buckets (gradients are reduced during the backward pass) pads each bucket
    to a multiple of its data-parallel size and of 128 (param_and_grad_buffer.py, 0.16.1), and a
    bucket may end inside a stack. There is no padding if every parameter is such a multiple. Stacks
    can be even although the result is False: a buffer of less than 40 million elements has one
    bucket.

    Args:
        shapes: Shapes of a rank's parameters by local name.
        layout: Training layout.
        has_buckets: Whether buffers have several buckets, which `train.fuse_param_gather` turns
            off.
    """
    if not has_buckets or layout.dp * layout.cp == 1:
        return True
    # With ep = 1, experts are in one buffer with all other parameters.
    own = layout.ep > 1
    divisor = lcm(layout.edp if own else layout.dp * layout.cp, 128)
    sizes = (prod(s) for name, s in shapes.items() if not own or place_in_stack(name))
    return all(size % divisor == 0 for size in sizes)


def in_stacks(names: Sequence[str]) -> list[str]:
    """Returns the parameters of a chunk in the order in which Megatron's wrapper must receive them.

    Megatron's buffers hold parameters in reverse order, so the reverse of the result has every
    stack in one piece and ascending.

    Args:
        names: Parameters in the order of the modules; only experts of one layer change places.
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
        elif place[0] in stacks:  # the first of its stack
            found += [expert for _, expert in sorted(stacks.pop(place[0]), reverse=True)]
    return found
