"""Memory and time of Muon (training/muon.py), which updates matrices. No torch."""

from __future__ import annotations

from functools import lru_cache
from math import prod

from hybridrl.models.family import Family, ModelShape
from hybridrl.models.weights import EXPERTS, Head, hf_shapes, hf_tensors_of_parameters
from hybridrl.parallel.layout import TrainLayout
from hybridrl.training.muon_matrices import NUM_ITERATIONS, is_hf_matrix

KEPT = 64  # number of models whose tensors are cached
FP32_BYTES = 4
# Bytes per element of a matrix in the iteration: itself in fp32, and four in bf16.
SCRATCH_BYTES = FP32_BYTES + 4 * 2
_EXPERTS = ".experts."


@lru_cache(KEPT)
def _tensors(family: Family, shape: ModelShape, head: Head) -> dict[str, tuple[int, ...]]:
    return hf_shapes(family, shape, head)


def num_by_adamw(family: Family, shape: ModelShape, layout: TrainLayout, head: Head) -> int:
    """Returns how many trained parameters AdamW updates: vocabularies, norms, biases."""
    vocabularies, vectors = [], 0
    for name, size in _tensors(family, shape, head).items():
        if is_hf_matrix(name, size):
            continue
        if min(size) > 1 and len(size) == 2:
            vocabularies.append(prod(size))
        else:
            vectors += prod(size)
    # With several stages, the first has the embeddings and the last has the head.
    fullest = max(vocabularies, default=0) if layout.pp > 1 else sum(vocabularies)
    return (fullest // layout.tp + vectors // layout.pp) // (layout.dp * layout.cp)


def scratch_bytes(family: Family, shape: ModelShape, layout: TrainLayout, head: Head) -> int:
    """Returns the memory in which the largest parameter is updated (Muon._step_matrices).

    While one of its matrices (such as gate) is orthogonalized, the changes of all on this rank and
    the parts from all tensor-parallel ranks are in memory in fp32.
    """
    most = 0
    for local, tensors in hf_tensors_of_parameters(family, shape, head):
        sizes = [prod(size[-2:]) for name, size in tensors.items() if is_hf_matrix(name, size)]
        if sizes:
            parts = layout.etp if EXPERTS in f".{local}" else layout.tp
            fused = FP32_BYTES * sum(sizes)
            gathered = fused if parts > 1 else 0
            most = max(most, fused // parts + gathered + SCRATCH_BYTES * max(sizes))
    return most


def orthogonalization_flops(
    family: Family, shape: ModelShape, layout: TrainLayout, head: Head
) -> float:
    """Returns an upper bound for a rank's step: it orthogonalizes every matrix of its stage."""
    total = 0.0
    for name, size in _tensors(family, shape, head).items():
        if not is_hf_matrix(name, size):
            continue
        short, long = sorted(size[-2:])
        products = 4.0 * short * short * long + 2.0 * short**3
        parts = layout.pp * (layout.ep if _EXPERTS in name else 1)
        total += prod(size[:-2]) * NUM_ITERATIONS * products / parts
    return total
