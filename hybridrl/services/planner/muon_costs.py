"""Memory and time of Muon (training/muon.py), which updates matrices. No torch."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from hybridrl.models.family import Family, ModelShape
from hybridrl.models.weights import Head, hf_shapes
from hybridrl.parallel.layout import TrainLayout

KEPT = 64  # number of models whose tensors are cached
# Bytes per element of the largest matrix while it is orthogonalized: the update of the local part,
# the whole matrix and its gathered parts in fp32, and four bf16 matrices of the iteration.
SCRATCH_BYTES = 4 + 4 + 4 + 4 * 2
NUM_ITERATIONS = 5
_EXPERTS = ".experts."
_BY_ADAMW = ("embed", "lm_head", "score.weight")


@lru_cache(KEPT)
def _tensors(family: Family, shape: ModelShape, head: Head) -> dict[str, tuple[int, ...]]:
    return hf_shapes(family, shape, head)


def num_by_adamw(family: Family, shape: ModelShape, layout: TrainLayout, head: Head) -> int:
    """Returns the number of parameters that AdamW updates on the fullest rank: vocabularies, norms
    and biases.

    Args:
        family: Family with a weight table of the trained parameters.
        shape, layout, head: Sizes, training layout and head of the model.
    """
    vocabularies, vectors = [], 0
    for name, size in _tensors(family, shape, head).items():
        if any(part in name for part in _BY_ADAMW):
            vocabularies.append(prod(size))
        elif len(size) < 2:
            vectors += prod(size)
    # With several stages, the first has the embeddings and the last has the head.
    fullest = max(vocabularies, default=0) if layout.pp > 1 else sum(vocabularies)
    return (fullest // layout.tp + vectors // layout.pp) // (layout.dp * layout.cp)


def scratch_bytes(family: Family, shape: ModelShape, head: Head) -> int:
    """Returns the memory in which the largest matrix is orthogonalized."""
    return SCRATCH_BYTES * max(
        (prod(size[-2:]) for size, _ in _matrices(family, shape, head)), default=0
    )


def orthogonalization_flops(
    family: Family, shape: ModelShape, layout: TrainLayout, head: Head
) -> float:
    """Returns the operations of one rank in a step. Every rank that updates a part of a matrix
    orthogonalizes all of it. This is a bound, for ranks that update a part of each matrix of their
    stage.
    """
    total = 0.0
    for size, is_expert in _matrices(family, shape, head):
        short, long = sorted(size[-2:])
        products = 4.0 * short * short * long + 2.0 * short**3
        parts = layout.pp * (layout.ep if is_expert else 1)
        total += prod(size[:-2]) * NUM_ITERATIONS * products / parts
    return total


def _matrices(family: Family, shape: ModelShape, head: Head) -> list[tuple[tuple[int, ...], bool]]:
    """Returns the shapes of the matrices, and whether they are experts'."""
    return [
        (size, _EXPERTS in name)
        for name, size in _tensors(family, shape, head).items()
        if len(size) > 1 and not any(part in name for part in _BY_ADAMW)
    ]
