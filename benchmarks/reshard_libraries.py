"""Libraries that bring trained weights to where they generate, in the Trainer's own processes.

* mbridge (verl's exporter) out of a Megatron model of its own, in the training layout, into the
  live vLLM parameters by vLLM's `load_weights`;
* `megatron.core.resharding` out of the Trainer's model into a Megatron model of its own in the
  rollout layout: it knows no inference engine.

Each is a context: what it takes is given back at its end. Collective over the world.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

import torch
from reshard_clock import NotInstalledError
from torch import Tensor

from hybridrl.hybrid_engine.planning.plan import plan_reshard
from hybridrl.hybrid_engine.verify import verify
from hybridrl.parallel.groups import World
from hybridrl.parallel.layout import TrainLayout
from hybridrl.parallel.mesh import Mesh
from hybridrl.training.model import ParallelModel

Way = tuple[Callable[[], object], Callable[[], None]]
"""What is timed, and the check of what it wrote, after one run."""

BITS_OF = {2: torch.int16, 4: torch.int32}


def spoil(engine: Mapping[str, Tensor]) -> None:
    """Overwrites tensors with bits that no weight has: all ones, a NaN."""
    for tensor in engine.values():
        tensor.view(BITS_OF[tensor.element_size()]).fill_(-1)


def checksums(engine: Mapping[str, Tensor]) -> Tensor:
    """Returns the sum of each tensor's bits, queued behind what writes them."""
    sums = [t.view(BITS_OF[t.element_size()]).sum(dtype=torch.int64) for t in engine.values()]
    return torch.stack(sums) if sums else torch.empty(0, dtype=torch.int64)


def check_overwritten(engine: Mapping[str, Tensor]) -> None:
    """Refuses what `spoil` left."""
    for name, tensor in engine.items():
        if bool((tensor.view(BITS_OF[tensor.element_size()]) == -1).any()):
            raise RuntimeError(f"{name} was not written")


def give_memory_back() -> None:
    """Returns to the device what nothing refers to any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def mbridge_way(trainer: Any, own: Mapping[str, Tensor]) -> Iterator[Way]:
    """mbridge's export into vLLM's loader.

    Its weights are drawn by Megatron, and other than the Trainer's: that all were written is all
    that is checked. Those of the Trainer that are the engine's too are as before in the end.
    """
    if find_spec("mbridge") is None:
        raise NotInstalledError("mbridge")
    from mbridge import AutoBridge  # type: ignore[import-not-found]
    from transformers import AutoConfig

    live = trainer.engine.tensors()
    kept = {name: live[name].clone() for name in trainer.engine.shared}
    fields = dict(trainer.source.hf_config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    if not hasattr(config, "rope_theta"):  # transformers 5 moved it, mbridge 0.15.1 reads it
        config.rope_theta = fields["rope_theta"]
    trainer.platform.seed(1)
    model: Any = None
    try:
        bridge = AutoBridge.from_config(config)
        model = bridge.get_model()

        def run() -> None:
            with torch.no_grad():
                trainer.engine.model.load_weights(bridge.export_weights(model))

        yield run, lambda: check_overwritten(own)
    finally:
        model = None
        for name, tensor in kept.items():
            live[name].copy_(tensor)
        kept.clear()
        give_memory_back()


@contextmanager
def megatron_way(trainer: Any, tp: int) -> Iterator[Way]:
    """`megatron.core.resharding` into a Megatron model of tensor parallel size `tp`.

    Ends the use of the Trainer's own Megatron groups: nothing that needs them may come after.
    """
    from megatron.core.resharding import swap_model_weights
    from megatron.core.resharding.refit import clear_service_cache

    before: ParallelModel = trainer.policy.model
    mesh = Mesh(
        World(trainer.platform, trainer.world.timeout_s), TrainLayout(trainer.world.size, tp=tp)
    )
    trainer.platform.seed(1)
    after: Any = ParallelModel(mesh, trainer.source, "lm", trainer.config.train)
    weights = after.weights()
    spoil(weights)
    backend = "gloo" if trainer.platform.is_cpu else "nccl"

    def run() -> None:
        with torch.no_grad():
            swap_model_weights(before.chunks, after.chunks, backend)

    def check() -> None:
        ranks = range(mesh.world.size)
        sources = [before.layout_of(rank) for rank in ranks]
        targets = [after.layout_of(rank) for rank in ranks]
        dtype = next(iter(weights.values())).dtype
        plan = plan_reshard(sources, targets, dtype.itemsize)
        verify(plan, mesh.world, before.weights(), weights, dtype)

    try:
        yield run, check
    finally:
        after = None
        weights.clear()
        clear_service_cache()
        give_memory_back()
