"""The gated delta rule in chunks, against the rule token by token, and its order of sequences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from hybridrl import ops
from hybridrl.errors import UserError
from hybridrl.models.megatron import delta_kernels
from hybridrl.models.megatron.attention import PackedSequences, SharedPrompts
from hybridrl.models.megatron.delta_kernels import choose_rule, gradient_fault
from hybridrl.models.megatron.delta_net import Recurrence
from hybridrl.models.megatron.delta_rule import (
    LENGTH_EPS,
    DeltaInputs,
    Sequences,
    causal_convolution,
    delta_rule,
)
from hybridrl.models.mixers import DeltaShape
from hybridrl.platform import Platform

KEYS, VALUES, KEY_DIM, VALUE_DIM = 2, 4, 8, 6
# One token, less than a chunk, exactly one, one more, and several.
LENGTHS = (1, 30, 64, 65, 150, 3)
CPU = torch.device("cpu")
# fp32 against fp64; the largest gradient is about 3.
TOLERANCE = 2e-5
SIZES = DeltaShape((0,), KEYS, VALUES, KEY_DIM, VALUE_DIM, 4)


def drawn(lengths: tuple[int, ...], seed: int = 0) -> tuple[DeltaInputs, torch.Tensor]:
    """Returns random inputs that remember about 20 tokens, and states."""
    generator = torch.Generator().manual_seed(seed)
    tokens = sum(lengths)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    inputs = DeltaInputs(
        noise(tokens, KEYS, KEY_DIM),
        noise(tokens, KEYS, KEY_DIM),
        noise(tokens, VALUES, VALUE_DIM),
        -0.05 * noise(tokens, VALUES).abs(),
        noise(tokens, VALUES).sigmoid(),
    )
    return inputs, noise(len(lengths), VALUES, KEY_DIM, VALUE_DIM)


def token_by_token(
    inputs: DeltaInputs, lengths: tuple[int, ...], states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The rule as the paper writes it."""
    query, key = (
        one / (one.square().sum(-1, keepdim=True) + LENGTH_EPS).sqrt() for one in inputs[:2]
    )
    query, key = (one.repeat_interleave(VALUES // KEYS, 1) for one in (query, key))
    outputs, finals, at = [], [], 0
    for length, first in zip(lengths, states, strict=True):
        state = first
        for t in range(at, at + length):
            state = state * inputs.decay_TG[t].exp()[:, None, None]
            known = torch.einsum("gkv,gk->gv", state, key[t])
            change = inputs.beta_TG[t][:, None] * (inputs.value_TGV[t] - known)
            state = state + torch.einsum("gk,gv->gkv", key[t], change)
            outputs.append(torch.einsum("gkv,gk->gv", state, query[t]) / KEY_DIM**0.5)
        finals.append(state)
        at += length
    return torch.stack(outputs), torch.stack(finals)


def loss(output: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Weighs every element of outputs and final states differently."""
    weight = torch.arange(output.numel(), dtype=output.dtype).view_as(output).sin()
    of_states = torch.arange(states.numel(), dtype=states.dtype).view_as(states).cos()
    return (weight * output).sum() + (of_states * states).sum()


@pytest.mark.parametrize("has_states", [True, False])
def test_chunks_give_the_outputs_and_gradients_of_single_tokens(has_states: bool) -> None:
    inputs, states = drawn(LENGTHS)
    states = states * has_states
    found, expected = (
        DeltaInputs(*(one.clone().to(dtype).requires_grad_() for one in inputs))
        for dtype in (torch.float32, torch.float64)
    )
    own, exact = states.clone().requires_grad_(), states.double().requires_grad_()
    output, final = delta_rule(
        found, Sequences(LENGTHS, CPU), own if has_states else None, wants_states=True
    )
    exact_output, exact_final = token_by_token(expected, LENGTHS, exact)
    assert final is not None
    assert torch.allclose(output.double(), exact_output, atol=TOLERANCE)
    assert torch.allclose(final.double(), exact_final, atol=TOLERANCE)
    loss(output, final).backward()
    loss(exact_output, exact_final).backward()
    for name, one, other in zip(DeltaInputs._fields, found, expected, strict=True):
        assert one.grad is not None and other.grad is not None
        assert torch.allclose(one.grad.double(), other.grad, atol=10 * TOLERANCE), name
    if has_states:
        assert own.grad is not None and exact.grad is not None
        assert torch.allclose(own.grad.double(), exact.grad, atol=10 * TOLERANCE)


def test_a_sequence_does_not_depend_on_its_neighbours() -> None:
    inputs, _ = drawn(LENGTHS)
    whole, _ = delta_rule(inputs, Sequences(LENGTHS, CPU))
    at = 0
    for length in LENGTHS:
        part = DeltaInputs(*(one[at : at + length] for one in inputs))
        alone, _ = delta_rule(part, Sequences((length,), CPU))
        assert torch.allclose(alone, whole[at : at + length], atol=1e-6)
        at += length


def convolved(order: Recurrence, channels: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    history = order.history
    rows = torch.cat((channels, channels.new_zeros(1, channels.size(1))))[history.index_E]
    return causal_convolution(rows, weight)[history.row_T]


def test_samples_continue_the_convolution_of_their_prompt() -> None:
    """Prompts of 2 and 5 tokens, shorter and longer than the kernel, and a sample without one."""
    kernel, channels = 4, 3
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randn(size, channels, generator=generator) for size in (2, 5)]
    samples = [torch.randn(size, channels, generator=generator) for size in (1, 4, 6, 3)]
    weight = torch.randn(channels, kernel, generator=generator)
    packed = [prompts[0], samples[0], samples[1], prompts[1], samples[2], samples[3]]
    prefixes = (-1, 0, 0, -1, 3, -1)
    lengths = [len(one) for one in packed]
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    before_each = tuple(0 if prefix < 0 else len(packed[prefix]) for prefix in prefixes)
    positions = torch.zeros(sum(lengths))
    shared = SharedPrompts(tuple(bounds.tolist()), prefixes, before_each, positions)
    order = Recurrence(PackedSequences.of(bounds, 9, shared), kernel, CPU)
    found = convolved(order, torch.cat(packed), weight).split(lengths)
    for number, (own, prefix) in enumerate(zip(packed, prefixes, strict=True)):
        before = own[:0] if prefix < 0 else packed[prefix]
        padded = torch.cat((own.new_zeros(kernel - 1, channels), before, own))
        expected = torch.nn.functional.silu(
            torch.stack(
                [(padded[t : t + kernel].T * weight).sum(1) for t in range(len(padded) - 3)]
            )
        )
        assert torch.allclose(found[number], expected[len(before) :], atol=1e-6), number
    assert order.second is not None
    assert order.second.sequences.lengths == (1, 4, 6)
    assert order.prompts_N.tolist() == [0, 0, 1]
    tokens = torch.cat((order.first.index_T, order.second.index_T))
    assert tokens[order.place_T].tolist() == list(range(sum(lengths)))


class _WrongDecay(torch.autograd.Function):
    """Returns decays, with gradients as of a miscompiled kernel: some signs are wrong."""

    @staticmethod
    def forward(ctx: Any, decay_TG: torch.Tensor) -> torch.Tensor:
        return decay_TG.clone()

    @staticmethod
    def backward(ctx: Any, grad_TG: torch.Tensor) -> torch.Tensor:
        wrong = grad_TG.clone()
        wrong[::7] *= -1
        return wrong


def with_wrong_gradient(
    inputs: DeltaInputs,
    sequences: Sequences,
    state: torch.Tensor | None = None,
    wants_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    wrong = inputs._replace(decay_TG=_WrongDecay.apply(inputs.decay_TG))
    return delta_rule(wrong, sequences, state, wants_states)


def without_history(
    inputs: DeltaInputs,
    sequences: Sequences,
    state: torch.Tensor | None = None,
    wants_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gives the initial state no gradient, as shared prompts need."""
    return delta_rule(inputs, sequences, None if state is None else state.detach(), wants_states)


def in_bf16(
    inputs: DeltaInputs,
    sequences: Sequences,
    state: torch.Tensor | None = None,
    wants_states: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rounds as a kernel does."""
    rounded = DeltaInputs(*(one.bfloat16() for one in inputs[:3]), *inputs[3:])
    output, final = delta_rule(rounded, sequences, state, wants_states)
    return output.bfloat16().float(), final


def convolved_alone(
    channels: torch.Tensor,
    weight: torch.Tensor,
    places: tuple[torch.Tensor, ...],
    before: torch.Tensor | None,
) -> torch.Tensor:
    """The convolution as its kernels have it, token by token."""
    outputs = []
    for t, (number, since) in enumerate(zip(*(one.tolist() for one in places[:2]), strict=True)):
        own = channels[t - since : t + 1]
        if before is None:
            own = torch.nn.functional.pad(own, (0, 0, weight.size(1) - 1, 0))
        else:
            own = torch.cat((before[number], own))
        outputs.append((own[-weight.size(1) :].float() * weight.T.float()).sum(0))
    return torch.nn.functional.silu(torch.stack(outputs)).to(channels.dtype)


def test_the_check_at_the_start_finds_a_wrong_gradient() -> None:
    """The forward pass of the planted fault is right, as on Hopper with Triton 3.6."""
    checked = (SIZES, 1, torch.float32, CPU)
    assert gradient_fault(delta_rule, *checked) is None
    assert gradient_fault(in_bf16, *checked) is None
    fault = gradient_fault(with_wrong_gradient, *checked)
    assert fault is not None and fault.startswith("the gradient of the decay differs"), fault
    with pytest.raises(RuntimeError, match="not have been used"):
        gradient_fault(without_history, *checked)


def test_kernels_are_refused_if_their_gradient_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = DeltaShape((0,), KEYS, VALUES, 128, 64, 4)
    on_gpu = cast(Platform, SimpleNamespace(is_cpu=False, device=CPU))
    asked = (sizes, 1, torch.bfloat16, on_gpu)
    monkeypatch.setattr(ops, "find_spec", lambda name: None)
    delta_kernels._kernel_fault.cache_clear()
    found = choose_rule("auto", *asked)
    assert found.rule is delta_rule and "triton is not installed" in found.said
    monkeypatch.setattr(ops, "find_spec", lambda name: name)
    monkeypatch.setattr(ops, "causal_convolution", convolved_alone)
    for rule, reason in (
        (with_wrong_gradient, "the gradient of the decay differs"),
        (without_history, "the kernels failed"),
    ):
        delta_kernels._kernel_fault.cache_clear()
        monkeypatch.setattr(delta_kernels, "kernel_rule", rule)
        found = choose_rule("auto", *asked)
        assert found.rule is delta_rule and reason in found.said
        with pytest.raises(UserError, match=reason) as caught:
            choose_rule("triton", *asked)
        assert caught.value.name == "train.delta_rule"
    delta_kernels._kernel_fault.cache_clear()
    monkeypatch.setattr(delta_kernels, "kernel_rule", in_bf16)
    assert choose_rule("triton", *asked).rule is in_bf16
    # A convolution that begins without the tokens of a prompt.
    monkeypatch.setattr(ops, "causal_convolution", lambda *given: convolved_alone(*given[:3], None))
    delta_kernels._kernel_fault.cache_clear()
    assert "the kernels failed" in choose_rule("auto", *asked).said
    monkeypatch.setattr(
        ops, "causal_convolution", lambda *given: convolved_alone(*given[:3], -given[3])
    )
    delta_kernels._kernel_fault.cache_clear()
    assert "the convolution's output differs" in choose_rule("auto", *asked).said
    assert choose_rule("torch", *asked).rule is delta_rule
    delta_kernels._kernel_fault.cache_clear()
