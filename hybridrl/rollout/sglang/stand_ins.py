"""Stand-ins for two packages that SGLang imports, and a fix for models registered twice.

SGLang imports `torchvision`, whose wheels do not load with a CPU build of torch, and `sgl_kernel`,
which is compiled for GPUs. Text generation on CPUs with torch's attention calls neither of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hybridrl.rollout.common.process_state import replaced
from hybridrl.rollout.common.stand_ins import stand_in_for

STOOD_IN = ("sgl_kernel", "torchvision")
IMAGES = "AutoImageProcessor"


@contextmanager
def known_models_kept() -> Iterator[None]:
    """Makes transformers keep its own model types when SGLang registers the same ones.

    SGLang 0.5.16 registers a config for qwen3_asr, which transformers 5.19 and newer contain, and
    refuse to register again. May be removed once SGLang supports these versions.
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

    if not stand_in_for(STOOD_IN):
        return
    # SGLang registers image processors with a class that exists in transformers only if torchvision
    # is available. Clears what transformers may have cached before.
    import_utils.is_torchvision_available.cache_clear()
    for module in (transformers, transformers.models.auto):
        vars(module).get("_object_missing_backend", {}).pop(IMAGES, None)
        vars(module).pop(IMAGES, None)
