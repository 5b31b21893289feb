"""Layouts of models that no family describes yet, for planning on paper: mixtures of experts.

Every HF tensor is a local tensor of its own, cut as Megatron and vLLM cut it: attention by heads,
experts whole over the expert-parallel ranks, norms, routers and low-rank projections on all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal

from hybridrl.models.boxes import Shape, whole
from hybridrl.models.weights import RankLayout, Region

Kind = Literal["replicated", "column", "row", "kv", "expert"]


@dataclass(frozen=True)
class PaperTensor:
    """An HF tensor: how it is cut, in which layer it is (-1: before all) and of which expert."""

    name: str
    shape: Shape
    kind: Kind
    layer: int
    expert: int = 0


@dataclass(frozen=True)
class PaperModel:
    """A model of which only the tensors matter.

    Args:
        num_kv_heads: over which tensors of kind "kv" are cut at most.
    """

    name: str
    num_layers: int
    num_experts: int
    num_kv_heads: int
    tensors: tuple[PaperTensor, ...]

    @property
    def num_parameters(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors)


def qwen3_235b_a22b() -> PaperModel:
    """Qwen3-235B-A22B: 94 layers, 128 experts in each."""
    hidden, heads, kv_heads, head, inner, experts = 4096, 64, 4, 128, 1536, 128
    found = [PaperTensor("model.embed_tokens.weight", (151936, hidden), "column", -1)]
    for layer in range(94):
        p = f"model.layers.{layer}."
        found += [
            PaperTensor(f"{p}input_layernorm.weight", (hidden,), "replicated", layer),
            PaperTensor(f"{p}post_attention_layernorm.weight", (hidden,), "replicated", layer),
            PaperTensor(f"{p}self_attn.q_proj.weight", (heads * head, hidden), "column", layer),
            PaperTensor(f"{p}self_attn.k_proj.weight", (kv_heads * head, hidden), "kv", layer),
            PaperTensor(f"{p}self_attn.v_proj.weight", (kv_heads * head, hidden), "kv", layer),
            PaperTensor(f"{p}self_attn.o_proj.weight", (hidden, heads * head), "row", layer),
            PaperTensor(f"{p}self_attn.q_norm.weight", (head,), "replicated", layer),
            PaperTensor(f"{p}self_attn.k_norm.weight", (head,), "replicated", layer),
            PaperTensor(f"{p}mlp.gate.weight", (experts, hidden), "replicated", layer),
            *_experts(p, layer, experts, inner, hidden),
        ]
    found.append(PaperTensor("model.norm.weight", (hidden,), "replicated", 94))
    found.append(PaperTensor("lm_head.weight", (151936, hidden), "column", 94))
    return PaperModel("Qwen3-235B-A22B", 94, experts, kv_heads, tuple(found))


def deepseek_v3() -> PaperModel:
    """DeepSeek-V3 without its token-prediction layer: 61 layers, 256 experts in the last 58."""
    hidden, heads, inner, experts, dense = 7168, 128, 2048, 256, 18432
    q_rank, kv_rank, nope, rope, value = 1536, 512, 128, 64, 128
    found = [PaperTensor("model.embed_tokens.weight", (129280, hidden), "column", -1)]
    for layer in range(61):
        p, a = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        kv_a, q_b = (kv_rank + rope, hidden), (heads * (nope + rope), q_rank)
        found += [
            PaperTensor(f"{p}input_layernorm.weight", (hidden,), "replicated", layer),
            PaperTensor(f"{p}post_attention_layernorm.weight", (hidden,), "replicated", layer),
            PaperTensor(f"{a}q_a_proj.weight", (q_rank, hidden), "replicated", layer),
            PaperTensor(f"{a}q_a_layernorm.weight", (q_rank,), "replicated", layer),
            PaperTensor(f"{a}q_b_proj.weight", q_b, "column", layer),
            PaperTensor(f"{a}kv_a_proj_with_mqa.weight", kv_a, "replicated", layer),
            PaperTensor(f"{a}kv_a_layernorm.weight", (kv_rank,), "replicated", layer),
            PaperTensor(f"{a}kv_b_proj.weight", (heads * (nope + value), kv_rank), "column", layer),
            PaperTensor(f"{a}o_proj.weight", (hidden, heads * value), "row", layer),
        ]
        if layer < 3:
            found += _gated(f"{p}mlp.", layer, dense, hidden)
            continue
        found += [
            PaperTensor(f"{p}mlp.gate.weight", (experts, hidden), "replicated", layer),
            PaperTensor(f"{p}mlp.gate.e_score_correction_bias", (experts,), "replicated", layer),
            *_gated(f"{p}mlp.shared_experts.", layer, inner, hidden),
            *_experts(p, layer, experts, inner, hidden),
        ]
    found.append(PaperTensor("model.norm.weight", (hidden,), "replicated", 61))
    found.append(PaperTensor("lm_head.weight", (129280, hidden), "column", 61))
    return PaperModel("DeepSeek-V3", 61, experts, heads, tuple(found))


def train_layouts(
    model: PaperModel, world_size: int, tp: int, pp: int, ep: int
) -> list[RankLayout]:
    """Returns every rank's part: Megatron's order tp-cp-ep-dp-pp, experts not cut themselves.

    Layers that `pp` does not divide go to the first stages.
    """
    plane = world_size // pp
    stage = [pp * layer // model.num_layers for layer in range(model.num_layers)]
    stage = [0, *stage, pp - 1]  # of layer -1 and of what follows the last layer
    parts: dict[tuple[int, int, int], RankLayout] = {}
    found = []
    for rank in range(world_size):
        place = (rank // plane, rank % tp, rank % plane % ep)
        if place not in parts:
            held = (t for t in model.tensors if stage[t.layer + 1] == place[0])
            parts[place] = _layout(model, held, tp, place[1], ep, place[2])
        found.append(parts[place])
    return found


def engine_parts(model: PaperModel, tp: int, is_expert_parallel: bool) -> list[RankLayout]:
    """Returns what each rank of an engine holds, experts whole or cut like everything else."""
    ep = tp if is_expert_parallel else 1
    return [
        _layout(model, model.tensors, tp, rank, ep, rank if is_expert_parallel else 0)
        for rank in range(tp)
    ]


def _layout(
    model: PaperModel, tensors: Iterator[PaperTensor] | tuple[PaperTensor, ...],
    tp: int, tp_rank: int, ep: int, ep_rank: int,
) -> RankLayout:  # fmt: skip
    regions = []
    for tensor in tensors:
        box = list(whole(tensor.shape))
        kind, parts, part = tensor.kind, tp, tp_rank
        if kind == "expert":
            if tensor.expert * ep // model.num_experts != ep_rank:
                continue
            down = tensor.name.endswith("down_proj.weight")
            kind = "replicated" if ep > 1 else "row" if down else "column"
        if kind == "kv" and tp > model.num_kv_heads:
            parts, part = model.num_kv_heads, tp_rank * model.num_kv_heads // tp
        if kind != "replicated":
            dim = 1 if kind == "row" else 0
            size = tensor.shape[dim]
            box[dim] = (part * size // parts, (part + 1) * size // parts)
        local = tuple((0, stop - start) for start, stop in box)
        regions.append(Region(tensor.name, tuple(box), tensor.name, local))
    shapes = {r.local: tuple(stop for _, stop in r.local_box) for r in regions}
    return RankLayout(tuple(regions), shapes)


def _gated(prefix: str, layer: int, inner: int, hidden: int) -> list[PaperTensor]:
    return [
        PaperTensor(f"{prefix}gate_proj.weight", (inner, hidden), "column", layer),
        PaperTensor(f"{prefix}up_proj.weight", (inner, hidden), "column", layer),
        PaperTensor(f"{prefix}down_proj.weight", (hidden, inner), "row", layer),
    ]


def _experts(
    prefix: str, layer: int, experts: int, inner: int, hidden: int
) -> Iterator[PaperTensor]:
    for expert in range(experts):
        for tensor in _gated(f"{prefix}mlp.experts.{expert}.", layer, inner, hidden):
            yield PaperTensor(tensor.name, tensor.shape, "expert", layer, expert)
