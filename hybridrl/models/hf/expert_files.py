"""Stacks of experts in files: tensors that contain one matrix of every expert of a layer.

A weight table names each expert's matrices. Some directories store gate and up of all experts as
one tensor, `mlp.experts.gate_up_proj`, and `down_proj` as another. Matrices are transposed in
published directories of Qwen3-VL with experts, but not in directories that transformers writes.
Code here decides by the shapes, as transformers does. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hybridrl.models.boxes import Box, Shape

EXPERT_MATRIX = re.compile(
    r"(?P<experts>.*\.mlp\.experts)\.(?P<index>\d+)\.(?P<matrix>gate_proj|up_proj|down_proj)\.weight"
)
# Values of `model_type` of models whose published directories contain transposed stacks. vLLM reads
# no other files of these models.
TRANSPOSED = ("qwen3_vl_moe",)


class StackPlace(NamedTuple):
    """Place of an expert's matrix in a stack.

    first_row: First row of the matrix among the rows of the expert's matrices.
    """

    stack: str
    expert: int
    first_row: int
    is_transposed: bool

    def box(self, box: Box) -> Box:
        """Returns the rectangle of the stack that contains a rectangle of the matrix."""
        (start, stop), columns = box
        rows = self.first_row + start, self.first_row + stop
        expert = self.expert, self.expert + 1
        return (expert, columns, rows) if self.is_transposed else (expert, rows, columns)


def transposed(stack: Shape) -> Shape:
    return (stack[0], *stack[:0:-1])


def has_transposed_stacks(config: Mapping[str, Any]) -> bool:
    """Whether a model is written with stacks of transposed matrices."""
    return config.get("model_type") in TRANSPOSED


def expert_stacks(
    shapes: Mapping[str, Shape], is_transposed: Callable[[str, Shape], bool]
) -> tuple[dict[str, StackPlace], dict[str, Shape]]:
    """Returns the place of each expert's matrix in stacks, and the shape of each stack.

    Args:
        is_transposed: Function that returns whether a stack contains transposed matrices, given the
            stack's name and its shape without transposition.
    """
    members: dict[str, list[tuple[int, str]]] = {}
    for name in shapes:
        if (found := EXPERT_MATRIX.fullmatch(name)) is not None:
            matrix = "down_proj" if found["matrix"] == "down_proj" else "gate_up_proj"
            stack = f"{found['experts']}.{matrix}"
            members.setdefault(stack, []).append((int(found["index"]), name))
    places: dict[str, StackPlace] = {}
    stacks: dict[str, Shape] = {}
    for stack, own in members.items():
        rows, columns = shapes[own[0][1]]
        num_experts = len({index for index, _ in own})
        plain = num_experts, rows * len(own) // num_experts, columns
        swaps = is_transposed(stack, plain)
        stacks[stack] = transposed(plain) if swaps else plain
        for index, name in own:
            first = rows * name.endswith(".up_proj.weight")
            places[name] = StackPlace(stack, index, first, swaps)
    return places, stacks
