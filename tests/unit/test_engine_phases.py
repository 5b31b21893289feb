"""The comparison of engine and trainer at the start of a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_images import save_processor

from hybridrl.config.schema import RolloutConfig
from hybridrl.contracts.prompts import Content
from hybridrl.loop.engine_phases import EngineDiffersError, _compare, _fixed_requests
from hybridrl.models.megatron.image_inputs import ImageInputs
from hybridrl.models.vision.images import decoded
from hybridrl.models.vision.shape import VisionShape
from hybridrl.rollout.engine import Completion, Request, SamplingParams


def config_of(rollout: RolloutConfig, fp8: str = "none") -> Any:
    """Returns the parts of a configuration that the comparison reads."""
    numerics, train = SimpleNamespace(is_exact=False), SimpleNamespace(fp8=fp8)
    return SimpleNamespace(rollout=rollout, numerics=numerics, train=train)


@pytest.mark.parametrize("fp8", ["none", "hybrid", "blockwise"])
def test_a_difference_names_fp8_where_the_trainer_multiplies_in_it(fp8: str) -> None:
    def logprobs(batch: Any) -> torch.Tensor:
        return torch.full((batch.num_tokens,), -3.0)

    model = SimpleNamespace(source=SimpleNamespace(dtype=torch.bfloat16))
    policy: Any = SimpleNamespace(model=model, logprobs=logprobs)
    request = Request(0, (1, 2, 3), 0, SamplingParams(1.0, max_new_tokens=2))
    completion = Completion(0, (4, 5), (-1.0, -1.0), "length", 1)
    with pytest.raises(EngineDiffersError, match="differ by 2 nats on average") as raised:
        _compare(policy, [request], [[completion]], config_of(RolloutConfig(), fp8))
    said = str(raised.value)
    assert (f"train.fp8={fp8}" in said and "Set train.fp8=none" in said) is (fp8 != "none")
    assert "position, norm and head settings" in said
    assert f"allowed: {0.2 if fp8 == 'none' else 0.8:g} on average" in said
    rollout = RolloutConfig(engine="vllm", quantization="fp8")
    with pytest.raises(EngineDiffersError, match="Set rollout.quantization=none") as raised:
        _compare(policy, [request], [[completion]], config_of(rollout, fp8))
    assert (f"trainer too (train.fp8={fp8})" in str(raised.value)) is (fp8 != "none")
    assert "allowed: 0.8 on average" in str(raised.value)


# The processor shrinks the larger image from 30 tokens to 12.
@pytest.mark.parametrize(
    ("max_tokens", "num_tokens", "size"),
    [(24, 12, (48, 40)), (14, 6, (24, 16)), (9, 0, None)],
)
def test_every_second_prompt_has_an_image_if_it_fits(
    max_tokens: int, num_tokens: int, size: tuple[int, int] | None, tmp_path: Path
) -> None:
    save_processor(tmp_path)
    vision = VisionShape(
        "qwen3_vl", {}, image_token=3, start_token=2, end_token=4, patch_size=4, merge_size=2
    )
    source = SimpleNamespace(
        shape=SimpleNamespace(vocab_size=90), extra_inputs=ImageInputs(vision, tmp_path)
    )
    policy: Any = SimpleNamespace(model=SimpleNamespace(source=source))
    sampler: Any = SimpleNamespace(sampling=SamplingParams(1.0, max_new_tokens=8))
    requests = _fixed_requests(sampler, policy, max_tokens)
    assert [bool(one.contents) for one in requests] == [False, num_tokens > 0] * 2
    assert all(len(one.prompt) <= max_tokens for one in requests)
    assert len({one.prompt for one in requests}) == len(requests)
    for one in requests:
        for image in one.contents:
            assert one.prompt[image.start - 1 : image.end + 1] == (2, *[3] * num_tokens, 4)
            assert decoded(image.arrays["file"].tobytes()).size == size
    images = [image.key for one in requests for image in one.contents]
    assert len({*images}) == len(images)


def test_engine_and_trainer_are_compared_with_the_same_images() -> None:
    found: list[Any] = []

    def logprobs(batch: Any) -> torch.Tensor:
        found.extend(prompt.contents for prompt in batch.prompts)
        return torch.full((batch.num_tokens,), -1.0)

    model = SimpleNamespace(source=SimpleNamespace(dtype=torch.float32))
    policy: Any = SimpleNamespace(model=model, logprobs=logprobs)
    image = Content("image", 1, 1, "key")
    request = Request(0, (1, 2, 3), 0, SamplingParams(1.0, max_new_tokens=2), contents=(image,))
    completion = Completion(0, (4, 5), (-1.0, -1.0), "length", 1)
    _compare(policy, [request], [[completion]], config_of(RolloutConfig()))
    assert found == [(image,)]
