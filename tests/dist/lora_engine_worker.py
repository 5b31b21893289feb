"""One rank of the test of an engine with an adapter, split over two ranks; PEFT is the oracle.

lora_engine_worker.py ENGINE
"""

from __future__ import annotations

import sys

import torch
from adapter_cases import draw_adapter, hf_tensors, with_adapter, write_tensors
from engine_cases import ALL_MODELS, PACKAGED_ALL, make_reference, make_requests, worst_logp
from packaged import engine_class

from hybridrl.models.adapters.lora import Lora
from hybridrl.models.adapters.rows import adapted, target_names
from hybridrl.models.family import resolve_family
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout
from hybridrl.platform import Platform
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_new_tokens=10)
# float32 sums in another order, over three layers.
LOGP_TOLERANCE = 1e-4


def run(engine_name: str, rank: int, num_kv_heads: int) -> None:
    name = f"{engine_name}-qwen2-tied"
    config = {**PACKAGED_ALL[name], "num_key_value_heads": num_kv_heads}
    ALL_MODELS[name] = config
    plain, lora = resolve_family(None, config), Lora(8, 12.0)
    family = adapted(plain, lora)
    peft = with_adapter(make_reference(name), lora, target_names(plain, plain.shape(config)), 0)
    settings = EngineSettings(
        family.for_engines(config), family.architectures, "float32", 8, 64, kv_cache_bytes=4 << 20
    )
    engine = engine_class(engine_name)(settings, family, RolloutLayout.consecutive(2, 2), rank)
    worst = []
    for version in range(2):
        engine.sleep()
        draw_adapter(peft, version)
        tensors = hf_tensors(peft, lora)
        write_tensors(engine, tensors, version)
        worst.append(worst_logp(engine, peft, make_requests(5, GREEDY)))
    assert max(worst) < LOGP_TOLERANCE, worst
    # The other rank's columns of A, and its rows of B: both ranks' parts, swapped.
    for proj, dim in (("self_attn.o_proj.lora_A", 1), ("mlp.up_proj.lora_B", 0)):
        part = f"model.layers.1.{proj}.weight"
        swapped = torch.cat(tensors[part].chunk(2, dim)[::-1], dim)
        write_tensors(engine, {**tensors, part: swapped}, 2)
        found = worst_logp(engine, peft, make_requests(5, GREEDY))
        assert found > 10 * LOGP_TOLERANCE, (part, found)
    engine.close()
    print(f"rank {rank} with {num_kv_heads} key-value heads: within {max(worst):.1e} of PEFT")


def main() -> None:
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    platform.seed(1)
    torch.set_grad_enabled(False)
    for num_kv_heads in (2, 1):  # one for each rank, and the same on both
        run(sys.argv[1], World(platform, 120).rank, num_kv_heads)
    stop_process_group()


if __name__ == "__main__":
    main()
