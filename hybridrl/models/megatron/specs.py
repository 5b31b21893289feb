"""Accesses the parts of Megatron-Core's layer specs, which differ between Megatron-Core versions.

In 0.16.1, a part is a `ModuleSpec` with a class and its submodules. In 0.19, feed-forward layers,
mixtures of experts and their parts are a `functools.partial` of a class, of its class method
`as_mlp_submodule` or of a function, with a keyword `submodules`. The functions here support both
forms.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from types import MethodType
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec


def submodules_of(part: Any) -> Any:
    return part.keywords["submodules"] if isinstance(part, partial) else part.submodules


def module_of(part: Any) -> Any:
    """Returns the class or function that builds a part; None if the part has neither form."""
    if isinstance(part, ModuleSpec):
        return part.module
    if isinstance(part, partial):
        return part.func.__self__ if isinstance(part.func, MethodType) else part.func
    return None


def with_module(part: Any, module: type) -> Any:
    """Returns a copy of a part with a subclass of its class, and the same submodules."""
    if isinstance(part, ModuleSpec):
        return dataclasses.replace(part, module=module)
    built: Any = module
    if isinstance(part.func, MethodType):
        built = getattr(module, part.func.__name__)
    return partial(built, *part.args, **part.keywords)
