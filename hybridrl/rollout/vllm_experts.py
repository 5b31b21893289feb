"""vLLM's experts: the parameters that stack them, one by one, and their computation on CPU.

vLLM 0.32 on CPU packs `w13_weight` and `w2_weight` for its grouped GEMM once they are loaded: same
name and shape, elements in another order, so what is written afterwards is read wrongly, silently.
And that kernel passes over `expert_map`: with whole experts by rank a token would get experts of
other numbers. Here experts stay as they are and each is two products. May go once vLLM has a CPU
kernel for unpacked experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.rollout.vllm_latent import ABSORBED

STACKS = ("w13_weight", "w2_weight")  # gate over up, and down, of all experts of a rank


def live_tensors(model: torch.nn.Module) -> dict[str, Tensor]:
    """Returns vLLM's live parameters by the names of `fused_layout`: of one that stacks the experts
    of this rank, (E, rows, columns), each expert's matrix as `<parameter>/<index>`. Without copies
    of others that vLLM has as parameters.
    """
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in ABSORBED:
            continue
        if name.rpartition(".")[2] in STACKS:
            found |= {f"{name}/{i}": one for i, one in enumerate(parameter.data)}
        else:
            found[name] = parameter.data
    return found


def deal_experts(model: torch.nn.Module, experts: Sequence[int]) -> None:
    """Makes this rank the holder of these experts in every layer, in place of vLLM's own choice.

    vLLM's loader and its kernels look for an expert in the layer's `expert_map`, (experts of the
    layer,): its place on this rank, or -1. It is written where it lies, so that whoever holds it
    has it. Of the two that exist one belongs to the layer and one to the manager of maps; they may
    be the same.

    Args:
        model: vLLM's, with whole experts by rank.
        experts: ascending; their places on this rank follow one another.

    Raises:
        ModelError: a layer, or its manager, has no such map, or one of another number of experts.
    """
    found: list[Any] = [part for part in model.modules() if hasattr(part, "w13_weight")]
    for part in found:
        manager = getattr(part, "expert_map_manager", None)
        maps: list[Any] = [getattr(holder, "expert_map", None) for holder in (part, manager)]
        if any(one is None or int((one >= 0).sum()) != len(experts) for one in maps):
            raise _no_map(type(part).__name__)
        places = torch.full_like(maps[0], -1)
        places[list(experts)] = torch.arange(len(experts), dtype=places.dtype, device=places.device)
        for one in maps:
            one.copy_(places)
    if not found:
        raise _no_map(type(model).__name__)


def _no_map(name: str) -> ModelError:
    return ModelError(
        "config.json",
        name,
        "a mixture whose layers have vLLM's expert_map, to deal experts as they lie in training",
        "Set rollout.ep=1.",
    )


def compute_with_live_experts() -> None:
    """Puts `experts_forward` in the place of vLLM's kernel and leaves the parameters unpacked."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    def apply(kernel: Any, output: Tensor, hidden_states: Tensor, **given: Any) -> None:
        output.copy_(
            experts_forward(
                hidden_states,
                given["w1"],
                given["w2"],
                given["topk_weights"],
                given["topk_ids"],
                given["expert_map"],
            )
        )

    experts = cpu_moe.CPUUnquantizedExperts
    experts._supports_grouped_gemm = classmethod(lambda kernel, config: (True, None))
    experts.process_weights_after_loading = lambda kernel, layer: None
    experts.supports_expert_map = lambda kernel: True
    experts.apply = apply


def experts_forward(
    hidden_TD: Tensor,
    gate_up_EID: Tensor,
    down_EDI: Tensor,
    weights_TK: Tensor,
    experts_TK: Tensor,
    local_of_expert: Tensor | None = None,
) -> Tensor:
    """Returns the weighted sum of each token's experts, of those that are on this rank; (T, D).

    Args:
        hidden_TD: of T tokens.
        gate_up_EID: (local experts, 2 * width, D), the gate's rows first.
        down_EDI: (local experts, D, width).
        weights_TK: of the K experts of each token.
        experts_TK: their global numbers.
        local_of_expert: the local number of each global one, -1 where it is on another rank; None:
            all are here.
    """
    if local_of_expert is not None:
        experts_TK = local_of_expert[experts_TK.long()]
    out_TD = torch.zeros_like(hidden_TD)
    for expert in torch.unique(experts_TK).tolist():
        if expert < 0:
            continue
        tokens, places = torch.nonzero(experts_TK == expert, as_tuple=True)
        gate, up = F.linear(hidden_TD[tokens], gate_up_EID[expert]).chunk(2, dim=-1)
        found = F.linear(F.silu(gate) * up, down_EDI[expert])
        out_TD.index_add_(0, tokens, found * weights_TK[tokens, places, None].to(found.dtype))
    return out_TD
