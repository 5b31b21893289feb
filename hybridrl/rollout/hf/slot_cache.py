"""The `hf` engine's cache: keys, values and recurrent states of the running rows, one slot each."""

from __future__ import annotations

from typing import Any

from torch import Tensor, arange
from torch.nn.functional import pad
from transformers.cache_utils import Cache

# transformers' name of layers with a recurrent module.
LINEAR = "linear_attention"
# Number of positions by which the cache grows.
CACHE_BLOCK = 64


class _States:
    """States of one recurrent layer. The attributes have the next forward's slots under key 0."""

    record_past = False

    def __init__(self) -> None:
        self.conv_states: dict[int, Tensor] = {}
        self.recurrent_states: dict[int, Tensor] = {}
        self._held: dict[str, Tensor] = {}

    def store(self, kind: str, states: Tensor, slots: slice) -> None:
        """Stores states in their slots; adds slots if necessary."""
        held = self._held.get(kind)
        if held is None or len(held) < slots.stop:
            grown = states.new_zeros(slots.stop, *states.shape[1:])
            if held is not None:
                grown[: len(held)] = held
            self._held[kind] = held = grown
        held[slots] = states

    def select(self, slots: slice) -> None:
        """Sets the attributes to views of these slots."""
        self.conv_states = {0: self._held["conv_states"][slots]}
        self.recurrent_states = {0: self._held["recurrent_states"][slots]}

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copies slots; no slot is both source and target."""
        for held in self._held.values():
            held[targets] = held[sources]

    def free(self) -> None:
        self._held.clear()
        self.conv_states, self.recurrent_states = {}, {}


class SlotCache(Cache):  # type: ignore[misc, unused-ignore]
    """Preallocated keys and values, and recurrent states, with one slot per running row.

    `start_prefill` or `start_decode` sets the slots and positions that the next forward writes. The
    model's attention then calls `update` once in each layer; a recurrent layer reads and updates
    its states.
    """

    def __init__(self, config: Any) -> None:
        num_layers = config.num_hidden_layers
        kinds = getattr(config, "layer_types", None) or [None] * num_layers
        super().__init__(layers=[])
        # transformers' recurrent layers find their states here, by layer.
        self.layers: list[Any] = [_States() if kind == LINEAR else None for kind in kinds]
        self._states: list[_States] = [layer for layer in self.layers if layer is not None]
        # Index of each attention layer in the storages of keys and values.
        attention = [layer for layer, kind in enumerate(kinds) if kind != LINEAR]
        self._place = {layer: index for index, layer in enumerate(attention)}
        # Keys and values: layer, slot, KV head, position, head size. Models with latent attention
        # cache latents and rotary keys, whose sizes differ. Allocated at the first use.
        self._kv: tuple[Tensor, Tensor] | None = None
        self._slots = slice(0, 0)
        self._source_B: Tensor | None = None
        self._position_B: Tensor | None = None
        self._num_keys = 0

    def start_prefill(self, start: int, source_B: Tensor, num_keys: int) -> None:
        """Prepares a pass whose row source_B[i] fills slot `start` + i."""
        self._slots = slice(start, start + len(source_B))
        self._source_B, self._position_B, self._num_keys = source_B, None, num_keys

    def start_decode(self, position_B: Tensor, num_keys: int) -> None:
        """Prepares a pass that writes each slot at position_B and reads `num_keys` keys."""
        self._slots = slice(0, len(position_B))
        self._source_B, self._position_B, self._num_keys = None, position_B, num_keys
        for states in self._states:
            states.select(self._slots)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores new keys and values (B, N, L, H); returns the keys and values to attend to."""
        place, held = self._place[layer_idx], self._reserved(key_states, value_states)
        keys, values = (cached[place, self._slots] for cached in held)
        if self._source_B is not None:
            keys[:, :, : self._num_keys] = key_states[self._source_B]
            values[:, :, : self._num_keys] = value_states[self._source_B]
            return key_states, value_states
        if self._position_B is None:
            raise RuntimeError("a forward began without start_prefill or start_decode")
        row_B1 = arange(keys.shape[0], device=keys.device)[:, None]
        head_N = arange(keys.shape[1], device=keys.device)
        index = (row_B1, head_N, self._position_B[:, None])
        keys[index] = key_states[:, :, 0]
        values[index] = value_states[:, :, 0]
        return keys[:, :, : self._num_keys], values[:, :, : self._num_keys]

    def move(self, sources: list[int], targets: list[int]) -> None:
        """Copies slots; no slot is both source and target."""
        if self._kv is not None:
            for cached in self._kv:
                cached[:, targets] = cached[:, sources]
        for states in self._states:
            states.move(sources, targets)

    def free(self) -> None:
        self._kv = None
        for states in self._states:
            states.free()

    @property
    def has_states(self) -> bool:
        return bool(self._states)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int = 0) -> bool:
        """Whether the next forward continues states, rather than starting them."""
        return self._source_B is None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the last inputs of a convolution, (B, C, L), updated in place; None in a prefill.
        transformers 5.19 and earlier read the layer's attribute instead.
        """
        return None if self._source_B is not None else self.layers[layer_idx].conv_states[0]

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Returns the states before a decoding step, (B, ...); None in a prefill. transformers 5.19
        and earlier read the layer's attribute instead.
        """
        return None if self._source_B is not None else self.layers[layer_idx].recurrent_states[0]

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """Stores the last inputs of a convolution, (B, C, L), in a prefill; returns the inputs."""
        assert self._source_B is not None  # a decoding step updates the inputs in place
        missing = max(kwargs["conv_kernel_size"] - conv_states.shape[-1], 0)
        last = pad(conv_states, (missing, 0))[..., -kwargs["conv_kernel_size"] :]
        self.layers[layer_idx].store("conv_states", last[self._source_B], self._slots)
        return conv_states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> Tensor:
        source_B, new = self._source_B, recurrent_states
        new = new if source_B is None else new[source_B]
        self.layers[layer_idx].store("recurrent_states", new, self._slots)
        return recurrent_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns 0, because the engine passes positions and masks to the model explicitly."""
        return 0

    def _reserved(self, *like: Tensor) -> tuple[Tensor, Tensor]:
        num_slots, length = 0, 0
        if self._kv is not None:
            num_slots, length = self._kv[0].shape[1], self._kv[0].shape[3]
            if num_slots >= self._slots.stop and length >= self._num_keys:
                return self._kv
        num_slots_needed = max(num_slots, self._slots.stop)
        length_needed = max(length, -(-self._num_keys // CACHE_BLOCK) * CACHE_BLOCK)
        # Filled with zeros: attention multiplies masked positions by 0, and 0 times a stale NaN
        # would be NaN.
        keys, values = (
            one.new_zeros(
                len(self._place), num_slots_needed, one.shape[1], length_needed, one.shape[3]
            )
            for one in like
        )
        if self._kv is not None:
            for grown, cached in zip((keys, values), self._kv, strict=True):
                grown[:, :num_slots, :, :length] = cached
        self._kv = keys, values
        return self._kv
