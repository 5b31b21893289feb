"""An engine on GPUs against transformers in bf16: what tests/contracts asks of it on CPUs.

engine_worker.py ENGINE [MODEL ...]    on one GPU; under torchrun on two a replica of both; prints a
                                       line a model: qwen3, qwen3_moe (these two unless told),
                                       mixtral, deepseek_v3.

bf16 rounds otherwise in other kernels: log-probabilities may be FACTOR times as far from fp32 as
those of transformers in bf16 are, and tokens of one engine are compared with tokens of the same.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
from dataclasses import replace
from itertools import compress
from typing import Any

import numpy as np
import torch
from engine_cases import write_weights
from packaged import CLASSES, LOSE_PRESENCE, engine_class
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl.models.family import resolve_family
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.platform import Platform
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import Completion, Request, SamplingParams, generate

IS_GPU = torch.cuda.is_available()  # without one the script only shows that it runs
DTYPE = torch.bfloat16 if IS_GPU else torch.float32
# Of two computations that round as often, on the worst of 1,920 tokens; and where nothing rounds.
FACTOR, LEAST = 2.0, 1e-4
# How often a draw from one computation differs from the same draw from another, at most, in mean
# differences of their log-probabilities: two draws by the same noise differ twice as often as the
# total variation, which is half of that mean, and filters and low temperatures add to it.
DRAWS = 3.0
CHANCE = 2.0  # standard deviations of that number that chance may add
VOCAB = 4000
CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
EXPERTS = {
    **CONFIG,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
# Sizes of a head as published models have them: kernels for latent attention have no others.
LATENT = {
    **{key: value for key, value in CONFIG.items() if key != "head_dim"},
    "num_key_value_heads": 4,
    "model_type": "deepseek_v3",
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 1,
}
MODELS = {
    "qwen3": CONFIG,
    "qwen3_moe": EXPERTS,
    "mixtral": {
        **CONFIG,
        "model_type": "mixtral",
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "deepseek_v3": LATENT,
}
KINDS = [
    SamplingParams(temperature=0.0, max_new_tokens=40),
    SamplingParams(temperature=0.7, top_k=50, max_new_tokens=40),
    SamplingParams(temperature=1.0, top_p=0.8, max_new_tokens=40, stop_token_ids=(1, 2, 3)),
    SamplingParams(temperature=1.0, max_new_tokens=40),
    SamplingParams(
        max_new_tokens=40,
        stop_token_ids=tuple(range(1, 129)),  # as many as vLLM takes
        min_new_tokens=20,
        repetition_penalty=1.3,
        presence_penalty=0.5,
    ),
]


def make_reference(config: dict[str, Any], seed: int, device: torch.device) -> tuple[Any, Any]:
    """Returns a model of random weights as the engine has them, and the same to compute in fp32."""
    fields = dict(config)
    made = AutoConfig.for_model(fields.pop("model_type"), **fields)
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32).eval()
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(0.1 * noise if parameter.ndim > 1 else 1 + 0.1 * noise)
    model = model.to(device, DTYPE)
    return model, copy.deepcopy(model).float()


def requests(count: int, seed: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    prompts = [tuple(rng.integers(4, VOCAB, 3 + i % 90).tolist()) for i in range(count)]
    return [Request(i, prompts[i], 77 + i, KINDS[i % len(KINDS)]) for i in range(count)]


def logps(model: Any, request: Request, done: Completion) -> torch.Tensor:
    """The reference's log-probabilities of a response by the request's own distribution."""
    from hybridrl.rollout.common.penalties import TokenHistory, penalized
    from hybridrl.rollout.common.sampling import log_distribution

    ids = torch.tensor([request.prompt + done.tokens], device=model.device)
    with torch.no_grad():
        logits_TV = model(ids).logits[0, len(request.prompt) - 1 : -1].float()
    # Sampled by another computation of bf16, a token may lie just outside of top-k or top-p.
    sampling = [replace(request.sampling, top_k=0, top_p=1.0)] * len(done.tokens)
    said = [TokenHistory(request.prompt, done.tokens[:place]) for place in range(len(done.tokens))]
    found_TV = log_distribution(penalized(logits_TV, sampling, said), sampling)
    return found_TV.gather(-1, torch.tensor(done.tokens, device=model.device)[:, None])[:, 0].cpu()


def check_logps(
    model: Any, exact: Any, asked: list[Request], done: list[Completion], is_mixture: bool
) -> tuple[str, float]:
    """Of whole distributions each; with top-k or top-p what is left out only raises them. Returns
    what was found, and the mean difference of engine and transformers in the engine's type.

    The worst token is judged. In a mixture rounding may choose another expert, nats away; how far
    the worst is then says which tokens there were, and means and what 90% are within is judged.
    """
    worst, apart = torch.zeros(2), list[float]()
    gaps: dict[bool, list[tuple[float, float]]] = {True: [], False: []}  # by whether whole
    for request, one in zip(asked, done, strict=True):
        wanted = logps(exact, request, one)
        of_type = logps(model, request, one)
        theirs = (of_type - wanted).abs()
        gap = torch.tensor(one.logps) - wanted
        whole = request.sampling.top_k == 0 and request.sampling.top_p == 1
        ours = gap.abs() if whole else -gap
        worst = torch.maximum(worst, torch.stack([ours.max(), theirs.max()]))
        gaps[whole] += zip(ours.clamp(min=0).tolist(), theirs.tolist(), strict=True)
        if whole and request.sampling.temperature > 0:
            apart += (torch.tensor(one.logps) - of_type).abs().tolist()
    (mean, their_mean), cut = (np.mean(gaps[whole], axis=0) for whole in (True, False))
    nearly, they_nearly = np.quantile(gaps[True], 0.9, axis=0)
    said = (
        f"log-probabilities within {worst[0]:.4f} of fp32, {mean:.4f} in the mean, 90% within "
        f"{nearly:.4f}, those of transformers {worst[1]:.4f}, {their_mean:.4f}, {they_nearly:.4f}"
    )
    in_mixture = [(mean, their_mean), (nearly, they_nearly), cut]
    judged = in_mixture if is_mixture else [worst.tolist()]
    for engine, reference in judged:
        assert engine <= FACTOR * reference + LEAST, said
    return said, float(np.mean(apart))


def count_changed(one: list[Completion], other: list[Completion]) -> tuple[int, int]:
    """Returns the draws whose tokens before them are equal, and how many of them differ."""
    drawn = changed = 0
    for a, b in zip(one, other, strict=True):
        equal = [x == y for x, y in zip(a.tokens, b.tokens, strict=False)]
        drawn += len(equal) if all(equal) else equal.index(False) + 1
        changed += not all(equal)
    return drawn, changed


def check_changed(what: str, one: list[Completion], other: list[Completion], apart: float) -> str:
    drawn, changed = count_changed(one, other)
    expected = DRAWS * apart * drawn
    most = expected + CHANCE * math.sqrt(expected)
    said = f"{changed} of {drawn} draws differ {what}, of {most:.0f} at most"
    assert changed <= most, said
    return said


def check_batches(engine: Any, asked: list[Request], done: list[Completion], apart: float) -> str:
    """Requests give the same whatever is beside them, but where rounding moves a draw."""
    backwards = generate(engine, asked[::-1])[::-1]
    alone = [generate(engine, [request])[0] for request in asked[:8]]
    return "; ".join(
        [
            check_changed("in another order", done, backwards, apart),
            check_changed("alone", done[:8], alone, apart),
        ]
    )


def check_interruption(
    engine: Any, model: Any, asked: list[Request], done: list[Completion], apart: float
) -> str:
    """Requests go on after an update in their middle as if nothing had been."""
    engine.submit(asked)
    for _ in range(15):
        engine.step()
    finished = engine.collect()
    pending = engine.pending()
    assert pending and any(one.tokens for one in pending)
    engine.sleep()
    write_weights(engine, model, engine.version)
    engine.clear()
    finished += generate(engine, pending)
    by_id = {one.request_id: one for one in finished}
    again = [by_id[one.request_id] for one in done]
    return check_changed("after a sleep in the middle", done, again, apart)


def check_sleep(engine: Any, model: Any) -> str:
    """Memory comes back, comes again, and what was captured reads what is written then."""
    if not IS_GPU:
        return "no memory to give back"
    torch.cuda.empty_cache()
    awake = torch.cuda.mem_get_info()[0]
    began = time.perf_counter()
    engine.sleep()
    slept = time.perf_counter()
    asleep = torch.cuda.mem_get_info()[0]
    engine.begin_update()
    engine.finish_update(engine.version)
    torch.cuda.synchronize()
    ended = time.perf_counter()
    assert asleep > awake, (awake, asleep)
    write_weights(engine, model, engine.version + 1)
    freed, times = (asleep - awake) / 2**20, (slept - began, ended - slept)
    return f"sleep freed {freed:.0f} MiB in {times[0]:.4f} s, waking took {times[1]:.4f} s"


def generators() -> list[torch.Tensor]:
    """States of torch's global generators, which the trainer draws from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if IS_GPU else [])]


def is_second_runner(engine: Any) -> bool:
    """Whether vLLM computes with the model runner that it takes for dense models."""
    scheduler = engine._live.llm.engine_core.engine_core.scheduler
    return bool(scheduler.use_v2_model_runner)


def check(kind: str, name: str, eager: bool, ep: int, rank: int, world: int) -> None:
    config = MODELS[name]
    family = resolve_family(None, config)
    config = family.for_engines(config)
    settings = EngineSettings(
        config, family.architectures, str(DTYPE).removeprefix("torch."), 64, 200, eager=eager, ep=ep
    )
    layout = RolloutLayout.consecutive(world, world)
    device = torch.device("cuda", rank) if IS_GPU else torch.device("cpu")
    began = time.perf_counter()
    engine = engine_class(kind)(settings, family, layout, rank, device)
    if IS_GPU and kind == "vllm":
        assert is_second_runner(engine)
    said = [f"started in {time.perf_counter() - began:.1f} s"]
    asked = requests(48)
    for version in range(2):
        model, exact = make_reference(config, version, device)
        write_weights(engine, model, version)
        before = generators()
        done = generate(engine, asked)
        assert all(map(torch.equal, before, generators())), "torch's generators were drawn from"
        found, apart = check_logps(model, exact, asked, done, name != "qwen3")
        said.append(found)
    said.append(check_batches(engine, asked, done, apart))
    # Some engines do not know again what a request has said when it goes on, and penalize it
    # otherwise than before.
    alike = [one.sampling != KINDS[-1] or kind not in LOSE_PRESENCE for one in asked]
    kept, of_kept = list(compress(asked, alike)), list(compress(done, alike))
    said.append(check_interruption(engine, model, kept, of_kept, apart))
    said.append(check_sleep(engine, model))
    said.append(check_changed("after it", done, generate(engine, asked), apart))
    holdings = {what: round(one.num_bytes / 2**20) for what, one in engine.memory().items()}
    said.append(f"MiB {holdings}")
    engine.close()
    if rank == 0:
        print(f"{kind} {name} tp {world} ep {ep} eager {eager}: " + "; ".join(said), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("engine", choices=CLASSES)
    parser.add_argument("models", nargs="*", metavar="MODEL")
    arguments = parser.parse_args()
    if not set(arguments.models) <= set(MODELS):
        parser.error(f"models are {', '.join(MODELS)}")
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if IS_GPU:
        torch.cuda.set_device(rank)
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    torch.set_grad_enabled(False)
    for name in arguments.models or ("qwen3", "qwen3_moe"):
        is_mixture = name != "qwen3"
        for eager in (False,) if is_mixture else (True, False):
            check(arguments.engine, name, eager, 1, rank, world)
        if world > 1 and is_mixture:
            check(arguments.engine, name, False, world, rank, world)
    stop_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
