"""Hides notices of Megatron-Core's log that users of hybridrl can do nothing about.

Megatron-Core 0.19 prints them whenever a model is built. Without a logging configuration they go to
stderr, where they would stand before the message about a user's mistake.
"""

from __future__ import annotations

import logging

_NOTICES = {
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.distributed.distributed_data_parallel": "DistributedDataParallel: full_param",
    "megatron.core.transformer.transformer_layer": "Unknown MLP type",
}
"""Beginnings of notices by the loggers that print them. The MLP type is that of models whose norms
stand after their layers (post_norm.py): Megatron passes no process group to it, and it then uses
the tensor-parallel group, as `MLP` does."""


def hide_notices() -> None:
    """Adds a filter to each logger of `_NOTICES`; calling it again changes nothing."""
    for name in _NOTICES:
        logging.getLogger(name).addFilter(_is_other)


def _is_other(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith(_NOTICES[record.name])
