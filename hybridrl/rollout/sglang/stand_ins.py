"""Stand-ins for two packages that SGLang imports, and a fix for models registered twice.

SGLang imports `torchvision`, whose wheels do not load with a CPU build of torch, and `sgl_kernel`,
which is compiled for GPUs. Text generation on CPUs with torch's attention calls neither of them.
Calling a stand-in raises an error.
"""

from __future__ import annotations

import enum
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from hybridrl.rollout.common.process_state import replaced

STOOD_IN = ("sgl_kernel", "torchvision")
IMAGES = "AutoImageProcessor"


class _Missing:
    """A function or class of a package with a stand-in."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{self._name} is a stub on CPUs: its package is not installed")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Missing(f"{self._name}.{name}")


class _Module(types.ModuleType):
    """A module of a package with a stand-in; every attribute exists."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":  # SGLang reads the enum's members at import
            modes = "NEAREST NEAREST_EXACT BILINEAR BICUBIC BOX HAMMING LANCZOS"
            return enum.Enum(name, modes)
        return _Missing(f"{self.__name__}.{name}")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages with stand-ins, and any submodule of them."""

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


@contextmanager
def known_models_kept() -> Iterator[None]:
    """Makes transformers keep its own model types when SGLang registers the same ones.

    SGLang 0.5.16 registers a config for qwen3_asr. transformers 5.19 and newer already contain that
    model type, and refuse to register it a second time. This fix may be removed once SGLang
    supports these versions.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    owner: Any = type(CONFIG_MAPPING)
    register = owner.register

    def register_new(mapping: Any, key: str, value: type, exist_ok: bool = False) -> None:
        if exist_ok or key not in mapping:
            register(mapping, key, value, exist_ok=exist_ok)

    with replaced(owner, "register", register_new):
        yield


def stand_in() -> None:
    """Makes SGLang importable by installing stand-ins for missing packages."""
    import transformers
    import transformers.models.auto
    from transformers.utils import import_utils

    missing = [name for name in STOOD_IN if name not in sys.modules and find_spec(name) is None]
    if not missing:
        return
    sys.meta_path.append(_Finder(missing))
    # SGLang registers image processors with a class that exists in transformers only if torchvision
    # is available. Clears what transformers may have cached before.
    import_utils.is_torchvision_available.cache_clear()
    for module in (transformers, transformers.models.auto):
        vars(module).get("_object_missing_backend", {}).pop(IMAGES, None)
        vars(module).pop(IMAGES, None)
