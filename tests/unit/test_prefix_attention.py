"""Attention to shared prompts in two calls, against one product of all positions."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch_kernel import TorchKernel

from hybridrl.models.family import ModelShape
from hybridrl.models.megatron import te_attention
from hybridrl.models.megatron.attention import PackedAttention, PackedSequences, SharedPrompts
from hybridrl.models.megatron.prefix_attention import (
    CHECKED_LENGTHS,
    CHECKED_PROMPTS,
    Call,
    Kernel,
    PrefixAttention,
    TwoCalls,
    gradient_fault,
    plain_attention,
)

CPU = torch.device("cpu")
HEADS, KV_HEADS, WIDTH = 6, 2, 8
BOUNDS = (0, *accumulate(CHECKED_LENGTHS))
CONTINUED = tuple(0 if p < 0 else CHECKED_LENGTHS[p] for p in CHECKED_PROMPTS)
SCALE = WIDTH**-0.5


def drawn() -> list[torch.Tensor]:
    """Queries, keys, values and the output's gradient."""
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randn(BOUNDS[-1], heads, WIDTH, generator=generator, dtype=torch.double)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    ]


def calls_of() -> TwoCalls:
    calls = TwoCalls.of(BOUNDS, CHECKED_PROMPTS, CONTINUED, CPU, least_shared=0)
    assert calls is not None
    return calls


def test_two_calls_give_the_output_and_gradients_of_one() -> None:
    *inputs, grad = drawn()
    found, expected = [], []
    for results, attend in (
        (found, lambda *qkv: PrefixAttention.apply(*qkv, calls_of(), TorchKernel(SCALE))),
        (expected, lambda *qkv: plain_attention(*qkv, BOUNDS, CHECKED_PROMPTS)),
    ):
        leaves = [one.clone().requires_grad_() for one in inputs]
        output = attend(*leaves)
        results += [output.detach(), *torch.autograd.grad(output, leaves, grad)]
    for one, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(one, reference, rtol=1e-12, atol=1e-12)


def test_plain_attention_is_that_of_torch_layers() -> None:
    """The reference of the check at the start, against the attention that CPUs train with."""
    query, key, value, _ = drawn()
    shared = SharedPrompts(BOUNDS, CHECKED_PROMPTS, CONTINUED, torch.zeros(BOUNDS[-1]))
    packed = PackedSequences.of(torch.tensor(BOUNDS, dtype=torch.int32), 400, shared)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * WIDTH,
        num_attention_heads=HEADS,
        num_query_groups=KV_HEADS,
        attention_dropout=0.0,
    )
    attention = PackedAttention(config, 1, AttnMaskType.causal, "self")
    found = attention(query, key, value, None, packed_seq_params=packed)
    expected = plain_attention(query, key, value, BOUNDS, CHECKED_PROMPTS).flatten(1)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("lengths", "prompts", "continued", "has_two"),
    [
        ((5000, 3, 4), (-1, 0, 0), (0, 5000, 5000), True),
        ((5000, 3, 4000, 6), (-1, 0, -1, 2), (0, 5000, 0, 4000), True),
        ((5000, 3, 3000, 6), (-1, 0, -1, 2), (0, 5000, 0, 3000), False),  # short on average
        # All tokens of a prompt but the last are shared: prompts of 4,096 and 4,095 tokens.
        ((4095, 3, 4), (-1, 0, 0), (0, 4095, 4095), True),
        ((4094, 3, 4), (-1, 0, 0), (0, 4094, 4094), False),
        ((5000, 3, 4), (-1, 0, 0), (0, 5000, 4999), False),  # a part of the prompt
        ((5000, 3, 4), (-1, 0, 1), (0, 5000, 5003), False),  # a tree
        ((5000, 3, 4), (-1, -1, -1), (0, 0, 0), False),  # nothing is shared
        ((5000, 3, 9, 4), (-1, 0, -1, 0), (0, 5000, 0, 5000), False),  # packed elsewhere
    ],
)
def test_only_whole_long_prompts_are_read_in_place(
    lengths: tuple[int, ...], prompts: tuple[int, ...], continued: tuple[int, ...], has_two: bool
) -> None:
    positions = torch.zeros(sum(lengths))
    shared = SharedPrompts((0, *accumulate(lengths)), prompts, continued, positions)
    assert (shared.two_calls is not None) == has_two
    assert replace(shared, cp_size=2).two_calls is None


def test_calls_cover_each_sequence_and_each_prompt_once() -> None:
    calls = calls_of()
    own = [(start, end - start) for start, end in pairwise(BOUNDS)]
    starts, lengths = (tuple(column) for column in zip(*own, strict=True))
    assert calls.own == Call(starts, lengths, starts, lengths, True, CPU)
    # The samples of a prompt are one sequence of queries.
    assert calls.prompts == Call((70, 506), (196, 93), (0, 306), (70, 200), False, CPU)
    bounds = calls.prompts.boundaries
    assert bounds.queries.tolist() == [0, 196, 289] and bounds.keys.tolist() == [0, 70, 270]
    assert bounds.query_offsets.tolist() == [70, 506, 599]
    assert bounds.key_offsets.tolist() == [0, 306, 506]
    assert (bounds.max_queries, bounds.max_keys) == (196, 200)


class _OwnLogSumExp(TorchKernel):
    """Divides gradients by the log-sum-exp of one call, as a kernel does that ignores its own."""

    def backward(self, grad_TNH, query_TNH, key_TGH, value_TGH, output_TNH, lse_TN, call):  # type: ignore[no-untyped-def]
        own_TNH, own_TN = self.forward(query_TNH, key_TGH, value_TGH, call)
        return super().backward(grad_TNH, query_TNH, key_TGH, value_TGH, own_TNH, own_TN, call)


class _LastKeysMissing(TorchKernel):
    """Leaves out the last 5 keys of each prompt in the forward pass."""

    def forward(self, query_TNH, key_TGH, value_TGH, call):  # type: ignore[no-untyped-def]
        if not call.is_causal:
            call = replace(call, key_lengths=tuple(n - 5 for n in call.key_lengths))
        return super().forward(query_TNH, key_TGH, value_TGH, call)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (TorchKernel(16**-0.5), None),
        (TorchKernel(0.2), "the output differs"),
        (_OwnLogSumExp(16**-0.5), "the gradient of queries differs"),
        (_LastKeysMissing(16**-0.5), "the output differs"),
    ],
)
def test_the_check_at_the_start_finds_wrong_kernels(kernel: Kernel, fault: str | None) -> None:
    found = gradient_fault(kernel, 4, 2, 16, CPU)
    assert found is None if fault is None else fault in str(found)


class _Refusing(TorchKernel):
    """Supports nothing."""

    def forward(self, *_: object) -> Any:
        raise RuntimeError("no valid execution plans\nand much more")


QWEN = ModelShape(
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    ffn_size=64,
    vocab_size=100,
)


@pytest.mark.parametrize(
    ("kernel", "shape", "cp", "said"),
    [
        (TorchKernel, QWEN, 1, None),
        (_LastKeysMissing, QWEN, 1, "keys are copied for each sample, since the output differs by"),
        (_Refusing, QWEN, 1, "cuDNN failed: no valid execution plans"),
        (TorchKernel, QWEN, 2, ""),
        (TorchKernel, replace(QWEN, window=4), 1, ""),
        (TorchKernel, replace(QWEN, attention_sinks=True), 1, ""),
    ],
)
def test_keys_are_copied_where_two_calls_are_wrong_or_impossible(
    kernel: type[TorchKernel],
    shape: ModelShape,
    cp: int,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(te_attention, "CudnnKernel", kernel)
    te_attention._cudnn_fault.cache_clear()
    chosen = te_attention.choose_calls(shape, 2, cp, CPU)
    assert chosen.uses_two == (said is None)
    assert (said or "") in chosen.said and bool(chosen.said) == bool(said)
    assert not chosen.said or chosen.said.endswith("training needs more memory than planned.")
    te_attention._cudnn_fault.cache_clear()
