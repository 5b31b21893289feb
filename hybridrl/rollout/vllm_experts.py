"""vLLM's experts: the parameters that stack them, one by one, and their computation on CPU.

vLLM 0.32 on CPU packs `w13_weight` and `w2_weight` for its grouped GEMM once they are loaded: same
name and shape, elements in another order, so what is written afterwards is read wrongly, silently.
And that kernel passes over `expert_map`: with whole experts by rank a token would get experts of
other numbers. Here experts stay as they are and each is two products. May go once vLLM has a CPU
kernel for unpacked experts.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hybridrl.rollout.cpu_experts import experts_forward


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
