"""Times the log-probability head on one GPU: hidden states to log-probabilities and entropies.

Each case is a hidden size and a vocabulary of Qwen2.5, cut in --shards as tensor parallelism cuts
it; one shard is timed as if it were the vocabulary, since the work is the same and what ranks
exchange is 16 bytes a token. Ways:

* ours: `ops.vocab_stats` and `ops.vocab_backward`, which adds to an fp32 main gradient itself.
* materialised: bf16 product, fp32 log-softmax and entropy, in plain PyTorch.
* compiled: the same under torch.compile.
* liger: Liger-Kernel's fused linear cross entropy, if importable: log-probabilities alone, no
  entropy, so its times are of less work, and it has none where a loss needs the entropy's gradient.

What each ends with is the same: with gradients, those of the hidden states in bf16, and those of
the weight added to an fp32 tensor, as Megatron's hook does it for ways that return them. Kinds of
work: `forward`; `logp`, a loss of log-probabilities with entropy as a metric; `entropy`, a loss of
both.

Before it is timed, each way is compared with fp64 on a slice of the tokens. Ours is not timed if
log-probability or entropy are further off than 8 times a plain fp32 computation (tensor cores cut
the last bits of each sum where others round), or a gradient than the materialised way's.

    python benchmarks/bench_token_logprobs.py --out benchmarks/results/token_logprobs_h200.json
    python benchmarks/bench_token_logprobs.py --out /tmp/small.json --device cpu --small
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from case_record import commit
from reshard_clock import WARMUPS, percentile

from hybridrl import ops

CASES = [(896, 151_936), (3584, 152_064)]  # Qwen2.5 0.5B and 7B
SMALL_CASES = [(64, 1_000)]
NUM_TOKENS, SMALL_TOKENS, SLICE_TOKENS = 8192, 256, 512
KINDS = ("forward", "logp", "entropy")
WAYS = ("ours", "materialised", "compiled", "liger")
FP32_FACTOR = 8.0


class Inputs(NamedTuple):
    """What the head gets, and the gradients that come back; each T tokens, V columns."""

    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    target_T: torch.Tensor
    grad_logp_T: torch.Tensor
    grad_entropy_T: torch.Tensor


class Found(NamedTuple):
    """What a way gives; None for what it has not."""

    logp_T: torch.Tensor
    entropy_T: torch.Tensor | None
    grad_hidden_TD: torch.Tensor | None = None
    main_grad_VD: torch.Tensor | None = None


Outputs = tuple[torch.Tensor, torch.Tensor | None]
Head = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, bool], Outputs]
Way = Callable[[Inputs, str, torch.Tensor | None], Found]


def main() -> int:
    """Runs the cases; returns 1 if ours was wrong in one."""
    arguments = parse()
    device = torch.device(arguments.device)
    cases = [case for case in CASES if case[0] in arguments.hidden]
    cases = SMALL_CASES if arguments.small else cases
    tokens = arguments.tokens or (SMALL_TOKENS if arguments.small else NUM_TOKENS)
    report: dict[str, Any] = {
        "benchmark": "token log-probabilities",
        "command": "python " + " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "machine": machine(device),
        "limits": limits(device, 512 if arguments.small else 8192),
        "cases": [],
    }
    for hidden, columns in cases:
        for shards in arguments.shards:
            case = run_case(hidden, columns // shards, tokens, arguments, report["limits"])
            report["cases"].append({"hidden": hidden, "shards": shards, **case})
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")
            print("\n".join(table(report["cases"][-1])), flush=True)
    return int(any("error" in case["ways"].get("ours", {}) for case in report["cases"]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--small", action="store_true", help="tiny sizes, to see that it runs")
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--hidden", type=int, nargs="+", default=[size for size, _ in CASES])
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--repeats", type=int, default=20)
    return parser.parse_args()


def run_case(
    hidden: int, columns: int, tokens: int, arguments: argparse.Namespace, limit: dict[str, float]
) -> dict[str, Any]:
    """Checks and times every way on one shard."""
    device = torch.device(arguments.device)
    inputs = draw(hidden, columns, tokens, device)
    part = Inputs(*(t if t is inputs.weight_VD else t[:SLICE_TOKENS] for t in inputs))
    exact = plain(part, torch.float64)
    fp32 = errors(plain(part, torch.float32), exact)
    bounds = {name: FP32_FACTOR * fp32[name] for name in ("logp", "entropy")}
    eager = errors(autograd(materialised, part, "entropy", zeros_like_main(part)), exact)
    bounds |= {name: eager[name] for name in ("grad_hidden", "main_grad")}
    case: dict[str, Any] = {
        "columns": columns,
        "tokens": tokens,
        "ideal_ms": ideal_ms(hidden, columns, tokens, limit),
        "fp32_errors": fp32,
        "ways": {},
    }
    for name in arguments.ways:
        try:
            way = make_way(name)
            kinds = [kind for kind in arguments.kinds if name != "liger" or kind != "entropy"]
            kind = "logp" if name == "liger" else "entropy"
            found = {"errors": errors(way(part, kind, zeros_like_main(part)), exact)}
            if name == "liger":  # its gradients are of another loss than the exact ones
                found["errors"] = {"logp": found["errors"]["logp"]}
            case["ways"][name] = found
            wrong = [
                key for key, bound in bounds.items() if not found["errors"].get(key, 0) <= bound
            ]
            if name == "ours" and wrong:
                found["error"] = f"not timed, too far from fp64: {wrong}; at most {bounds}"
                continue
            found |= {kind: measure(way, inputs, kind, arguments.repeats) for kind in kinds}
        except Exception as error:  # another's way may fail in any manner; the others go on
            text = f"{type(error).__name__}: {error}"[:400]
            case["ways"].setdefault(name, {})["error"] = text
    case["to_materialised"] = ratios(case["ways"])
    return case


def draw(hidden: int, columns: int, tokens: int, device: torch.device) -> Inputs:
    """Logits of standard deviation 3, as language models' have."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int, scale: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    return Inputs(
        normal(tokens, hidden, scale=1, dtype=torch.bfloat16),
        normal(columns, hidden, scale=3 / hidden**0.5, dtype=torch.bfloat16),
        torch.randint(0, columns, (tokens,), generator=generator, device=device),
        normal(tokens, scale=1 / tokens),
        normal(tokens, scale=1 / tokens),
    )


def zeros_like_main(inputs: Inputs) -> torch.Tensor:
    return torch.zeros_like(inputs.weight_VD, dtype=torch.float32)


def make_way(name: str) -> Way:
    """Returns the way; Liger-Kernel's raises ImportError where it is not installed."""
    if name == "ours":
        return ours
    if name == "liger":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        loss = LigerFusedLinearCrossEntropyLoss(reduction="none", accum_dtype=torch.float32)

        def fused(hidden: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, _: bool):
            return -loss(weight, hidden, target), None

        return partial(autograd, fused)
    if name == "compiled":
        torch._dynamo.reset()  # what it compiled for other shapes counts towards a limit
        return partial(autograd, torch.compile(materialised, dynamic=False))
    return partial(autograd, materialised)


def ours(inputs: Inputs, kind: str, main_grad_VD: torch.Tensor | None) -> Found:
    """The head as hybridrl/models/megatron/heads.py runs it, tensor parallel 1."""
    arguments = inputs.hidden_TD, inputs.weight_VD, inputs.target_T, 1.0
    stats = ops.vocab_stats(*arguments)
    log_sum = stats.sum_T.log()
    entropy = log_sum - stats.weighted_T / stats.sum_T
    found = Found(stats.target_T - stats.max_T - log_sum, entropy)
    if kind == "forward":
        return found
    saved = stats.max_T, log_sum, entropy
    grads = inputs.grad_logp_T, inputs.grad_entropy_T if kind == "entropy" else None
    grad_hidden, main_grad = ops.vocab_backward(*arguments, *saved, *grads, main_grad_VD)
    torch.empty_like(inputs.weight_VD)  # what heads.py hands autograd in the gradient's place
    return found._replace(grad_hidden_TD=grad_hidden, main_grad_VD=main_grad)


def materialised(
    hidden_TD: torch.Tensor, weight_VD: torch.Tensor, target_T: torch.Tensor, has_entropy: bool
) -> Outputs:
    """Log-probability and entropy from logits that are kept; the entropy's graph if wanted."""
    log_p = (hidden_TD @ weight_VD.T).float().log_softmax(-1)
    logp = log_p.gather(1, target_T[:, None])[:, 0]
    if not has_entropy:
        log_p = log_p.detach()
    return logp, -(log_p.exp() * log_p).sum(-1)


def autograd(head: Head, inputs: Inputs, kind: str, main_grad_VD: torch.Tensor | None) -> Found:
    """Runs a head, then autograd, then what Megatron's hook does with the weight's gradient."""
    if kind == "forward":
        with torch.no_grad():
            return Found(*head(inputs.hidden_TD, inputs.weight_VD, inputs.target_T, False))
    hidden = inputs.hidden_TD.detach().requires_grad_()
    weight = inputs.weight_VD.detach().requires_grad_()
    logp, entropy = head(hidden, weight, inputs.target_T, kind == "entropy")
    outputs, grads = [logp], [inputs.grad_logp_T]
    if kind == "entropy" and entropy is not None:
        outputs, grads = [logp, entropy], [inputs.grad_logp_T, inputs.grad_entropy_T]
    grad_hidden, grad_weight = torch.autograd.grad(outputs, (hidden, weight), grads)
    assert main_grad_VD is not None
    main_grad_VD.add_(grad_weight)
    entropy = None if entropy is None else entropy.detach()
    return Found(logp.detach(), entropy, grad_hidden, main_grad_VD)


def plain(inputs: Inputs, dtype: torch.dtype) -> Found:
    """The whole computation in one type, gradients by their formula."""
    hidden, weight, *grads = (inputs[index].to(dtype) for index in (0, 1, 3, 4))
    log_p = (hidden @ weight.T).log_softmax(-1)
    p = log_p.exp()
    entropy = -(p * log_p).sum(-1)
    logp = log_p.gather(1, inputs.target_T[:, None])[:, 0]
    slope = -p * (grads[0][:, None] + (log_p + entropy[:, None]) * grads[1][:, None])
    slope.scatter_add_(1, inputs.target_T[:, None], grads[0][:, None])
    return Found(logp, entropy, slope @ weight, slope.T @ hidden)


def errors(found: Found, exact: Found) -> dict[str, float]:
    """Returns the largest differences: in nats, and of a gradient's largest element."""
    result = {}
    for field, one, other in zip(Found._fields, found, exact, strict=True):
        name = field.rsplit("_", 1)[0]
        if one is not None:
            scale = other.abs().amax() if "grad" in name else 1.0
            result[name] = float((one.double() - other).abs().amax() / scale)
    return result


def measure(way: Way, inputs: Inputs, kind: str, repeats: int) -> dict[str, float]:
    """Times a kind of work; memory is what it takes beside its inputs and the main gradient."""
    is_cuda = inputs.hidden_TD.is_cuda
    main_grad = None if kind == "forward" else zeros_like_main(inputs)
    for _ in range(WARMUPS):
        way(inputs, kind, main_grad)
    peak = 0
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        way(inputs, kind, main_grad)
        peak = torch.cuda.max_memory_allocated() - before
    queued = [clock(partial(way, inputs, kind, main_grad), is_cuda) for _ in range(repeats)]
    times = [ms() for ms in queued]
    return {
        "ms": statistics.median(times),
        "p10_ms": percentile(times, 0.1),
        "p90_ms": percentile(times, 0.9),
        "peak_extra_bytes": peak,
    }


def clock(work: Callable[[], Any], is_cuda: bool) -> Callable[[], float]:
    """Runs or queues the work; returns what gives its milliseconds once it is done."""
    if not is_cuda:
        began = time.perf_counter()
        work()
        passed = (time.perf_counter() - began) * 1e3
        return lambda: passed
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()

    def passed_ms() -> float:
        end.synchronize()
        return start.elapsed_time(end)

    return passed_ms


def limits(device: torch.device, size: int) -> dict[str, float]:
    """Measures what the device can do: a bf16 product of random numbers, and a copy."""
    one, other = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    big = torch.empty(size * size * 8, device=device)
    to = torch.empty_like(big)
    is_cuda = device.type == "cuda"
    found = {}
    for key, work, amount in (
        ("product_tflops", lambda: one @ other, 2 * size**3 / 1e9),
        ("copy_tb_per_s", lambda: to.copy_(big), 2 * big.nbytes / 1e9),
    ):
        times = [clock(work, is_cuda) for _ in range(13)]
        found[key] = amount / statistics.median(ms() for ms in times[3:])
    return found


def ideal_ms(hidden: int, columns: int, tokens: int, limit: dict[str, float]) -> dict[str, float]:
    """Returns the times of kernels/token_logprobs.py's FLOPs and bytes at the measured limits."""
    product = 2 * tokens * columns * hidden / limit["product_tflops"] / 1e9
    logits = tokens * columns / limit["copy_tb_per_s"] / 1e9
    forward = product + 8 * logits
    whole = forward + 3 * product + 14 * logits
    return {"forward": forward, "logp": whole, "entropy": whole}


def ratios(ways: dict[str, Any]) -> dict[str, Any]:
    """Returns, by way and kind, how much faster than materialised, and its share of memory."""
    base = ways.get("materialised", {})
    result: dict[str, Any] = {}
    for name, way in ways.items():
        for kind in KINDS:
            if kind in way and kind in base:
                result.setdefault(name, {})[kind] = {"speedup": base[kind]["ms"] / way[kind]["ms"]}
                if base[kind]["peak_extra_bytes"]:
                    share = way[kind]["peak_extra_bytes"] / base[kind]["peak_extra_bytes"]
                    result[name][kind]["memory"] = share
    return result


def machine(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": name, "torch": torch.__version__}


def table(case: dict[str, Any]) -> list[str]:
    """Returns a case as lines to read."""
    lines = [f"hidden {case['hidden']}, {case['columns']} columns, {case['tokens']} tokens"]
    lines.append(f"  ideal ms {case['ideal_ms']}; errors of plain fp32 {case['fp32_errors']}")
    for name, way in case["ways"].items():
        lines.append(f"  {name}: errors {way.get('errors')} {way.get('error', '')}")
        for kind in KINDS:
            if kind in way:
                found, ratio = way[kind], case["to_materialised"].get(name, {}).get(kind, {})
                lines.append(
                    f"    {kind:8} {found['ms']:8.2f} ms ({found['p10_ms']:.2f} to "
                    f"{found['p90_ms']:.2f}), {found['peak_extra_bytes'] / 2**30:.2f} GiB; "
                    + ", ".join(f"{key} {value:.3f}" for key, value in ratio.items())
                )
    return lines


if __name__ == "__main__":
    sys.exit(main())
