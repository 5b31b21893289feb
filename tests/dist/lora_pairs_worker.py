"""One rank of the test of LoRA adapters between training layouts and engines: real Megatron, real
engines, gloo; PEFT on transformers' model is the oracle.

lora_pairs_worker.py FOLDER MODEL ENGINE PAIR...
    each pair is "tp,pp,cp,ep>rollout_tp,rollout_ep[,peer]"

FOLDER/base is the model MODEL of engine_cases.py, and FOLDER/peft an adapter on it.
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
from adapter_cases import canonical, part, with_layers
from engine_cases import ALL_MODELS, make_reference, make_requests, worst_logp
from lora_worker import make
from packaged import engine_class
from torch import Tensor

from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.hybrid_engine.transports.peer import PeerTransport
from hybridrl.hybrid_engine.verify import VerifyError
from hybridrl.models.adapters.lora import EXPERTS
from hybridrl.models.adapters.rows import HF_A, target_names
from hybridrl.models.adapters.slots import is_slot
from hybridrl.models.family import Family
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.platform import Platform
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import SamplingParams
from hybridrl.rollout.hf.adapter import HfEngine
from hybridrl.rollout.model_rules import held_family
from hybridrl.training.model import ParallelModel
from hybridrl.training.peer_weights import PeerWeights

UPDATES = 20
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=10)
LOGP_TOLERANCE = 1e-4  # float32 sums in another order, over three layers


def start(
    name: str, engine: str, model: ParallelModel, held: Family, sizes: tuple[int, int], shard: Any
) -> Any:
    """Starts an engine of `sizes`, tp and ep, for the model `name`."""
    config, (tp, ep) = dict(ALL_MODELS[name]), sizes
    if engine == "hf":
        return HfEngine(config, "float32", "cpu", 8, held)
    settings = EngineSettings(
        held.for_engines(config),
        held.architectures,
        "float32",
        8,
        64,
        kv_cache_bytes=4 << 20,
        ep=ep,
    )
    layout = RolloutLayout.consecutive(model.world.size, tp)
    return engine_class(engine)(settings, held, layout, model.world.rank, shard=shard)


def draw(peft: Any, model: ParallelModel, seed: int) -> None:
    """Replaces PEFT's adapter by another random one, also in this rank's part of the trainer's."""
    own, generator = model.adapter_weights(), torch.Generator().manual_seed(seed)
    whole = canonical(peft, model.source.family, model.source.shape)
    for name, tensor in whole.items():
        scale = 0.6 * tensor.shape[-1] ** -0.5 if name.endswith(HF_A) else 0.3
        tensor.copy_(scale * torch.randn(tensor.shape, generator=generator))
    with torch.no_grad():
        for region in model.adapter_layout().regions:
            part(own[region.local], region.local_box).copy_(part(whole[region.hf], region.hf_box))


def check_pair(
    folder: Path,
    name: str,
    engine_name: str,
    layout: TrainLayout,
    sizes: tuple[int, int],
    is_peer: bool,
) -> str:
    with torch.enable_grad():
        model = make(folder / "base", folder / "peft", layout, "none")
        model.make_trainable(1e-3, PeerWeights(model.world) if is_peer else None)
    family, shape = model.source.family, model.source.shape
    known = target_names(family, shape)
    has_experts = EXPERTS in family.lora.targets
    targets = [one for one in known if one in family.lora.targets]
    peft = with_layers(make_reference(name), family.lora, targets, has_experts).eval()
    held = held_family(engine_name, family, shape)
    source = model.weight_source(held)
    engine = start(name, engine_name, model, held, sizes, source.shard)
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
        draw(peft, model, version)
        sent = hybrid.to_rollout().total_planned_bytes
        first, later = (sent, later) if version == 0 else (first, sent)
        if version < UPDATES:
            hybrid.to_train()
    assert isinstance(hybrid.transport, PeerTransport) == is_peer
    worst = worst_logp(engine, peft, make_requests(4, GREEDY))
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
    """Faults on the last rank's engine are found on every rank: B of two projections swapped."""
    tensors: Mapping[str, Tensor] = engine.tensors()
    names = [name for name in tensors if "lora" in name]
    is_hf, has_dense = engine.name == "hf", "gate_up_proj" in str(names)
    fused, places = ("gate_up_proj", (0, 1)) if has_dense else ("qkv_proj", (1, 2))
    alike = [(fused, f"lora_b_stacked.{place}") for place in places]
    if is_hf:
        alike = [("gate_proj", "lora_B"), ("up_proj", "lora_B")]
    gate, up, row = (
        next(name for name in names if all(one in name for one in parts))
        for parts in (*alike, ("o_proj", "lora_A" if is_hf else "lora_a_stacked.0"))
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
    root, name, engine, *pairs = sys.argv[1:]
    world = World(platform, 300)
    for pair in pairs:
        train, _, rollout = pair.partition(">")
        tp, pp, cp, ep = map(int, train.split(","))
        rollout_tp, rollout_ep, *transport = rollout.split(",")
        layout = TrainLayout(world.size, tp=tp, pp=pp, cp=cp, ep=ep)
        sizes = int(rollout_tp), int(rollout_ep)
        found = check_pair(Path(root), name, engine, layout, sizes, transport == ["peer"])
        if world.rank == 0:
            print(f"PAIR {engine} {name} {world.size} ranks, {pair}: {found}", flush=True)


if __name__ == "__main__":
    main()
