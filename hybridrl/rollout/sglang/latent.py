"""Repairs SGLang's latent attention on CPUs, where its own kernels are not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from hybridrl.rollout.common.process_state import replaced
from hybridrl.rollout.sglang.arguments import CPU_ATTENTION


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
