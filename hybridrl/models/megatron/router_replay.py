"""Routers that take the experts which the rollout engine chose, in place of their own choice.

Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers"
(rollout routing replay). The router computes its own probabilities, with gradients, and the
recorded experts are weighed by them as those of its own choice would be. The choices go with the
micro-batch: a layer that is computed anew in the backward pass finds them where the forward pass
did. Positions without a record (padding, the last token of a sample) keep the router's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
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

COUNTS = 4  # of `Counted`
_IS_ROUTED = f"{ROUTED_EXPERTS}.is_there"


@dataclass(frozen=True)
class RoutedExperts:
    """The recorded choices of one micro-batch, of the positions of one context-parallel rank.

    Args:
        experts_SLK: of each position, layer with experts and expert of a token, the expert's
            number; uint8 or int16.
        is_routed_S: which positions have a record.
        predicts_S: which predict a response token.
    """

    experts_SLK: Tensor
    is_routed_S: Tensor
    predicts_S: Tensor

    @staticmethod
    def of(inputs: Mapping[str, Tensor]) -> RoutedExperts | None:
        """Returns the choices among a micro-batch's model inputs, None where there are none."""
        if ROUTED_EXPERTS not in inputs:
            return None
        return RoutedExperts(inputs[ROUTED_EXPERTS], inputs[_IS_ROUTED], inputs[PREDICTS])


class ExpertInputs(ExtraInputs):
    """The choices as inputs of a model.

    Args:
        shape: Of the model, which has experts.
    """

    blobs = (ROUTED_EXPERTS,)
    needed_by = "algorithm.router_replay=rollout"

    def __init__(self, shape: ModelShape) -> None:
        if shape.moe is None:
            raise ValueError("the model has no experts")
        num_layers = sum(map(shape.has_experts, range(shape.num_layers)))
        self._sizes = num_layers, shape.moe.experts_per_token
        self._num_experts = shape.moe.num_experts

    def prepare(self, micro: MicroBatch, batch: RolloutBatch) -> Mapping[str, ModelTensor]:
        """Returns each position's choices and whether it has any; nothing where the batch has none.

        Raises:
            BatchError: they are another model's. Found here on the host, since a device would stop
                at an expert that there is not.
        """
        packed, (num_layers, per_token) = micro.model_inputs, self._sizes
        if ROUTED_EXPERTS not in packed:
            return {}
        experts_SK = packed[ROUTED_EXPERTS].value
        if experts_SK.shape[1] != num_layers * per_token:
            got = f"came with {experts_SK.shape[1]} experts a token"
            raise _unfit(got, f"{num_layers} layers with experts of {per_token} experts a token")
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
    return BatchError(here, ROUTED_EXPERTS, got, f"{expected}, as the trained model has them")


class Replay:
    """The choices for one call of a router, with the interface of Megatron's RouterReplay
    (moe_utils.py, topk_routing_with_score_function, 0.16.1): that one is a list of the process, in
    which the routers of several models would meet.

    Args:
        experts_TK: of the tokens of this rank.
        is_routed_T: which of them have a record.
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
        """Returns the scores of the chosen experts, (T, K) with gradients, and the experts."""
        own_scores_TK, own_TK = default_compute_topk(scores, topk, num_groups, group_topk)
        self.own_TK = own_TK
        chosen_TK = torch.where(self.is_routed_T[:, None], self.experts_TK, own_TK)
        return scores.gather(1, chosen_TK), chosen_TK

    def agreeing(self) -> Tensor:
        """Returns of each token how many of its recorded experts the router would choose: (T,)."""
        assert self.own_TK is not None  # the router has chosen
        return (self.experts_TK[:, :, None] == self.own_TK[:, None]).any(2).sum(1)


class Counted(NamedTuple):
    """What a router counts of replays; sums over ranks and micro-batches.

    predicting: positions that predict a response token; replayed: of these, those with a record;
    agreeing: experts of these that the router would have chosen too; own: tokens without a record.
    """

    predicting: Tensor
    replayed: Tensor
    agreeing: Tensor
    own: Tensor

    @staticmethod
    def of(replay: Replay, predicts_T: Tensor, is_token_T: Tensor) -> Counted:
        """Counts one call of a router."""
        is_replayed_T = predicts_T & replay.is_routed_T
        return Counted(
            predicts_T.sum(),
            is_replayed_T.sum(),
            (replay.agreeing() * is_replayed_T).sum(),
            (is_token_T & ~replay.is_routed_T).sum(),
        )


class ReplayingLayer(TransformerLayer):
    """Megatron's layer, which hands the choices of its micro-batch to its router."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what Megatron's does."""
        packed: Any = kwargs.get("packed_seq_params")
        self.mlp.router.routed = None if packed is None else RoutedExperts.of(packed.model_inputs)
        return super().forward(*args, **kwargs)


def replay_of(
    routed: RoutedExperts, num_tokens: int, layer: int, group: dist.ProcessGroup
) -> tuple[Replay, Tensor]:
    """Returns the choices of a layer for this rank's tokens, and which predict response tokens.

    Args:
        routed: of the micro-batch.
        num_tokens: of this rank: with sequence parallelism, its share of the positions.
        layer: which of those with experts, from 0.
        group: tensor-parallel, whose ranks share the positions in order.
    """
    start = 0 if len(routed.is_routed_S) == num_tokens else dist.get_rank(group) * num_tokens
    share = slice(start, start + num_tokens)
    experts_TK = routed.experts_SLK[share, layer]
    return Replay(experts_TK, routed.is_routed_S[share]), routed.predicts_S[share]


def expert_layer_index(moe_layer_freq: Sequence[int], layer_number: int) -> int:
    """Returns which of the layers with experts a layer is, from 0.

    Args:
        moe_layer_freq: 1 for each layer with experts, else 0.
        layer_number: Megatron's, from 1.
    """
    return list(accumulate(moe_layer_freq))[layer_number - 1] - 1


def check_layers(chunks: Iterable[torch.nn.Module]) -> None:
    """Refuses layers that do not know of recorded choices.

    Raises:
        UserError: naming the class of the first.
    """
    for chunk in chunks:
        for part in chunk.modules():
            has_experts = getattr(getattr(part, "mlp", None), "router", None) is not None
            if has_experts and not isinstance(part, ReplayingLayer):
                raise UserError(
                    "algorithm.router_replay",
                    "rollout",
                    f"off with {type(part).__name__}, a layer of the model's family that does not "
                    "know of recorded experts",
                    "Set algorithm.router_replay=off, or leave layers with experts to hybridrl.",
                )


def replay_metrics(counts: Tensor, shape: ModelShape) -> dict[str, float]:
    """Returns what became of the recorded experts in an update.

    Args:
        counts: (L, COUNTS) as `Counted`, of all ranks, a row for each layer of the model.
        shape: of the model, which has experts.

    Returns:
        `replayed_share`: of the choices for positions that predict response tokens, in all layers
        with experts, those that were the engine's; 1 where nothing is wrong, less where a layer
        was not handed its record. `agreed_share`: of these, the experts that the trainer's router
        would have chosen too. `own_choice_tokens`: tokens without a record, mean over layers.
        Nothing if no layer saw a record.
    """
    if shape.moe is None:
        raise ValueError("the model has no experts")
    of_experts = counts[[layer for layer in range(len(counts)) if shape.has_experts(layer)]]
    # Every layer sees the same positions; one without a record counts none.
    predicting = float(of_experts[:, 0].max()) * len(of_experts)
    if not predicting:
        return {}
    _, replayed, agreeing, own = of_experts.sum(0).tolist()
    found = {"replayed_share": replayed / predicting, "own_choice_tokens": own / len(of_experts)}
    if replayed:
        found["agreed_share"] = agreeing / (replayed * shape.moe.experts_per_token)
    return found
