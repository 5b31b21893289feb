"""One rank of the test of packages' engines: Megatron TP2 x PP2 resharded into them, against
transformers.

packaged_worker.py ENGINE FOLDER some|more|hybrid

FOLDER/NAME_0 and FOLDER/NAME_1 are two HF directories of one model; `more` are the cases that
`some` leaves out. `hybrid` are models with recurrent layers, which are computed in bfloat16.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from packaged import engine_class
from rounded_agreement import check_rounded
from tiny_models import LONGEST, as_long
from transformers import AutoModelForCausalLM

from hybridrl.config.schema import TrainConfig
from hybridrl.hybrid_engine.engine import HybridEngine
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.sources import TrainingShard
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group, stop_process_group
from hybridrl.parallel.layout import RolloutLayout, TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.rollout.common.agreement import TokensDifferError
from hybridrl.rollout.common.penalties import TokenHistory, penalized
from hybridrl.rollout.common.sampling import log_distribution
from hybridrl.rollout.common.settings import EngineSettings
from hybridrl.rollout.engine import Completion, Request, SamplingParams, generate
from hybridrl.training.model import ModelSource, ParallelModel

PAIRS = RolloutLayout.consecutive(4, 2)
INTERLEAVED = RolloutLayout(2, ((0, 0), (1, 0), (0, 1), (1, 1)))  # groups {0, 2} and {1, 3}
CASES = {
    "some": [
        ("qwen3", PAIRS),
        ("llama", INTERLEAVED),
        ("qwen2", RolloutLayout.consecutive(4, 4)),  # more ranks than key-value heads
        ("llama", RolloutLayout.consecutive(4, 1)),
    ],
    "more": [("llama", PAIRS), ("qwen2", PAIRS), ("qwen2", INTERLEAVED), ("qwen3", INTERLEAVED)],
}
# Families that only some engines were compared with, and so only they run.
OF_ENGINE = {
    # Prompts and responses are longer than mistral's window, and phi35's original length.
    ("vllm", "some"): [
        (name, PAIRS) for name in ("mistral", "granite", "phi35", "glm4", "gemma2", "gemma3_text")
    ],
    ("vllm", "more"): [("phi3", PAIRS), ("phi4mini", PAIRS)],
    ("vllm", "hybrid"): [
        ("qwen3_5_text", PAIRS),
        ("qwen3_next", INTERLEAVED),
        ("qwen3_5_moe_text", RolloutLayout.consecutive(4, 1)),
    ],
    ("sglang", "some"): [(name, PAIRS) for name in ("granite", "phi35", "glm4")],
    ("sglang", "more"): [("phi4mini", PAIRS)],
}
CHOOSE_FACTORS = ("vllm",)  # of longrope, by the longest sequence that they are started for
ROUNDED = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
GREEDY = SamplingParams(temperature=0.0, max_new_tokens=6)
LONG_GREEDY = replace(GREEDY, max_new_tokens=24)  # of ROUNDED, for a mean over many tokens
SAMPLED = SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_new_tokens=5)
PENALIZED = SamplingParams(
    0.9, 1.0, 0, 6, (1, 2, 3), min_new_tokens=4, repetition_penalty=1.4, presence_penalty=0.6
)
# float32 sums in another order, over four layers.
LOGP_TOLERANCE = 1e-4


def requests(replica: int, sampling: SamplingParams) -> list[Request]:
    """Returns a replica's prompts, one longer than two KV blocks of 32 tokens."""
    rng = np.random.default_rng(replica)
    lengths = [3, 1, 8, 70, 30, 5]
    return [
        Request(i, tuple(rng.integers(2, 199, length).tolist()), 1000 * replica + i, sampling)
        for i, length in enumerate(lengths)
    ]


def check_greedy(oracle: torch.nn.Module, asked: list[Request], done: list[Completion]) -> float:
    """Compares tokens and log-probabilities with one forward of transformers; returns the worst."""
    worst = 0.0
    if getattr(oracle.config, "attn_logit_softcapping", None):
        oracle.set_attn_implementation("eager")  # its default leaves the cap out
    for request, completion in zip(asked, done, strict=True):
        with torch.no_grad():
            tokens = torch.tensor(request.prompt + completion.tokens)
            logits = oracle(as_long(oracle, tokens)[None]).logits[0, : len(tokens)]
        logp = logits.float().log_softmax(-1)[len(request.prompt) - 1 : -1]
        assert logp.argmax(-1).tolist() == list(completion.tokens), request.request_id
        expected = logp[range(len(completion.tokens)), list(completion.tokens)]
        worst = max(worst, float((expected - torch.tensor(completion.logps)).abs().max()))
    assert worst < LOGP_TOLERANCE, worst
    return worst


def check_penalized(oracle: torch.nn.Module, asked: list[Request], done: list[Completion]) -> None:
    """Compares log-probabilities with those of transformers' logits, penalized token by token."""
    for request, completion in zip(asked, done, strict=True):
        tokens = torch.tensor(request.prompt + completion.tokens)
        logits = oracle(as_long(oracle, tokens)[None]).logits[0, : len(tokens)].float()
        for place, token in enumerate(completion.tokens):
            said = TokenHistory(request.prompt, completion.tokens[:place])
            row = logits[len(request.prompt) + place - 1][None]
            wanted = log_distribution(penalized(row, [PENALIZED], [said]), [PENALIZED])[0, token]
            assert abs(float(wanted) - completion.logps[place]) < LOGP_TOLERANCE, request.request_id


def check_replica(layout: RolloutLayout, rank: int, done: list[Completion]) -> None:
    """Compares the completions of all ranks of each replica; they must be the same to the bit."""
    everyone: list[list[Completion]] = [[]] * layout.tp * layout.replicas
    dist.all_gather_object(everyone, done)
    replica = layout.assignment[rank][0]
    for other, (where, _) in enumerate(layout.assignment):
        assert (everyone[other] == done) == (where == replica), (rank, other)


def check_agreement(engine: Any, layout: RolloutLayout, rank: int) -> None:
    """Gives one rank of the first replica other seeds: all ranks of the replica must be told."""
    replica, tp_rank = layout.assignment[rank]
    asked = requests(replica, SAMPLED)
    if (replica, tp_rank) == (0, 1):
        asked = [replace(request, seed=request.seed + 1) for request in asked]
    try:
        generate(engine, asked)
    except TokensDifferError as error:
        culprit = layout.assignment.index((0, 1))
        assert replica == 0 and f"ranks [{culprit}]" in str(error), error
    else:
        assert replica != 0


def generators() -> tuple[bytes, bytes]:
    return torch.get_rng_state().numpy().tobytes(), np.random.get_state()[1].tobytes()


def check_shared(engine: Any, shard: TrainingShard, is_cut_alike: bool) -> None:
    """Of the stage's layers, what is cut alike is the trainer's own memory; norms always are."""
    pointers = {tensor.data_ptr() for tensor in shard.tensors.values()}
    tensors = engine.tensors()
    assert engine.shared == {n for n, tensor in tensors.items() if tensor.data_ptr() in pointers}
    kinds = {name.split(".")[-2] for name in engine.shared}
    assert {"input_layernorm", "post_attention_layernorm"} <= kinds
    assert ("gate_up_proj" in kinds and "down_proj" in kinds) == is_cut_alike, kinds


def run(engine_name: str, folder: Path, name: str, layout: RolloutLayout, mesh: Mesh) -> None:
    rank = mesh.world.rank
    hf_config = json.loads((folder / f"{name}_0" / "config.json").read_text())
    family = resolve_family(None, hf_config)
    is_rounded = name in ROUNDED
    dtype = torch.bfloat16 if is_rounded else torch.float32
    dtype_name = str(dtype).removeprefix("torch.")
    parts = family, hf_config, dtype, family.name, folder / f"{name}_0"
    source = ModelSource(*parts, LONGEST)
    model = ParallelModel(mesh, source, "lm", TrainConfig(micro_batch_tokens=48))
    # Of longrope as it is on disk, where the engine chooses factors as it would to serve it.
    given = hf_config if engine_name in CHOOSE_FACTORS else source.computed_config
    settings = EngineSettings(given, family.architectures, dtype_name, 4, LONGEST)
    torch.manual_seed(rank)
    before = generators()
    shard = TrainingShard(model.layout(), model.weights())
    engine = engine_class(engine_name)(settings, family, layout, rank, shard=shard)
    is_cut_alike = (layout.tp, layout.assignment[rank][1]) == (2, mesh.place.tp)
    check_shared(engine, shard, is_cut_alike)
    hybrid = HybridEngine(
        model.whole_weights(), engine, model.world, staging_bytes=1 << 16, verify_every=1
    )
    replica, worst = layout.assignment[rank][0], []
    sampled: list[list[Completion]] = []
    for version in range(2):
        directory = folder / f"{name}_{version}"
        load_hf(directory, model.layout(), model.weights(), hf_shapes(family, source.shape))
        hybrid.to_rollout(version)
        with torch.random.fork_rng():  # transformers draws the decays of delta nets
            oracle = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        asked = requests(replica, LONG_GREEDY if is_rounded else GREEDY)
        done = generate(engine, asked)
        worst.append((check_rounded if is_rounded else check_greedy)(oracle, asked, done))
        check_replica(layout, rank, done)
        sampled.append(generate(engine, requests(replica, SAMPLED)))
        check_replica(layout, rank, sampled[-1])
        if version == 0:
            asked = requests(replica, PENALIZED)
            done = generate(engine, asked)
            if not is_rounded:
                check_penalized(oracle, asked, done)
            check_replica(layout, rank, done)
            hybrid.to_train()
    assert sampled[0] != sampled[1]
    assert generators() == before, "the engine moved the trainer's random generators"
    if layout.tp == 2:
        check_agreement(engine, layout, rank)
    engine.close()
    unit = "times transformers' rounding" if is_rounded else "of transformers"
    print(f"rank {rank} {name} {layout.assignment}: within {max(worst):.1e} {unit}")


def main() -> None:
    engine, folder, which = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    mesh = Mesh(World(platform, 120), TrainLayout(4, tp=2, pp=2))
    platform.seed(1)
    torch.set_grad_enabled(False)
    for name, layout in CASES.get(which, []) + OF_ENGINE[engine, which]:
        run(engine, folder, name, layout, mesh)
    stop_process_group()


if __name__ == "__main__":
    main()
