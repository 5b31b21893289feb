"""Wraps a module and replaces some of its attributes, for libraries that assume a single world."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class View(ModuleType):
    """Forwards to `module`, except for attributes that are set on the view."""

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
