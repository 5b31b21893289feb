"""Sizes of recurrent modules that replace attention in some layers of a hybrid model.

A subclass of `MixerShape` describes one kind of module: where its Megatron class is, its sizes, and
what it costs. Layers, plans and metrics read only this description; the family's weight table
contains the module's weights. docs/guides/hybrid_layers.md contains a complete example. Pure data,
no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

from hybridrl.errors import UserError

FP32_BYTES = 4
DELTA_CHUNK = 64  # tokens that a gated delta net computes together


@dataclass(frozen=True)
class MixerShape:
    """Sizes and costs of one kind of recurrent module; base class.

    Args:
        layers: Global indices of the layers in which the module replaces attention.

    Attributes:
        module: Dotted path `package.module:CLASS` of the Megatron module. It is built with the
            keywords `config`, `sizes` (this object), `layer_number` and `pg_collection`, and is
            called like Megatron's self-attention.
        name: Name of the module for messages.
    """

    layers: tuple[int, ...]

    module: ClassVar[str]
    name: ClassVar[str]

    @property
    def divided(self) -> Mapping[str, int]:
        """Sizes that tensor parallelism divides, by the key of config.json that sets them."""
        raise NotImplementedError

    def state_bytes(self, tp: int, itemsize: int) -> int:
        """Returns the bytes that each of an engine's `tp` ranks holds per request and layer."""
        raise NotImplementedError

    def matmul_params(self, hidden_size: int) -> int:
        """Returns the number of weights that each token is multiplied with in one layer."""
        raise NotImplementedError

    @property
    def token_flops(self) -> int:
        """FLOPs per token and layer in addition to the products with weights."""
        raise NotImplementedError

    def stored_elements(self, hidden_size: int) -> int:
        """Returns how many elements one layer stores per token for the backward pass.

        The layer's input and the feed-forward layer's values are not included.
        """
        raise NotImplementedError

    @property
    def scratch_bytes(self) -> int:
        """Bytes per token that one layer needs while its backward pass runs."""
        return 0


@dataclass(frozen=True)
class DeltaShape(MixerShape):
    """Sizes of a gated delta net (Yang et al. 2024, "Gated Delta Networks").

    Args:
        value_heads: Number of value heads, a multiple of `key_heads`. Each has its own decay.
        key_dim: Size of one query or key head.
        value_dim: Size of one value head.
        kernel: Number of positions that the causal convolution reads, including the current one.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int

    module: ClassVar[str] = "hybridrl.models.megatron.delta_net:GatedDeltaNet"
    name: ClassVar[str] = "gated delta nets"

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def convolved(self) -> int:
        """Number of channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def divided(self) -> Mapping[str, int]:
        return {"linear_num_key_heads": self.key_heads, "linear_num_value_heads": self.value_heads}

    def state_bytes(self, tp: int, itemsize: int) -> int:
        state = self.values * self.key_dim * FP32_BYTES
        return (state + (self.kernel - 1) * self.convolved * itemsize) // tp

    def matmul_params(self, hidden_size: int) -> int:
        inputs = self.convolved + self.values + 2 * self.value_heads
        return hidden_size * (inputs + self.values)

    @property
    def token_flops(self) -> int:
        # Per value head: the state's product with the key, the update by an outer product, and the
        # product with the query. The convolution has one product per channel and position.
        return 6 * self.values * self.key_dim + 2 * self.kernel * self.convolved

    def stored_elements(self, hidden_size: int) -> int:
        # The normalized input; the channels as projected, copied with their history, in float32
        # before and after the convolution (two elements each), and convolved; the projected gates,
        # and in float32 the output, its norm and the gates, with their product.
        return hidden_size + 7 * self.convolved + 9 * self.values

    @property
    def scratch_bytes(self) -> int:
        # The backward pass recomputes the rule, in float32: a state per chunk, matrices of a
        # chunk's pairs of tokens, and queries, keys and values with their products.
        states = self.values * self.key_dim // DELTA_CHUNK
        pairs = 6 * self.value_heads * DELTA_CHUNK
        return FP32_BYTES * (states + pairs + 8 * self.values + 4 * self.value_heads * self.key_dim)


def mixer_rules(
    mixer: MixerShape | None, tp_sizes: Mapping[str, int], cp_sizes: Mapping[str, int]
) -> Iterator[UserError]:
    """Yields why parallel sizes, given by key, cannot divide a model's recurrent modules."""
    if mixer is None:
        return
    for key, cp in cp_sizes.items():
        if cp > 1:
            allowed = f"1 with {mixer.name}, which compute whole sequences"
            yield UserError(key, cp, allowed, f"Set {key}=1.")
    for key, parts in tp_sizes.items():
        for name, size in mixer.divided.items():
            if size % parts:
                allowed = f"a divisor of the model's {name} = {size}"
                yield UserError(key, parts, allowed, f"Change {key}.")
                break
