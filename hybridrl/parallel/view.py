"""A module with some of its names replaced, for other people's code that knows one world only."""

from __future__ import annotations

from types import ModuleType
from typing import Any


class View(ModuleType):
    """What `module` has, but for the attributes that are set on the view.

    Args:
        module: to look through to.
    """

    def __init__(self, module: ModuleType) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_module"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.__dict__[name] = value
