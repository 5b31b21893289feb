"""Replays the experts that the rollout engine selected, instead of the router's own choice.

Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers"
(rollout routing replay). The router computes its own probabilities, with gradients, and uses these
probabilities to weight the recorded experts, as it would weight its own choice. The records are
part of the micro-batch, so a layer that is recomputed in the backward pass uses the same experts.
At positions without a record (padding, a sample's last token), the router's own choice is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from hybridrl.contracts.batch import BatchError, Producer, RolloutBatch
from hybridrl.contracts.micro_batch import MicroBatch, ModelTensor
from hybridrl.contracts.routed_experts import ROUTED_EXPERTS
from hybridrl.errors import UserError
from hybridrl.models.family import ModelShape
from hybridrl.models.inputs import PREDICTS, ExtraInputs

COUNTS = 4  # fields of `Counted`
_IS_ROUTED = f"{ROUTED_EXPERTS}.is_there"


@dataclass(frozen=True)
class RoutedExperts:
    """Recorded experts in one micro-batch, for the positions of one context-parallel rank.

    Args:
        experts_SLK: Recorded experts at each position, for each layer with experts; uint8 or int16.
    """

    experts_SLK: Tensor
    is_routed_S: Tensor
    predicts_S: Tensor

    @staticmethod
    def of(inputs: Mapping[str, Tensor]) -> RoutedExperts | None:
        if ROUTED_EXPERTS not in inputs:
            return None
        return RoutedExperts(inputs[ROUTED_EXPERTS], inputs[_IS_ROUTED], inputs[PREDICTS])


class ExpertInputs(ExtraInputs):
    """Provides recorded experts as model inputs."""

    blobs = (ROUTED_EXPERTS,)
    needed_by = "algorithm.router_replay=rollout"

    def __init__(self, shape: ModelShape) -> None:
        if shape.moe is None:
            raise ValueError("the model has no experts")
        num_layers = sum(map(shape.has_experts, range(shape.num_layers)))
        self._sizes = num_layers, shape.moe.experts_per_token
        self._num_experts = shape.moe.num_experts

    def prepare(self, micro: MicroBatch, batch: RolloutBatch) -> Mapping[str, ModelTensor]:
        """Returns the recorded experts at each position; empty if the batch has none.

        Raises BatchError if the records do not fit the model: checked on the host, because an index
        out of range would crash a GPU kernel.
        """
        packed, (num_layers, per_token) = micro.model_inputs, self._sizes
        if ROUTED_EXPERTS not in packed:
            return {}
        experts_SK = packed[ROUTED_EXPERTS].value
        if experts_SK.shape[1] != num_layers * per_token:
            got = f"contained {experts_SK.shape[1]} experts per token"
            raise _unfit(got, f"{per_token} experts per token in each of {num_layers} layers")
        low, high = map(int, experts_SK.aminmax()) if experts_SK.numel() else (0, 0)
        if low < 0 or high >= self._num_experts:
            got = f"came with expert {low if low < 0 else high}"
            raise _unfit(got, f"experts from 0 to {self._num_experts - 1}")
        return {
            ROUTED_EXPERTS: ModelTensor(experts_SK.unflatten(1, self._sizes), is_per_position=True),
            _IS_ROUTED: packed[_IS_ROUTED],
        }


def _unfit(got: str, expected: str) -> BatchError:
    here = Producer.here("the micro-batch")
    return BatchError(here, ROUTED_EXPERTS, got, f"{expected}, as in the trained model")


class Replay:
    """Recorded experts for one call of a router, with the interface of Megatron's RouterReplay.

    Megatron's class (moe_utils.py, topk_routing_with_score_function, 0.16.1) keeps one list per
    process, which would mix up the routers of several models.
    """

    def __init__(self, experts_TK: Tensor, is_routed_T: Tensor) -> None:
        self.experts_TK, self.is_routed_T = experts_TK.long(), is_routed_T
        self.own_TK: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None,
        group_topk: int | None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """Returns the scores of the selected experts, (T, K) with gradients, and the experts."""
        own_scores_TK, own_TK = default_compute_topk(scores, topk, num_groups, group_topk)
        self.own_TK = own_TK
        chosen_TK = torch.where(self.is_routed_T[:, None], self.experts_TK, own_TK)
        return scores.gather(1, chosen_TK), chosen_TK

    def agreeing(self) -> Tensor:
        """Returns, for each token, how many recorded experts the router also selected, (T,)."""
        assert self.own_TK is not None  # the router has already selected experts
        return (self.experts_TK[:, :, None] == self.own_TK[:, None]).any(2).sum(1)


class Counted(NamedTuple):
    """A router's replay counts, to be summed over ranks and micro-batches.

    Args:
        predicting: Number of positions that predict a response token.
        replayed: Number of these positions that have a record.
        agreeing: Number of recorded experts, at replayed positions, that the router would also have
            selected.
        own: Number of tokens without a record.
    """

    predicting: Tensor
    replayed: Tensor
    agreeing: Tensor
    own: Tensor

    @staticmethod
    def of(replay: Replay, predicts_T: Tensor, is_token_T: Tensor) -> Counted:
        is_replayed_T = predicts_T & replay.is_routed_T
        return Counted(
            predicts_T.sum(),
            is_replayed_T.sum(),
            (replay.agreeing() * is_replayed_T).sum(),
            (is_token_T & ~replay.is_routed_T).sum(),
        )


class ReplayingLayer(TransformerLayer):
    """Megatron's layer, extended to pass the micro-batch's recorded experts to its router."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        packed: Any = kwargs.get("packed_seq_params")
        self.mlp.router.routed = None if packed is None else RoutedExperts.of(packed.model_inputs)
        return super().forward(*args, **kwargs)


def replay_of(
    routed: RoutedExperts, num_tokens: int, layer: int, group: dist.ProcessGroup
) -> tuple[Replay, Tensor]:
    """Returns a layer's recorded experts for this rank's tokens, and a mask of predicting tokens.

    Args:
        num_tokens: Number of this rank's tokens; with sequence parallelism, its shard of the
            positions.
        layer: Index among the layers with experts, starting at 0.
        group: Tensor-parallel group, over whose ranks the positions are sharded in order.
    """
    start = 0 if len(routed.is_routed_S) == num_tokens else dist.get_rank(group) * num_tokens
    share = slice(start, start + num_tokens)
    experts_TK = routed.experts_SLK[share, layer]
    return Replay(experts_TK, routed.is_routed_S[share]), routed.predicts_S[share]


def check_layers(chunks: Iterable[torch.nn.Module]) -> None:
    """Raises UserError, naming the class, if a layer with experts cannot replay recorded ones."""
    for chunk in chunks:
        for part in chunk.modules():
            has_experts = getattr(getattr(part, "mlp", None), "router", None) is not None
            if has_experts and not isinstance(part, ReplayingLayer):
                raise UserError(
                    "algorithm.router_replay",
                    "rollout",
                    f"off with {type(part).__name__}, a layer that cannot replay experts",
                    "Set algorithm.router_replay=off, or use hybridrl's layers with experts.",
                )


def replay_metrics(counts: Tensor, shape: ModelShape) -> dict[str, float]:
    """Returns metrics about the replays in an update.

    Args:
        counts: (L, COUNTS), with columns as in `Counted`, summed over all ranks; one row per layer.

    Returns:
        `replayed_share`: over all layers with experts and all positions that predict response
        tokens, the share at which recorded experts were used; below 1 if a layer received no
        record. `agreed_share`: share of the replayed experts that the trainer's own router would
        also have selected. `own_choice_tokens`: number of tokens without a record, averaged over
        layers. Empty if no layer received a record.
    """
    if shape.moe is None:
        raise ValueError("the model has no experts")
    of_experts = counts[[layer for layer in range(len(counts)) if shape.has_experts(layer)]]
    # Every layer has the same positions, but a layer without a record counts none of them.
    predicting = float(of_experts[:, 0].max()) * len(of_experts)
    if not predicting:
        return {}
    _, replayed, agreeing, own = of_experts.sum(0).tolist()
    found = {"replayed_share": replayed / predicting, "own_choice_tokens": own / len(of_experts)}
    if replayed:
        found["agreed_share"] = agreeing / (replayed * shape.moe.experts_per_token)
    return found
