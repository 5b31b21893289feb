"""Calculator tool: evaluates arithmetic expressions of bounded size by walking their syntax tree.

Supports numbers, + - * / // % **, signs and parentheses. Executes no other code. No integer has
more than MAX_BITS bits, so every expression is evaluated quickly. Does not import torch.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from hybridrl.environments.parsers import ToolParser
from hybridrl.environments.tools import ToolEnvironment

MAX_CHARACTERS = 200  # this also bounds the depth of the syntax tree
MAX_BITS = 512

Number = int | float
BINARY: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator(ToolEnvironment):
    """Environment with the tool `calculate(expression)`; arguments as in ToolEnvironment."""

    runs = "here"  # runs in the rank's process, because a calculation cannot hang

    def __init__(
        self,
        parser: str | ToolParser = "hermes",
        parser_options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__({"calculate": calculate}, parser, parser_options)


def calculate(expression: str) -> str:
    """Returns the value of an arithmetic expression as text. Floats have ten significant digits.
    Raises ValueError for other expressions and for too long or large ones, and ArithmeticError for
    a division by zero.
    """
    if not isinstance(expression, str) or len(expression) > MAX_CHARACTERS:
        raise ValueError(f"not a valid expression, or longer than {MAX_CHARACTERS} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError("not an arithmetic expression") from error
    value = _value(tree.body)
    return str(value) if isinstance(value, int) else f"{value:.10g}"


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return _bounded(node.value + 0)  # converts a bool to an int
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            # Check a lower bound on the number of bits of the result before computing the power.
            # The result has at most twice as many bits as this bound.
            if not abs(right) * max(_bits(left) - 1, 0) <= MAX_BITS:
                raise ValueError("too large")
            if left < 0 and not isinstance(right, int):
                raise ValueError("cannot compute a root of a negative number")
        return _bounded(BINARY[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and parentheses are supported")


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and _bits(value) > MAX_BITS:
        raise ValueError("too large")
    return value


def _bits(value: Number) -> int:
    return int(value).bit_length() if abs(value) < 2.0**1000 else 1024
