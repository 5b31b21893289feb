"""How Megatron-Core says what a part of a layer is built of, which differs between its versions.

In 0.16.1 it is a `ModuleSpec` of a class and its submodules. In 0.19 feed-forward layers, mixtures
of experts and their parts are a `functools.partial` of a class, of its class method
`as_mlp_submodule` or of a function, with `submodules` among its keywords. The functions here read
and change both.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from types import MethodType
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec


def submodules_of(part: Any) -> Any:
    """Returns the submodules that a part is built of, the object itself."""
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules


def module_of(part: Any) -> Any:
    """Returns the class that a part is of; None: it is built in a way of its own."""
    if isinstance(part, ModuleSpec):
        return part.module
    if isinstance(part, partial):
        return part.func.__self__ if isinstance(part.func, MethodType) else part.func
    return None


def with_module(part: Any, module: type) -> Any:
    """Returns a part that is of another class and built of the same submodules.

    Args:
        part: as Megatron says it.
        module: a subclass of what it is of.
    """
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, module=module)
    built: Any = module
    if isinstance(part.func, MethodType):
        built = getattr(module, part.func.__name__)
    return partial(built, *part.args, **part.keywords)
