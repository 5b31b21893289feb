"""What checkpoints write and read of the optimizer's state, and Megatron's own way of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from hybridrl.checkpoint import store


@contextmanager
def written_bytes() -> Iterator[dict[str, int]]:
    """Counts the bytes of fp32 tensors on the host that a checkpoint's writer gets, and clones."""
    sizes = {"in place": 0, "cloned": 0}
    given: set[int] = set()
    save, prepare = dist_checkpointing.save, FileSystemWriterAsync.prepare_write_data

    def watched_save(state: Any, *args: Any) -> Any:
        for part in nested_values(state["optimizer"]):
            if isinstance(part, ShardedTensor) and part.data is not None:
                given.add(part.data.data_ptr())
        return save(state, *args)

    def watched_prepare(writer: Any, *args: Any) -> None:
        prepare(writer, *args)
        for *_, (_, tensors) in writer.write_buckets:
            for item, tensor in tensors:
                if item.index.fqn.startswith("optimizer."):
                    is_given = tensor.data_ptr() in given
                    sizes["in place" if is_given else "cloned"] += tensor.nbytes

    dist_checkpointing.save = watched_save
    FileSystemWriterAsync.prepare_write_data = watched_prepare
    try:
        yield sizes
    finally:
        dist_checkpointing.save = save
        FileSystemWriterAsync.prepare_write_data = prepare


@contextmanager
def read_bytes() -> Iterator[dict[str, int]]:
    """Counts the bytes of the optimizer's state that a rank asks of a checkpoint."""
    sizes = {"asked": 0}
    load = dist_checkpointing.load

    def watched_load(state: Any, *args: Any) -> Any:
        for part in nested_values(state["optimizer"]):
            if isinstance(part, ShardedTensor | ShardedTensorFactory):
                sizes["asked"] += part.data.nbytes
        return load(state, *args)

    dist_checkpointing.load = watched_load
    try:
        yield sizes
    finally:
        dist_checkpointing.load = load


@contextmanager
def megatrons_own_way() -> Iterator[None]:
    """Checkpoints of which a first data-parallel rank gathers the optimizer's state."""
    ours, gathers = store.param_state, DistributedOptimizer.sharded_param_state_fully_reshardable
    over_gloo = {"distrib_optim_fully_reshardable_mem_efficient": True}
    store.param_state = lambda optimizer, *args: gathers(optimizer, *args[:2], over_gloo)
    try:
        yield
    finally:
        store.param_state = ours
