"""Random models and layouts, and what every rank must hold of them, without the weight table.

The references here cut and join whole HF arrays by reshape and concatenation, as Megatron and vLLM
document their parameters, so that a fault in regions, plan or transport cannot hide in both sides.
Every HF element has a value of its own, so a value tells where it came from; padding is -1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hybridrl.hybrid_engine.planning.expert_maps import ExpertTensors, with_experts
from hybridrl.hybrid_engine.planning.plan import Plan
from hybridrl.models.family import Family, LatentShape, ModelShape, MoeShape, resolve_family
from hybridrl.models.weights import (
    NOTHING,
    RankLayout,
    fused_layout,
    hf_layout,
    hf_shapes,
    megatron_layout,
)
from hybridrl.parallel.layout import RolloutLayout, TrainLayout

Arrays = dict[str, np.ndarray]
ORDERS = ("tp-cp-ep-dp-pp", "pp-tp-cp-ep-dp", "dp-tp-cp-ep-pp", "tp-cp-ep-pp-dp", "cp-dp-ep-tp-pp")
PADDING = -1.0


@dataclass(frozen=True)
class Case:
    """A model, how it is trained, and how it generates; engine "hf" or "fused".

    `ranks` are those that train, of a world that may have others; None: all. The experts of an
    engine are dealt to `rollout_ep` parts of its ranks, in order or as `rollout.experts` says.
    """

    shape: ModelShape
    train: TrainLayout
    rollout: RolloutLayout
    engine: str
    ranks: tuple[int, ...] | None = None
    rollout_ep: int = 1

    @property
    def family(self) -> Family:
        """Dense families share the table, which reads the shape."""
        if self.shape.latent is not None:
            return resolve_family("deepseek_v3", {})
        return resolve_family("llama" if self.shape.moe is None else "qwen3_moe", {})

    @property
    def world(self) -> int:
        return len(self.rollout.assignment)

    @property
    def trains(self) -> tuple[int, ...]:
        return tuple(range(self.world)) if self.ranks is None else self.ranks

    def sources(self) -> list[RankLayout]:
        found = [NOTHING] * self.world
        for place, rank in enumerate(self.trains):
            found[rank] = megatron_layout(self.family, self.shape, self.train, place)
        return found

    def targets(self) -> list[RankLayout]:
        found = [NOTHING] * self.world
        for rank in self.rollout.ranks:
            _, tp_rank = self.rollout.place(rank)
            if self.engine == "hf":
                found[rank] = hf_layout(hf_shapes(self.family, self.shape))
            else:
                parts = self.rollout.tp, tp_rank, self.rollout_ep
                found[rank] = fused_layout(self.family, self.shape, *parts)
                if (experts := self.rollout.experts_of(rank)) is not None:
                    tensors = ExpertTensors(self.family, self.shape)
                    found[rank] = with_experts(found[rank], tensors, experts)
        return found

    def weights(self) -> Arrays:
        """Every HF tensor; element values count up from 0 through the whole model."""
        found, start = {}, 0
        for name, shape in hf_shapes(self.family, self.shape).items():
            size = int(np.prod(shape))
            found[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
            start += size
        assert start < 2**24, "values must stay exact in float32"
        return found

    def trained(self, hf: Mapping[str, np.ndarray], rank: int) -> Arrays:
        if rank not in self.trains:
            return {}
        return megatron_reference(hf, self.shape, self.train, self.trains.index(rank))

    def generating(self, hf: Mapping[str, np.ndarray], rank: int) -> Arrays:
        tp_rank = self.rollout.tp_rank(rank)
        if tp_rank is None:
            return {}
        if self.engine == "hf":
            return dict(hf)
        experts = self.rollout.experts_of(rank)
        return fused_reference(hf, self.shape, self.rollout.tp, tp_rank, self.rollout_ep, experts)


def random_case(seed: int, world: int | None = None) -> Case:
    """Returns a case that can be laid out, over 1, 2, 4 or 8 ranks."""
    rng = random.Random(seed)
    while True:
        size = world or rng.choice((1, 2, 4, 8))
        train, shape = _random_train(rng, size), _random_shape(rng)
        rollout_tp = rng.choice([n for n in (1, 2, 4, 8) if size % n == 0])
        engine = "hf" if rollout_tp == 1 and rng.random() < 0.5 else "fused"
        rollout = RolloutLayout.consecutive(size, rollout_tp)
        if rng.random() < 0.3:
            places = list(rollout.assignment)
            rng.shuffle(places)
            rollout = RolloutLayout(rollout_tp, tuple(places))
        layers = train.pp * train.vpp
        shape = ModelShape(
            **{**shape.__dict__, "num_layers": layers * rng.choice((1, 2) if layers < 8 else (1,))}
        )
        if _fits(shape, train.tp, is_megatron=True) and _fits(shape, rollout_tp):
            return Case(shape, train, rollout, engine)


def random_case_with_experts(seed: int, world: int | None = None) -> Case:
    """Returns a case with experts, cut and dealt otherwise in training than in the engine."""
    rng = random.Random(f"experts {seed}")
    while True:
        case = random_case(rng.randrange(1 << 30), world)
        train, shape = case.train, case.shape
        plane = train.world_size // train.pp
        if case.rollout.tp == 1 and rng.random() < 0.5:
            continue  # of these are many, and their engines have all experts on each rank
        ep, etp = rng.choice((1, 2, 4, 8)), rng.choice((1, 1, 2, 4))
        rollout_ep = rng.choice([n for n in (1, case.rollout.tp) if case.rollout.tp % n == 0])
        if plane % (ep * etp) or not (train.pp == 1 or train.order.endswith("pp")):
            continue
        dense = tuple(i for i in range(shape.num_layers) if rng.random() < 0.2)
        moe = MoeShape(8, 2, 8 * rng.randint(1, 3), dense_layers=dense)
        if len(dense) < shape.num_layers and moe.expert_ffn_size % case.rollout.tp == 0:
            shape = replace(shape, moe=moe, linear_bias=False)
            train, rollout = replace(train, ep=ep, etp=etp), case.rollout
            if rng.random() < 0.4:
                shape = _with_latents(rng, shape, moe)
            if rollout_ep > 1 and rng.random() < 0.5:
                rollout = replace(rollout, experts=_dealt_anyhow(rng, rollout, 8))
            return replace(case, shape=shape, train=train, rollout=rollout, rollout_ep=rollout_ep)


def _dealt_anyhow(
    rng: random.Random, layout: RolloutLayout, num_experts: int
) -> tuple[tuple[int, ...], ...]:
    """Deals the experts of each replica to its ranks, as many to each, at random."""
    experts = [rng.sample(range(num_experts), num_experts) for _ in range(layout.replicas)]
    count = num_experts // layout.tp
    places = (layout.place(rank) for rank in layout.ranks)
    return tuple(tuple(sorted(experts[r][at * count : (at + 1) * count])) for r, at in places)


def _with_latents(rng: random.Random, shape: ModelShape, moe: MoeShape) -> ModelShape:
    """Returns the shape of a model as DeepSeek-V3, with or without a latent of queries."""
    sizes = [rng.randint(1, 3) for _ in range(3)]
    latent = LatentShape(rng.choice((0, 5)), rng.randint(1, 6), sizes[0], 2 * sizes[1], sizes[2])
    moe = replace(moe, shared_ffn_size=8 * rng.randint(1, 3), has_bias=True)
    plain = {"qkv_bias": False, "qk_norm": False, "num_kv_heads": shape.num_heads}
    return replace(shape, moe=moe, latent=latent, head_dim=latent.query_dim, **plain)


def random_placed_case(seed: int, world: int | None = None) -> Case:
    """Returns a case on disjoint, overlapping or nested rank sets of a world of 2 to 8 ranks."""
    rng = random.Random(seed)
    while True:
        size = world or rng.randint(2, 8)
        trains, generates = (sorted(rng.sample(range(size), rng.randint(1, size))) for _ in "ab")
        if len(trains) == len(generates) == size:
            continue
        case = random_case(rng.randrange(1 << 30), len(trains))
        tp = rng.choice([n for n in (1, 2, 4, 8) if len(generates) % n == 0])
        if not _fits(case.shape, tp):
            continue
        engine = "hf" if tp == 1 and rng.random() < 0.5 else "fused"
        rollout = RolloutLayout.consecutive(len(generates), tp).on(generates, size)
        return Case(case.shape, case.train, rollout, engine, tuple(trains))


def _random_train(rng: random.Random, size: int) -> TrainLayout:
    while True:
        tp, pp, cp = (rng.choice((1, 1, 2, 4, 8)) for _ in range(3))
        if size % (tp * pp * cp) == 0:
            vpp = rng.choice((1, 2)) if pp > 1 else 1
            return TrainLayout(size, tp=tp, pp=pp, cp=cp, vpp=vpp, order=rng.choice(ORDERS))


def _random_shape(rng: random.Random) -> ModelShape:
    num_kv_heads = rng.choice((1, 2, 3, 4, 8))
    linear_bias = rng.random() < 0.2
    return ModelShape(
        num_layers=1,
        hidden_size=8 * rng.randint(1, 3),
        num_heads=num_kv_heads * rng.choice((1, 2, 3, 4, 8)),
        num_kv_heads=num_kv_heads,
        head_dim=rng.choice((2, 3, 4)),
        ffn_size=8 * rng.randint(1, 4),
        vocab_size=rng.randint(5, 300),
        tied_embeddings=rng.random() < 0.4,
        qkv_bias=linear_bias or rng.random() < 0.4,
        qk_norm=rng.random() < 0.4,
        linear_bias=linear_bias,
    )


def _fits(shape: ModelShape, tp: int, is_megatron: bool = False) -> bool:
    heads, kv = shape.num_heads, shape.num_kv_heads
    if heads % tp or (kv % tp and tp % kv) or shape.ffn_size % tp:
        return False
    return not is_megatron or (heads + 2 * kv) * shape.head_dim % tp == 0


def megatron_reference(
    hf: Mapping[str, np.ndarray], shape: ModelShape, layout: TrainLayout, rank: int
) -> Arrays:
    """Returns the parameters of one rank of a Megatron model."""
    where, tp = layout.coordinates(rank), layout.tp
    r, found = where.tp, {}

    def column(array: np.ndarray) -> np.ndarray:
        return np.split(array, tp, axis=0)[r]

    def vocab(array: np.ndarray) -> np.ndarray:
        return column(_padded(array, shape.padded_vocab(tp)))

    def qkv(layer: str, kind: str) -> np.ndarray:
        kv = shape.num_kv_heads
        parts = [hf[f"{layer}self_attn.{x}_proj.{kind}"] for x in "qkv"]
        grouped = [part.reshape(kv, part.shape[0] // kv, *part.shape[1:]) for part in parts]
        joined = np.concatenate(grouped, axis=1)
        return column(joined.reshape(-1, *joined.shape[2:]))

    def gate_up(layer: str, kind: str) -> np.ndarray:
        return np.concatenate([column(hf[f"{layer}mlp.{x}_proj.{kind}"]) for x in ("gate", "up")])

    def expert_parts(name: str, layer: str, experts: list[int]) -> None:
        at = layout.expert_coordinates(rank)
        for local, expert in enumerate(np.split(np.array(experts), layout.ep)[at.ep]):
            of = f"{layer}mlp.experts.{expert}."
            gate, up, down = (hf[f"{of}{x}_proj.weight"] for x in ("gate", "up", "down"))
            halves = [np.split(half, layout.etp)[at.etp] for half in (gate, up)]
            own = f"{name}mlp.experts.local_experts.{local}."
            found[f"{own}linear_fc1.weight"] = np.concatenate(halves)
            found[f"{own}linear_fc2.weight"] = np.split(down, layout.etp, 1)[at.etp]
        found[f"{name}mlp.router.weight"] = hf[f"{layer}mlp.gate.weight"]
        assert shape.moe is not None
        if shape.moe.has_bias:
            found[f"{name}mlp.router.expert_bias"] = hf[f"{layer}mlp.gate.e_score_correction_bias"]
        if shape.moe.shared_ffn_size:
            shared, own = f"{layer}mlp.shared_experts.", f"{name}mlp.shared_experts."
            halves = [column(hf[f"{shared}{x}_proj.weight"]) for x in ("gate", "up")]
            found[f"{own}linear_fc1.weight"] = np.concatenate(halves)
            down = hf[f"{shared}down_proj.weight"]
            found[f"{own}linear_fc2.weight"] = np.split(down, tp, 1)[r]

    def latents(name: str, layer: str) -> None:
        own, theirs = f"{name}self_attention.", f"{layer}self_attn."
        down = [hf[f"{theirs}kv_a_proj_with_mqa.weight"]]
        if f"{theirs}q_a_proj.weight" in hf:
            down.insert(0, hf[f"{theirs}q_a_proj.weight"])
            found[f"{own}q_layernorm.weight"] = hf[f"{theirs}q_a_layernorm.weight"]
            found[f"{own}linear_q_up_proj.weight"] = column(hf[f"{theirs}q_b_proj.weight"])
        else:
            found[f"{own}linear_q_proj.weight"] = column(hf[f"{theirs}q_proj.weight"])
        found[f"{own}linear_down_proj.weight"] = np.concatenate(down)
        found[f"{own}kv_layernorm.weight"] = hf[f"{theirs}kv_a_layernorm.weight"]
        found[f"{own}linear_kv_up_proj.weight"] = column(hf[f"{theirs}kv_b_proj.weight"])

    per_chunk = shape.num_layers // (layout.pp * layout.vpp)
    for chunk in range(layout.vpp):
        first = (chunk * layout.pp + where.pp) * per_chunk
        for index in range(per_chunk):
            layer = f"model.layers.{first + index}."
            name = f"{chunk}/decoder.layers.{index}."
            found[f"{name}input_layernorm.weight"] = hf[f"{layer}input_layernorm.weight"]
            found[f"{name}pre_mlp_layernorm.weight"] = hf[f"{layer}post_attention_layernorm.weight"]
            if shape.latent is None:
                found[f"{name}self_attention.linear_qkv.weight"] = qkv(layer, "weight")
            else:
                latents(name, layer)
            is_dense = shape.moe is None or first + index in shape.moe.dense_layers
            rows = {"self_attention.linear_proj": "self_attn.o_proj"}
            if is_dense:
                found[f"{name}mlp.linear_fc1.weight"] = gate_up(layer, "weight")
                rows["mlp.linear_fc2"] = "mlp.down_proj"
            else:
                assert shape.moe is not None
                expert_parts(name, layer, list(range(shape.moe.num_experts)))
            for ours, theirs in rows.items():
                found[f"{name}{ours}.weight"] = np.split(hf[f"{layer}{theirs}.weight"], tp, 1)[r]
                if shape.linear_bias:
                    found[f"{name}{ours}.bias"] = hf[f"{layer}{theirs}.bias"]
            if shape.qkv_bias:
                found[f"{name}self_attention.linear_qkv.bias"] = qkv(layer, "bias")
            if shape.linear_bias:
                found[f"{name}mlp.linear_fc1.bias"] = gate_up(layer, "bias")
            for x in "qk" if shape.qk_norm else "":
                norm = hf[f"{layer}self_attn.{x}_norm.weight"]
                found[f"{name}self_attention.{x}_layernorm.weight"] = norm
    embedding = hf["model.embed_tokens.weight"]
    last = layout.vpp - 1
    if where.pp == 0:
        found["0/embedding.word_embeddings.weight"] = vocab(embedding)
    if where.pp == layout.pp - 1:
        found[f"{last}/decoder.final_layernorm.weight"] = hf["model.norm.weight"]
        if not shape.tied_embeddings:
            found[f"{last}/output_layer.weight"] = vocab(hf["lm_head.weight"])
        elif layout.pp > 1:
            found[f"{last}/output_layer.weight"] = vocab(embedding)
    return found


def fused_reference(
    hf: Mapping[str, np.ndarray],
    shape: ModelShape,
    tp: int,
    tp_rank: int,
    ep: int = 1,
    experts: Sequence[int] | None = None,
) -> Arrays:
    """Returns the parameters of one rank of an engine that fuses projections as vLLM does, with
    these whole experts; None: with those that are the rank's in order.
    """
    found: Arrays = {}
    head = shape.head_dim
    kv_of_rank = np.split(
        np.repeat(np.arange(shape.num_kv_heads), max(tp // shape.num_kv_heads, 1)), tp
    )
    q_of_rank = np.split(np.arange(shape.num_heads), tp)

    def heads(array: np.ndarray, which: np.ndarray) -> np.ndarray:
        return array.reshape(-1, head, *array.shape[1:])[which].reshape(-1, *array.shape[1:])

    for name, array in hf.items():
        if ".experts." in name:
            before, after = name.split(".experts.")
            expert, kind = int(after.split(".")[0]), after.split(".")[1]
            assert shape.moe is not None
            count, etp = shape.moe.num_experts // ep, tp // ep
            first = tp_rank // etp * count
            own = list(experts or range(first, first + count))
            if expert not in own:
                continue
            place = own.index(expert)
            stem, part = f"{before}.experts.routed_experts.", tp_rank % etp
            if kind == "down_proj":
                found[f"{stem}w2_weight/{place}"] = np.split(array, etp, 1)[part]
            elif kind == "gate_proj":
                halves = [array, hf[name.replace("gate_proj", "up_proj")]]
                joined = np.concatenate([np.split(half, etp)[part] for half in halves])
                found[f"{stem}w13_weight/{place}"] = joined
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            padded = _padded(array, -(-shape.vocab_size // 64) * 64)
            found[name] = np.split(padded, tp)[tp_rank]
        elif ".q_a_proj." in name:
            parts = [array, hf[name.replace("q_a_proj", "kv_a_proj_with_mqa")]]
            found[name.replace("q_a_proj", "fused_qkv_a_proj")] = np.concatenate(parts)
        elif (
            ".kv_a_proj_with_mqa." in name and name.replace("kv_a_proj_with_mqa", "q_a_proj") in hf
        ):
            continue
        elif "_b_proj." in name or (".q_proj." in name and shape.latent is not None):
            found[name] = np.split(array, tp)[tp_rank]
        elif ".q_proj." in name:
            q, k, v = (hf[name.replace(".q_proj.", f".{x}_proj.")] for x in "qkv")
            kv = kv_of_rank[tp_rank]
            parts = [heads(q, q_of_rank[tp_rank]), heads(k, kv), heads(v, kv)]
            found[name.replace(".q_proj.", ".qkv_proj.")] = np.concatenate(parts)
        elif ".gate_proj." in name:
            halves = (array, hf[name.replace(".gate_proj.", ".up_proj.")])
            parts = [np.split(half, tp)[tp_rank] for half in halves]
            found[name.replace(".gate_proj.", ".gate_up_proj.")] = np.concatenate(parts)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = np.split(array, tp, axis=1)[tp_rank]
        elif not any(part in name for part in (".k_proj.", ".v_proj.", ".up_proj.")):
            found[name] = array
    return found


def run_plan(plan: Plan, sources: list[Arrays], targets: list[RankLayout]) -> list[Arrays]:
    """Executes a plan in numpy; what it does not write stays -1."""
    results = []
    for ops, target in zip(plan.ops, targets, strict=True):
        dest = {n: np.full(shape, PADDING, np.float32) for n, shape in target.shapes.items()}
        for op in ops:
            source = sources[op.source_rank][op.source]
            dest[op.dest][_index(op.dest_box)] = source[_index(op.source_box)]
        results.append(dest)
    return results


def minimum_receive_elements(
    hf: Mapping[str, np.ndarray], held: Mapping[str, np.ndarray], needed: Mapping[str, np.ndarray]
) -> int:
    """Returns how many HF elements a rank needs and does not hold, by the values in its arrays."""
    size = sum(array.size for array in hf.values())
    is_held, is_needed = (_mask(arrays, size) for arrays in (held, needed))
    return int(np.count_nonzero(is_needed & ~is_held))


def _mask(arrays: Mapping[str, np.ndarray], size: int) -> np.ndarray:
    mask = np.zeros(size, bool)
    for array in arrays.values():
        values = array[array != PADDING].astype(np.int64)
        mask[values] = True
    return mask


def _padded(array: np.ndarray, rows: int) -> np.ndarray:
    pad = np.full((rows - array.shape[0], *array.shape[1:]), PADDING, array.dtype)
    return np.concatenate([array, pad])


def _index(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)
