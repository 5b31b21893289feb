"""Stacks of experts: one matrix of each expert that a rank has of a layer, in order. No torch.

Megatron keeps each expert's matrix as a parameter, inference engines all of a layer in one tensor
(experts, rows, columns). Where the trainer's matrices lie one after another, as far apart from each
other, they are such a tensor already. Owns which parameters form a stack, and the order in which
they must be handed to Megatron's wrapper, whose buffers then hold them so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

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
