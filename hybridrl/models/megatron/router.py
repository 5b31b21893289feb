"""Megatron's MoE router, with auxiliary losses and token counts that ignore padding.

Megatron scales its auxiliary losses for a later division that hybridrl does not perform
(calculate_per_token_loss with summed gradients, parallel/schedule.py), so this module computes its
own losses. Each loss is a mean over all tokens in an update: a rank adds the sum over its own
tokens, divided by `num_step_tokens`, and the gradient reduction sums over ranks. The loss therefore
does not depend on the number of micro-batches or ranks. Padding is not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import router_gating_linear
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from hybridrl.models.megatron.attached_loss import AttachedLoss
from hybridrl.models.megatron.router_replay import COUNTS, Counted, RoutedExperts, replay_of
from hybridrl.models.trainable import has_trained


class Router(TopKRouter):
    """Megatron's router; it computes in fp32 (`moe_router_dtype`) and never drops tokens.

    Attributes:
        aux_loss, z_loss: Coefficients of the losses; 0 turns a loss off.
        num_step_tokens: Number of tokens in the update over all ranks, by which both losses are
            divided.
        tokens_E: Number of tokens that each expert received on this rank since `clear`.
        entropy: Entropy of the expert scores, summed over these tokens, in nats.
        routed: Experts that the engine selected for the current micro-batch; None if the router
            selects them itself (router_replay.py).
        replayed: Replay counts since `clear`, as in `Counted`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Megatron (0.16.1) creates the weight on the CPU and moves it in the first forward pass,
        # which is too late if weights are exported before.
        self.weight.data = self.weight.data.to(torch.cuda.current_device())
        if self.bias is not None:
            self.bias.data = self.bias.data.to(torch.cuda.current_device())
        self.aux_loss = self.z_loss = 0.0
        self.num_step_tokens = 1
        self.tokens_E: Tensor | None = None
        self.entropy: Tensor | None = None
        self.routed: RoutedExperts | None = None
        self.replayed: Tensor | None = None

    def gating(self, input: Tensor) -> Tensor:
        """Returns the logits of the experts, (S, 1, E) fp32.

        A bias is added here: the product of transformer-engine 2.11 that Megatron (0.19) uses reads
        a bf16 bias as fp32 (TransformerEngine issue 3562).
        """
        if self.bias is None:
            logits: Tensor = super().gating(input)
            return logits
        logits = router_gating_linear(input, self.weight, None, torch.float32)
        return logits + self.bias.float()

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """Does nothing: Megatron would count padding; hybridrl updates the bias from `tokens_E`."""

    def clear(self) -> None:
        self.tokens_E = self.entropy = self.replayed = None

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the experts' weights (0 if not selected) and a mask of the selected, (T, E).

        In training, this also counts tokens and attaches the losses to the weights.

        Args:
            padding_mask: (S, 1) bool, true at padding; None if there is no padding.
        """
        replay, predicts_T = None, None
        if self.routed is not None:
            # Megatron numbers layers from 1; `moe_layer_freq` is 1 for layers with experts, else 0.
            layer = sum(self.config.moe_layer_freq[: self.layer_number]) - 1
            num_tokens = logits.size(0) * logits.size(1)
            replay, predicts_T = replay_of(self.routed, num_tokens, layer, self.tp_group)
        self.router_replay = replay
        probs_TE, chosen_TE = super().routing(logits, padding_mask)
        self.router_replay = None
        # Without this check, recomputation would count twice.
        if not (self.training and torch.is_grad_enabled()):
            return probs_TE, chosen_TE
        logits_TE = logits.view(-1, logits.size(-1))
        is_token_T = torch.ones_like(chosen_TE[:, 0])
        if padding_mask is not None:
            is_token_T = ~padding_mask.reshape(-1)
        tokens_E = (chosen_TE & is_token_T[:, None]).sum(0)
        self._count(logits_TE.detach(), is_token_T, tokens_E)
        if replay is not None and predicts_T is not None:
            counted = torch.stack(Counted.of(replay, predicts_T, is_token_T))
            self.replayed = counted if self.replayed is None else self.replayed + counted
        loss = self._loss(logits_TE, is_token_T, tokens_E)
        if loss is not None:
            probs_TE = AttachedLoss.apply(probs_TE, loss)
        return probs_TE, chosen_TE

    @torch.no_grad()
    def _count(self, logits_TE: Tensor, is_token_T: Tensor, tokens_E: Tensor) -> None:
        p_TE = self._shares(logits_TE)
        entropy = -(torch.xlogy(p_TE, p_TE).sum(-1) * is_token_T).sum()
        if self.tokens_E is None or self.entropy is None:
            self.tokens_E, self.entropy = tokens_E, entropy
        else:
            self.tokens_E, self.entropy = self.tokens_E + tokens_E, self.entropy + entropy

    def _shares(self, logits_TE: Tensor) -> Tensor:
        """Returns the experts' scores, by softmax or sigmoids divided by their sum, (T, E) fp32."""
        if self.score_function == "softmax":
            return logits_TE.float().softmax(-1)
        scores_TE = logits_TE.float().sigmoid()
        return scores_TE / scores_TE.sum(-1, keepdim=True)

    def _loss(self, logits_TE: Tensor, is_token_T: Tensor, tokens_E: Tensor) -> Tensor | None:
        loss: Tensor | None = None
        if self.aux_loss:
            # Fedus et al. 2022, "Switch Transformers", eq. 4, for several experts per token: E *
            # sum over experts of (share of selections) * (mean probability). Both are computed over
            # the micro-batch's tokens; the loss is weighted by their number.
            whole_E = tokens_E.to(torch.float32, copy=True)
            dist.all_reduce(whole_E, group=self.tp_cp_group)
            share_E = whole_E / whole_E.sum().clamp(min=1)
            mass_E = (self._shares(logits_TE) * is_token_T[:, None]).sum(0)
            loss = self.aux_loss * len(share_E) * (share_E * mass_E).sum()
        if self.z_loss:
            # Zoph et al. 2022, "ST-MoE", eq. 5.
            z = (logits_TE.float().logsumexp(-1).square() * is_token_T).sum() * self.z_loss
            loss = z if loss is None else loss + z
        return None if loss is None else loss / self.num_step_tokens


def routers(chunks: Iterable[torch.nn.Module]) -> Iterator[Router]:
    for chunk in chunks:
        yield from (part for part in chunk.modules() if isinstance(part, Router))


def load_of(chunks: Iterable[torch.nn.Module], num_layers: int, num_experts: int) -> Tensor:
    """Returns the counts from this rank's routers, (L, E + 1) float64 on the CPU.

    A row contains the number of tokens for each expert in a layer, then the sum of entropies. The
    sum over all ranks is the model's load.
    """
    found = torch.zeros(num_layers, num_experts + 1, dtype=torch.float64)
    for router in routers(chunks):
        if router.tokens_E is None or router.entropy is None:
            continue
        row = found[router.layer_number - 1]  # Megatron counts layers from 1
        # A sync point, once per update.
        row += torch.cat((router.tokens_E.double(), router.entropy.double()[None])).cpu()
    return found


@torch.no_grad()
def balance(chunks: Iterable[torch.nn.Module], load: Tensor, rate: float) -> None:
    """Changes each expert's bias by `rate` to make the load more even.

    An expert's bias is decreased if the expert received more tokens than the layer's mean, and
    increased if it received fewer (DeepSeek-AI 2024, "DeepSeek-V3", section 2.1.2).

    Args:
        chunks: This rank's chunks of a model whose routers have biases; frozen routers are skipped.
    """
    for router in routers(chunks):
        if not has_trained(router):
            continue
        tokens_E = load[router.layer_number - 1, :-1]
        router.expert_bias.add_(rate * (tokens_E.mean() - tokens_E).sign().to(router.expert_bias))


def replayed_of(chunks: Iterable[torch.nn.Module], num_layers: int) -> Tensor:
    """Returns the replay counts from this rank's routers, (L, COUNTS) float64 on the CPU."""
    found = torch.zeros(num_layers, COUNTS, dtype=torch.float64)
    for router in routers(chunks):
        if router.replayed is not None:
            found[router.layer_number - 1] += router.replayed.double().cpu()  # as in load_of
    return found


def load_metrics(load: Tensor, experts_per_token: int) -> dict[str, float]:
    """Returns metrics about how evenly a model uses its experts.

    Returns:
        `max_load`: number of tokens that the busiest expert in any layer received, as a multiple of
        the layer's mean; 1 means perfectly even. `unused_experts`: number of experts that received
        no token, summed over layers. `routing_entropy`: entropy of the expert scores in nats,
        averaged over tokens and layers. `max_load/layer_3` and `routing_entropy/layer_3` are the
        values for one layer, numbered from 0.
    """
    is_used_L = load[:, :-1].sum(1) > 0  # dense layers have no counts
    used = load[is_used_L]
    if not len(used):
        return {}
    tokens_LE, entropy_L = used[:, :-1], used[:, -1]
    totals_L = tokens_LE.sum(1)
    busiest_L = tokens_LE.amax(1) * tokens_LE.size(1) / totals_L
    mean_entropy_L = entropy_L * experts_per_token / totals_L
    found = {
        "max_load": float(busiest_L.max()),
        "unused_experts": float((tokens_LE == 0).sum()),
        "routing_entropy": float(mean_entropy_L.mean()),
    }
    layers = is_used_L.nonzero()[:, 0].tolist()
    for name, value_L in (("max_load", busiest_L), ("routing_entropy", mean_entropy_L)):
        pairs = zip(layers, value_L.tolist(), strict=True)
        found |= {f"{name}/layer_{layer}": value for layer, value in pairs}
    return found
