"""A reward whose module makes the engine fail in the middle of generation, as PLANTED says.

PLANTED="STEP:RANK,RANK": on these ranks the model raises in its third forward pass of that step,
inside the engine, while tensor-parallel peers wait in the layer's collective for this rank.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from scripted_reward import digits

from hybridrl.parallel import waiting_room

__all__ = ["digits"]


def plant(planted_step: int) -> None:
    from hybridrl.generation.sampler import Sampler

    submit = Sampler.submit

    def submit_and_arm(self: Sampler, *given: Any, step: int, **named: Any) -> None:
        submit(self, *given, step=step, **named)
        calls: list[int] = []

        def fail_at_third(*_: Any) -> None:
            calls.append(step)
            if len(calls) == 3:
                Path(os.environ["PLANTED_TIME"]).write_text(str(time.time()))
                raise RuntimeError("planted in a forward pass")

        if step == planted_step:
            # SGLang calls no hooks above the decoder, vLLM none of the decoder itself.
            layer = self.engine.model.get_submodule("model.layers.0")
            layer.register_forward_pre_hook(fail_at_third)

    Sampler.submit = submit_and_arm  # type: ignore[method-assign]


if "RANK" in os.environ and "PLANTED" in os.environ:
    waiting_room.PATIENCE_S = 3.0  # of 10 s, which the ranks of a replica would wait out
    _step, _ranks = os.environ["PLANTED"].split(":")
    if os.environ["RANK"] in _ranks.split(","):
        plant(int(_step))
