"""Whether the parameters of a trained model are whole on this rank, and what makes them so.

Only trained parameters are gathered and freed: frozen ones have no masters, and stay.

A distributed optimizer updates the part of each flat parameter buffer that this rank owns. Whole
parameters come from a gather over the data-parallel ranks, which Megatron makes at the end of the
step. Two knobs make it later:

* `train.fuse_param_gather`: after a step only the owned parts are new. The engine is written from
  them, and then the gather runs beside generation.
* `train.release_weights_in_rollout`: once the engine has them the parameters are freed. Before
  training they are made again as a step makes them: fp32 masters, cast into the owned parts, then
  the gather. Only storages are emptied and filled: tensors and views stay what they are.

Who waits for whom: `complete` and `restore` are collective over the data-parallel ranks if a gather
is due, which all of them agree on; `release` may start one, and waits for nobody but on CPU, where
what is started is made (platform.py). Invariant: whoever calls `complete` finds the parameters
whole, or an error that says why they are not there.
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
        optimizer: returns Megatron's optimizer, its state in place.
        is_gathered_late: whether a step leaves the gather to `release` or `complete`.
        is_freed: whether `release` frees the parameters; the optimizer has masters of its own.
    """

    def __init__(
        self,
        chunks: Sequence[Any],
        optimizer: Callable[[], Any],
        is_gathered_late: bool,
        is_freed: bool,
    ) -> None:
        self._chunks, self._optimizer = chunks, optimizer
        self._is_gathered_late, self.is_freed = is_gathered_late, is_freed
        self._is_due = self._is_under_way = self._is_away = False  # the gather twice, the weights

    def stepped(self) -> None:
        """The optimizer has taken a step."""
        self._is_due = self._is_gathered_late

    def complete(self) -> None:
        """Makes the parameters whole, for later work on the device.

        Raises:
            RuntimeError: they are freed, since this is the rollout phase.
        """
        if self._is_away:
            raise RuntimeError(
                "the training weights are freed (train.release_weights_in_rollout=true): enter the "
                "training phase"
            )
        if self._is_due:
            self._start()
        if self._is_under_way:
            for chunk in self._chunks:
                for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                    group.finish_param_sync(skip_next_bucket_dispatch=True)
            self._is_under_way = False

    def release(self) -> None:
        """The engine has the weights: frees them, or starts to make them whole."""
        if self.is_freed:
            for buffer in self._buffers():
                buffer.param_data.untyped_storage().resize_(0)
            # What a step has left to gather is gathered when they are made again.
            self._is_due, self._is_away = False, True
        elif self._is_due:
            self._start()

    @torch.no_grad()
    def restore(self) -> None:
        """Makes the parameters whole again."""
        if self._is_away:
            for buffer in self._buffers():
                buffer.param_data.untyped_storage().resize_(buffer.param_data.nbytes)
                buffer.param_data.zero_()  # what lies between the parameters, too
            for optimizer in self._optimizer().chained_optimizers:
                optimizer._copy_main_params_to_model_params()
            self._is_away, self._is_due = False, True
        self.complete()

    def _start(self) -> None:
        for chunk in self._chunks:
            chunk.start_param_sync()
        # Megatron's own setting: with a gather in the step it waits for it at once.
        self._is_due, self._is_under_way = False, self._is_gathered_late

    def _buffers(self) -> Iterator[Any]:
        """Yields the buffers that masters can fill; an fp32 one is its own master."""
        for buffer in flat_buffers(self._chunks):
            if buffer.param_dtype != torch.float32:
                yield buffer
