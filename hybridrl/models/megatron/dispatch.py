"""How tokens get to their experts where the ranks that share a layer's experts share a micro-batch.

Megatron's all-to-all dispatcher sends a token once for each of its experts that is on another rank,
and a rank then sorts what it has received by expert. Tensor-parallel ranks of one replica have
equal shares of the same positions: there every rank gets each token once instead, and sorts the
tokens of its experts out of them. With 8 experts a token, dealt to two ranks, hidden states are a
quarter of the bytes and one copy less in each direction; a rank alone has one copy less too. The
sums of what a rank's experts add to each token are reduced over the ranks and scattered by
position, in the type of the activations, as tensor-parallel layers do it.

Who waits for whom: the methods are collective over the ranks that share the experts of a layer. The
host waits once a layer, for the number of tokens of each expert, while the tokens are on their way.
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
    """Gives layers of experts a dispatcher that gathers tokens, where `gathers` says so.

    Args:
        chunks: of a model that has just been built; Megatron's process groups are its own.
        shape: of the model, which may have no experts.
    """
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
    """Whether the ranks that share a layer's experts have shares of one micro-batch, and a token
    that is sent to all of them is not sent more often than for each of its experts. Of a layout
    `TrainLayout.gathers_tokens` says the same.

    Args:
        groups: Megatron's of this rank, those of experts among them.
        experts_per_token: experts that compute with a token.
    """
    sharing = dist.get_process_group_ranks(groups.tp_ep)
    if len(sharing) == 1:
        return True
    is_one_batch = set(sharing) <= set(dist.get_process_group_ranks(groups.tp))
    return is_one_batch and groups.ep.size() <= experts_per_token


class GatheringDispatcher(MoEAllGatherTokenDispatcher):
    """Megatron's dispatcher of all tokens to all ranks (token_dispatcher.py, 0.16.1), with another
    order of its parts: it counts the tokens of each expert before the tokens are there, and sorts
    weights together with tokens. Megatron's own waits for the device twice, with nothing under way,
    and reduces in the type of the router, which is fp32.
    """

    routing_map: Tensor | None  # of Megatron's, which types nothing

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns all tokens, (T, D), and the weights of this rank's experts for them, (T, E).

        Args:
            hidden_states: of this rank's tokens.
            probs: of its tokens, of all experts.
        """
        assert self.routing_map is not None  # `dispatch_preprocess` has set it
        own = slice(self.local_expert_indices[0], self.local_expert_indices[-1] + 1)
        with torch.no_grad():
            # As bytes, which every backend gathers.
            chosen_TE = self._gathered(self.routing_map.to(torch.uint8))
            self.local_map = chosen_TE[:, own].bool().contiguous()
            self._tokens_E = self.local_map.sum(dim=0).to("cpu", non_blocking=True)
            self._counted = None
            if chosen_TE.is_cuda:
                self._counted = torch.cuda.Event()
                self._counted.record()
        self.routing_map = None
        probs = self._gathered(probs)[:, own].contiguous()
        return self._gathered(hidden_states), probs

    def _gathered(self, part: Tensor) -> Tensor:
        """Returns the rows of all ranks; their gradients are summed and scattered."""
        if self.tp_ep_group.size() == 1:
            return part
        return gather_from_sequence_parallel_region(part, group=self.tp_ep_group)

    def dispatch_postprocess(
        self, hidden_states: Tensor, probs: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the tokens of this rank's experts, by expert, how many each has, on the CPU, and
        the weight of each.
        """
        self.hidden_shape_before_permute = hidden_states.shape
        if self._counted is not None:
            self._counted.synchronize()  # the one sync point of the layer
        tokens_E = self._tokens_E
        num_tokens = int(tokens_E.sum())
        # transformer-engine's kernels (2.11) give back no rows at all for none, and their backward
        # fails: a micro-batch of padding alone may have no token for the experts of a rank.
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
        """Returns what this rank's experts add to each token, (T, D); zeros where none do."""
        added: Tensor = unpermute(
            hidden_states,
            self.reversed_local_input_permutation_mapping,
            restore_shape=self.hidden_shape_before_permute,
            routing_map=self.local_map,
            fused=self._is_fused,
        )
        return added

    def token_combine(self, hidden_states: Tensor) -> Tensor:
        """Returns the sums of this rank's tokens over all experts."""
        if self.tp_ep_group.size() == 1:
            return hidden_states
        return reduce_scatter_to_sequence_parallel_region(hidden_states, group=self.tp_ep_group)
