"""How many floating-point operations a model's passes need, and a GPU's peak rate. No torch.

Model FLOPs: what the mathematics asks for, a multiplication and an addition counting two.
Recomputed activations, padding and the masked half of attention scores do not count, so that a
rate is comparable between ways of computing the same (Chowdhery et al. 2022, "PaLM", appendix B),
nor do output heads where nothing is predicted. What samples share counts once where it is computed
once: their rate is that of the hardware, and what sharing saves is a number of its own.
The backward pass of a matrix product is two products of the same size: the gradient of its input,
if something before it is trained, and that of its weight, if the weight is trained. The backward
pass of attention is twice its forward pass.
Matrix products and attention only; norms, rotary positions, softmax and the optimizer are left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from hybridrl.models.family import ModelShape
from hybridrl.models.trainable import ALL, BackwardShares

# Dense bf16 tensor-core FLOP/s by the words of the device's name, the special before the general;
# NVIDIA's data sheets of each product, whose numbers with sparsity are twice these.
PEAK_FLOPS_PER_S = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "A100": 312e12,
    "B200": 2250e12,
    "GB200": 2500e12,
}


def matmul_params(shape: ModelShape) -> int:
    """Returns the weights of the decoder layers that a token is multiplied with: of a mixture of
    experts the router's and those of the experts that compute with the token.
    """
    attention = _attention_params(shape)
    dense = 3 * shape.hidden_size * shape.ffn_size
    if (moe := shape.moe) is None:
        return shape.num_layers * (attention + dense)
    width = moe.experts_per_token * moe.expert_ffn_size + moe.shared_ffn_size
    mixture = shape.hidden_size * (3 * width + moe.num_experts)
    num_dense = len(moe.dense_layers)
    feed_forward = num_dense * dense + (shape.num_layers - num_dense) * mixture
    return shape.num_layers * attention + feed_forward


def _attention_params(shape: ModelShape) -> int:
    hidden, heads = shape.hidden_size, shape.num_heads
    if (latent := shape.latent) is None:
        q, kv = heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return hidden * (q + 2 * kv) + q * hidden
    query = heads * latent.query_dim * (latent.query_rank or hidden)
    key_value = heads * (latent.plain_dim + latent.value_dim) * latent.key_value_rank
    down = hidden * (latent.query_rank + latent.cached_dim)
    return down + query + key_value + heads * latent.value_dim * hidden


def attention_length(shape: ModelShape) -> int:
    """Returns the sequence length at which causal attention costs as much as all products with
    weights, the output head's included.

    Half the pairs of L positions, of which each costs 2 FLOPs a head for each element of its key
    and its value, are L * (key + value) * heads a token and layer; products are 2 FLOPs a weight.
    """
    weights = matmul_params(shape) + shape.hidden_size * shape.vocab_size
    return 2 * weights // (shape.num_layers * shape.num_heads * (shape.head_dim + shape.value_dim))


def attended_pairs(shape: ModelShape, length: int) -> int:
    """Returns the pairs of positions that attend one to the other in a sequence, over all layers:
    those that the causal mask and the layers' windows leave.
    """
    whole = length * (length + 1) // 2
    if shape.window is None:
        return shape.num_layers * whole
    outside = max(0, length - shape.window)  # of the last query's positions
    windowed = whole - outside * (outside + 1) // 2
    num_whole = shape.num_whole_layers
    return num_whole * whole + (shape.num_layers - num_whole) * windowed


class Flops(NamedTuple):
    """FLOPs of a forward pass: of products with the layers' weights, of attention, of the head."""

    weights: int
    attention: int
    head: int


def _forward(
    shape: ModelShape,
    lengths: Iterable[int],
    head_tokens: int,
    head_size: int | None,
    prefixes: Iterable[int] | None,
) -> Flops:
    lengths = list(lengths)
    shared = [0] * len(lengths) if prefixes is None else list(prefixes)
    tokens = sum(lengths) - sum(shared)
    pairs = sum(attended_pairs(shape, length) for length in lengths)
    pairs -= sum(attended_pairs(shape, prefix) for prefix in shared)
    outputs = shape.vocab_size if head_size is None else head_size
    return Flops(
        2 * matmul_params(shape) * tokens,
        2 * shape.num_heads * (shape.head_dim + shape.value_dim) * pairs,
        2 * shape.hidden_size * outputs * head_tokens,
    )


def forward_flops(
    shape: ModelShape,
    lengths: Iterable[int],
    head_tokens: int,
    head_size: int | None = None,
    prefixes: Iterable[int] | None = None,
) -> int:
    """Returns the FLOPs of one forward pass over sequences, of all ranks together.

    A token costs two FLOPs for each weight; attention, two products, of 2 FLOPs for each element of
    a key and of a value, for each head and each of the L (L + 1) / 2 pairs of positions that the
    causal mask leaves, fewer in layers with windows.

    Args:
        shape: sizes of the model.
        lengths: tokens of each sequence, prompt and response together.
        head_tokens: positions that the output head is computed for: of the trainer, the response
            tokens.
        head_size: outputs of the head; None: the vocabulary, 1 for a value head.
        prefixes: Leading tokens of each sequence that are computed with another; None: no token is.
    """
    return sum(_forward(shape, lengths, head_tokens, head_size, prefixes))


def train_flops(
    shape: ModelShape,
    lengths: Iterable[int],
    head_tokens: int,
    head_size: int | None = None,
    prefixes: Iterable[int] | None = None,
    backward: BackwardShares = ALL,
) -> int:
    """Returns the FLOPs of one forward and backward pass.

    Args:
        shape, lengths, head_tokens, head_size, prefixes: as of `forward_flops`.
        backward: What the backward pass computes.
    """
    found = _forward(shape, lengths, head_tokens, head_size, prefixes)
    return round(
        found.weights * (1 + backward.flow + backward.weights)
        + found.attention * (1 + 2 * backward.attention)
        + found.head * (1 + backward.head_flow + backward.head_weights)
    )


GeneratedLengths = dict[int, tuple[int, list[tuple[int, int]]]]
"""Of each group its prompt's tokens, and of each of its samples those of prompt and response
together, and how many of them were sampled: what an environment gives is only read.
"""


def num_generated(generated: GeneratedLengths) -> int:
    """Returns the tokens of prompts and responses, a prompt counted for each of its samples, and
    observations with the responses.
    """
    return sum(length for _, samples in generated.values() for length, _ in samples)


def generate_flops(shape: ModelShape, generated: GeneratedLengths) -> int:
    """Returns the FLOPs of generating: each prompt computed once, each response token once, also
    those of earlier turns, logits of the sampled tokens only.

    Args:
        shape: sizes of the model.
        generated: what there is of each prompt.
    """
    shared = [prompt for prompt, _ in generated.values()]
    prompts = [prompt for prompt, samples in generated.values() for _ in samples]
    lengths = [sample for _, samples in generated.values() for sample in samples]
    again = forward_flops(shape, prompts, 0) - forward_flops(shape, shared, 0)
    wholes, sampled = [whole for whole, _ in lengths], sum(num for _, num in lengths)
    return forward_flops(shape, wholes, sampled) - again


def peak_flops_per_s(device_name: str) -> float | None:
    """Returns the dense bf16 peak of a GPU by its name, e.g. 'NVIDIA H100 80GB HBM3'; None if it is
    not in the table.
    """
    words = set(re.split(r"[\s-]+", device_name))
    found = (peak for name, peak in PEAK_FLOPS_PER_S.items() if words.issuperset(name.split()))
    return next(found, None)
