"""One rank of the test of LoRA adapters between training layouts and engines: real Megatron, real
engines, gloo; PEFT on transformers' model is the oracle.

lora_pairs_worker.py FOLDER ENGINE PAIR...   each pair is "tp,pp,cp>rollout_tp[,peer]"

In every pair, 20 updates of the adapters are sent, with a training phase between them, and each is
verified by checksum. After the last one, the engine's greedy responses must be PEFT's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from adapter_cases import draw_adapter, part, with_adapter
from engine_cases import ALL_MODELS, full_logits, make_reference, make_requests
from lora_worker import ALPHA, RANK, make
from packaged import engine_class
from torch import Tensor

from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.transports.peer import PeerTransport
from hybridrl.hybrid_engine.verify import VerifyError
from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.rows import target_names
from hybridrl.models.adapters.slots import is_slot
from hybridrl.models.family import resolve_family
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.platform import Platform
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import SamplingParams, generate
from hybridrl.rollout.hf.adapter import HfEngine
from hybridrl.training.model import ParallelModel
from hybridrl.training.peer_weights import PeerWeights

MODEL, UPDATES = "vllm-qwen2-tied", 20
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=10)
LOGP_TOLERANCE = 1e-4  # float32 sums in another order, over three layers


def start(engine: str, model: ParallelModel, tp: int, shard: Any) -> Any:
    config, family = dict(ALL_MODELS[MODEL]), model.source.family
    if engine == "hf":
        return HfEngine(config, "float32", "cpu", 8, family)
    settings = EngineSettings(
        family.for_engines(config), family.architectures, "float32", 8, 64, kv_cache_bytes=4 << 20
    )
    layout = RolloutLayout.consecutive(model.world.size, tp)
    return engine_class(engine)(settings, family, layout, model.world.rank, shard=shard)


def write_model(model: ParallelModel, peft: Any) -> None:
    """Writes PEFT's adapter into this rank's part of the trainer's."""
    own = model.adapter_weights()
    whole = {
        name.removeprefix("base_model.model.").replace(".default", ""): tensor.detach()
        for name, tensor in peft.named_parameters()
    }
    with torch.no_grad():
        for region in model.adapter_layout().regions:
            part(own[region.local], region.local_box).copy_(part(whole[region.hf], region.hf_box))


def worst_logp(engine: Any, peft: Any) -> float:
    """Returns the largest difference to PEFT; inf if a token differs."""
    requests, worst = make_requests(4, GREEDY), 0.0
    for request, done in zip(requests, generate(engine, requests), strict=True):
        logp_LV = full_logits(peft, request, done).log_softmax(-1)
        if logp_LV.argmax(-1).tolist() != list(done.tokens):
            return float("inf")
        logps = logp_LV[range(len(done.tokens)), list(done.tokens)]
        worst = max(worst, float((logps - torch.tensor(done.logps)).abs().max()))
    return worst


def check_pair(folder: Path, engine_name: str, layout: TrainLayout, tp: int, is_peer: bool) -> str:
    lora = Lora(RANK, ALPHA)
    plain = resolve_family(None, ALL_MODELS[MODEL])
    targets = target_names(plain, plain.shape(ALL_MODELS[MODEL]))
    peft = with_adapter(make_reference(MODEL), lora, targets, 0)
    with torch.enable_grad():
        model = make(folder / "base", folder / "peft", layout, "none")
        model.make_trainable(1e-3, PeerWeights(model.world) if is_peer else None)
    source = model.weight_source(model.source.family)
    engine = start(engine_name, model, tp, source.shard)
    hybrid = HybridEngine(
        source,
        engine,
        model.world,
        staging_bytes=1 << 14,
        verify_every=1,
        peer_memory=model.peers,
        timeout_s=120,
    )
    first = later = 0
    for version in range(UPDATES + 1):
        draw_adapter(peft, version)
        write_model(model, peft)
        sent = hybrid.to_rollout().total_planned_bytes
        first, later = (sent, later) if version == 0 else (first, sent)
        if version < UPDATES:
            hybrid.to_train()
    assert isinstance(hybrid.transport, PeerTransport) == is_peer
    worst = worst_logp(engine, peft)
    assert worst < LOGP_TOLERANCE, worst
    check_faults(hybrid, engine)
    shared = getattr(engine, "shared", frozenset())
    held = {name: one.nbytes for name, one in engine.tensors().items() if not is_slot(name)}
    copied = sum(size for name, size in held.items() if name not in shared)
    hybrid.close()
    engine.close()
    model.close()
    return (
        f"{worst:.1e} of PEFT, {first} bytes sent first and {later} later, {copied} of "
        f"{sum(held.values())} bytes of the base copied"
    )


def check_faults(hybrid: HybridEngine, engine: Any) -> None:
    """Faults behind the transport's back, on the last rank's engine, are found on every rank."""
    tensors: Mapping[str, Tensor] = engine.tensors()
    names = [name for name in tensors if "lora" in name]
    gate, up, row = (
        (
            next(name for name in names if all(one in name for one in parts))
            for parts in (("gate", "lora_B"), ("up_proj", "lora_B"), ("o_proj", "lora_A"))
        )
        if engine.name == "hf"
        else (
            next(name for name in names if all(one in name for one in parts))
            for parts in (
                ("gate_up_proj", "lora_b_stacked.0"),
                ("gate_up_proj", "lora_b_stacked.1"),
                ("o_proj", "lora_a_stacked.0"),
            )
        )
    )

    def swap() -> None:
        kept = tensors[gate].clone()
        tensors[gate].copy_(tensors[up])
        tensors[up].copy_(kept)

    faults: dict[str, Callable[[], object]] = {
        "swapped": swap,
        "scaled": lambda: tensors[up].mul_(2),
        "stale": lambda: tensors[row].mul_(1.001),
        "turned": lambda: tensors[row].copy_(tensors[row].flip(1)),
    }
    is_last = int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1
    for fault, plant in faults.items():
        kept = {name: tensors[name].clone() for name in (gate, up, row)}
        if is_last:
            plant()
        try:
            hybrid.verify()
        except VerifyError as error:
            assert "lora" in str(error)
        else:
            raise AssertionError(f"the fault was not found: {fault}")
        for name, content in kept.items():
            tensors[name].copy_(content)
    hybrid.verify()


def main() -> None:
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 300)
    platform.seed(1)
    torch.set_grad_enabled(False)
    folder, engine, world = Path(sys.argv[1]), sys.argv[2], World(platform, 300)
    for pair in sys.argv[3:]:
        sizes, _, rest = pair.partition(">")
        tp, pp, cp = map(int, sizes.split(","))
        rollout_tp, _, transport = rest.partition(",")
        layout = TrainLayout(world.size, tp=tp, pp=pp, cp=cp)
        found = check_pair(folder, engine, layout, int(rollout_tp), transport == "peer")
        if world.rank == 0:
            print(f"PAIR {engine} {world.size} ranks, {pair}: {found}", flush=True)


if __name__ == "__main__":
    main()
