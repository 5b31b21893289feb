"""One rank: samples that share their prompt's positions give what samples of their own give.

shared_prompts_worker.py FOLDER FAMILIES LAYOUT...     a layout is "tp,pp,vpp,cp[,recompute]"
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from parity_worker import FAMILY_KEYS, gradients_in_hf_names, grouped_batch, objective

from hybridrl.config.schema import TrainConfig
from hybridrl.contracts.batch import Producer, Prompt, Rollout, RolloutBatch, TrainBatch
from hybridrl.errors import UserError
from hybridrl.models.family import resolve_family
from hybridrl.models.hf.shards import load_hf
from hybridrl.models.megatron.attention import PackedAttention
from hybridrl.models.weights import hf_shapes
from hybridrl.parallel.groups import World
from hybridrl.parallel.joining import start_process_group
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.platform import Platform
from hybridrl.training.model import ModelSource, ParallelModel

# Tokens of each prompt, and of each response to it: one sample, a prompt of one token, a group that
# is more than one micro-batch, responses longer than the prompt and shorter.
GROUPS = (
    (9, (5, 12, 3, 8)),
    (1, (4, 6)),
    (6, (7,)),
    (14, (2, 2, 9, 1)),
    (2, (1, 1)),
    (20, (12, 9, 11, 10, 3)),
)
BUDGET = 96
TOLERANCE = 2e-6  # of the largest gradient; fp32 sums in another order, nothing else


# Episodes of a group, each with its sequences. A sequence is a list of (seed, number of tokens,
# whether they are trained); parts with equal seeds and lengths are equal tokens. The first part is
# the context. Branches leave at a turn's end, within a turn and within the context; one sequence is
# the beginning of another; a sequence of another episode has the same context.
EPISODES = (
    (
        (
            ((1, 9, False), (2, 5, True), (3, 4, False), (4, 6, True)),
            ((1, 9, False), (2, 5, False), (5, 3, False), (6, 7, True)),
            ((1, 9, False), (2, 5, False), (5, 3, False), (6, 4, False), (7, 5, True)),
            ((1, 6, False), (8, 9, True)),
            ((9, 11, False), (10, 8, True)),
        ),
        (
            ((1, 9, False), (11, 12, True)),
            ((9, 11, False), (12, 3, True)),
        ),
        (((1, 9, False), (13, 2, True), (14, 3, False), (15, 4, True)),),
    ),
    tuple((((16, 14, False), (17 + i, 5 + i, True)),) for i in range(4)),
    ((((30, 7, False), (31, 3, True)),),),
)


def a_forest(vocab: int) -> TrainBatch:
    """Returns a batch of agents' sequences."""
    prompts, rollouts, groups = [], [], []
    sample = 0
    for group, episodes in enumerate(EPISODES):
        for sequences in episodes:
            for number, parts in enumerate(sequences):
                drawn = []
                for seed, count, _ in parts:
                    generator = torch.Generator().manual_seed(seed)
                    tokens_of_seed = torch.randint(0, vocab, (40,), generator=generator)
                    drawn.append(tokens_of_seed[:count].tolist())
                context, tokens = tuple(drawn[0]), tuple(chain.from_iterable(drawn[1:]))
                observed = [not is_trained for _, n, is_trained in parts[1:] for _ in range(n)]
                edges = [i for i, one in enumerate(observed) if one]
                gaps = tuple(chain.from_iterable((i, i + 1) for i in edges))
                prompts.append(Prompt(group, "", context, {}, tokens, response_gaps=gaps))
                rollouts.append(
                    Rollout(
                        sample,
                        prompts[-1],
                        tokens,
                        (0.0,) * len(tokens),
                        "stop",
                        0,
                        tuple(observed),
                        sequence=number,
                    )
                )
                groups.append(group)
            sample += 1
    found = RolloutBatch.from_rollouts(rollouts, groups, Producer.here("the test of branches"))
    batch = TrainBatch.supervised(prompts, Producer.here("the test of branches"))
    names = ("sample_ids_B", "group_B", "sequence_B", "branch_of_B", "branch_tokens_B", "context_B")
    return replace(batch, **{name: getattr(found, name) for name in names})


def a_batch(vocab: int, is_forest: bool) -> TrainBatch:
    return a_forest(vocab) if is_forest else grouped_batch(GROUPS, vocab)


def value_objective(output_S: torch.Tensor, micro: Any) -> tuple[torch.Tensor, None]:
    weight_S = (micro.positions_S % 5 - 1.5) * micro.loss_mask_S
    return (weight_S * output_S).sum() / 100, None


def run(
    mesh: Mesh, source: ModelSource, head: str, recompute: str, shares: bool, is_forest: bool
) -> tuple[dict[str, Any], float, torch.Tensor, int]:
    """Returns gradients in HF names (of a language model), their norm, the response tokens' outputs
    and the positions that hold a token.
    """
    settings = TrainConfig(
        micro_batch_tokens=BUDGET,
        recompute=recompute,
        share_prompts=None if shares else False,  # they are by default
        tp=mesh.layout.tp,
        cp=mesh.layout.cp,
    )
    mesh.platform.seed(1)
    model = ParallelModel(mesh, source, head, settings)
    assert model.planner.shares_prompts == shares
    # The same on all ranks, although only some of them may have recurrent layers.
    assert model.planner.shares_branches == (shares and source.shape.mixer is None)
    shapes = hf_shapes(source.family, source.shape)
    if head == "lm":
        load_hf(source.directory, model.layout(), model.weights(), shapes)
    else:
        for number, (_, tensor) in enumerate(sorted(model.weights().items())):
            generator = torch.Generator().manual_seed(number)
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.1)
    model.make_trainable(1e-3)
    batch = a_batch(source.shape.vocab_size, is_forest)
    plan = model.plan(batch)
    inputs = plan.inputs
    outputs = model.forward_all(inputs)
    columns = [output.logp_S if head == "lm" else output for output in outputs]
    found_T = plan.column(columns) * batch.response_mask_T
    model.accumulate(inputs, objective if head == "lm" else value_objective)
    gradients = gradients_in_hf_names(model) if head == "lm" else {}
    norm = model.grad_norm()
    packed = [sample for one in inputs for sample in one.whole.sample_indices]
    assert sorted(set(packed)) == sorted(packed)
    padding = mesh.layout.tp * (2 * mesh.layout.cp if mesh.layout.cp > 1 else 1)
    held = sum(int((one.whole.sequence_index_S >= 0).sum()) for one in inputs)
    assert all(one.whole.num_positions <= BUDGET + padding for one in inputs)
    saved = sum(model.planner.shared_tokens(batch, is_lookup=True))
    copies = mesh.layout.world_size // mesh.layout.dp
    helds = mesh.world.gather_objects(held)
    assert sum(helds) == (int(batch.lengths_B.sum()) - saved) * copies, (helds, saved)
    return gradients, norm, found_T, held


def compare(mesh: Mesh, source: ModelSource, head: str, recompute: str, is_forest: bool) -> str:
    own, own_norm, own_T, own_held = run(mesh, source, head, recompute, False, is_forest)
    shared, norm, shared_T, shared_held = run(mesh, source, head, recompute, True, is_forest)
    largest = max(
        mesh.world.gather_objects(max([float(g.abs().max()) for g, _ in own.values()] or [1]))
    )
    worst = 0.0
    for name, (gradient, held) in own.items():
        worst = max(worst, float(((gradient - shared[name][0]) * held).abs().max()))
    assert worst <= TOLERANCE * largest, (mesh.world.rank, head, worst / largest)
    assert own_norm > 0 and abs(norm / own_norm - 1) < 1e-5, (head, norm, own_norm)
    assert float((own_T - shared_T).abs().max()) < 1e-5 and own_T.abs().sum() > 0, head
    tokens = int(a_batch(source.shape.vocab_size, is_forest).lengths_B.sum())
    owns, shareds = zip(*mesh.world.gather_objects((own_held, shared_held)), strict=True)
    copies = mesh.layout.world_size // mesh.layout.dp
    assert sum(owns) == tokens * copies
    assert sum(shareds) < 0.8 * tokens * copies, (shareds, tokens)
    what = "branches" if is_forest else head
    return (
        f"{what}: {worst / largest:.1e} of the largest, {sum(shareds) / sum(owns):.2f} of positions"
    )


def check_refused(mesh: Mesh, source: ModelSource) -> None:
    """Attention that does not know of shared prompts."""
    PackedAttention.takes_shared_prompts = False
    try:
        ParallelModel(mesh, source, "lm", TrainConfig(micro_batch_tokens=48, share_prompts=True))
    except UserError as error:
        assert "train.share_prompts" in str(error) and "PackedAttention" in str(error)
        # Nobody asked for it: such layers are trained without.
        own = ParallelModel(mesh, source, "lm", TrainConfig(micro_batch_tokens=48))
        assert not own.planner.shares_prompts
    else:
        raise AssertionError("not refused")
    finally:
        PackedAttention.takes_shared_prompts = True


def main() -> None:
    root, families = Path(sys.argv[1]), sys.argv[2].split(",")
    platform = Platform.detect()
    platform.activate()
    start_process_group(platform, 120)
    size = torch.distributed.get_world_size()
    for name in families:
        folder = root / name
        hf_config = json.loads((folder / "config.json").read_text())
        family = resolve_family(FAMILY_KEYS.get(name), hf_config)
        source = ModelSource(family, hf_config, torch.float32, family.name, folder)
        for text in sys.argv[3:]:
            *sizes, last = text.split(",")
            recompute = [] if last.isdigit() else [last]
            sizes += [last] if last.isdigit() else []
            tp, pp, vpp, cp = map(int, sizes)
            mesh = Mesh(World(platform, 120), TrainLayout(size, tp, pp, vpp=vpp, cp=cp))
            cases = [("lm", False), ("value", False)]
            # Recurrent layers cannot continue the middle of a sequence.
            has_branches = source.shape.mixer is None
            if has_branches and (tp > 1 or cp > 1 or "BRANCHES" in os.environ):
                cases.append(("lm", True))
            for head, is_forest in cases:
                said = compare(mesh, source, head, *(recompute or ["none"]), is_forest)
                if mesh.world.rank == 0:
                    print(f"{name} {text} {said}", flush=True)
            parallel_state.destroy_model_parallel()
    mesh = Mesh(World(platform, 120), TrainLayout(size))
    check_refused(mesh, source)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
