"""Repairs of SGLang for CPUs and for longrope, and stand-ins for two packages that it imports.

SGLang imports `torchvision`, whose wheels do not load with a CPU build of torch, and `sgl_kernel`,
which is compiled for GPUs. Text generation on CPUs with torch's attention calls neither of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hybridrl.errors import ModelError
from hybridrl.rollout.common.process_state import replaced
from hybridrl.rollout.common.stand_ins import stand_in_for
from hybridrl.rollout.sglang.arguments import CPU_ATTENTION


def settle_longrope(model: torch.nn.Module, version: str) -> None:
    """Makes every position use one table of angles; must run before CUDA graphs are captured.

    If any position in a batch exceeds the original length, SGLang (0.5.16 to 0.5.23) uses the long
    factors for the whole batch, so that a request's result depends on other requests. A run uses
    only one set of factors (models/families/by_length.py). Raises ModelError if both sets differ.
    """
    for name, part in model.named_modules():
        if not hasattr(part, "long_short_cos_sin_cache"):
            continue
        rope: Any = part
        if list(rope.short_factor) != list(rope.long_factor):
            raise ModelError(
                f"config.json: short_factor and long_factor, at {name} of {version}",
                "different lists",
                "equal lists, since a run uses the same factors for all its sequences",
                "Start the engine with the config that the trainer computes.",
            )
        rope.long_short_cos_sin_cache = rope.long_cos_sin_cache
        rope.original_max_position_embeddings = 0  # first position of the table


@contextlib.contextmanager
def latents_on_cpu() -> Iterator[None]:
    """Makes an engine that starts in this context compute latent attention with torch.

    Works around SGLang 0.5.16 to 0.5.23, whose table of attention backends uses Triton's entry for
    torch's attention. Torch's attention then expects the cache of latents to contain keys and
    values of all heads. The added entry stays until the process ends, and is needed until SGLang
    has its own. SGLang's rotary embedding for latents supports only YaRN on CPUs, so models without
    rotary scaling use the one for models without latent attention.
    """
    from sglang.srt.layers.rotary_embedding import get_rope
    from sglang.srt.models import deepseek_v2
    from sglang.srt.models.deepseek_common import attention_backend_handler as choice
    from sglang.srt.models.deepseek_common.attention_forward_methods import forward_methods

    absorbed = forward_methods.AttnForwardMethod.MLA
    choice.AttentionBackendRegistry.register(CPU_ATTENTION, lambda layer, batch: absorbed)
    get_yarn = deepseek_v2.get_rope_wrapper

    def positions(head_size: int, *, rope_scaling: Any, device: str, **sizes: Any) -> Any:
        if rope_scaling is not None:
            return get_yarn(head_size, rope_scaling=rope_scaling, device=device, **sizes)
        return get_rope(head_size, **sizes)

    with replaced(deepseek_v2, "get_rope_wrapper", positions):
        yield


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
