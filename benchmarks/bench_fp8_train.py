"""Times updates with transformer-engine's ways of scaling FP8, in one process on one GPU.

    python benchmarks/bench_fp8_train.py --out OUT.json [--case 7b/dp1] [--micro-batch-tokens 8192]

All ways use the same model, bf16 weights and samples; only the recipe of its layers changes. First,
the bits of weights that transformer-engine quantizes by blocks are compared with those that engines
receive (rollout.quantization=fp8). Then each way's log-probabilities and gradients are compared
with those of bf16, and its passes are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from bench_train import commit, describe
from case_name import with_num_layers
from train_case import Case

from hybridrl import ops
from hybridrl.metrics.flops import forward_flops, train_flops

WAYS: dict[str, tuple[str | None, str]] = {  # fp8 and fp8_recipe of Megatron
    "bf16": (None, "delayed"),
    "blockwise": ("e4m3", "blockwise"),
    "blockwise, e5m2 gradients": ("hybrid", "blockwise"),
    "tensorwise": ("hybrid", "tensorwise"),
    "delayed": ("hybrid", "delayed"),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", default="7b/dp1")
    parser.add_argument("--num-layers", type=int)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--ways", default=",".join(range_of(len(WAYS))))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--limit-s", type=float, default=200)
    found = parser.parse_args()
    found.layers, found.prompt_tokens, found.response_tokens, found.samples = "auto", 256, 512, 1
    found.models = Path(__file__).parent / "models"
    found.tails = found.profile = False
    return found


def range_of(count: int) -> list[str]:
    return [str(number) for number in range(count)]


def check_bits() -> dict[str, Any]:
    """Compares weights quantized by transformer-engine with those that engines receive."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    quantizer = Float8BlockQuantizer(
        tex.DType.kFloat8E4M3,
        rowwise=True,
        columnwise=False,
        amax_epsilon=0.0,
        force_pow_2_scales=True,
        block_scaling_dim=2,
    )
    found = {}
    for rows, columns in ((4608, 3584), (3584, 18944), (1152, 896)):
        weight = torch.randn(rows, columns, device="cuda")
        weight *= torch.logspace(-6, 1, rows, device="cuda")[torch.randperm(rows)][:, None]
        weight = weight.bfloat16()
        weight[:128, :128] = 0
        theirs = quantizer(weight)
        blocks = weight.float().view(rows // 128, 128, columns // 128, 128).abs().amax((1, 3))
        scales = ops.power_of_two_scales(blocks)
        ours = ops.quantize_blocks(ops.Tiles(weight, scales, 0, 0))
        bits = theirs._rowwise_data.view(torch.uint8)
        their_scales = theirs._rowwise_scale_inv[:, : columns // 128]
        nonzero = blocks > 0
        found[f"{rows} x {columns}"] = {
            "equal bits": float((bits == ours).float().mean()),
            "equal scales": float((their_scales == scales)[nonzero].float().mean()),
        }
    return found


class Ways(Case):
    """A case whose layers change their recipe."""

    def use(self, way: str) -> None:
        fp8, recipe = WAYS[way]
        for chunk in self.policy.model._chunks:
            for module in chunk.modules():
                config = getattr(module, "config", None)
                if hasattr(config, "fp8_recipe"):
                    config.fp8, config.fp8_recipe = fp8, recipe

    def measure(self, ways: list[str]) -> None:
        small = self.batch_of([(64, 192)] * 8)
        batch = self.uniform_batch()
        sizes = self.flop_sizes(batch)
        wanted: torch.Tensor | None = None
        for way in ways:
            self.use(way)
            logps = self.policy.logprobs(small)[small.response_mask_T]
            norm = self.policy.update(small)["policy/grad_norm"]
            if wanted is None:
                wanted = logps
            gap = (logps - wanted).abs()
            self.result.setdefault("differences", {})[way] = {
                "mean": float(gap.mean()),
                "largest": float(gap.max()),
                "gradient_norm": norm,
            }
            self.save(way, json.dumps(self.result["differences"][way]))
            self.attempt(f"{way} logprobs", batch, self.logprobs, forward_flops(*sizes))
            self.attempt(f"{way} update", batch, self.update, train_flops(*sizes))
            torch.cuda.empty_cache()


def main() -> None:
    arguments = parse()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with tempfile.TemporaryDirectory() as folder:
        job = describe(arguments.case, arguments)
        job |= {
            "model": with_num_layers(job["model"], arguments.num_layers, folder),
            "folder": folder,
            "launched_at": time.time(),
        }
        case = Ways(job)
        case.begin()
        if torch.cuda.is_available():
            import transformer_engine  # noqa: F401  # before torch loads its own cuDNN

            case.result["commit"] = commit()
            try:
                case.result["bits"] = check_bits()
            except Exception as error:
                case.result["bits"] = {"error": repr(error)}
            case.save("bits", json.dumps(case.result["bits"]))
        case.start()
        case.measure_peak()
        case.policy.model.peak_learning_rate = 0.0  # weights stay
        names = list(WAYS)
        try:
            case.measure([names[int(number)] for number in arguments.ways.split(",")])
        finally:
            arguments.out.write_text(json.dumps(case.result, indent=1) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
