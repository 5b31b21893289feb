"""The one table of rollout engines that exist. No torch.

Owns their names, and what is said of one that does not exist yet. What builds each is
trainer/setup.py.
"""

from __future__ import annotations

from typing import Literal

from pydantic_core import PydanticCustomError

EngineName = Literal["hf", "vllm", "scripted"]
# A replica is one rank, on CPU as on a GPU; the others are cut over `rollout.tp` ranks.
ONE_RANK_ENGINES = ("hf", "scripted")
NOT_YET = {"sglang": "SGLang"}


def refuse_not_yet(name: object) -> object:
    """Passes a name on, unless it is of an engine that is known but has no adapter yet."""
    if isinstance(name, str) and name.lower() in NOT_YET:
        said = f"'hf' or 'vllm', the engines that exist; {NOT_YET[name.lower()]} is not there yet"
        raise PydanticCustomError("engine_not_yet", said)  # type: ignore[arg-type]  # a literal
    return name
