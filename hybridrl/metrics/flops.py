"""Counts the floating-point operations in a model's passes, and lists the peak rates of GPUs. No
torch.

Model FLOPs count the operations that the mathematics requires; a multiplication followed by an
addition counts as two. Recomputed activations, padding, the masked half of the attention scores,
and the output head at positions without a prediction do not count, so rates are comparable between
implementations (Chowdhery et al. 2022, "PaLM", appendix B). A prompt that several samples share
counts once if it is computed once.

Only matrix products and attention count. The backward pass of a product has two of the same size:
for the gradient of the input, if an earlier layer is trained, and of the weight, if it is trained.
Attention's costs twice its forward pass. In a gated delta net, the products with its state and its
convolution count like attention. A trained layer for multi-token prediction counts in updates, with
its own pass of the head, whose weight gets no gradient from it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from hybridrl.models.family import ModelShape
from hybridrl.models.mtp import input_params, mtp_layer
from hybridrl.models.trainable import ALL, BackwardShares

# Dense bf16 tensor-core FLOP/s by words in the device's name; the first match is used. Source:
# NVIDIA's data sheets, which also list rates with sparsity; these rates are twice as high.
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
    """Returns the number of decoder weights that multiply each token, including its experts'."""
    attention = shape.num_attention_layers * _attention_params(shape)
    if (mixer := shape.mixer) is not None:
        attention += len(mixer.layers) * mixer.matmul_params(shape.hidden_size)
    dense = 3 * shape.hidden_size * shape.ffn_size
    if (moe := shape.moe) is None:
        return attention + shape.num_layers * dense
    width = moe.experts_per_token * moe.expert_ffn_size + moe.shared_ffn_size
    mixture = shape.hidden_size * (3 * width + moe.num_experts)
    num_dense = len(moe.dense_layers)
    feed_forward = num_dense * dense + (shape.num_layers - num_dense) * mixture
    return attention + feed_forward


def _attention_params(shape: ModelShape) -> int:
    hidden, heads = shape.hidden_size, shape.num_heads
    if (latent := shape.latent) is None:
        q, kv = heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        return hidden * (shape.query_size + 2 * kv) + q * hidden
    query = heads * latent.query_dim * (latent.query_rank or hidden)
    key_value = heads * (latent.plain_dim + latent.value_dim) * latent.key_value_rank
    down = hidden * (latent.query_rank + latent.cached_dim)
    return down + query + key_value + heads * latent.value_dim * hidden


def attention_length(shape: ModelShape) -> int:
    """Returns the length at which causal attention costs as many FLOPs as products with weights.

    A sequence of L positions has L / 2 query-key pairs per token. Each pair costs 2 FLOPs per head
    for each element of a key and a value. Attention thus costs L * (key + value) * heads FLOPs per
    token and layer. Matrix products cost 2 FLOPs per weight and token.
    """
    weights = matmul_params(shape) + shape.hidden_size * shape.vocab_size
    per_head = shape.num_heads * (shape.head_dim + shape.value_dim)
    return 2 * weights // max(shape.num_attention_layers * per_head, 1)


def attended_pairs(shape: ModelShape, length: int) -> int:
    """Returns the query-key pairs, within masks and windows, over all layers with attention."""
    whole = length * (length + 1) // 2
    if shape.window is None:
        return shape.num_attention_layers * whole
    outside = max(0, length - shape.window)  # positions that the last query does not attend to
    windowed = whole - outside * (outside + 1) // 2
    num_whole = shape.num_whole_layers
    return num_whole * whole + (shape.num_layers - num_whole) * windowed


def recurrent_flops(shape: ModelShape) -> int:
    """Returns the FLOPs per token of recurrent modules, without products with weights."""
    return 0 if shape.mixer is None else len(shape.mixer.layers) * shape.mixer.token_flops


class Flops(NamedTuple):
    """FLOPs of a forward pass: weights of layers, attention and recurrence, and the head."""

    weights: int
    attention: int
    head: int


def _forward(
    shape: ModelShape,
    lengths: Iterable[int],
    head_tokens: int,
    head_size: int | None,
    prefixes: Iterable[int] | None,
    adapter_params: int,
) -> Flops:
    lengths = list(lengths)
    shared = [0] * len(lengths) if prefixes is None else list(prefixes)
    tokens = sum(lengths) - sum(shared)
    pairs = sum(attended_pairs(shape, length) for length in lengths)
    pairs -= sum(attended_pairs(shape, prefix) for prefix in shared)
    outputs = shape.vocab_size if head_size is None else head_size
    return Flops(
        2 * (matmul_params(shape) + adapter_params) * tokens,
        2 * shape.num_heads * (shape.head_dim + shape.value_dim) * pairs
        + recurrent_flops(shape) * tokens,
        2 * shape.hidden_size * outputs * head_tokens,
    )


def forward_flops(
    shape: ModelShape,
    lengths: Iterable[int],
    head_tokens: int,
    head_size: int | None = None,
    prefixes: Iterable[int] | None = None,
    adapter_params: int = 0,
) -> int:
    """Returns the FLOPs of one forward pass over sequences, summed over ranks.

    A token costs two FLOPs per weight. Attention consists of two matrix products, which cost 2
    FLOPs for each element of a key and of a value, per head and attended pair of positions.

    Args:
        lengths: Number of tokens in each sequence, prompt plus response.
        head_tokens: Number of positions at which the output head is computed; in training, those of
            response tokens.
        head_size: Number of outputs of the head, 1 for a value head. If None, the vocabulary size.
        prefixes: For each sequence, leading tokens that are computed in another sequence.
        adapter_params: LoRA parameters that each token is multiplied with.
    """
    return sum(_forward(shape, lengths, head_tokens, head_size, prefixes, adapter_params))


def train_flops(
    shape: ModelShape,
    lengths: Iterable[int],
    head_tokens: int,
    head_size: int | None = None,
    prefixes: Iterable[int] | None = None,
    backward: BackwardShares = ALL,
    adapter_params: int = 0,
) -> int:
    """Returns the FLOPs of a forward and `backward` pass over all ranks; see `forward_flops`."""
    lengths = list(lengths)
    found = _forward(shape, lengths, head_tokens, head_size, prefixes, adapter_params)
    of_mtp = _mtp_train_flops(shape, lengths, head_tokens) if shape.has_mtp else 0
    return of_mtp + round(
        found.weights * (1 + backward.flow + backward.weights)
        + found.attention * (1 + 2 * backward.attention)
        + found.head * (1 + backward.head_flow + backward.head_weights)
    )


def _mtp_train_flops(shape: ModelShape, lengths: Sequence[int], head_tokens: int) -> int:
    found = _forward(mtp_layer(shape), lengths, head_tokens, None, None, 0)
    joined = 2 * input_params(shape) * sum(lengths)
    return 3 * (joined + found.weights + found.attention) + 2 * found.head


GeneratedLengths = dict[int, tuple[int, list[tuple[int, int]]]]
"""By group: the number of prompt tokens and, for each sample, its total number of tokens and the
number of sampled tokens. Observations from environments are not sampled.
"""


def num_generated(generated: GeneratedLengths) -> int:
    """Returns the tokens in prompts, once per sample, responses and observations."""
    return sum(length for _, samples in generated.values() for length, _ in samples)


def generate_flops(shape: ModelShape, generated: GeneratedLengths) -> int:
    """Returns the FLOPs of generation, summed over ranks.

    Assumes that each prompt is computed once per group and each response token once, even over
    several turns. Logits are computed only for sampled tokens.
    """
    shared = [prompt for prompt, _ in generated.values()]
    prompts = [prompt for prompt, samples in generated.values() for _ in samples]
    lengths = [sample for _, samples in generated.values() for sample in samples]
    repeated = forward_flops(shape, prompts, 0) - forward_flops(shape, shared, 0)
    wholes, sampled = [whole for whole, _ in lengths], sum(num for _, num in lengths)
    return forward_flops(shape, wholes, sampled) - repeated


def peak_flops_per_s(device_name: str) -> float | None:
    """Returns the dense bf16 peak rate of a named GPU ('NVIDIA H100 80GB HBM3'), if known."""
    words = set(re.split(r"[\s-]+", device_name))
    found = (peak for name, peak in PEAK_FLOPS_PER_S.items() if words.issuperset(name.split()))
    return next(found, None)
