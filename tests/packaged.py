"""The engines of packages that are installed beside hybridrl: the one list that tests run them by.

A test that takes `name` from PACKAGED runs for each engine whose package this environment has, and
is skipped for the others. A new engine joins by a line in CLASSES.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from hybridrl.rollout.registry import load_symbol

CLASSES = {
    "vllm": "hybridrl.rollout.vllm.adapter:VllmEngine",
    "sglang": "hybridrl.rollout.sglang.adapter:SglangEngine",
}

# Keys of models that an engine refuses, and that its variants of the tests' models leave out.
REFUSED_KEYS = {"vllm": (), "sglang": ("mlp_only_layers",)}
# Families with images that an engine refuses.
REFUSED_FAMILIES = {"vllm": (), "sglang": ("qwen3_5", "qwen3_5_moe")}
# Engines that refuse presence_penalty of a request that goes on, saved or after an update. No trait
# says so: what is trained on has no penalties, and evaluations are not saved before their end.
LOSE_PRESENCE = ("vllm",)


def needs(engine: str) -> tuple[Any, Any]:
    """Returns the marks of a test that needs an engine: CPU only, where attention has float32."""
    is_there = find_spec(engine) is not None and not torch.cuda.is_available()
    skip = pytest.mark.skipif(not is_there, reason=f"needs {engine} on a host without GPUs")
    return pytest.mark.engine, skip


FUSED_LAYOUT = "hybridrl.rollout.common.packaged_engine.fused_layout"
PACKAGED = [pytest.param(name, marks=needs(name)) for name in CLASSES]
INSTALLED = [name for name in CLASSES if not needs(name)[1].args[0]]
NEEDS_ANY = (
    pytest.mark.engine,
    pytest.mark.skipif(not INSTALLED, reason=f"needs one of {', '.join(CLASSES)}"),
)


def engine_class(name: str) -> Any:
    """Returns the adapter's class."""
    return load_symbol(CLASSES[name])
