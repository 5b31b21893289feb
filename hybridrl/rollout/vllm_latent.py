"""vLLM's latent attention: the copies of the projection up that decoding reads, and its norms.

For decoding vLLM multiplies queries and outputs with the projection up of keys and values, cut and
turned into `W_UK_T` and `W_UV`, which it makes once after loading. After every write of
`kv_b_proj` they are made again here, in place, since CUDA graphs keep their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hybridrl.errors import ModelError
from hybridrl.models.families.latent import LATENT_EPS
from hybridrl.models.family import LatentShape

LATENT_NORMS = ("q_a_layernorm", "kv_a_layernorm")
ABSORBED = ("W_UK_T", "W_UV")  # since 0.32 parameters, before plain attributes


def check_latent(
    model: torch.nn.Module, latent: LatentShape, num_layers: int, version: str
) -> None:
    """Looks for all that the functions below set: by names alone, they would pass over others.

    Args:
        model: vLLM's, loaded.
        latent: sizes of its attention.
        num_layers: of it.
        version: vLLM's, for the message.

    Raises:
        ModelError: a layer has not its two copies, or not its norms of latents.
    """
    copies, norms = len(list(_copies(model))), len(list(_norms(model)))
    per_layer = 1 + (latent.query_rank > 0)
    for found, expected, what in (
        (copies, len(ABSORBED) * num_layers, " and ".join(ABSORBED)),
        (norms, per_layer * num_layers, f"norms of latents, {' and '.join(LATENT_NORMS)}"),
    ):
        if found != expected:
            raise ModelError(
                "rollout.engine",
                f"{found} tensors of {version}",
                f"{expected}, over {num_layers} layers: {what}",
                "Install a version that the tests cover, or set rollout.engine=hf.",
            )


def set_epsilon(model: torch.nn.Module) -> None:
    """Gives norms of latents the epsilon that the model was made with: vLLM takes the other norms',
    which in Moonlight is another. Before graphs are captured.
    """
    for norm in _norms(model):
        norm.variance_epsilon = LATENT_EPS


def _norms(model: torch.nn.Module) -> Iterator[Any]:
    for name, part in model.named_modules():
        if name.endswith(LATENT_NORMS) and hasattr(part, "variance_epsilon"):
            yield part


def layout_name(name: str) -> str | None:
    """Returns the layout's name of a vLLM parameter, which is its own; None: it is a copy."""
    return None if name.rpartition(".")[2] in ABSORBED else name


@torch.no_grad()
def absorb(model: torch.nn.Module) -> None:
    """Makes every layer's copies of its projection up again; nothing where there are none.

    Args:
        model: vLLM's. Of a layer `kv_b_proj.weight` is (N * (P + V), L): of each of N heads the P
            rows of its key, then the V rows of its value; `W_UK_T` is (N, P, L), `W_UV` (N, L, V).
    """
    for _, copy, source in _copies(model):
        copy.copy_(source)


@torch.no_grad()
def stale_copy(model: torch.nn.Module) -> str | None:
    """Returns the name of the first copy that is not what `absorb` makes; None: all are."""
    return next((name for name, copy, source in _copies(model) if not copy.equal(source)), None)


def _copies(model: torch.nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yields the name of each copy, the copy, and the view of the weight that it is of."""
    for name, layer in model.named_modules():
        if not all(hasattr(layer, copy) for copy in ABSORBED):
            continue
        attention: Any = layer
        weight = attention.kv_b_proj.weight
        heads = weight.view(attention.num_heads, -1, weight.size(-1))
        size = attention.qk_nope_head_dim
        yield f"{name}.W_UK_T", attention.W_UK_T, heads[:, :size]
        yield f"{name}.W_UV", attention.W_UV, heads[:, size:].transpose(1, 2)
