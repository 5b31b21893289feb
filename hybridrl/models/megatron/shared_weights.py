"""Lets several models on the same ranks use the same frozen weights.

Each model has its own Megatron modules, adapters, gradients and optimizer. Their frozen linear
layers, norms and embeddings hold the same `Parameter` objects, so a rank stores these weights once.
Models can therefore be recomputed, pipelined and saved as if each had its own weights.

Invariant: shared parameters are never trained.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from hybridrl.models.megatron.build import named_parameters
from hybridrl.models.weights import RankLayout


def shareable(
    own: RankLayout, other: RankLayout, trained: Collection[str], frozen: Collection[str]
) -> frozenset[str]:
    """Returns the local names of parameters that a model can take from another model."""
    regions = _regions(own), _regions(other)
    return frozenset(
        name
        for name, found in regions[0].items()
        if name in frozen and name not in trained and found == regions[1].get(name)
        if own.shapes[name] == other.shapes[name]
    )


def _regions(layout: RankLayout) -> dict[str, set[object]]:
    found: dict[str, set[object]] = {}
    for region in layout.regions:
        found.setdefault(region.local, set()).add(region)
    return found


@contextmanager
def without_memory(num_vocab_rows: int) -> Iterator[None]:
    """Linear layers that are built in this context have weights without memory (meta tensors), so
    that building a second model does not need the memory of its weights for a moment.

    Call `take_weights` afterwards.

    Args:
        num_vocab_rows: Number of rows of this rank's embedding. Weights with this number of rows
            keep their memory, because Megatron sums tied embeddings over pipeline stages when it
            builds a model.
    """

    def to_meta(
        module: torch.nn.Module, name: str, parameter: torch.nn.Parameter
    ) -> torch.nn.Parameter | None:
        # Megatron's and transformer-engine's classes. Modules of other kinds, such as routers, move
        # their weights while they are built.
        is_linear = any(kind.__name__.endswith("Linear") for kind in type(module).__mro__)
        if not is_linear or parameter.dim() != 2 or parameter.size(0) == num_vocab_rows:
            return None
        return _like(parameter, torch.device("meta"))

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[no-untyped-call, arg-type]  # it may return one
    try:
        yield
    finally:
        handle.remove()


def take_weights(
    chunks: Sequence[torch.nn.Module],
    others: Sequence[torch.nn.Module],
    names: Collection[str],
    device: torch.device,
) -> None:
    """Replaces the parameters `names` by another model's; others without memory become zero."""
    shared: Mapping[str, torch.nn.Parameter] = named_parameters(others)
    for local, parameter in named_parameters(chunks).items():
        chunk, _, path = local.partition("/")
        module, _, name = path.rpartition(".")
        new = parameter
        if local in names:
            new = shared[local]
        elif parameter.is_meta:
            new = _like(parameter, device)
        if new is not parameter:
            # The method of torch: transformer-engine's own initializes the value.
            owner = chunks[int(chunk)].get_submodule(module)
            torch.nn.Module.register_parameter(owner, name, new)


def _like(parameter: torch.nn.Parameter, device: torch.device) -> torch.nn.Parameter:
    found = torch.nn.Parameter(
        torch.zeros_like(parameter, device=device), requires_grad=parameter.requires_grad
    )
    vars(found).update(vars(parameter))
    return found
