"""Which queued requests wait until another one has computed the prompt that they have in common.

SGLang finds keys and values by prefix once a pass is over: samples of a prompt that come in one
pass compute it each. So the first of them goes alone, one more pass of few tokens. First samples
are no more than AHEAD_TOKENS ahead of the others: a cache that is full of prompts has no room for
their samples. Pure, no torch, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridrl.rollout.engine import Request

# Tokens of prompts that need not be computed, from which one more pass is worth its time. A GPU
# computes a few hundred tokens while it reads the weights once, and of a small model as many more
# while the host prepares the pass.
WORTH_TOKENS = 1024
# Two passes: one is computed while the host looks at what came of the one before.
AHEAD_TOKENS = 16384


class SharedPrompts:
    """Decides which queued requests an engine begins now; the same on all ranks of a replica.
    Requests wait if at least `worth_tokens` are saved; at most `ahead_tokens` of prompts are
    computed and waited for at a time.
    """

    def __init__(self, worth_tokens: int = WORTH_TOKENS, ahead_tokens: int = AHEAD_TOKENS) -> None:
        self._worth_tokens, self._ahead_tokens = worth_tokens, ahead_tokens
        # While requests wait: a number for each prompt, and for each request that of its prompt,
        # since to look a long prompt up takes time; and which request computes a prompt.
        self._numbers: dict[tuple[int, ...], int] = {}
        self._prompt_of: dict[int, int] = {}
        self._first: dict[int, Request] = {}

    def due(self, queued: Sequence[Request], is_computing: Callable[[int], bool]) -> list[Request]:
        """Returns the queued requests that are to begin, in order. `is_computing` says whether the
        prompt of a request that began is still to be computed.
        """
        waits = {prompt for prompt, one in self._first.items() if is_computing(one.request_id)}
        tokens = sum(len(self._first[prompt].prompt) for prompt in waits)
        begins: set[int] = set()
        for prompt, same in self._undecided(queued).items():
            if tokens < self._ahead_tokens:
                self._first[prompt] = same[0]
                begins.add(same[0].request_id)
                tokens += len(same[0].prompt)
            waits.add(prompt)
        prompt_of = self._prompt_of
        due = [
            one
            for one in queued
            if one.request_id in begins or prompt_of[one.request_id] not in waits
        ]
        if len(due) == len(queued):
            self.forget()
        for one in due:  # its number may come again, with another prompt
            prompt_of.pop(one.request_id, None)
        return due

    def _undecided(self, queued: Sequence[Request]) -> dict[int, list[Request]]:
        """Returns the requests to each prompt that several have and none computes, by its number;
        none where little would be saved.
        """
        numbers, prompt_of = self._numbers, self._prompt_of
        found: dict[int, list[Request]] = {}
        for one in queued:
            if (prompt := prompt_of.get(one.request_id)) is None:
                prompt = numbers.setdefault(one.prompt, len(numbers))
                prompt_of[one.request_id] = prompt
            if prompt not in self._first:
                found.setdefault(prompt, []).append(one)
        shared = {prompt: same for prompt, same in found.items() if len(same) > 1}
        saved = sum((len(same) - 1) * (len(same[0].prompt) - 1) for same in shared.values())
        # Where others wait, one pass more is taken anyway.
        return shared if self._first or saved >= self._worth_tokens else {}

    def forget(self) -> None:
        """Forgets who waits: what was begun is dropped, or nobody waits."""
        for known in (self._numbers, self._prompt_of, self._first):
            known.clear()
