"""What checkpoints write and read of the optimizer's state, and Megatron's own way of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

from hybridrl.checkpoint import model_state, sharded_files, tensor_files, torch_dist_format
from hybridrl.training import optimizer as trainer_optimizer


@contextmanager
def written_bytes() -> Iterator[dict[str, int]]:
    """Counts the bytes of the optimizer's state that a checkpoint's writer gets, and clones."""
    sizes = {"in place": 0, "cloned": 0}
    write = sharded_files._FileWriter.write

    def watched_write(writer: Any) -> None:
        for _, content in writer._buckets:
            for item, tensor in content:
                if item.index.fqn.startswith("optimizer."):
                    is_same = tensor_files.on_host(tensor).data_ptr() == tensor.data_ptr()
                    sizes["in place" if is_same else "cloned"] += tensor.nbytes
        write(writer)

    sharded_files._FileWriter.write = watched_write
    try:
        yield sizes
    finally:
        sharded_files._FileWriter.write = write


@contextmanager
def read_bytes() -> Iterator[dict[str, int]]:
    """Counts the bytes of the optimizer's state that a rank asks of a checkpoint."""
    sizes = {"asked": 0}
    load = torch_dist_format.load

    def watched_load(state: Any, *args: Any, **kwargs: Any) -> Any:
        for part in nested_values(state["optimizer"]):
            if isinstance(part, ShardedTensor | ShardedTensorFactory):
                sizes["asked"] += part.data.nbytes
        return load(state, *args, **kwargs)

    torch_dist_format.load = watched_load
    try:
        yield sizes
    finally:
        torch_dist_format.load = load


@contextmanager
def megatrons_own_way() -> Iterator[None]:
    """Checkpoints of which a first data-parallel rank gathers the optimizer's state."""
    name = "sharded_param_state_fully_reshardable"
    ours, gathers = (
        (model_state.own_shares, model_state.hand_out),
        getattr(DistributedOptimizer, name),
    )
    over_gloo = {"distrib_optim_fully_reshardable_mem_efficient": True}

    def gather(optimizer: Any, model_state: Any, is_loading: bool, metadata: Any) -> Any:
        return gathers(optimizer, model_state, is_loading, over_gloo)

    model_state.own_shares, model_state.hand_out = lambda *_: nullcontext(), lambda *_: None
    setattr(DistributedOptimizer, name, gather)
    try:
        yield
    finally:
        model_state.own_shares, model_state.hand_out = ours
        setattr(DistributedOptimizer, name, gathers)


@contextmanager
def small_buckets() -> Iterator[None]:
    """Cuts most parameters over all data-parallel ranks, as with large models, by small buckets."""
    config = trainer_optimizer.DistributedDataParallelConfig
    trainer_optimizer.DistributedDataParallelConfig = partial(config, bucket_size=5000)
    try:
        yield
    finally:
        trainer_optimizer.DistributedDataParallelConfig = config
