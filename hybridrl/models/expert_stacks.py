"""Stacks of experts: one matrix of each expert that a rank has of a layer, in order. No torch.

Megatron keeps each expert's matrix as a parameter, inference engines all of a layer in one tensor
(experts, rows, columns). Where the trainer's matrices lie one after another, as far apart from each
other, they are such a tensor already. Owns which parameters form a stack, and the order in which
they must be handed to Megatron's wrapper, whose buffers then hold them so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import lcm, prod

from hybridrl.models.boxes import Shape
from hybridrl.parallel.layout import TrainLayout

# Experts one by one, and in transformer-engine's grouped layer.
_NAMES = (
    re.compile(
        r"(?P<mixture>.*\.mlp\.experts)\.local_experts\.(?P<place>\d+)\.(?P<matrix>.*)\.weight"
    ),
    re.compile(r"(?P<mixture>.*\.mlp\.experts)\.(?P<matrix>.*)\.weight(?P<place>\d+)"),
)


def place_in_stack(name: str) -> tuple[str, int] | None:
    """Returns the stack of a Megatron parameter and its place there; None: it is in none.

    Args:
        name: of the parameter, or of the local tensor of a layout.
    """
    for pattern in _NAMES:
        if found := pattern.fullmatch(name):
            return f"{found['mixture']}.{found['matrix']}", int(found["place"])
    return None


def is_run(names: Sequence[str]) -> bool:
    """Whether parameters follow one another in one stack."""
    places = [place_in_stack(name) for name in names]
    first = places[0]
    return first is not None and places == [(first[0], first[1] + i) for i in range(len(names))]


def stacks_are_even(shapes: Mapping[str, Shape], layout: TrainLayout, has_buckets: bool) -> bool:
    """Whether the experts of a stack certainly lie as far apart in Megatron's buffers.

    A buffer of several buckets (gradients are reduced beside the backward pass) has padding after
    each, up to a multiple of its data-parallel size and of 128 (param_and_grad_buffer.py, 0.16.1).
    A bucket may end inside a stack. There is no padding where all parameters are such multiples.
    Where it is not certain, the stacks may still be even: a buffer of less than 40 million elements
    has one bucket.

    Args:
        shapes: of a rank's parameters, by the names of its layout.
        layout: of training.
        has_buckets: whether gradients are reduced so: `train.fuse_param_gather` is off.
    """
    if not has_buckets or layout.dp * layout.cp == 1:
        return True
    # Experts that are not dealt lie among all other parameters.
    own = layout.ep > 1
    divisor = lcm(layout.edp if own else layout.dp * layout.cp, 128)
    sizes = (prod(s) for name, s in shapes.items() if not own or place_in_stack(name))
    return all(size % divisor == 0 for size in sizes)


def in_stacks(names: Sequence[str]) -> list[str]:
    """Returns a chunk's parameters in an order whose reverse has every stack in one piece and
    ascending: Megatron's buffers hold parameters in the reverse of the order that they are given.

    Args:
        names: in the order of the modules. Only experts of one layer change places.
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
            found += [one for _, one in sorted(stacks.pop(place[0]), reverse=True)]
    return found
