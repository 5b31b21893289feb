"""The arguments with which a kernel for packed sequences attends to shared prompts."""

from __future__ import annotations

import pytest
import torch

from hybridrl.models.megatron.attention import SharedPrompts
from hybridrl.models.megatron.context_parallel import context_positions

# Sequences of 16, 8, 24, 8 and 16 positions: a prompt of 13 tokens and its padding, two samples
# that continue it, a sample of its own, and padding.
STARTS = (0, 16, 24, 48, 56, 72)
PREFIX_SEQUENCES = (-1, 0, 0, -1, -1)
PREFIX_LENGTHS = (0, 13, 13, 0, 0)
WIDTH = 6


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention whose last query attends to the last key."""
    offset = len(key) - len(query)
    mask = torch.arange(len(key)) <= torch.arange(len(query))[:, None] + offset
    weights = (query @ key.T).masked_fill(~mask, float("-inf")).softmax(-1)
    return weights @ value


def test_recurrent_layers_continue_only_whole_sequences() -> None:
    def shared(prefix_sequences: tuple[int, ...], lengths: tuple[int, ...], cp: int = 1) -> list:
        positions_S = torch.zeros(1, dtype=torch.int64)
        return SharedPrompts((0, 8, 12, 20), prefix_sequences, lengths, positions_S, cp).sequences

    assert shared((-1, 0, 0), (0, 8, 8))[2] == (0, 8, 12, 8)
    assert shared((-1, 0, 0), (0, 7, 5), cp=2)[1] == (0, 7, 8, 4)  # with padding
    for prefix_sequences, lengths in (((-1, 0, -1), (0, 7, 0)), ((-1, 0, 1), (0, 8, 12))):
        with pytest.raises(RuntimeError, match="recurrent layers cannot continue"):
            shared(prefix_sequences, lengths)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_keys_of_each_chunk_are_the_prompt_and_the_sequence_up_to_its_end(cp: int) -> None:
    generator = torch.Generator().manual_seed(3)
    query, key, value = torch.randn(3, STARTS[-1], WIDTH, generator=generator, dtype=torch.double)
    wanted = torch.empty_like(query)
    for number, (start, end) in enumerate(zip(STARTS, STARTS[1:], strict=False)):
        prompt = range(PREFIX_LENGTHS[number]) if PREFIX_SEQUENCES[number] == 0 else ()
        rows = torch.tensor([*prompt, *range(start, end)])
        wanted[start:end] = attend(query[start:end], key[rows], value[rows])
    held = [context_positions(STARTS, cp, rank) for rank in range(cp)]
    gathered_key, gathered_value = (torch.cat([x[h] for h in held]) for x in (key, value))
    for rank in range(cp):
        shared = SharedPrompts(
            STARTS, PREFIX_SEQUENCES, PREFIX_LENGTHS, torch.zeros(1, dtype=torch.int64), cp, rank
        )
        keys = shared.keys
        queries, counts = keys.cu_seqlens_q.tolist(), keys.cu_seqlens_k.tolist()
        assert queries[-1] == STARTS[-1] // cp and counts[-1] == len(keys.index_K)
        local = query[held[rank]]
        found = [
            attend(
                local[queries[i] : queries[i + 1]],
                gathered_key[keys.index_K[counts[i] : counts[i + 1]]],
                gathered_value[keys.index_K[counts[i] : counts[i + 1]]],
            )
            for i in range(len(queries) - 1)
        ]
        assert torch.allclose(torch.cat(found), wanted[held[rank]])
        assert keys.max_seqlen_q == max(b - a for a, b in zip(queries, queries[1:], strict=False))
        assert keys.max_seqlen_k == max(b - a for a, b in zip(counts, counts[1:], strict=False))
