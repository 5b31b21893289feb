"""Weight layouts: where a rank stores each rectangle of each HF tensor.

Tensors of the HF checkpoint are the canonical coordinates. For one rank, a layout maps rectangles
of HF tensors to rectangles of local tensors. Import, export and resharding are therefore the same
operation: intersecting rectangles. Pure data, no torch. Invariant: the regions and padding of a
layout exactly tile each local tensor (`check_layout` verifies this).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from hybridrl.errors import ModelError
from hybridrl.models.adapters.rows import GROUPED_ADAPTERS, HF_A, HF_B, A, B, is_adapter
from hybridrl.models.adapters.slots import SLOT_A, SLOT_B, slot_rank
from hybridrl.models.boxes import Box, Shape, show, sizes, tiling_fault, whole
from hybridrl.models.cuts import Cut, fused_cut, megatron_cut, plain_cut, table_error
from hybridrl.models.family import EMBEDDING, OUTPUT_LAYER, Family, ModelShape, Row
from hybridrl.parallel.layout import TrainLayout

Head = Literal["lm", "value"]
"""Head on a model's last stage: log-probabilities over the vocabulary, or one value per token."""

VALUE_HEAD = "score.weight"  # HF name of a value head's weight
EXPERTS = ".mlp.experts."  # part of the local name of every expert tensor
# Parameter names if transformer-engine fuses a norm into the following linear layer.
_LAYER = "decoder.layers.{L}."
# Norms before a mixture of experts and before latent attention are never fused, because several
# layers read their output.
INPUT_NORM, PRE_MLP_NORM = (f"{_LAYER}{n}_layernorm.weight" for n in ("input", "pre_mlp"))
TE_NAMES = {
    INPUT_NORM: f"{_LAYER}self_attention.linear_qkv.layer_norm_weight",
    PRE_MLP_NORM: f"{_LAYER}mlp.linear_fc1.layer_norm_weight",
}
# Names of an expert's projections in an engine's stacked tensors.
_FUSED_EXPERTS = {"linear_fc1": "w13", "linear_fc2": "w2"}
# Parameter names if transformer-engine computes all experts of a rank in one module.
GROUPED_NAMES = {
    f"{_LAYER}mlp.experts.local_experts.{{E}}.linear_{fc}.weight": (
        f"{_LAYER}mlp.experts.linear_{fc}.weight{{E}}"
    )
    for fc in ("fc1", "fc2")
}
GROUPED_NAMES |= {
    f"{_LAYER}mlp.experts.local_experts.{{E}}.linear_{fc}.{part}": (
        f"{_LAYER}mlp.experts.linear_{fc}.{GROUPED_ADAPTERS}.{{E}}.{part}"
    )
    for fc in ("fc1", "fc2")
    for part in (A, B)
}


@dataclass(frozen=True, slots=True)
class Region:
    """A rectangle of an HF tensor, and the rectangle of a local tensor that stores it."""

    hf: str
    hf_box: Box
    local: str
    local_box: Box


@dataclass(frozen=True)
class RankLayout:
    """All local tensors of one rank, and the elements of the HF checkpoint that they contain.

    Args:
        regions: Rectangles that correspond to HF elements.
        padding: (local name, box) of elements that correspond to no HF element, such as rows that
            pad a vocabulary, or whose HF element another rank supplies.
    """

    regions: tuple[Region, ...]
    shapes: Mapping[str, Shape]
    padding: tuple[tuple[str, Box], ...] = ()


NOTHING = RankLayout((), {})
"""Layout of a rank that holds no part of the model."""


def of_names(layout: RankLayout, names: Collection[str]) -> RankLayout:
    return RankLayout(
        tuple(region for region in layout.regions if region.local in names),
        {name: size for name, size in layout.shapes.items() if name in names},
        tuple(part for part in layout.padding if part[0] in names),
    )


def hf_shapes(family: Family, shape: ModelShape, head: Head = "lm") -> dict[str, Shape]:
    """Returns the shape of every HF tensor of the model.

    With head="value", `score.weight` replaces `lm_head.weight`.
    """
    shapes: dict[str, Shape] = {}
    for row in _rows(family, shape, head):
        for layer in row.layers_of(shape):
            for expert in range(row.num_experts or 1):
                for part, size in _hf_tensors(row).items():
                    shapes[part.format(L=layer, E=expert)] = size
    return shapes


def hf_tensors_of_parameters(
    family: Family, shape: ModelShape, head: Head = "lm"
) -> list[tuple[str, dict[str, Shape]]]:
    """Returns Megatron's name of each kind of parameter, which all layers and experts have in
    common, and the HF tensors that it consists of.
    """
    return [(row.megatron, _hf_tensors(row)) for row in _rows(family, shape, head)]


def megatron_layout(
    family: Family,
    shape: ModelShape,
    layout: TrainLayout,
    rank: int,
    head: Head = "lm",
    te: bool = False,
    grouped: bool = False,
) -> RankLayout:
    """Returns the layout of a Megatron model on `rank`.

    Local names are `CHUNK/PARAMETER`: the virtual pipeline chunk, then Megatron's parameter name,
    in which the layer index is relative to the chunk. With tied embeddings and several pipeline
    stages, the last stage holds a copy of the embedding, `output_layer.weight`.

    Args:
        head: "lm", the vocabulary head; "value", a critic, whose `output_layer.weight` of shape (1,
            hidden) is HF's `score.weight`.
        te: Whether norms are parameters of the linear layers that follow them, as in
            transformer-engine.
        grouped: Whether all experts of a rank are one module, as in transformer-engine.

    Raises ModelError, naming the parameter, if the model cannot be sharded this way.
    """
    where = layout.coordinates(rank)
    _check_division(shape, layout)
    chunks = layout.layers(where.pp, shape.num_layers)
    is_last = where.pp == layout.pp - 1
    builder = _LayoutBuilder()
    for row in _rows(family, shape, head):
        experts: Sequence[int] = (0,)  # names in rows without experts do not contain {E}
        if row.num_experts:
            experts = layout.experts(rank, row.num_experts)
            cut = plain_cut(row, layout.etp, layout.expert_coordinates(rank).etp, "train.etp")
        else:
            cut = megatron_cut(row, shape, layout.tp, where.tp)
        held_layers = row.layers_of(shape)
        if row.stage == "layer":
            for chunk, layers in enumerate(chunks):
                for index, layer in enumerate(layers):
                    if layer not in held_layers:
                        continue
                    name = f"{chunk}/{_megatron_name(row, shape, layer, te, grouped)}"
                    for local, expert in enumerate(experts):
                        builder.add(row, layer, name.format(L=index, E=local), cut, expert)
        elif row.stage == "first" and where.pp == 0:
            builder.add(row, 0, f"0/{row.megatron}", cut)
        elif row.stage == "last" and is_last:
            builder.add(row, 0, f"{layout.vpp - 1}/{row.megatron}", cut)
        has_copy = row.megatron == EMBEDDING and shape.tied_embeddings and head == "lm"
        if has_copy and is_last and layout.pp > 1:
            builder.add(row, 0, f"{layout.vpp - 1}/{OUTPUT_LAYER}", cut)
    return builder.layout()


def megatron_layouts(
    family: Family,
    shape: ModelShape,
    layout: TrainLayout,
    head: Head = "lm",
    te: bool = False,
    grouped: bool = False,
) -> list[RankLayout]:
    """Returns the layout of each rank of a Megatron model.

    Ranks with equal layouts, such as the data- and context-parallel ranks of a dense model, share
    one object.
    """
    found: dict[tuple[int, ...], RankLayout] = {}
    ranks = []
    for rank in range(layout.world_size):
        where = layout.coordinates(rank)
        key: tuple[int, ...] = (where.tp, where.pp)
        if shape.moe is not None:
            of_experts = layout.expert_coordinates(rank)
            key += (of_experts.etp, of_experts.ep)
        if key not in found:
            found[key] = megatron_layout(family, shape, layout, rank, head, te, grouped)
        ranks.append(found[key])
    return ranks


def hf_layout(shapes: Mapping[str, Shape]) -> RankLayout:
    """Returns the layout of complete HF tensors under their own names."""
    boxes = {name: whole(shape) for name, shape in shapes.items()}
    regions = tuple(Region(name, box, name, box) for name, box in boxes.items())
    return RankLayout(regions, dict(shapes))


def fused_layout(
    family: Family, shape: ModelShape, tp: int, tp_rank: int, ep: int = 1
) -> RankLayout:
    """Returns the layout of one tensor-parallel rank of an engine with fused projections.

    Names and order are as in vLLM. `qkv_proj` is [queries; keys; values] for the rank's heads,
    where key-value heads are replicated if `tp` exceeds their number. `gate_up_proj` is [gate; up].
    A gated delta net has `in_proj_qkvz`, [queries; keys; values; gates], and `in_proj_ba`.
    `fused_qkv_a_proj` is the down projection to [queries; keys and values]. Vocabularies are padded
    to a multiple of 64; tied models have no `lm_head`. Each expert in an engine's stacked tensor is
    a separate local tensor, `<parameter>/<index on the rank>`: `w13_weight` contains [gate; up],
    and `w2_weight` contains down.

    Adapters are in slots (adapters/slots.py), `<layer>.lora_a_stacked.<i>` and
    `<layer>.lora_b_stacked.<i>` for the layer's projection `i`. Slots of projections without an
    adapter are padding, and so are the rows and columns beyond the adapters' rank.

    Args:
        ep: Number of groups into which a layer's experts are divided; each expert is split into `tp
            / ep` shards.
    """
    builder = _LayoutBuilder()
    rows = _rows(family, shape, "lm")
    for row in rows:
        if is_adapter(row.megatron):
            continue
        if row.num_experts:
            _add_fused_experts(builder, row, shape, tp, tp_rank, ep)
            continue
        cut = fused_cut(row, shape, tp, tp_rank)
        for layer in row.layers_of(shape):
            builder.add(row, layer, _fused_name(row).format(L=layer), cut)
    if family.lora is not None:
        adapters = {row.megatron: row for row in rows if is_adapter(row.megatron)}
        for name, row_a in adapters.items():
            if name.endswith(f".{A}"):
                assert not row_a.num_experts  # `slot_rules`
                row_b = adapters[f"{name.removesuffix(A)}{B}"]
                slots = _slots(row_a, row_b, shape, slot_rank(family.lora), tp, tp_rank)
                for layer in row_a.layers_of(shape):
                    for slot in slots:
                        builder.add_slot(slot, layer)
    return builder.layout()


def fused_layouts(family: Family, shape: ModelShape, tp: int, ep: int = 1) -> list[RankLayout]:
    return [fused_layout(family, shape, tp, tp_rank, ep) for tp_rank in range(tp)]


def check_layout(layout: RankLayout) -> None:
    """Raises ModelError, naming elements, unless regions and padding tile each local tensor."""
    boxes: dict[str, list[Box]] = {name: [] for name in layout.shapes}
    for region in layout.regions:
        if region.local not in boxes or sizes(region.hf_box) != sizes(region.local_box):
            what = f"{region.hf}{show(region.hf_box)} at {show(region.local_box)}"
            raise table_error(region.local, what)
        boxes[region.local].append(region.local_box)
    for name, box in layout.padding:
        boxes[name].append(box)
    for name, shape in layout.shapes.items():
        fault = tiling_fault(boxes[name], shape)
        if fault:
            raise table_error(name, f"{fault[0]} at {show(fault[1])}")


def check_coverage(layouts: Iterable[RankLayout], shapes: Mapping[str, Shape]) -> None:
    """Verifies that the layouts together contain all elements of all HF tensors and nothing else.

    Raises ModelError if an HF tensor is unknown, or names elements that no rank holds.
    """
    boxes: dict[str, set[Box]] = {name: set() for name in shapes}
    for layout in layouts:
        check_layout(layout)
        for region in layout.regions:
            if region.hf not in boxes:
                raise table_error(region.hf, f"mapped to {region.local}, but not in the model")
            boxes[region.hf].add(region.hf_box)
    for name, shape in shapes.items():
        fault = tiling_fault(sorted(boxes[name]), shape, allow_overlap=True)
        if fault:
            raise table_error(name, f"{fault[0]} at {show(fault[1])}, over all ranks")


def check_tensors(layout: RankLayout, shapes: Mapping[str, Shape]) -> None:
    """Raises ModelError unless a rank has exactly the tensors that its layout describes."""
    for name in sorted(layout.shapes.keys() | shapes.keys()):
        mapped, live = layout.shapes.get(name, "none"), shapes.get(name, "none")
        if mapped != live:
            raise ModelError(
                f"parameter {name}",
                f"shape {live} in the live model",
                f"shape {mapped}, from the weight table",
                "Fix the family's rows, or choose the family that describes this model.",
            )


@dataclass(frozen=True)
class _Slot:
    """A slot of an adapter: local name, shape, and the rectangle of the HF tensor that its first
    elements contain; `hf` is None if the projection has no adapter. `{L}` is the layer.
    """

    local: str
    shape: Shape
    hf: str | None
    hf_box: Box


class _LayoutBuilder:
    """Builds one rank's layout from its regions, shapes and padding."""

    def __init__(self) -> None:
        self._regions: list[Region] = []
        self._shapes: dict[str, Shape] = {}
        self._padding: list[tuple[str, Box]] = []

    def add(self, row: Row, layer: int, local: str, cut: Cut, expert: int = 0) -> None:
        before, after = whole(row.shapes[0][: cut.dim]), whole(row.shapes[0][cut.dim + 1 :])
        offset = 0
        for part, start, stop in cut.runs:
            first = _first_row(row, part)
            hf_box = (*before, (first + start, first + stop), *after)
            local_box = (*before, (offset, offset + stop - start), *after)
            hf = row.parts[part].format(L=layer, E=expert)
            self._regions.append(Region(hf, hf_box, local, local_box))
            offset += stop - start
        end = offset + cut.num_padding
        if cut.num_padding:
            self._padding.append((local, (*before, (offset, end), *after)))
        self._shapes[local] = sizes((*before, (0, end), *after))

    def add_slot(self, slot: _Slot, layer: int) -> None:
        local, held = slot.local.format(L=layer), (0,) * len(slot.shape)
        if slot.hf is not None:
            held = sizes(slot.hf_box)
            hf = slot.hf.format(L=layer)
            self._regions.append(Region(hf, slot.hf_box, local, whole(held)))
        if held != slot.shape:
            # Only the dim of the rank is longer than the adapter.
            first = [n if n < size else 0 for n, size in zip(held, slot.shape, strict=True)]
            self._padding.append((local, tuple(zip(first, slot.shape, strict=True))))
        self._shapes[local] = slot.shape

    def layout(self) -> RankLayout:
        return RankLayout(tuple(self._regions), self._shapes, tuple(self._padding))


def _hf_tensors(row: Row) -> dict[str, Shape]:
    found: dict[str, Shape] = {}
    for index in row.stored_parts:
        name, (first, *rest) = row.parts[index], row.shapes[index]
        found[name] = (found[name][0] + first if name in found else first, *rest)
    return found


def _first_row(row: Row, part: int) -> int:
    """Returns a part's first row in its HF tensor, whose parts are never split along dim 1."""
    before = zip(row.parts[:part], row.shapes[:part], strict=True)
    return sum(shape[0] for name, shape in before if name == row.parts[part])


def _rows(family: Family, shape: ModelShape, head: Head) -> tuple[Row, ...]:
    rows = family.rows(shape)
    if head == "lm":
        return rows
    score = Row(OUTPUT_LAYER, (VALUE_HEAD,), ((1, shape.hidden_size),), "replicated", "last")
    return (*(row for row in rows if row.megatron != OUTPUT_LAYER), score)


def _check_division(shape: ModelShape, layout: TrainLayout) -> None:
    """Raises ModelError if the model cannot be divided into this layout."""
    if shape.moe is not None and shape.linear_bias and layout.etp > 1:
        # Each rank would add the bias of the second projection (Megatron 0.16.1 refuses it too).
        raise ModelError(
            "train.etp",
            layout.etp,
            "1 with experts that have biases",
            "Set train.etp=1, and distribute whole experts with train.ep.",
        )
    if shape.moe is not None and shape.moe.num_experts % layout.ep:
        raise ModelError(
            "train.ep",
            layout.ep,
            f"a divisor of the model's {shape.moe.num_experts} experts",
            "Choose another train.ep.",
        )
    if shape.gated_attention and shape.num_kv_heads < layout.tp:
        # Megatron-Core 0.16.1 would apply the gates of all of a group's queries to some of them.
        raise ModelError(
            "train.tp",
            layout.tp,
            f"at most the model's {shape.num_kv_heads} key-value heads with gated attention",
            "Choose another train.tp.",
        )
    if shape.num_layers < layout.pp * layout.vpp:
        raise ModelError(
            "train.pp * train.vpp",
            layout.pp * layout.vpp,
            f"at most the model's {shape.num_layers} layers",
            "Choose other pipeline sizes.",
        )
    first = len(layout.layers(0, shape.num_layers)[0])
    if shape.vision is not None and first < shape.vision.deepstack_layers:
        raise ModelError(
            "train.pp * train.vpp",
            layout.pp * layout.vpp,
            f"few enough that the first stage has {shape.vision.deepstack_layers} layers, to whose "
            "outputs features of images are added",
            "Choose smaller pipeline sizes.",
        )


def _megatron_name(row: Row, shape: ModelShape, layer: int, te: bool, grouped: bool) -> str:
    name = row.megatron
    alone = {PRE_MLP_NORM} if shape.has_experts(layer) else set()
    alone |= {INPUT_NORM} if shape.latent is not None else set()
    if te and name not in alone:
        name = TE_NAMES.get(name, name)
    return GROUPED_NAMES.get(name, name) if grouped else name


def _fused_name(row: Row) -> str:
    """Returns the name of a row's parameter in an engine with fused projections, with `{L}`."""
    name = row.parts[0]
    if row.kind == "qkv":
        return name.replace(".q_proj.", ".qkv_proj.")
    if row.kind == "gate_up":
        return name.replace(".gate_proj.", ".gate_up_proj.")
    if row.kind == "sections":
        name = name.replace(".in_proj_qkv.", ".in_proj_qkvz.")
        return name.replace(".in_proj_b.", ".in_proj_ba.")
    if row.kind == "replicated" and len(row.parts) > 1:
        name = name.replace(".gate_proj.", ".gate_up_proj.")  # of a vision tower
        return name.replace(".q_a_proj.", ".fused_qkv_a_proj.")
    return name


def _slots(
    row_a: Row, row_b: Row, shape: ModelShape, rank: int, tp: int, tp_rank: int
) -> list[_Slot]:
    """Returns an engine rank's slots of a layer: A and B of each of its projections.

    Projections that the HF checkpoint stores in one tensor have an adapter in common. Each then has
    its own slot for A, with the same content.
    """
    layer = _fused_name(row_b).removesuffix(f".{HF_B}")
    # A is cut like the layer's input: only if the layer is row-parallel.
    ((_, start, stop),) = plain_cut(row_a, tp, tp_rank).runs[:1]
    columns = (start, stop) if row_a.kind == "row" else (0, row_a.shapes[0][1])
    own_rank, width = row_a.shapes[0][0], columns[1] - columns[0]
    found = []
    runs_b = fused_cut(row_b, shape, tp, tp_rank).runs
    for index, (part, (_, first, last)) in enumerate(zip(row_b.parts, runs_b, strict=True)):
        has_adapter = index in row_b.stored_parts
        before = _first_row(row_b, index)
        name_a = f"{part.removesuffix(HF_B)}{HF_A}"
        box_a = ((0, own_rank), columns)
        box_b = ((before + first, before + last), (0, own_rank))
        slots = [
            _Slot(f"{layer}.{SLOT_A}.{index}", (rank, width), name_a, box_a),
            _Slot(f"{layer}.{SLOT_B}.{index}", (last - first, rank), part, box_b),
        ]
        found += slots if has_adapter else [replace(one, hf=None) for one in slots]
    return found


def _add_fused_experts(
    builder: _LayoutBuilder, row: Row, shape: ModelShape, tp: int, tp_rank: int, ep: int
) -> None:
    """Adds the experts of an engine rank.

    With etp = tp / ep, the rank holds shard `tp_rank % etp` of each expert in group `tp_rank //
    etp`. Only the first shard holds a bias of the second projection; for the others, it is padding.
    """
    if tp % ep or row.num_experts % ep:
        allowed = f"a divisor of rollout.tp = {tp} and of the model's {row.num_experts} experts"
        raise ModelError("rollout.ep", ep, allowed, "Choose another rollout.ep.")
    ep_rank, etp_rank = divmod(tp_rank, tp // ep)
    cut = plain_cut(row, tp // ep, etp_rank)
    count = row.num_experts // ep
    stem = row.parts[0].split("experts.")[0] + "experts."
    _, linear, kind = row.megatron.rsplit(".", 2)
    fused = f"routed_experts.{_FUSED_EXPERTS[linear]}_{kind}"
    if row.kind == "replicated" and etp_rank:
        # The ranks that share an expert add up their outputs; only the first one adds the bias.
        cut = Cut(0, [], row.shapes[0][0])
    for layer in row.layers_of(shape):
        for local in range(count):
            name = f"{stem.format(L=layer)}{fused}/{local}"
            builder.add(row, layer, name, cut, ep_rank * count + local)
