"""Names of vLLM's parameters that differ from those in HF checkpoints, apart from fused ones: in
GPT-OSS, and in models with images. No vLLM.
"""

from __future__ import annotations

import re

_RENAMED = (
    (re.compile(r"^language_model\.(model\.|lm_head\.)"), r"\1"),
    (re.compile(r"^visual\."), "model.visual."),
    (re.compile(r"^model\.embedding\."), "model.embed_tokens."),
    (re.compile(r"^(model\.layers\.\d+)\.attn\."), r"\1.self_attn."),
)


def hf_style(name: str) -> str:
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name
