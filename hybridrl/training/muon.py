"""Muon for the model's weight matrices and AdamW for its other parameters, on shards.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) replaces the update of a matrix
by the nearest orthogonal matrix. Each matrix of the HF checkpoint is orthogonalized as a whole, so
that a step is the same in every layout. Embeddings, output layers, norms, biases and convolutions
are updated by AdamW. The scale of an update is that of Liu et al. 2025 ("Muon is Scalable for LLM
Training", arXiv 2502.16982, section 2.2), which gives it the root mean square of AdamW's updates.

Megatron's own Muon (0.16.1, 0.19.2) needs the package emerging-optimizers, and in 0.16.1 keeps the
whole state on every data-parallel rank. Here, Megatron's distributed optimizer holds this optimizer
in place of its Adam, so that momentum and masters are sharded, saved and loaded like Adam's states.

Collective: the data-parallel ranks of a part of the model gather updates in its gradient buffers.
Then tensor-parallel ranks, whose shards have the same bounds, gather the matrices that are split
over them, in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hybridrl.checkpoint.optimizer_kinds import MOMENTS, MOMENTUM
from hybridrl.models.weights import EXPERTS, RankLayout
from hybridrl.training.muon_matrices import NUM_ITERATIONS, Matrix, is_split, matrices_of
from hybridrl.training.piecewise_adam import adamw
from hybridrl.training.step_counts import StepCounts

# Polynomial of the Newton-Schulz iteration (Jordan et al. 2024). Singular values end between 0.7
# and 1.2, which works as well as 1 and needs few iterations.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
# Root mean square of AdamW's updates (Liu et al. 2025, equation 4).
UPDATE_RMS = 0.2


@dataclass(frozen=True)
class _Owned:
    """A parameter of which this rank updates a shard.

    begin: Index of the shard's first element in the parameter.
    matrices: Matrices that the parameter consists of; empty if AdamW updates it.
    peers: Tensor-parallel ranks that have parts of the matrices; None if this rank has them
        whole.
    """

    parameter: Tensor
    group: int
    master: Tensor
    begin: int
    matrices: tuple[Matrix, ...]
    peers: Any

    @property
    def update(self) -> Tensor:
        whole: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]  # Megatron's
        return whole.view(-1)[self.begin : self.begin + self.master.numel()]


class Muon(StepCounts):
    """Muon and AdamW on the shards of one distributed optimizer.

    Args:
        matrices: Matrices of each model parameter that Muon updates.
        peers: For each of these parameters, the group of tensor-parallel ranks that have parts of
            its matrices; None if this rank has them whole.

    Attributes:
        state: States of each shard, by name: `momentum_buffer`, or AdamW's moments; all fp32.
    """

    def __init__(
        self,
        optimizer: Any,
        matrices: Mapping[Tensor, tuple[Matrix, ...]],
        peers: Mapping[Tensor, Any],
        momentum: float,
        device: torch.device,
    ) -> None:
        super().__init__(optimizer.optimizer.param_groups)
        self.device, self.momentum = device, momentum
        self._optimizer, self._matrices = optimizer, matrices
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._owned: list[_Owned] = []
        for parameter, (group, index) in optimizer.model_param_group_index_map.items():
            master = self.param_groups[group]["params"][index]
            begin = optimizer._get_model_param_range_map(parameter)["param"].start
            found, split = matrices.get(parameter, ()), peers.get(parameter)
            self._owned.append(_Owned(parameter, group, master, begin, found, split))
            self.state[master] = {
                name: torch.zeros_like(master, dtype=torch.float32)
                for name in self.state_names(parameter)
            }

    def state_names(self, parameter: Tensor) -> tuple[str, ...]:
        return (MOMENTUM,) if parameter in self._matrices else MOMENTS

    @torch.no_grad()
    def step(self) -> None:
        """Updates all masters with the gradients in `grad`. Collective; see the module.

        The gradient buffers are overwritten.
        """
        self.count_step()
        for owned in self._owned:
            if owned.matrices:
                gradient, average = owned.master.grad, self.state[owned.master][MOMENTUM]
                assert gradient is not None
                average.lerp_(gradient, 1 - self.momentum)
                owned.update.copy_(gradient.lerp(average, self.momentum))  # Nesterov's momentum
        self._gather_updates()
        for owned in self._owned:
            group = self.param_groups[owned.group]
            if owned.matrices:
                self._step_matrices(owned, group)
            else:
                self._step_adamw(owned, group)

    def _gather_updates(self) -> None:
        """Completes the updates of matrices in the gradient buffers."""
        group = self._optimizer.data_parallel_group
        if group.size() == 1:
            return
        for buffer in self._optimizer.buffers:
            for bucket in buffer.buckets:
                if any(parameter in self._matrices for parameter in bucket.params):
                    whole = bucket.grad_data
                    # This rank's part is where it belongs already.
                    own = whole.chunk(group.size())[group.rank()]
                    dist.all_gather_into_tensor(whole, own, group=group)

    def _step_matrices(self, owned: _Owned, group: Mapping[str, Any]) -> None:
        local: Tensor = owned.parameter.main_grad  # type: ignore[attr-defined]  # Megatron's
        locals_, own = [local], 0
        if owned.peers is not None:
            own = owned.peers.rank()
            locals_ = [torch.empty_like(local) for _ in range(owned.peers.size())]
            dist.all_gather(locals_, local.contiguous(), group=owned.peers)
        change = torch.zeros_like(local)
        for matrix in owned.matrices:
            whole = local.new_zeros(matrix.shape)
            for held, places in zip(locals_, matrix.places, strict=True):
                for here, there in places:
                    whole[there] = held[here]
            nearest = orthogonalized(whole)
            scale = UPDATE_RMS * math.sqrt(max(matrix.shape))
            for here, there in matrix.places[own]:
                change[here].copy_(nearest[there]).mul_(scale)
        end = owned.begin + owned.master.numel()
        if group["weight_decay"]:
            owned.master.mul_(1 - group["lr"] * group["weight_decay"])
        owned.master.sub_(change.view(-1)[owned.begin : end], alpha=group["lr"])

    def _step_adamw(self, owned: _Owned, group: Mapping[str, Any]) -> None:
        state, gradient = self.state[owned.master], owned.master.grad
        assert gradient is not None
        exp_avg, exp_avg_sq = (state[name] for name in MOMENTS)
        change = torch.empty_like(gradient)
        adamw(owned.master, gradient, exp_avg, exp_avg_sq, change, group)


def orthogonalized(matrix: Tensor) -> Tensor:
    """Returns nearly the nearest orthogonal matrix, by Newton-Schulz iterations.

    The result is computed in bf16 on a GPU, as in Jordan et al. (2024), and in fp32 on a CPU.
    """
    found = matrix.bfloat16() if matrix.device.type == "cuda" else matrix.float()
    is_tall = found.size(0) > found.size(1)
    if is_tall:
        found = found.T
    found = found / found.norm().clamp(min=EPSILON)
    linear, cubic, quintic = COEFFICIENTS
    for _ in range(NUM_ITERATIONS):
        gram = found @ found.T
        factor = torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic)
        found = torch.addmm(found, factor, found, beta=linear)
    return found.T if is_tall else found


def model_matrices(
    named: Mapping[str, Tensor],
    layout_of: Callable[[int], RankLayout],
    tp_group: Any,
    expert_tp_group: Any,
) -> tuple[dict[Tensor, tuple[Matrix, ...]], dict[Tensor, Any]]:
    """Returns the matrices of each trained parameter that Muon updates, and the groups of ranks
    that have parts of them (`Muon`).
    """
    found: dict[Tensor, tuple[Matrix, ...]] = {}
    peers: dict[Tensor, Any] = {}
    for has_experts, group in ((False, tp_group), (True, expert_tp_group)):
        layouts = [layout_of(rank) for rank in dist.get_process_group_ranks(group)]
        for name, matrices in matrices_of(layouts, group.rank()).items():
            parameter = named[name]
            if (EXPERTS in name) != has_experts or not parameter.requires_grad:
                continue
            own = group.rank()
            if any(is_split(matrix, own) for matrix in matrices):
                found[parameter], peers[parameter] = matrices, group
            else:
                found[parameter] = tuple(replace(m, places=(m.places[own],)) for m in matrices)
    return found, peers
