"""Dispatches tokens by an all-gather among ranks that share experts and a micro-batch.

The methods are collective over the ranks that share a layer's experts. The host waits once per
layer, for the number of tokens per expert, while the tokens are in transit.

Megatron's all-to-all dispatcher sends a token once for each of its experts on another rank, and the
receiver sorts tokens by expert. However, the tensor-parallel ranks of a replica hold equal shares
of the same micro-batch. Here, each rank gathers every token once and selects the tokens for its
experts. With 8 experts per token on two ranks, this transfers a quarter of the bytes of hidden
states, with one copy fewer in each direction; even a single rank saves a copy. Expert outputs are
reduce-scattered by position in the activations' data type, as in tensor-parallel layers.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection, permute, unpermute
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher
from torch import Tensor

from hybridrl.models.family import ModelShape


def gather_tokens(chunks: Iterable[torch.nn.Module], shape: ModelShape) -> None:
    """Makes expert layers use a dispatcher that gathers tokens, if `gathers` allows it."""
    if shape.moe is None:
        return
    groups = get_default_pg_collection()
    if not gathers(groups, shape.moe.experts_per_token):
        return
    for chunk in chunks:
        for part in chunk.modules():
            if isinstance(part, MoELayer):
                part.token_dispatcher = GatheringDispatcher(
                    part.num_local_experts,
                    part.local_expert_indices,
                    config=part.config,
                    pg_collection=groups,
                )


def gathers(groups: ProcessGroupCollection, experts_per_token: int) -> bool:
    """Whether gathering is possible in this layout and sends no more than Megatron's all-to-all.

    Gathering is possible if the ranks that share a layer's experts hold parts of the same
    micro-batch. It sends no more bytes than all-to-all if there are at most as many such ranks as
    experts per token. `TrainLayout.gathers_tokens` implements the same rule for a layout.
    """
    sharing = dist.get_process_group_ranks(groups.tp_ep)
    if len(sharing) == 1:
        return True
    is_one_batch = set(sharing) <= set(dist.get_process_group_ranks(groups.tp))
    return is_one_batch and groups.ep.size() <= experts_per_token


class GatheringDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's MoEAllGatherTokenDispatcher (token_dispatcher.py, 0.16.1), reordered.

    The dispatcher counts the tokens per expert before the tokens arrive, and sorts routing weights
    together with the tokens. Megatron's version waits for the device twice while nothing is in
    transit, and reduces outputs in the router's data type, fp32.
    """

    routing_map: Tensor | None  # Megatron has no type annotation for this

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns all tokens, (T, D), and their routing weights for this rank's experts, (T, E)."""
        assert self.routing_map is not None  # set by `dispatch_preprocess`
        own = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        with torch.no_grad():
            # Cast to uint8, which every backend can gather.
            chosen_TE = self._gather(self.routing_map.to(torch.uint8))
            self.local_map = chosen_TE[:, own].bool().contiguous()
            self._tokens_E = self.local_map.sum(dim=0).to("cpu", non_blocking=True)
            self._counted = None
            if chosen_TE.is_cuda:
                self._counted = torch.cuda.Event()
                self._counted.record()
        self.routing_map = None
        probs = self._gather(probs)[:, own].contiguous()
        return self._gather(hidden_states), probs

    def _gather(self, part: Tensor) -> Tensor:
        """Gathers the rows of all ranks; their gradients are reduce-scattered."""
        if self.tp_ep_group.size() == 1:
            return part
        return gather_from_sequence_parallel_region(part, group=self.tp_ep_group)

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns this rank's tokens sorted by expert, tokens per expert (CPU), and weights."""
        self.hidden_shape_before_permute = hidden_states.shape
        if self._counted is not None:
            self._counted.synchronize()  # the only sync point in the layer
        tokens_E = self._tokens_E
        num_tokens = int(tokens_E.sum())
        # The backward pass of transformer-engine's kernels (2.11) fails if there are no rows, which
        # happens if a micro-batch has no tokens for a rank's experts.
        self._is_fused = self.config.moe_permute_fusion and num_tokens > 0
        found = permute(
            hidden_states,
            self.local_map,
            probs=probs,
            num_out_tokens=num_tokens,
            fused=self._is_fused,
        )
        tokens, weights, self.reversed_local_input_permutation_mapping = found[:3]
        return tokens, tokens_E, weights

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Returns, for each token, the sum of the outputs of this rank's experts, (T, D)."""
        added: Tensor = unpermute(
            hidden_states,
            self.reversed_local_input_permutation_mapping,
            restore_shape=self.hidden_shape_before_permute,
            routing_map=self.local_map,
            fused=self._is_fused,
        )
        return added

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Returns the sums over all experts' outputs for this rank's tokens."""
        if self.tp_ep_group.size() == 1:
            return hidden_states
        return reduce_scatter_to_sequence_parallel_region(hidden_states, group=self.tp_ep_group)
