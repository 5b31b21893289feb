"""Counts floating-point operations of a model's passes, and lists GPUs' peak rates. No torch.

Model FLOPs are those of the mathematics; a multiplication and an addition count two. Recomputed
activations, padding, the masked half of attention scores, and output heads without a prediction do
not count. So rates are comparable between implementations (Chowdhery et al. 2022, "PaLM", appendix
B). A prompt that several samples share counts once if it is computed once.

The backward pass of a matrix product is two products of the same size: one for the gradient of its
input, if something before it is trained, and one for its weight, if the weight is trained. The
backward pass of attention is twice its forward pass. Only matrix products and attention count;
norms, rotary positions, softmax and the optimizer do not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from hybridrl.models.family import ModelShape
from hybridrl.models.trainable import ALL, BackwardShares

# Dense bf16 tensor-core FLOP/s by words of the device's name; the first match counts. Source:
# NVIDIA's data sheets, whose numbers with sparsity are twice these.
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
    """Returns the number of decoder weights that multiply each token. In a mixture of experts these
    include the router and the experts that compute the token, not the others.
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
    weights, including the output head.

    The L positions of a sequence have L / 2 pairs per token. Each costs 2 FLOPs per head for each
    element of a key and a value, in all L * (key + value) * heads per token and layer. Products
    cost 2 FLOPs per weight.
    """
    weights = matmul_params(shape) + shape.hidden_size * shape.vocab_size
    return 2 * weights // (shape.num_layers * shape.num_heads * (shape.head_dim + shape.value_dim))


def attended_pairs(shape: ModelShape, length: int) -> int:
    """Returns the number of query-key pairs of a sequence, summed over all layers. The causal mask
    and the layers' windows exclude the others.
    """
    whole = length * (length + 1) // 2
    if shape.window is None:
        return shape.num_layers * whole
    outside = max(0, length - shape.window)  # positions that the last query does not attend to
    windowed = whole - outside * (outside + 1) // 2
    num_whole = shape.num_whole_layers
    return num_whole * whole + (shape.num_layers - num_whole) * windowed


class Flops(NamedTuple):
    """FLOPs of a forward pass: products with the layers' weights, attention, output head."""

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
    """Returns the FLOPs of one forward pass over sequences, summed over ranks.

    A token costs two FLOPs for each weight. Attention has two products, with 2 FLOPs for each
    element of a key and of a value, each head and each attended pair of positions.

    Args:
        lengths: Number of tokens of each sequence, prompt and response together.
        head_tokens: Number of positions for which the output head is computed; in training the
            response tokens.
        head_size: Number of outputs of the head, 1 for a value head; None takes the vocabulary.
        prefixes: Number of leading tokens of each sequence that another sequence computes; None if
            there are none.
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
    """Returns the FLOPs of one forward and backward pass, summed over ranks.

    Args:
        shape, lengths, head_tokens, head_size, prefixes: See `forward_flops`.
        backward: Shares of the backward pass that are computed.
    """
    found = _forward(shape, lengths, head_tokens, head_size, prefixes)
    return round(
        found.weights * (1 + backward.flow + backward.weights)
        + found.attention * (1 + 2 * backward.attention)
        + found.head * (1 + backward.head_flow + backward.head_weights)
    )


GeneratedLengths = dict[int, tuple[int, list[tuple[int, int]]]]
"""By group: the number of prompt tokens and, for each sample, the number of all its tokens and of
those that were sampled. Observations of environments are not sampled.
"""


def num_generated(generated: GeneratedLengths) -> int:
    """Returns the number of tokens of prompts, responses and observations. A prompt counts once for
    each of its samples.
    """
    return sum(length for _, samples in generated.values() for length, _ in samples)


def generate_flops(shape: ModelShape, generated: GeneratedLengths) -> int:
    """Returns the FLOPs of generation, summed over ranks.

    Each prompt and each response token is computed once, including earlier turns. Logits are
    computed for sampled tokens only.
    """
    shared = [prompt for prompt, _ in generated.values()]
    prompts = [prompt for prompt, samples in generated.values() for _ in samples]
    lengths = [sample for _, samples in generated.values() for sample in samples]
    repeated = forward_flops(shape, prompts, 0) - forward_flops(shape, shared, 0)
    wholes, sampled = [whole for whole, _ in lengths], sum(num for _, num in lengths)
    return forward_flops(shape, wholes, sampled) - repeated


def peak_flops_per_s(device_name: str) -> float | None:
    """Returns the dense bf16 peak of a GPU by its name, such as 'NVIDIA H100 80GB HBM3', or None if
    the table does not list it.
    """
    words = set(re.split(r"[\s-]+", device_name))
    found = (peak for name, peak in PEAK_FLOPS_PER_S.items() if words.issuperset(name.split()))
    return next(found, None)
