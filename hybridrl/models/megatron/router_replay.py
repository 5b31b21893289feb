"""Routers that take the experts which the rollout engine chose, in place of their own choice.

Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers"
(rollout routing replay). The router computes its own probabilities, with gradients, and the
recorded experts are weighed by them as those of its own choice would be. The choices go with the
micro-batch: a layer that is computed anew in the backward pass finds them where the forward pass
did. Positions without a record (padding, the last token of a sample) keep the router's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from hybridrl.contracts.batch import BatchError, Producer
from hybridrl.contracts.micro_batch import MicroBatch
from hybridrl.errors import UserError
from hybridrl.models.family import ModelShape

COUNTS = 4  # of `Counted`


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
    def of(micro: MicroBatch, shape: ModelShape) -> RoutedExperts | None:
        """Returns the choices of a micro-batch, None where it has none.

        Raises:
            BatchError: they are of another model.
        """
        experts_SK, is_routed_S, moe = micro.routed_experts_SK, micro.is_routed_S, shape.moe
        if experts_SK is None or is_routed_S is None:
            return None
        if moe is None:
            raise ValueError("the model has no experts")
        num_layers = sum(map(shape.has_experts, range(shape.num_layers)))
        sizes = num_layers, moe.experts_per_token
        if experts_SK.shape[1] != num_layers * moe.experts_per_token:
            got = f"came with {experts_SK.shape[1]} experts a token"
            raise _unfit(got, f"{sizes[0]} layers with experts of {sizes[1]} experts a token")
        return RoutedExperts(experts_SK.unflatten(1, sizes), is_routed_S, micro.loss_mask_S)


def check_numbers(micro: MicroBatch, num_experts: int) -> None:
    """Refuses experts that there are not; on the host, since a device would stop at such an index.

    Raises:
        BatchError: naming one.
    """
    experts_SK = micro.routed_experts_SK
    if experts_SK is None or not experts_SK.numel():
        return
    low, high = (int(one) for one in experts_SK.aminmax())
    if low < 0 or high >= num_experts:
        got = f"came with expert {low if low < 0 else high}"
        raise _unfit(got, f"experts from 0 to {num_experts - 1}")


def _unfit(got: str, expected: str) -> BatchError:
    here = Producer.here("the micro-batch")
    return BatchError(here, "routed_experts_TK", got, f"{expected}, as the trained model has them")


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
        self.mlp.router.routed = None if packed is None else packed.routed
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
