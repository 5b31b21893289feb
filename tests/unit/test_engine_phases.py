"""The comparison of engine and trainer at the start of a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch

from hybridrl.config.schema import RolloutConfig
from hybridrl.loop.engine_phases import EngineDiffersError, _compare
from hybridrl.rollout.engine import Completion, Request, SamplingParams


@pytest.mark.parametrize("fp8", ["none", "hybrid"])
def test_a_difference_names_fp8_where_the_trainer_multiplies_in_it(
    fp8: Literal["none", "hybrid"],
) -> None:
    def logprobs(batch: Any) -> torch.Tensor:
        return torch.full((batch.num_tokens,), -3.0)

    model = SimpleNamespace(
        source=SimpleNamespace(dtype=torch.bfloat16), train=SimpleNamespace(fp8=fp8)
    )
    policy: Any = SimpleNamespace(model=model, logprobs=logprobs)
    request = Request(0, (1, 2, 3), 0, SamplingParams(1.0, max_new_tokens=2))
    completion = Completion(0, (4, 5), (-1.0, -1.0), "length", 1)
    with pytest.raises(EngineDiffersError, match="differ by 2 nats on average") as raised:
        _compare(policy, [request], [[completion]], RolloutConfig())
    said = str(raised.value)
    assert ("train.fp8=hybrid" in said and "Set train.fp8=none" in said) is (fp8 != "none")
    assert "position, norm and head settings" in said
    rollout = RolloutConfig(engine="vllm", quantization="fp8")
    with pytest.raises(EngineDiffersError, match="Set rollout.quantization=none"):
        _compare(policy, [request], [[completion]], rollout)
