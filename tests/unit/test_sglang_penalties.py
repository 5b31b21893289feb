"""Least lengths and penalties of SGLang's requests on the device; without SGLang."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hybridrl.rollout.engine import Request, SamplingParams
from hybridrl.rollout.sglang.penalties import TokenTable

VOCAB = 19
KINDS = [
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(presence_penalty=-0.8, stop_token_ids=(2,)),
    SamplingParams(min_new_tokens=4, stop_token_ids=(1, 5)),
    SamplingParams(),
    SamplingParams(
        repetition_penalty=0.6, presence_penalty=1.1, min_new_tokens=7, stop_token_ids=(5,)
    ),
]


def by_definition(
    logits_V: Sequence[float], sampling: SamplingParams, prompt: Sequence[int], response: list[int]
) -> list[float]:
    """In float64, token by token."""
    found = []
    for token, given in enumerate(logits_V):
        logit = given
        if token in sampling.stop_token_ids and len(response) < sampling.min_new_tokens:
            logit = -math.inf
        if token in prompt or token in response:
            penalty = sampling.repetition_penalty
            logit = logit / penalty if logit > 0 else logit * penalty
        found.append(logit - sampling.presence_penalty * (token in response))
    return found


class Turns:
    """Random passes as SGLang makes them: prompts and decoding apart, in changing batches, with
    requests taken back and whole prompts in parts. The host gets tokens a pass late.
    """

    def __init__(self, table: TokenTable, seed: int) -> None:
        self.table, self.rng = table, np.random.default_rng(seed)
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.late: list[tuple[Any, int]] = []
        self.num_compared = self.num_taken_back = 0

    def add(self, number: int) -> None:
        """Has a third of requests begin with tokens that were drawn before."""
        rng, sampling = self.rng, KINDS[number % len(KINDS)]
        prompt = rng.integers(0, VOCAB, rng.integers(1, 6)).tolist()
        earlier = rng.integers(0, VOCAB, 3).tolist() if number % 3 == 0 else []
        name = f"r{number}"
        if sampling.needs_history:
            self.table.add(name, Request(number, tuple(prompt), 7, sampling))
        one = SimpleNamespace(rid=name, origin_input_ids=prompt + earlier, output_ids=[])
        one.sampling, one.prompt, one.response, one.length = sampling, prompt, earlier, 24
        self.waiting.append(one)

    def compute(self, requests: list[Any], has_prompts: bool, keeps: bool = True) -> None:
        """A pass, compared with the definition; its tokens are random."""
        rows = len(requests)
        logits_BV = torch.from_numpy(3 * self.rng.normal(size=(rows, VOCAB))).float()
        before = logits_BV.clone()
        position = [len(one.prompt) + len(one.response) - 1 for one in requests]
        self.table.prepare(requests, has_prompts)
        found_BV = self.table.penalized(logits_BV, torch.tensor(position))
        assert torch.equal(logits_BV, before)
        for one, given_V, found_V in zip(requests, logits_BV, found_BV, strict=True):
            wanted = by_definition(given_V.tolist(), one.sampling, one.prompt, one.response)
            # float32 rounds a product and a difference.
            exact_V = torch.tensor(wanted, dtype=torch.float64)
            torch.testing.assert_close(found_V.double(), exact_V, rtol=1e-5, atol=1e-5)
            assert one.sampling.needs_history or torch.equal(given_V, found_V)
            self.num_compared += 1
        token_B = torch.from_numpy(self.rng.integers(0, VOCAB, rows))
        self.table.note(token_B)
        for one, token in self.late:
            one.output_ids.append(token)
        self.late.clear()
        if keeps:
            for one, token in zip(requests, token_B.tolist(), strict=True):
                one.response = [*one.response, token]
                self.late.append((one, token))

    def take_back(self) -> None:
        """Takes a request back, and drops its token that is under way."""
        one = self.running.pop(self.rng.integers(len(self.running)))
        if (dropped := [late for late in self.late if late[0] is one]) != []:
            self.late.remove(dropped[0])
            one.response = one.response[:-1]
        self.waiting.append(one)
        self.num_taken_back += 1

    def turn(self) -> None:
        if self.waiting and self.rng.random() < 0.5:
            count = self.rng.integers(1, len(self.waiting) + 1)
            begun, self.waiting = self.waiting[:count], self.waiting[count:]
            if self.rng.random() < 0.3:  # what follows a part of a prompt is nobody's
                self.compute(begun, has_prompts=True, keeps=False)
            self.compute(begun, has_prompts=True)
            self.running += begun
        elif self.running:
            if self.rng.random() < 0.15:
                self.take_back()
            if self.running:
                self.compute(self.running, has_prompts=False)
        for one in [one for one in self.running if len(one.response) >= one.length]:
            self.running.remove(one)
            self.table.remove(one.rid)


def test_logits_are_those_of_the_definition_whatever_comes_and_goes() -> None:
    table = TokenTable()
    turns = Turns(table, 3)
    for number in range(40):
        turns.add(number)
        for _ in range(4):
            turns.turn()
    while turns.running or turns.waiting:
        turns.turn()
    assert turns.num_compared > 700 and turns.num_taken_back > 10
    assert table._table is None and not table._slots, "its memory is given back"


def test_without_such_requests_nothing_is_held_or_computed() -> None:
    table, logits_BV = TokenTable(), torch.randn(2, VOCAB)
    table.prepare([SimpleNamespace(rid="a"), SimpleNamespace(rid="b")], True)
    assert table.penalized(logits_BV, torch.tensor([3, 4])) is logits_BV
    table.note(torch.tensor([1, 2]))
    table.add("c", Request(1, (3,), 7, KINDS[0]))
    table.prepare([SimpleNamespace(rid="a"), SimpleNamespace(rid="b")], False)
    assert table.penalized(logits_BV, torch.tensor([3, 4])) is logits_BV
    assert table._table is None
