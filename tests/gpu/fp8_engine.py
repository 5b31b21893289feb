"""vLLM with FP8 weights that a sync writes, on one GPU, with random weights and any model's sizes.

fp8_engine.py MODEL.json [--quantization fp8|none] [--layers N] [--backend NAME] [--eager]
              [--against-transformers] [--decode PROMPT:NEW:REQUESTS ...] [--kv-cache fp8]
              [--own-kernels] [--turns FOLDER COUNT]

Checks that the engine's live parameters equal the quantized HF tensors, after each of two updates,
and that its log-probabilities are near those of transformers with the same dequantized weights.
Then prints the time and bytes of a sync, the bytes of the engine's weights, and decoding times.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import fcntl
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hybridrl.kernels import fp8_linear
from transformers import AutoConfig, AutoModelForCausalLM

from hybridrl import ops
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.models.boxes import box_view
from hybridrl.models.family import resolve_family
from hybridrl.models.quantized import SCALES, quantized_shapes, unquantized_modules
from hybridrl.models.sources import FullWeights, TrainingShard
from hybridrl.models.weights import megatron_layout
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.platform import Platform
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.rollout.vllm import adapter as vllm_adapter
from hybridrl.rollout.vllm import arguments as vllm_arguments
from hybridrl.rollout.vllm.adapter import VllmEngine
from hybridrl.training.quantized_weights import QuantizedWeights

BLOCK = 128
FP8 = torch.float8_e4m3fn
IS_GPU = torch.cuda.is_available()  # without one the script only shows that it runs
DEVICE = torch.device("cuda", 0) if IS_GPU else torch.device("cpu")


def wait() -> None:
    """Waits for the device."""
    if IS_GPU:
        torch.cuda.synchronize()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quantization", choices=("fp8", "none"), default="fp8")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--backend", choices=("cutlass", "deep_gemm", "triton"))
    parser.add_argument("--kv-cache", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--copies", action="store_true", help="bf16 weights are not shared")
    parser.add_argument("--against-transformers", action="store_true")
    parser.add_argument("--own-kernels", action="store_true", help="vLLM's product for few tokens")
    parser.add_argument("--table", type=Path, help="tilings that bench_fp8_linear.py found")
    parser.add_argument(
        "--turns",
        nargs=2,
        metavar=("FOLDER", "COUNT"),
        help="COUNT such processes start at the same time, and then measure one after another",
    )
    parser.add_argument("--decode", nargs="*", default=[], metavar="PROMPT:NEW:REQUESTS")
    return parser.parse_args()


@contextlib.contextmanager
def turn(turns: tuple[str, str] | None) -> Iterator[None]:
    """Context manager: the other processes have started, or failed, and measure nothing."""
    if turns is None:
        yield
        return
    folder, count = Path(turns[0]), int(turns[1])
    (folder / f"{os.getpid()}.ready").touch()
    began = time.perf_counter()
    while len(list(folder.glob("*.ready"))) < count and time.perf_counter() - began < 240:
        time.sleep(0.2)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def reference(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns a whole weight's FP8 elements and scales, by another way than the kernels'."""
    rows, columns = weight.shape
    blocks = weight.double().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    largest = blocks.abs().amax((1, 3))
    # log2 of a GPU is not exact, not even for powers of two.
    fractions, exponents = torch.frexp(largest / 448)
    scales = torch.ldexp(torch.ones_like(largest), exponents - (fractions == 0.5).int())
    scales = torch.where(largest > 0, scales, torch.ones_like(scales))
    quantized = (blocks / scales[:, None, :, None]).float().to(FP8).view(rows, columns)
    return quantized, scales.float()


class Weights:
    """Random bf16 weights as a trainer on one rank has them, and HF tensors out of them."""

    def __init__(self, family: Any, shape: Any) -> None:
        is_mixture = shape.moe is not None
        self.layout = megatron_layout(family, shape, TrainLayout(1), 0, te=True, grouped=is_mixture)
        self.tensors = {
            name: torch.empty(size, dtype=torch.bfloat16, device=DEVICE)
            for name, size in self.layout.shapes.items()
        }
        self.regions: dict[str, list[Any]] = {}
        for region in self.layout.regions:
            self.regions.setdefault(region.hf, []).append(region)
        self.draw(0)

    def draw(self, seed: int) -> None:
        generator = torch.Generator(DEVICE).manual_seed(seed)
        for name, tensor in self.tensors.items():
            if tensor.dim() == 1:
                tensor.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                tensor.normal_(0, 0.02 + 0.005 * seed, generator=generator)
                if ".layers." in name and "norm" not in name:
                    tensor[: BLOCK // 2] *= 3  # so that scales differ between blocks

    def hf(self, name: str) -> torch.Tensor:
        parts = self.regions[name]
        ends = [
            max(region.hf_box[dim][1] for region in parts) for dim in range(len(parts[0].hf_box))
        ]
        found = torch.empty(ends, dtype=torch.bfloat16, device=DEVICE)
        for region in parts:
            box_view(found, region.hf_box).copy_(
                box_view(self.tensors[region.local], region.local_box)
            )
        return found


def check_live(engine: VllmEngine, weights: Weights, quantized: Any) -> str:
    """Compares every parameter of the engine with the reference."""
    live, found = engine.tensors(), {}
    num_bits = num_plain = 0
    for region in engine.layout().regions:
        name = region.hf.removesuffix(SCALES)
        if name not in found:
            whole = weights.hf(name)
            found = {name: reference(whole) if name in quantized else (whole, None)}
        elements, scales = found[name]
        wanted = scales if region.hf.endswith(SCALES) else elements
        one = box_view(live[region.local], region.local_box)
        other = box_view(wanted, region.hf_box)
        assert one.dtype == other.dtype, (region, one.dtype, other.dtype)
        if one.dtype == FP8:
            one, other = one.view(torch.uint8), other.view(torch.uint8)
            num_bits += one.numel()
        else:
            num_plain += one.numel()
        assert torch.equal(one, other), f"{region.local}{region.local_box} differs from {region.hf}"
    return f"{num_bits:,} FP8 elements and {num_plain:,} others equal the quantized HF tensors"


@torch.no_grad()
def check_projections(engine: VllmEngine, max_batch: int) -> str:
    """Compares products with those of dequantized weights; vLLM rounds inputs by up to 1/16.

    Args:
        max_batch: Maximum number of requests that the engine decodes together; 0 if it keeps vLLM's
            product.
    """
    worst: dict[str, float] = {}
    for name, part in engine.model.named_modules():
        method = getattr(part, "quant_method", None)
        if type(method).__name__ != "Fp8LinearMethod" or ".layers.0." not in f".{name}.":
            continue
        wide = part.weight_scale_inv.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        weight = part.weight.float() * wide
        for rows in (1, 16, 64, 100, 300, 1024, 2048):
            hidden = torch.randn(rows, weight.size(1), device=DEVICE).bfloat16()
            found = method.apply(part, hidden).float()
            wanted = hidden.float() @ weight.t()
            gap = float((found - wanted).norm() / wanted.norm())
            unrounded = max_batch > 0 and all(
                ops.fp8_product_fits(num, part.weight) for num in (max_batch, rows)
            )
            kind = name.rpartition(".")[2] + (" unrounded" if unrounded else " rounded")
            worst[kind] = max(worst.get(kind, 0.0), gap)
    assert worst and max(worst.values()) < 0.06, worst
    for kind, gap in worst.items():  # a sum is rounded to bf16 once
        assert gap < 0.004 or kind.endswith(" rounded"), worst
    return "products differ by " + ", ".join(f"{n} {gap:.2%}" for n, gap in worst.items())


@torch.no_grad()
def logps_of(model: Any, requests: list[Request], done: list[Any]) -> list[torch.Tensor]:
    found = []
    for request, one in zip(requests, done, strict=True):
        ids = torch.tensor([request.prompt + one.tokens], device=DEVICE)
        logits = model(ids).logits[0, len(request.prompt) - 1 : -1].float()
        chosen = torch.tensor(one.tokens, device=DEVICE)[:, None]
        found.append(logits.log_softmax(-1).gather(-1, chosen)[:, 0].cpu())
    return found


def against_transformers(
    hf_config: dict[str, Any], weights: Weights, quantized: Any, requests: list[Request], done: Any
) -> dict[str, float]:
    """Returns mean differences of the engine's log-probabilities from those of transformers."""
    fields = {key: value for key, value in hf_config.items() if key != "model_type"}
    config = AutoConfig.for_model(hf_config["model_type"], **fields)
    means = {}
    with torch.device(DEVICE):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for kind in ("bf16 weights", "dequantized weights"):
        state = model.state_dict()
        for name in weights.regions:
            whole = weights.hf(name)
            if kind != "bf16 weights" and name in quantized:
                elements, scales = reference(whole)
                wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
                whole = (elements.float() * wide).bfloat16()
            if name in state:
                state[name].copy_(whole)
            else:  # transformers 5 stacks experts: gate_up_proj and down_proj
                stem, _, rest = name.partition(".experts.")
                expert, part, _ = rest.split(".")
                key = "down_proj" if part == "down_proj" else "gate_up_proj"
                place = state[f"{stem}.experts.{key}"][int(expert)]
                if part == "up_proj":
                    place[len(whole) :].copy_(whole)
                else:
                    place[: len(whole)].copy_(whole)
        theirs = logps_of(model, requests, done)
        gaps = [(torch.tensor(d.logps) - t).abs() for d, t in zip(done, theirs, strict=True)]
        gap = torch.cat(gaps)
        means[kind] = float(gap.mean())
        print(
            f"  log-probabilities differ from transformers with {kind} by {gap.mean():.4f} "
            f"nats on average, {gap.max():.3f} at most, "
            f"{(gap > 0.1).float().mean():.1%} by more than 0.1"
        )
    del model
    torch.cuda.empty_cache()
    return means


def requests_of(count: int, prompt: int, new: int, vocab: int, seed: int) -> list[Request]:
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(temperature=1.0, max_new_tokens=new)
    prompts = rng.integers(4, vocab, (count, prompt)).tolist()
    return [Request(i, tuple(one), 77 + i, sampling) for i, one in enumerate(prompts)]


def timed_sync(hybrid: HybridEngine, source: Any) -> tuple[float, float]:
    """Returns the median milliseconds of refreshing the source and of a transfer."""
    times: list[list[float]] = [[], []]
    for _ in range(12):
        for kind, call in enumerate((source.refresh, hybrid.transport.run)):
            wait()
            began = time.perf_counter()
            call()
            wait()
            times[kind].append(1e3 * (time.perf_counter() - began))
    refresh, transfer = (statistics.median(one[2:]) for one in times)
    return refresh, transfer


def main() -> None:
    options = parse()
    began = time.perf_counter()
    if options.backend:
        vllm_arguments.LINEAR_BACKEND = options.backend
        from hybridrl.rollout.vllm import fp8

        fp8.LINEAR_BACKEND = options.backend
    if IS_GPU:
        torch.cuda.set_device(DEVICE)
    elif options.quantization == "fp8":
        from pytest import MonkeyPatch

        sys.path.insert(0, "tests/contracts")
        from fp8_on_cpu import stand_in

        stand_in(MonkeyPatch())
    if options.own_kernels:
        vllm_adapter.multiply_unrounded_tokens = lambda model, max_batch: None
    if options.table and options.table.is_file():
        for key, (_, tiling) in json.loads(options.table.read_text()).items():
            block, outputs, inputs = map(int, key.split(","))
            fp8_linear.TILINGS[block, outputs, inputs] = fp8_linear.Tiling(*tiling)
    if options.turns:
        folder = Path(options.turns[0])
        folder.mkdir(parents=True, exist_ok=True)
        atexit.register((folder / f"{os.getpid()}.ready").touch)
    platform = Platform.detect()
    start_process_group(platform, 300.0)
    world = World(platform, 300.0)
    hf_config = json.loads(options.model.read_text())
    if options.layers:
        hf_config["num_hidden_layers"] = options.layers
        for key in ("max_window_layers",):
            hf_config.pop(key, None)
        hf_config.pop("layer_types", None)
    family = resolve_family(None, hf_config)
    shape = family.shape(hf_config)
    weights = Weights(family, shape)
    is_fp8 = options.quantization == "fp8"
    quantized = quantized_shapes(family, shape) if is_fp8 else {}
    source: Any = FullWeights([weights.layout], weights.tensors)
    shard = None if options.copies else TrainingShard(weights.layout, weights.tensors)
    if is_fp8:
        source = QuantizedWeights(source, 0, quantized)
    longest = max([300, *(sum(map(int, one.split(":")[:2])) for one in options.decode)])
    settings = EngineSettings(
        hf_config=family.for_engines(hf_config),
        architectures=family.architectures,
        dtype="bfloat16",
        max_batch=max([32, *(int(one.split(":")[2]) for one in options.decode)]),
        max_tokens=longest + 1,
        eager=options.eager,
        quantization=options.quantization,
        unquantized=tuple(unquantized_modules(family, shape)) if is_fp8 else (),
        kv_cache_dtype=options.kv_cache,
    )
    layout = RolloutLayout.consecutive(1, 1)
    engine = VllmEngine(settings, family, layout, 0, DEVICE, shard)
    print(
        f"  engine started after {time.perf_counter() - began:.0f} s; "
        f"{len(engine.shared)} of {len(engine.tensors())} tensors shared with the trainer",
        flush=True,
    )
    hybrid = HybridEngine(source, engine, world, staging_bytes=248 << 20)
    asked = requests_of(16, 40, 60, shape.vocab_size, 1)
    for seed in (1, 2):
        weights.draw(seed)
        stats = hybrid.to_rollout(verifies=True)
        print(
            f"  update {seed}: verified in {stats.verify_seconds:.2f} s; "
            f"{check_live(engine, weights, quantized)}",
            flush=True,
        )
        done = generate(engine, asked)
        assert all(len(one.tokens) == 60 for one in done)
        if seed == 1:
            hybrid.to_train()
    if is_fp8:
        print(
            f"  {check_projections(engine, 0 if options.own_kernels else settings.max_batch)} of "
            "their norm from dequantized weights",
            flush=True,
        )
    if options.against_transformers:
        means = against_transformers(hf_config, weights, quantized, asked, done)
        assert means["dequantized weights"] < 0.6, means
    own_turn = contextlib.ExitStack()  # until the process ends
    own_turn.enter_context(turn(options.turns))
    refresh, transfer = timed_sync(hybrid, source)
    held = engine.memory()
    own, shared = (held[key].num_bytes for key in ("weights", "weights shared with the trainer"))
    print(
        f"  sync: scales {refresh:.2f} ms, transfer {transfer:.2f} ms, "
        f"{sum(hybrid.plan.local_bytes):,} bytes planned; engine weights: own {own:,} bytes, "
        f"shared {shared:,}; graphs and workspace {held['graphs and workspace'].num_bytes:,}",
        flush=True,
    )
    for one in options.decode:
        prompt, new, count = map(int, one.split(":"))
        long = requests_of(count, prompt, new, shape.vocab_size, 2)
        one_token = SamplingParams(temperature=1.0, max_new_tokens=1)
        short = [replace(request, sampling=one_token) for request in long]
        generate(engine, short)  # fills the prefix cache
        times = {}
        for kind, batch in (
            ("prefilled", short),
            ("all", long),
            ("prefilled", short),
            ("all", long),
        ):
            wait()
            start = time.perf_counter()
            generate(engine, batch)
            times[kind] = time.perf_counter() - start
        step = (times["all"] - times["prefilled"]) / (new - 1)
        print(
            f"  decode {count} requests at {prompt} to {prompt + new} tokens: "
            f"{1e3 * step:.3f} ms a step, {count / step:,.0f} tokens/s",
            flush=True,
        )
    print(
        f"PASS {options.model.stem} {options.quantization} {options.backend or ''} "
        f"({time.perf_counter() - began:.0f} s)",
        flush=True,
    )
    os._exit(0)


if __name__ == "__main__":
    main()
