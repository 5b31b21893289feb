"""Completes, frees and restores the parameters of a trained model on this rank.

A distributed optimizer updates the part of each flat parameter buffer that this rank owns. A gather
over the data-parallel ranks then completes the parameters; by default Megatron gathers at the end
of the step. Two knobs delay it.

With `train.fuse_param_gather`, only the owned parts are new after a step. The engine is written
from them, and the gather overlaps generation.

With `train.release_weights_in_rollout`, the parameters are freed once the engine has them. Before
training they are rebuilt: fp32 masters are cast into the owned parts, then gathered. Only storages
are emptied and filled, so tensors and views stay valid. Frozen parameters have no masters and are
never freed.

`complete` and `restore` are collective over the data-parallel ranks if a gather is pending, on
which all ranks agree. `release` may start a gather without waiting for it, except on CPU, where a
started gather also completes (platform.py). Invariant: after `complete` the parameters are whole,
or it has raised an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from hybridrl.training.memory import flat_buffers


class TrainedWeights:
    """The parameters of one trained model on this rank.

    Args:
        chunks: Megatron's data-parallel wrappers.
        optimizer: Returns Megatron's optimizer with its state on the device.
        gathers_late: Whether a step leaves the gather to `release` or `complete`.
        is_freed: Whether `release` frees the parameters; the optimizer then has separate masters.
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
        """Records an optimizer step."""
        self._gather_pending = self._gathers_late

    def complete(self) -> None:
        """Completes the parameters for later work on the device.

        Raises:
            RuntimeError: They are freed, because this is the rollout phase.
        """
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
        """Frees the parameters, or starts their gather, once the engine has the weights."""
        if self.is_freed:
            for buffer in self._buffers():
                buffer.param_data.untyped_storage().resize_(0)
            # `restore` includes a gather that is still pending.
            self._gather_pending, self._is_empty = False, True
        elif self._gather_pending:
            self._start()

    @torch.no_grad()
    def restore(self) -> None:
        """Allocates the parameters again, if freed, and completes them."""
        if self._is_empty:
            for buffer in self._buffers():
                buffer.param_data.untyped_storage().resize_(buffer.param_data.nbytes)
                buffer.param_data.zero_()  # padding between the parameters too
            for optimizer in self._optimizer().chained_optimizers:
                optimizer._copy_main_params_to_model_params()
            self._is_empty, self._gather_pending = False, True
        self.complete()

    def _start(self) -> None:
        for chunk in self._chunks:
            chunk.start_param_sync()
        # If the step itself gathers, Megatron waits for the gather immediately.
        self._gather_pending, self._gather_running = False, self._gathers_late

    def _buffers(self) -> Iterator[Any]:
        """Yields the buffers with separate masters; an fp32 buffer is its own master."""
        for buffer in flat_buffers(self._chunks):
            if buffer.param_dtype != torch.float32:
                yield buffer
