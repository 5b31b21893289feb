"""Stand-ins for packages that an engine imports but does not call; calling one raises an error."""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any


class _Missing:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self._name} is a stub on CPUs: its package is not installed")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":  # read at import
            modes = "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
            return enum.Enum(name, modes)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, roots: Sequence[str]) -> None:
        self._roots = frozenset(roots)

    def find_spec(
        self, fullname: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".")[0] not in self._roots:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        vars(module)["__version__"] = "0"
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: the module is empty."""


def stand_in_for(names: Sequence[str]) -> bool:
    """Installs stand-ins for those packages that are missing; returns whether there are any."""
    missing = [name for name in names if name not in sys.modules and find_spec(name) is None]
    if missing:
        sys.meta_path.append(_Finder(missing))
    return bool(missing)
