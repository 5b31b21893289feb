"""One rank of the experts' test: dealt over ranks, resharded into an engine, against
transformers.

experts_worker.py ENGINE FOLDER some|more|latent|sinks

FOLDER/NAME_0 and FOLDER/NAME_1 are two HF directories of one model; `latent` are the cases of
deepseek_v3, `sinks` those of gpt_oss, `more` those that `some` leaves out.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from job_world import job_world
from packaged import engine_class
from safetensors.torch import load_file
from tiny_models import chosen_by, slices_of
from transformers import AutoModelForCausalLM

from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.verify import VerifyError
from hybridrl.models.boxes import box_view, volume
from hybridrl.models.expert_stacks import ordered_by_stack
from hybridrl.models.family import read_model
from hybridrl.models.sources import FullWeights, TrainingShard
from hybridrl.models.weights import RankLayout, hf_shapes, megatron_layouts
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.platform import Platform
from hybridrl.rollout.common.process_state import replaced
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.common.weight_copies import LatentCopies
from hybridrl.rollout.engine import Request, SamplingParams, generate
from hybridrl.rollout.registry import ENGINES

WORLD = 2
IN_ORDER = None
ANYHOW = ((0, 3, 5, 6), (1, 2, 4, 7))  # of 8 experts
# Training layout, tensor- and expert-parallel size of the engine.
LAYOUTS = (
    (TrainLayout(WORLD, ep=2), 2, 2),
    (TrainLayout(WORLD, ep=2), 2, 1),
    (TrainLayout(WORLD, tp=2, etp=2), 2, 2),
    (TrainLayout(WORLD, pp=2), 1, 1),
)
# Model, training layout, tensor- and expert-parallel size of the engine, and its ranks' experts.
CASES = {
    "some": [("qwen3_moe", TrainLayout(WORLD, ep=2), 2, 2, ANYHOW)],
    "more": [
        ("mixtral", TrainLayout(WORLD, ep=2), 2, 2, ANYHOW),
        *((name, *layouts, IN_ORDER) for name in ("qwen3_moe", "mixtral") for layouts in LAYOUTS),
    ],
    "latent": [("deepseek_v3", *layouts, IN_ORDER) for layouts in LAYOUTS],
    # Experts with biases, of which a rank that has the second part of each expert has none.
    "sinks": [
        ("gpt_oss", TrainLayout(WORLD, ep=2), 2, 1, IN_ORDER),
        ("gpt_oss", TrainLayout(WORLD, ep=2), 2, 2, ANYHOW),
        ("gpt_oss", TrainLayout(WORLD, tp=2), 1, 1, IN_ORDER),
    ],
}
EXPERT = r"\.experts\.\D*(\d+)"  # the index of an expert in the name of an HF tensor
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6)
LOGP_TOLERANCE = 1e-4  # float32 sums in another order, over four layers


def write(layout: RankLayout, tensors: dict[str, torch.Tensor], hf: dict[str, Any]) -> None:
    """Fills the tensors of a training layout, as training would have them."""
    for region in layout.regions:
        part = box_view(hf[region.hf], region.hf_box)
        box_view(tensors[region.local], region.local_box).copy_(part)


def in_buffer(layout: RankLayout) -> dict[str, torch.Tensor]:
    """Returns the tensors of a training layout in one buffer, in Megatron's order."""
    order = ordered_by_stack(sorted(layout.shapes))[::-1]
    sizes = [prod(layout.shapes[name]) for name in order]
    parts = torch.zeros(sum(sizes)).split(sizes)
    return {n: part.view(layout.shapes[n]) for n, part in zip(order, parts, strict=True)}


def check_shared(engine: Any, source: RankLayout) -> None:
    """All experts of a layer that the rank trains with, and no others, are the trainer's memory."""
    held = {(r.hf, r.hf_box) for r in source.regions}
    needed: dict[str, list[bool]] = {}
    for region in engine.layout().regions:
        stack, _, index = region.local.partition("/")
        if index:
            needed.setdefault(stack, []).append((region.hf, region.hf_box) in held)
    stacks = {name.partition("/")[0] for name in engine.shared if "/" in name}
    assert stacks == {stack for stack, found in needed.items() if all(found)}


def check_greedy(engine: Any, oracle: torch.nn.Module, replica: int) -> None:
    rng = np.random.default_rng(replica)
    asked = [
        Request(i, tuple(rng.integers(2, 190, size).tolist()), i, GREEDY)
        for i, size in enumerate((3, 1, 8, 70, 5))
    ]
    for request, done in zip(asked, generate(engine, asked), strict=True):
        with torch.no_grad(), chosen_by(oracle) as chosen:
            logits = oracle(torch.tensor([request.prompt + done.tokens])).logits[0]
        if done.blobs:
            # Each rank tells the same of all experts, wherever they are; of the last token nothing.
            expected = torch.stack(chosen, 1)[:-1].sort(-1).values
            found = torch.from_numpy(done.blobs["routed_experts"]).long().view(expected.shape)
            assert torch.equal(found.sort(-1).values, expected), request.request_id
        logp = logits.log_softmax(-1)[len(request.prompt) - 1 : -1]
        assert logp.argmax(-1).tolist() == list(done.tokens), request.request_id
        expected = logp[range(len(done.tokens)), list(done.tokens)]
        worst = float((expected - torch.tensor(done.logps)).abs().max())
        assert worst < LOGP_TOLERANCE, worst


def check(
    engine_name: str,
    folder: Path,
    name: str,
    train: TrainLayout,
    tp: int,
    ep: int,
    experts: tuple[tuple[int, ...], ...] | None,
    rank: int,
) -> None:
    traits = ENGINES[engine_name]
    if not traits.takes_expert_maps:
        experts = IN_ORDER
    hf_config = json.loads((folder / f"{name}_0" / "config.json").read_text())
    family, shape = read_model(None, hf_config)
    sources = megatron_layouts(family, shape, train)
    weights = in_buffer(sources[rank])
    settings = EngineSettings(
        family.for_engines(hf_config),
        family.architectures,
        "float32",
        4,
        96,
        ep=ep,
        records_experts=traits.records_experts,
    )
    layout = replace(RolloutLayout.consecutive(WORLD, tp), experts=experts)
    shard = TrainingShard(sources[rank], weights)
    engine = engine_class(engine_name)(settings, family, layout, rank, shard=shard)
    check_shared(engine, sources[rank])
    hybrid = HybridEngine(
        FullWeights(sources, weights), engine, job_world(), staging_bytes=1 << 16, verify_every=1
    )
    for version in range(2):
        directory = folder / f"{name}_{version}"
        stored = load_file(directory / "model.safetensors")
        write(sources[rank], weights, slices_of(stored, hf_shapes(family, shape)))
        stats = hybrid.to_rollout(version)
        oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        check_greedy(engine, oracle, layout.place(rank)[0])
    dealt = [r for r in engine.layout().regions if ".experts." in r.hf]
    held = {(r.hf, r.hf_box) for r in sources[rank].regions}
    if experts is not None:
        own = {int(found[1]) for r in dealt if (found := re.search(EXPERT, r.hf))}
        assert own == set(experts[rank])
        # Of four experts each rank has two already.
        brought = sum(volume(r.hf_box) for r in dealt if (r.hf, r.hf_box) not in held)
        assert stats.received_bytes == 4 * brought > 0
        assert 2 * brought == sum(volume(r.hf_box) for r in dealt)
    elif (train.ep, ep) == (2, 2):  # each rank has its experts already, and half of the rest
        assert dealt and all((r.hf, r.hf_box) in held for r in dealt)
        assert stats.received_bytes == 0
    engine.finish_update = engine.finish_update  # type: ignore[method-assign]  # to be replaced
    copied = [n for n in engine.tensors() if n.endswith("w13_weight/1") and n not in engine.shared]
    if any(everyone_has(bool(copied))):
        check_swapped(engine, hybrid, copied[0] if copied else "", rank)
    if shape.latent is not None:
        check_stale(hybrid, engine, weights, rank)
    hybrid.close()
    engine.close()
    print(f"rank {rank} {name} {train} -> tp {tp} ep {ep}: equal", flush=True)


def everyone_has(mine: bool) -> list[bool]:
    found = [False] * WORLD
    dist.all_gather_object(found, mine)
    return found


def check_swapped(engine: Any, hybrid: HybridEngine, stack: str, rank: int) -> None:
    """An expert in the place of another, on the last rank that copies experts, is named."""
    culprit = max(r for r, has in enumerate(everyone_has(bool(stack))) if has)
    finish = engine.finish_update

    def plant(version: int) -> None:
        if rank == culprit:
            first, other = (engine.tensors()[f"{stack[:-1]}{i}"] for i in (0, 1))
            other.copy_(first)
        finish(version)

    with replaced(engine, "finish_update", plant):
        said = failure(hybrid)
    assert f"rank {culprit}" in said and (rank != culprit or said.startswith(stack)), said


def check_stale(
    hybrid: HybridEngine, engine: Any, weights: dict[str, torch.Tensor], rank: int
) -> None:
    """Copies of the projection up, and a router's bias, that stay those of older weights.

    vLLM's copies are views on CPU; here they get memory of their own.
    """
    assert not [name for name in engine.shared if "kv_b_proj" in name]
    for layer in (part for part in engine.model.modules() if hasattr(part, "W_UV")):
        layer.W_UV.data, layer.W_UK_T.data = layer.W_UV.clone(), layer.W_UK_T.clone()
    for name, weight in weights.items():
        if name.endswith(("linear_kv_up_proj.weight", "expert_bias")):
            weight.add_(1)
    hybrid.to_rollout()
    assert engine.stale_copy() is None
    (bias, *_) = (name for name in engine.tensors() if name.endswith("e_score_correction_bias"))
    finish = engine.finish_update

    def plant(version: int) -> None:
        finish(version)
        if rank == 1:
            engine.tensors()[bias].sub_(1)

    with replaced(engine, "finish_update", plant):
        said = failure(hybrid)
    assert said.startswith(bias) and "rank 1" in said, said
    for name, weight in weights.items():
        if name.endswith("linear_kv_up_proj.weight"):
            weight.add_(1)
    keys = sys.modules[type(engine).__module__].COPIES.keys
    with replaced(LatentCopies, "absorb", lambda copies, model: None):
        said = failure(hybrid)
    assert f"{keys} of the engine on rank 0" in said, said
    hybrid.to_rollout()


def failure(hybrid: HybridEngine) -> str:
    try:
        hybrid.to_rollout()
    except VerifyError as error:
        return str(error)
    raise AssertionError("the engine's weights were taken for the trainer's")


def main() -> None:
    engine, folder = sys.argv[1], Path(sys.argv[2])
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    torch.set_grad_enabled(False)
    rank = torch.distributed.get_rank()
    for name, train, tp, ep, experts in CASES[sys.argv[3]]:
        check(engine, folder, name, train, tp, ep, experts, rank)
    stop_process_group()


if __name__ == "__main__":
    main()
