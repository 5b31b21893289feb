"""Random models and layouts, and what every rank must hold of them, without the weight table.

The references here cut and join whole HF arrays by reshape and concatenation, as Megatron and vLLM
document their parameters, so that a fault in regions, plan or transport cannot hide in both sides.
Every HF element has a value of its own, so a value tells where it came from; padding is -1.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hybridrl.hybrid_engine.plan import Plan
from hybridrl.models.family import Family, ModelShape, resolve_family
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

    `ranks` are those that train, of a world that may have others; None: all.
    """

    shape: ModelShape
    train: TrainLayout
    rollout: RolloutLayout
    engine: str
    ranks: tuple[int, ...] | None = None

    @property
    def family(self) -> Family:
        return resolve_family("llama", {})  # all three share the table, which reads the shape

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
                found[rank] = fused_layout(self.family, self.shape, self.rollout.tp, tp_rank)
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
        return fused_reference(hf, self.shape, self.rollout.tp, tp_rank)


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


def random_placed_case(seed: int, world: int | None = None) -> Case:
    """Returns a case on rank sets of a world of 2 to 8 ranks: disjoint, overlapping or within each
    other.
    """
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

    per_chunk = shape.num_layers // (layout.pp * layout.vpp)
    for chunk in range(layout.vpp):
        first = (chunk * layout.pp + where.pp) * per_chunk
        for index in range(per_chunk):
            layer = f"model.layers.{first + index}."
            name = f"{chunk}/decoder.layers.{index}."
            found[f"{name}input_layernorm.weight"] = hf[f"{layer}input_layernorm.weight"]
            found[f"{name}pre_mlp_layernorm.weight"] = hf[f"{layer}post_attention_layernorm.weight"]
            found[f"{name}self_attention.linear_qkv.weight"] = qkv(layer, "weight")
            found[f"{name}mlp.linear_fc1.weight"] = gate_up(layer, "weight")
            for ours, theirs in (
                ("self_attention.linear_proj", "self_attn.o_proj"),
                ("mlp.linear_fc2", "mlp.down_proj"),
            ):
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
    hf: Mapping[str, np.ndarray], shape: ModelShape, tp: int, tp_rank: int
) -> Arrays:
    """Returns the parameters of one rank of an engine that fuses projections as vLLM does."""
    found: Arrays = {}
    head = shape.head_dim
    kv_of_rank = np.split(
        np.repeat(np.arange(shape.num_kv_heads), max(tp // shape.num_kv_heads, 1)), tp
    )
    q_of_rank = np.split(np.arange(shape.num_heads), tp)

    def heads(array: np.ndarray, which: np.ndarray) -> np.ndarray:
        return array.reshape(-1, head, *array.shape[1:])[which].reshape(-1, *array.shape[1:])

    for name, array in hf.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            padded = _padded(array, -(-shape.vocab_size // 64) * 64)
            found[name] = np.split(padded, tp)[tp_rank]
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
