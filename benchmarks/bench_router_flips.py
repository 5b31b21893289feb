"""Measures how much of a mixture's mismatch in bf16 comes from routers that choose other experts.

    python benchmarks/bench_router_flips.py --out OUT.json

transformers' GPT-OSS on the CPU, three layers with random weights and the 20B model's numbers of
experts, narrower, with weights scaled so that logits vary as in the 20B model. The same weights
and tokens are computed in fp32, in bf16, and in bf16 with the experts that fp32 chose. The
difference is that of log-probabilities of tokens drawn from fp32. No code of hybridrl computes
anything here.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from case_record import command_of, commit
from transformers import GptOssConfig, GptOssForCausalLM

WIDTH, REAL_WIDTH, NUM_LAYERS, VOCABULARY, TOKENS = 768, 2880, 3, 8192, (2, 256)


def main() -> None:
    """Writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rounded = random_model().bfloat16()
    exact = copy.deepcopy(rounded).float()
    tokens = torch.randint(0, VOCABULARY, TOKENS)
    with chosen_experts(exact) as by_exact:
        reference = log_probabilities(exact, tokens)
    with chosen_experts(rounded) as by_rounded:
        found = log_probabilities(rounded, tokens)
    with replayed(rounded, by_exact):
        with_replay = log_probabilities(rounded, tokens)
    drawn = torch.distributions.Categorical(logits=reference).sample()[..., None]
    result = {
        "benchmark": "mismatch of a mixture in bf16, with and without the experts of fp32",
        "command": command_of(sys.argv),
        "commit": commit(),
        "machine": {"torch": torch.__version__, "transformers": transformers.__version__},
        "tokens_with_other_experts": [
            float((a.sort(-1)[0] != b.sort(-1)[0]).any(-1).float().mean())
            for a, b in zip(by_exact, by_rounded, strict=True)
        ],
        "logprob_diff_mean": {
            name: float((one - reference).gather(-1, drawn).abs().mean())
            for name, one in (("own experts", found), ("experts of fp32", with_replay))
        },
    }
    print(json.dumps(result, indent=1))
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")


def random_model() -> Any:
    """Returns GPT-OSS in fp32, initialized as hybridrl does for the real width."""
    config = GptOssConfig(
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=16,
        num_key_value_heads=2,
        head_dim=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        vocab_size=VOCABULARY,
        attn_implementation="eager",
    )
    model = GptOssForCausalLM(config).float().eval()
    for name, parameter in model.named_parameters():
        if "bias" in name or "sinks" in name:
            parameter.data.zero_()
        elif parameter.dim() == 1:
            parameter.data.fill_(1)
        else:
            is_embedding = "embed_tokens" in name
            scale = 0.02 if is_embedding else 0.02 * (REAL_WIDTH / WIDTH) ** 0.5
            if "o_proj" in name or "down_proj" in name:
                scale /= (2 * NUM_LAYERS) ** 0.5
            parameter.data.normal_(0, scale)
    return model


@torch.no_grad()
def log_probabilities(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the log-probabilities of all tokens at each position, fp32."""
    return model(tokens).logits.float().log_softmax(-1)


@contextmanager
def chosen_experts(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collects the experts of each token, (T, 4), layer by layer."""
    found: list[torch.Tensor] = []
    hooks = [
        layer.mlp.router.register_forward_hook(lambda _, __, output: found.append(output[2]))
        for layer in model.model.layers
    ]
    yield found
    for hook in hooks:
        hook.remove()


@contextmanager
def replayed(model: Any, experts: list[torch.Tensor]) -> Iterator[None]:
    """Makes routers take these experts, with their own logits."""

    def take(chosen: torch.Tensor) -> Any:
        def hook(_: Any, __: Any, output: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return output[0], output[0].gather(-1, chosen).softmax(-1), chosen

        return hook

    hooks = [
        layer.mlp.router.register_forward_hook(take(chosen))
        for layer, chosen in zip(model.model.layers, experts, strict=True)
    ]
    yield
    for hook in hooks:
        hook.remove()


if __name__ == "__main__":
    main()
