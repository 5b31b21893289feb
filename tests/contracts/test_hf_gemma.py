"""The hf engine with models whose attention has soft caps or two kinds of positions."""

from __future__ import annotations

import pytest
import torch
from tiny_models import tiny_model

from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.rollout.hf.adapter import HfEngine


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text"])
def test_hf_engine_decodes_gemma_greedily_as_transformers_does(name: str) -> None:
    """Beyond the window of 7; transformers' eager attention has the caps, its default does not."""
    model = tiny_model(name).eval()
    model.set_attn_implementation("eager")
    engine = HfEngine(model.config.to_dict() | {"architectures": [type(model).__name__]})
    engine.begin_update()
    parameters = dict(model.named_parameters())
    for key, tensor in engine.tensors().items():
        tensor.copy_(parameters[key].data)
    engine.finish_update(0)
    sampling = SamplingParams(temperature=0.0, max_new_tokens=8)
    asked = [Request(i, tuple(range(2, 2 + n)), i, sampling) for i, n in enumerate((3, 12, 20))]
    for request, done in zip(asked, generate(engine, asked), strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([request.prompt + done.tokens])).logits[0]
        logp = logits.log_softmax(-1)[len(request.prompt) - 1 : -1]
        assert logp.argmax(-1).tolist() == list(done.tokens)
        expected = logp[range(len(done.tokens)), list(done.tokens)]
        # float32 sums in another order, over four layers.
        assert torch.allclose(expected, torch.tensor(done.logps), atol=1e-4)
