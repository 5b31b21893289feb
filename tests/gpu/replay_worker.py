"""Experts that vLLM records on a GPU, with captured graphs and without, against transformers.

    PYTHONPATH=$PWD:$PWD/tests python tests/gpu/replay_worker.py OUT.json

A mixture of experts with random weights in bfloat16 generates with both kinds of engine: many short
requests that are decoded together in batches which graphs pad, some with a prefix in common, and
prompts longer than a step takes, which vLLM computes in pieces. Every token but the last must have
a record. Of the recorded choices as many must be those of transformers, given the same tokens, as
rounding leaves: bfloat16 swaps experts near a tie, so eager vLLM is compared too, and graphs may
lose 0.02 to it. A record of another token or layer would agree by chance, in 4 of 16.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cases import write_weights
from engine_worker import is_second_runner
from tiny_models import chosen_by
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hybridrl.models.family import resolve_family
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.platform import Platform
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import Completion, Request, SamplingParams, generate
from hybridrl.rollout.vllm.adapter import VllmEngine

VOCAB, LONGEST, MAX_TOKENS = 2048, 20_000, 20_064
LEAST_SHARE, MOST_LOST = 0.85, 0.02
CONFIG = Qwen3MoeConfig(
    vocab_size=VOCAB,
    hidden_size=512,
    intermediate_size=1024,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=16,
    num_experts_per_tok=4,
    moe_intermediate_size=256,
    norm_topk_prob=True,
    mlp_only_layers=[1],
    max_position_embeddings=32768,
    architectures=["Qwen3MoeForCausalLM"],
)


def requests() -> list[Request]:
    """Returns 75 requests of 1 to 20,000 prompt tokens; 24 share their first 300."""
    rng, sampling = np.random.default_rng(0), SamplingParams(max_new_tokens=48)
    prefix = rng.integers(2, VOCAB, 300).tolist()
    lengths = [*rng.integers(1, 400, 48).tolist(), LONGEST, LONGEST - 77, 9_001]
    prompts = [rng.integers(2, VOCAB, length).tolist() for length in lengths]
    prompts += [prefix + rng.integers(2, VOCAB, 1 + n).tolist() for n in range(24)]
    return [Request(i, tuple(one), i, sampling) for i, one in enumerate(prompts)]


def agreed(oracle: Any, request: Request, done: Completion) -> tuple[int, int]:
    """Returns how many recorded choices transformers makes too, and of how many."""
    tokens = (*request.prompt, *done.tokens[:-1])
    with torch.no_grad(), chosen_by(oracle) as chosen:
        oracle(torch.tensor([tokens], device="cuda"), logits_to_keep=1)
    theirs_TLK = torch.stack(chosen, 1).cpu()
    ours_TLK = torch.from_numpy(done.blobs["routed_experts"]).long().view(-1, *theirs_TLK.shape[1:])
    assert ours_TLK.shape == theirs_TLK.shape, (ours_TLK.shape, theirs_TLK.shape)
    same = (ours_TLK[..., :, None] == theirs_TLK[..., None, :]).any(-1)
    return int(same.sum()), same.numel()


def share(oracle: Any, eager: bool, versions: int) -> dict[str, Any]:
    """Generates with the weights of each version; returns the shares of equal choices."""
    config = oracle.config.to_dict()
    family = resolve_family(None, config)
    settings = EngineSettings(
        config,
        family.architectures,
        "bfloat16",
        32,
        MAX_TOKENS,
        kv_cache_bytes=4 << 30,
        eager=eager,
        records_experts=True,
    )
    engine = VllmEngine(settings, family, RolloutLayout.consecutive(1, 1), 0, "cuda")
    assert is_second_runner(engine)
    found, asked = [], requests()
    start = time.perf_counter()
    for version in range(versions):
        if version:
            engine.sleep()
        torch.manual_seed(version)
        for parameter in oracle.parameters():
            torch.nn.init.normal_(parameter, std=0.02 if parameter.dim() > 1 else 0.1)
            if parameter.dim() == 1:
                parameter.data += 1
        write_weights(engine, oracle, version)
        pairs = [agreed(oracle, *one) for one in zip(asked, generate(engine, asked), strict=True)]
        found.append(sum(same for same, _ in pairs) / sum(number for _, number in pairs))
    seconds = time.perf_counter() - start
    engine.close()
    return {"shares": found, "seconds": seconds}


def main() -> None:
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    oracle = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).cuda().eval()
    oracle.requires_grad_(False)
    eager, graphs = (share(oracle, eager, versions=2) for eager in (True, False))
    stop_process_group()
    report = {"device": torch.cuda.get_device_name(), "eager": eager, "graphs": graphs}
    Path(sys.argv[1]).write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))
    for one, other in zip(eager["shares"], graphs["shares"], strict=True):
        assert one >= LEAST_SHARE and other >= one - MOST_LOST, report


if __name__ == "__main__":
    main()
