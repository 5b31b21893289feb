"""Completes, frees and restores the parameters of a trained model on this rank.

The distributed optimizer updates only the slice of each flat parameter buffer that this rank owns.
An all-gather over the data-parallel ranks then completes the parameters. By default, Megatron runs
the all-gather at the end of the step; two knobs postpone this.

With `train.fuse_param_gather`, only the owned slices are up to date after a step. The engine is
updated from these slices, and the all-gather overlaps generation.

With `train.release_weights_in_rollout`, the parameters are freed once the engine has received them.
Before training they are rebuilt: fp32 masters are cast into the owned slices, which are then
all-gathered. Only storages are emptied and refilled, so tensors and views stay valid. Frozen
parameters have no masters and are never freed.

`complete` and `restore` are collective over the data-parallel ranks if an all-gather is pending; it
is pending on all ranks or on none. `release` may start an all-gather without waiting for it, except
on CPU, where starting it also completes it (platform.py). Invariant: after `complete` returns, the
parameters are complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hybridrl.training.memory import flat_buffers


class TrainedWeights:
    """This rank's parameters of one trained model.

    Args:
        gathers_late: Whether `release` or `complete` gathers the parameters, rather than the step
            itself.
        is_freed: Whether `release` frees the parameters, to be rebuilt from fp32 masters.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Callable[[], Any],
        gathers_late: bool,
        is_freed: bool,
    ) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._gathers_late, self.is_freed = gathers_late, is_freed
        self._gather_pending = self._gather_running = self._is_empty = False

    def stepped(self) -> None:
        self._gather_pending = self._gathers_late

    def complete(self) -> None:
        """Completes the parameters for later work on the device; RuntimeError during rollout."""
        if self._is_empty:
            raise RuntimeError(
                "the training weights are freed (train.release_weights_in_rollout=true): enter the "
                "training phase"
            )
        if self._gather_pending:
            self._start()
        if self._gather_running:
            for chunk in self._chunks:
                for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)
            self._gather_running = False

    def release(self) -> None:
        """Frees the parameters or starts gathering them, once the engine has the weights."""
        if self.is_freed:
            for buffer in self._buffers():
                buffer.param_data.untyped_storage().resize_(0)
            # `restore` gathers anyway, so a pending gather can be dropped.
            self._gather_pending, self._is_empty = False, True
        elif self._gather_pending:
            self._start()

    @torch.no_grad()
    def restore(self) -> None:
        """Reallocates and rebuilds the parameters if they were freed, and completes them."""
        if self._is_empty:
            for buffer in self._buffers():
                buffer.param_data.untyped_storage().resize_(buffer.param_data.nbytes)
                buffer.param_data.zero_()  # also zeros the padding between the parameters
            for optimizer in self._optimizer().chained_optimizers:
                optimizer._copy_main_params_to_model_params()
            self._is_empty, self._gather_pending = False, True
        self.complete()

    def _start(self) -> None:
        for chunk in self._chunks:
            chunk.start_param_sync()
        # If steps gather by themselves, start_param_sync has already waited for the gather.
        self._gather_pending, self._gather_running = False, self._gathers_late

    def _buffers(self) -> Iterator[Any]:
        """Yields the buffers that have separate masters; fp32 buffers are their own masters."""
        for buffer in flat_buffers(self._chunks):
            if buffer.param_dtype != torch.float32:
                yield buffer
