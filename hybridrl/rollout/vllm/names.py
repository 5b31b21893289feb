"""Names of vLLM's parameters that differ from those in HF checkpoints, apart from fused parameters.

vLLM's GPT-OSS has its own names for attention and the embedding, and models with images have others
for their parts. No vLLM.
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
    """Returns the name of a parameter or module as the layout of engines has it."""
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name
