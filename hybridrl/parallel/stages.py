"""Lets pipeline stages communicate without exchanging tensor shapes.

Micro-batches of packed samples differ in length. Megatron therefore sends the shape of each tensor
before the tensor itself. The receiving host waits for the shape and for its whole device
(`P2PCommunicator._communicate_shapes`), and launches no kernels during this time. Here, all stages
plan the same micro-batches, so each stage knows the shapes in advance and no host waits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core import parallel_state
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

NOTHING = [0, 0, 0]


class KnownShapes(P2PCommunicator):  # type: ignore[misc]  # Megatron is untyped
    """Megatron's communicator between stages, for micro-batches of known lengths.

    Each execution of a schedule needs a new object. All stages run the forward passes in the same
    order of micro-batches and chunks. Backward passes follow the same order, with chunks numbered
    from the last. `lengths` are the positions that this context-parallel rank computes.
    """

    def __init__(self, config: Any, lengths: Sequence[int], num_chunks: int = 1) -> None:
        super().__init__(parallel_state.get_pipeline_model_parallel_group(), config)
        sharing = config.tensor_model_parallel_size if config.sequence_parallel else 1
        shapes = [[length // sharing, 1, config.hidden_size] for length in lengths]
        group_size = config.microbatch_group_size_per_vp_stage if num_chunks > 1 else len(lengths)
        order = get_schedule_table(len(lengths), num_chunks, group_size)

        def without(chunk: int | None) -> Iterator[list[int]]:
            """Yields the shapes in the order of the schedule, skipping one chunk."""
            return iter([shapes[number] for number, of_chunk in order if of_chunk != chunk])

        # The first chunk of the first stage receives nothing, and the last chunk of the last stage
        # sends nothing. Backward passes number chunks from the last one.
        place = self.pp_group.rank()
        is_first, is_last = place == 0, place == self.pp_group.size() - 1
        before = 0 if is_first else None
        after = num_chunks - 1 if is_last else None
        self._activations, self._sent = without(before), without(after)
        self._gradients = without(0 if is_last else None)
        self._sent_back = without(num_chunks - 1 if is_first else None)

    def _communicate_shapes(
        self,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
    ) -> tuple[list[int], list[int]]:
        """Returns the shapes of the tensors that arrive from the previous and from the next stage.

        Raises RuntimeError for a shape that the receiver does not expect; otherwise the receiver
        would time out.
        """
        check(tensor_send_next, self._sent)
        check(tensor_send_prev, self._sent_back)
        return (
            next_of(self._activations) if recv_prev else NOTHING,
            next_of(self._gradients) if recv_next else NOTHING,
        )


def check(sent: Tensor | None, shapes: Iterator[list[int]]) -> None:
    """Compares a tensor that is about to be sent, if any, with the next expected shape."""
    if sent is not None and list(sent.shape) != (expected := next_of(shapes)):
        raise RuntimeError(
            f"a pipeline stage sends a tensor of shape {list(sent.shape)}; its micro-batch has "
            f"shape {expected}. This is a bug in hybridrl; please report it"
        )


def next_of(shapes: Iterator[list[int]]) -> list[int]:
    if (shape := next(shapes, None)) is None:
        raise RuntimeError(
            "a pipeline stage exchanges more tensors than it has micro-batches. This is a bug in "
            "hybridrl; please report it"
        )
    return shape


def stage_groups() -> ProcessGroupCollection:
    """Returns the groups of a schedule, which Megatron-Core collects without a communicator."""
    groups = ProcessGroupCollection()
    groups.tp = parallel_state.get_tensor_model_parallel_group()
    groups.cp = parallel_state.get_context_parallel_group()
    groups.pp = parallel_state.get_pipeline_model_parallel_group()
    groups.embd = parallel_state.get_embedding_group(check_initialized=False)
    groups.pos_embd = parallel_state.get_position_embedding_group(check_initialized=False)
    groups.dp = parallel_state.get_data_parallel_group(partial_data_parallel=False)
    groups.dp_cp = parallel_state.get_data_parallel_group(
        with_context_parallel=True, partial_data_parallel=False
    )
    # Megatron-Core 0.19 reads this group if routers have biases.
    groups.tp_dp_cp = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    return groups
