"""Recorded experts of interrupted requests, and repeated backward passes of shared prompts, on one
GPU.

    PYTHONPATH=$PWD:$PWD/tests python tests/gpu/lagged_replay_worker.py OUT.json [vllm|sglang|none]

Prints a line with PASS or FAIL for each check and writes all numbers; about two minutes.

lag: an engine (vLLM with graphs) is left in the middle as by the sampler: `pending`, `clear`, other
weights, `submit`. Experts of tokens from before must be those of a transformers model with the
older weights, of tokens from after those of the newer ones.
preempted: a KV cache that is too small makes the engine take requests back and compute them again,
in pieces; all are taken out at such moments.
backward: gradients of keys that samples share have the same bits in 20 passes. The time of a pass
beside that of `index_add_`, and how often the whole model's gradients repeat, are only reported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from engine_cases import write_weights
from packaged import engine_class
from tiny_models import chosen_by
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from hybridrl.models.family import resolve_family
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.platform import Platform
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import Completion, Request, SamplingParams

VOCAB, TOKEN_BYTES = 2048, 4 * 2 * 4 * 128 * 2
# bfloat16 swaps experts near a tie; another token's, layer's or version's choices would agree by
# chance, in 4 of 16.
LEAST_SHARE, MOST_BY_CHANCE = 0.85, 0.5
CONFIG = {
    "vocab_size": VOCAB,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 256,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "architectures": ["Qwen3MoeForCausalLM"],
}
REPEATS = 20


def reference(version: int) -> Any:
    """Returns a model of random weights."""
    torch.manual_seed(version)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**CONFIG), dtype=torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02 if parameter.dim() > 1 else 0.1)
        if parameter.dim() == 1:
            parameter.data += 1
    return model.eval().requires_grad_(False)


def agreed(oracle: Any, request: Request, done: Completion) -> np.ndarray:
    """Returns, by position, the share of recorded choices that transformers makes too."""
    tokens = (*request.prompt, *done.tokens[:-1])
    with torch.no_grad(), chosen_by(oracle) as chosen:
        oracle(torch.tensor([tokens], device="cuda"), logits_to_keep=1)
    theirs_TLK = torch.stack(chosen, 1).cpu()
    assert done.experts is not None and len(done.experts) == len(tokens), done.request_id
    ours_TLK = torch.from_numpy(done.experts).long().view(theirs_TLK.shape)
    same_TLK = (ours_TLK[..., :, None] == theirs_TLK[..., None, :]).any(-1)
    return same_TLK.float().mean((1, 2)).numpy()


def make_requests(count: int, longest: int, new_tokens: int, first: int = 0) -> list[Request]:
    rng, sampling = np.random.default_rng(first), SamplingParams(max_new_tokens=new_tokens)
    lengths = rng.integers(20, longest, count)
    prefix = rng.integers(2, VOCAB, 40)
    return [
        Request(
            first + i, (*prefix.tolist(), *rng.integers(2, VOCAB, length).tolist()), i, sampling
        )
        for i, length in enumerate(lengths)
    ]


def make_engine(name: str, max_batch: int, max_tokens: int, cache_tokens: int) -> Any:
    config = Qwen3MoeConfig(**CONFIG).to_dict()
    family = resolve_family(None, config)
    settings = EngineSettings(
        family.for_engines(config),
        family.architectures,
        "bfloat16",
        max_batch,
        max_tokens,
        kv_cache_bytes=cache_tokens * TOKEN_BYTES,
        # SGLang compiles kernels for each size of a graph at its first start, minutes in all.
        eager=name == "sglang",
        records_experts=True,
    )
    return engine_class(name)(settings, family, RolloutLayout.consecutive(1, 1), 0, "cuda")


def run_out(engine: Any) -> dict[int, Completion]:
    found = {}
    while engine.has_unfinished:
        engine.step()
        found |= {done.request_id: done for done in engine.collect()}
    return found


def check_lag(name: str, models: list[Any]) -> dict[str, Any]:
    engine = make_engine(name, 128, 512, 128 * 512)
    write_weights(engine, models[0], 0)
    asked = make_requests(128, 300, 120)
    engine.submit(asked)
    for _ in range(50):
        engine.step()
    began = time.perf_counter()
    begun = engine.pending()
    pending_ms = 1e3 * (time.perf_counter() - began)
    engine.clear()
    engine.sleep()
    write_weights(engine, models[1], 1)
    engine.submit(begun)
    done = run_out(engine)
    engine.close()
    before, after, older = [], [], []
    for one in begun:
        read = len(one.prompt) + len(one.tokens) - 1 if one.tokens else 0
        assert (0 if one.experts is None else len(one.experts)) == read, (one.request_id, read)
        with_new = agreed(models[1], one, done[one.request_id])
        before.append(agreed(models[0], one, done[one.request_id])[:read])
        after.append(with_new[read:])
        older.append(with_new[:read])
    shares = {
        "tokens of older weights": float(np.concatenate(before).mean()),
        "tokens of newer weights": float(np.concatenate(after).mean()),
        "tokens of older weights, by newer": float(np.concatenate(older).mean()),
    }
    passed = (
        len(begun) > 100
        and min(list(shares.values())[:2]) >= LEAST_SHARE
        and shares["tokens of older weights, by newer"] <= MOST_BY_CHANCE
    )
    return {"passed": passed, "shares": shares, "begun": len(begun), "pending_ms": pending_ms}


def make_pieces_small(name: str, engine: Any) -> None:
    """Makes prompts, and what is computed again, come in pieces; and SGLang late to see that its
    cache is too small.
    """
    if name == "vllm":
        engine._live.llm.engine_core.engine_core.scheduler.max_num_scheduled_tokens = 256
        return
    scheduler = engine._scheduler
    scheduler.chunked_prefill_size = 256
    if hasattr(scheduler, "new_token_ratio_tracker"):
        scheduler.new_token_ratio_tracker.current = scheduler.new_token_ratio_tracker.min = 0.01


def taken_back(name: str, engine: Any) -> tuple[bool, bool]:
    """Returns whether a request waits that was taken back, and whether one is computed again."""
    if name == "vllm":
        core = engine._live.llm.engine_core.engine_core
        found = [one for one in core.scheduler.requests.values() if one.num_preemptions]
        counts = [(one.num_computed_tokens, one.num_tokens) for one in found]
    else:
        found = [running.request for running in engine._running.values()]
        counts = [
            (one.kv_committed_len, len(one.origin_input_ids) + len(one.output_ids))
            for one in found
            if one.output_ids and one.retraction_count
        ]
    waits = any(not computed for computed, _ in counts)
    return waits, any(0 < computed < tokens - 1 for computed, tokens in counts)


def check_preempted(name: str, models: list[Any]) -> dict[str, Any]:
    engine = make_engine(name, 64, 900, 10_000)
    make_pieces_small(name, engine)
    asked = make_requests(64, 400, 400, first=1000)
    write_weights(engine, models[0], 0)
    engine.submit(asked)
    done: dict[int, Completion] = {}
    num = {"waiting": 0, "in pieces": 0}
    num_steps = 0
    while engine.has_unfinished:
        engine.step()
        num_steps += 1
        done |= {one.request_id: one for one in engine.collect()}
        for kind, is_so in zip(num, taken_back(name, engine), strict=True):
            if not is_so or num[kind] == 3:
                continue
            num[kind] += 1
            begun = engine.pending()
            for one in begun:
                read = len(one.prompt) + len(one.tokens) - 1 if one.tokens else 0
                held = 0 if one.experts is None else len(one.experts)
                assert held == read, (kind, one.request_id, held, read)
            if num[kind] == 2:  # the rows stay in the engine; the weights are the same ones
                write_weights(engine, models[0], 1)
            else:
                engine.clear()
                engine.submit(begun)
            break
    engine.close()
    shares = [float(agreed(models[0], one, done[one.request_id]).mean()) for one in asked]
    passed = min(num.values()) > 0 and min(shares) >= LEAST_SHARE - 0.05
    found = {"least_share": min(shares), "mean_share": float(np.mean(shares))}
    return {"passed": passed, **found, "taken_out": num, "steps": num_steps}


def time_ms(call: Any) -> float:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(REPEATS):
        call()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / REPEATS


def check_gather() -> dict[str, Any]:
    """Keys of 7B with tensor parallel 2: 2 of 4 heads of 128; 8 groups of 8 samples of a prompt of
    2,000 tokens with 300 tokens each.
    """
    from hybridrl.models.megatron.attention import GatherKeys, SharedPrompts

    bounds, prefixes = [0], []
    for _ in range(8):
        first = len(prefixes)
        for length, prefix in ((2000, -1), *[(300, first)] * 8):
            bounds.append(bounds[-1] + length)
            prefixes.append(prefix)
    shared = SharedPrompts(tuple(bounds), tuple(prefixes), torch.zeros(1, device="cuda"))
    keys = shared.keys
    tokens = torch.randn(bounds[-1], 2, 128, device="cuda", dtype=torch.bfloat16)
    tokens.requires_grad_(True)
    gradient = torch.randn(len(keys.index_K), 2, 128, device="cuda", dtype=torch.bfloat16)

    def ours() -> torch.Tensor:
        out = GatherKeys.apply(tokens, keys.index_K, keys.readers)
        return torch.autograd.grad(out, tokens, gradient)[0]

    def atomics() -> torch.Tensor:
        total = torch.zeros(tokens.shape, dtype=torch.float32, device="cuda")
        tokens.index_select(0, keys.index_K)
        return total.index_add_(0, keys.index_K, gradient.float()).to(gradient.dtype)

    first, other = ours(), atomics()
    exact = torch.zeros(tokens.shape, dtype=torch.float64, device="cuda")
    exact.index_add_(0, keys.index_K, gradient.double())
    error = float((first.double() - exact).abs().max() / exact.abs().max())
    num_differ = sum(not torch.equal(first, ours()) for _ in range(REPEATS))
    return {
        "passed": num_differ == 0 and error < 2**-8,
        "passes that differ": num_differ,
        "passes of index_add_ that differ": sum(
            not torch.equal(other, atomics()) for _ in range(REPEATS)
        ),
        "error": error,
        "ms": time_ms(ours),
        "ms of index_add_": time_ms(atomics),
    }


def model_backward(shares: bool) -> dict[str, Any]:
    """Gradients of a whole mixture in 20 passes of one batch, in a process of its own."""
    from hybridrl.config.schema import TrainConfig
    from hybridrl.contracts.batch import Producer, Prompt, TrainBatch
    from hybridrl.parallel.groups import World
    from hybridrl.parallel.layout import TrainLayout
    from hybridrl.parallel.mesh import Mesh
    from hybridrl.training.model import ModelSource, ParallelModel

    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    mesh = Mesh(World(platform, 120), TrainLayout(1))
    config = Qwen3MoeConfig(**CONFIG).to_dict()
    family = resolve_family(None, config)
    source = ModelSource(family, config, torch.bfloat16, family.name, Path())
    platform.seed(1)
    settings = TrainConfig(micro_batch_tokens=16384, share_prompts=shares)
    model = ParallelModel(mesh, source, "lm", settings)
    generator = torch.Generator().manual_seed(0)
    for tensor in model.weights().values():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_((0.02 * noise if tensor.dim() > 1 else 1 + 0.1 * noise).to(tensor))
    model.make_trainable(1e-3)

    def draw(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, VOCAB, (count,), generator=generator).tolist())

    prompts, groups = [], []
    for number in range(4):
        tokens = draw(900)
        prompts += [Prompt(number, "", tokens, {}, draw(100 + 20 * i)) for i in range(8)]
        groups += [number] * 8
    batch = TrainBatch.supervised(prompts, Producer.here("the test of repeated passes"))
    batch = replace(batch, group_B=torch.tensor(groups))

    def objective(output: Any, micro: Any) -> tuple[torch.Tensor, None]:
        return (output.logp_S * micro.loss_mask_S).sum() / 1000, None

    chunks: list[torch.nn.Module] = model.chunks
    held = {
        f"{number} {name}": parameter.main_grad
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.named_parameters()
    }
    first: dict[str, torch.Tensor] = {}
    num_differ, differing, norms = 0, set[str](), set[float]()
    for _ in range(REPEATS + 1):
        model.accumulate(model.plan(batch).inputs, objective)
        found = {name: gradient.clone() for name, gradient in held.items()}
        for gradient in held.values():
            gradient.zero_()
        norms.add(sum(float(one.double().square().sum()) for one in found.values()) ** 0.5)
        first = first or found
        others = {name for name, one in found.items() if not torch.equal(one, first[name])}
        num_differ += bool(others)
        differing |= others
    assert min(norms) > 0
    stop_process_group()
    return {
        "passes that differ": num_differ,
        "gradients that differ": f"{len(differing)} of {len(held)}",
        "names": sorted(differing)[:4],
        "norms": sorted(norms)[:: max(1, len(norms) - 1)],
    }


def in_own_process(shares: bool) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile() as file:
        command = [sys.executable, __file__, file.name, "model", "--shares", str(int(shares))]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        text = Path(file.name).read_text()
    return json.loads(text) if text else {"error": done.stderr[-2000:]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("part", nargs="?", default="vllm")
    parser.add_argument("--shares", type=int, default=1)
    args = parser.parse_args()
    if args.part == "model":
        args.out.write_text(json.dumps(model_backward(bool(args.shares))))
        return
    report: dict[str, Any] = {"device": torch.cuda.get_device_name()}

    def note(name: str, call: Any, *arguments: Any) -> None:
        began = time.perf_counter()
        try:
            found = call(*arguments)
        except Exception as error:  # the other checks are of use
            found = {"passed": False, "error": f"{type(error).__name__}: {error}"}
        report[name] = {**found, "seconds": round(time.perf_counter() - began, 1)}
        verdict = {True: "PASS", False: "FAIL"}.get(found.get("passed"), "INFO")
        print(f"{verdict} {name}: {json.dumps(report[name])}", flush=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")

    note("backward", check_gather)
    if args.part != "none":
        platform = Platform.detect()
        platform.activate()
        start_process_group(platform, 120)
        models = [reference(version) for version in range(2)]
        note("lag", check_lag, args.part, models)
        note("preempted", check_preempted, args.part, models)
        stop_process_group()
    if args.part != "sglang":
        note("model, shared prompts", in_own_process, True)
        note("model, own prompts", in_own_process, False)
    failed = [
        name for name, one in report.items() if isinstance(one, dict) and one.get("passed") is False
    ]
    print(f"failed: {failed or 'none'}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
