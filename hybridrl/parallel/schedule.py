"""Runs micro-batches through the pipeline with Megatron's schedules.

Who waits for whom: all ranks of a model replica (its tensor, context and pipeline ranks) call
`forward_backward` or `forward_only` together, with the same micro-batches. Replicas wait for each
other in the gradient reduction, so all replicas must have the same number of micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_model_config

from hybridrl.parallel import progress
from hybridrl.parallel.stages import KnownShapes, stage_groups

Item = TypeVar("Item")
Forward = Callable[[torch.nn.Module, Item], Any]


def forward_backward(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Item],
    lengths: Sequence[int],
    forward: Forward[Item],
    loss: Callable[[Any, Item], tuple[torch.Tensor, Any]],
) -> list[Any]:
    """Accumulates gradients over all micro-batches, and reduces them over replicas.

    Args:
        lengths: For each micro-batch, number of positions that this context-parallel rank computes.
        loss: Function that receives the last chunk's output. It returns the loss, already divided
            by the global denominator, and an extra value. It is called only on the last stage.

    Returns:
        On the last stage, the extra values that `loss` returned, in order; on others, [].
    """

    def step(data: Iterator[Item], chunk: torch.nn.Module) -> tuple[Any, Callable[[Any], Any]]:
        progress.advance()
        work = next(data)

        def loss_of(output: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
            # With three returned values instead of two, Megatron does not divide the loss.
            value, extra = loss(output, work)
            return value, torch.ones((), dtype=torch.int, device=value.device), extra

        return forward(chunk, work), loss_of

    return _run(chunks, micro_batches, lengths, step, forward_only=False)


def forward_only(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Item],
    lengths: Sequence[int],
    forward: Forward[Item],
) -> list[Any]:
    """Runs all micro-batches without gradients; the last stage gets the outputs, others []."""

    def step(data: Iterator[Item], chunk: torch.nn.Module) -> tuple[Any, Callable[..., Any]]:
        progress.advance()

        def output_itself(output: Any, non_loss_data: bool = True) -> Any:
            return output

        return forward(chunk, next(data)), output_itself

    with torch.no_grad():
        return _run(chunks, micro_batches, lengths, step, forward_only=True)


def finalize_summed_gradients(
    chunks: Sequence[torch.nn.Module], num_tokens: object = None, **kwargs: Any
) -> None:
    """Reduces gradients as Megatron does, but without dividing them.

    The losses are already divided by the global denominator. Gradients of parameters with the
    attribute `summed_over` are also added up over that group, whose ranks hold copies and have one
    summand each; Megatron does this only for copies of parameters outside of experts.
    """
    finalize_model_grads(list(chunks), None, **kwargs)
    copies: dict[Any, list[torch.Tensor]] = {}
    for chunk in chunks:
        for parameter in chunk.parameters():
            group = getattr(parameter, "summed_over", None)
            if group is not None and parameter.requires_grad:
                copies.setdefault(group, []).append(parameter.main_grad)  # type: ignore[attr-defined]
    for group, gradients in copies.items():
        total = torch._utils._flatten_dense_tensors(gradients)
        torch.distributed.all_reduce(total, group=group)
        summed = torch._utils._unflatten_dense_tensors(total, gradients)
        torch._foreach_copy_(gradients, summed)


def _run(
    chunks: Sequence[torch.nn.Module],
    micro_batches: Sequence[Item],
    lengths: Sequence[int],
    step: Callable[..., Any],
    forward_only: bool,
) -> list[Any]:
    iterators = [iter(micro_batches) for _ in chunks]
    single, config = len(chunks) == 1, get_model_config(chunks[0])
    links: dict[str, Any] = {}
    if config.pipeline_model_parallel_size > 1:
        assert len(lengths) == len(micro_batches)
        known = KnownShapes(config, lengths, len(chunks))
        links = {"p2p_communicator": known, "pg_collection": stage_groups()}
    results = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iterators[0] if single else iterators,
        model=chunks[0] if single else list(chunks),
        num_microbatches=len(micro_batches),
        seq_length=1,  # unused, because micro-batches differ in length (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        **links,
    )
    return list(results)
