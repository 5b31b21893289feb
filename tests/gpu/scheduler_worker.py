"""One process on a GPU: vLLM's scheduler with our shortcuts against vLLM's own, played and live.

    PYTHONPATH=tests python tests/gpu/scheduler_worker.py

For a version of vLLM to come into vllm/version.py:KNOWN_SCHEDULERS this has to end well with it,
and on CPU contracts/test_vllm_engine.py. Live, both must draw the same tokens with the same
log-probabilities: they decode the same batches.
"""

from __future__ import annotations

import json
import time
from itertools import product

import numpy as np
from engine_cases import PACKAGED_MODELS
from scheduler_cases import Kind, compare_schedulers

from hybridrl.models.family import resolve_family
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.platform import Platform
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import Completion, Request, SamplingParams, generate
from hybridrl.rollout.vllm.adapter import VllmEngine
from hybridrl.rollout.vllm.version import installed_version, is_scheduler_known

CONFIG = {**PACKAGED_MODELS["vllm-qwen3"], "vocab_size": 4000, "head_dim": 64, "hidden_size": 256}
MAX_BATCH, NUM_REQUESTS, MAX_TOKENS = 32, 96, 400


def requests() -> list[Request]:
    """Returns three times as many as are decoded together, of all lengths; some stop early."""
    rng = np.random.default_rng(1)
    found = []
    for number in range(NUM_REQUESTS):
        prompt = tuple(rng.integers(2, CONFIG["vocab_size"], rng.integers(1, 200)).tolist())
        stops = tuple(range(20)) if number % 3 else ()
        sampling = SamplingParams(max_new_tokens=int(rng.integers(1, 200)), stop_token_ids=stops)
        found.append(Request(number, prompt, 1000 + number, sampling))
    return found


def run(engine: VllmEngine, version: int) -> tuple[list[Completion], float]:
    """Generates with an empty cache; returns the completions and seconds."""
    engine.begin_update()
    engine.finish_update(version)
    began = time.perf_counter()
    return generate(engine, requests()), time.perf_counter() - began


def main() -> None:
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    family = resolve_family(None, CONFIG)
    settings = EngineSettings(
        hf_config=CONFIG,
        architectures=family.architectures,
        dtype="float32" if platform.is_cpu else "bfloat16",
        max_batch=MAX_BATCH,
        max_tokens=MAX_TOKENS,
        eager=True,
    )
    layout = RolloutLayout.consecutive(1, 1)
    engine = VllmEngine(settings, family, layout, 0, "cpu" if platform.is_cpu else "cuda")
    core = engine._live.llm.engine_core.engine_core
    scheduler, decoding = core.scheduler, engine._decoding
    version = installed_version(platform.is_cpu)
    kinds = {"async": core.async_scheduling, "second runner": scheduler.use_v2_model_runner}
    print(f"{version}: {kinds}, known: {is_scheduler_known(version)}", flush=True)
    for is_async, is_second_runner in product((False, True), repeat=2):
        for num_blocks, max_tokens in ((300, 8192), (40, 8192), (300, 48)):
            kind = Kind(is_async, is_second_runner, num_blocks, max_tokens)
            ours, total = compare_schedulers(core, kind, NUM_REQUESTS)
            told = f"{dict(ours.counts)} of {dict(total)} are vLLM's"
            print(f"{kind}: {told}, {len(ours.preempted)} preempted", flush=True)
    run(engine, 0)  # compiles kernels
    found, seconds = run(engine, 1)
    scheduler.schedule, decoding._is_known = decoding._own_schedule, False
    expected, own_seconds = run(engine, 2)
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    assert [one.logps for one in found] == [one.logps for one in expected]
    said = {"seconds": round(seconds, 3), "vLLM's own": round(own_seconds, 3), "ok": True}
    print(json.dumps(said), flush=True)
    engine.close()
    stop_process_group()


if __name__ == "__main__":
    main()
