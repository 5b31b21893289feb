"""Delays queued requests until another request has computed their common prompt.

SGLang can reuse cached keys and values of a prefix only after the pass that computes them. If
several samples of one prompt are in the same pass, each computes the prompt. Therefore the first
sample starts alone, at the cost of one additional pass with few tokens. At most AHEAD_TOKENS prompt
tokens are computed ahead of the other samples, because a cache full of prompts would have no room
for samples. No torch, no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hybridrl.rollout.engine import Request

# Minimum number of prompt tokens that an additional pass must save. A GPU can compute a few hundred
# tokens in the time in which it reads the weights, and for a small model a few hundred more while
# the host prepares the pass.
WORTH_TOKENS = 1024
# Enough for two passes: the GPU computes one while the host processes the previous one.
AHEAD_TOKENS = 16384


class SharedPrompts:
    """Chooses which queued requests an engine starts, the same on all ranks of a replica.

    Args:
        worth_tokens: Minimum number of saved tokens for which requests wait.
        ahead_tokens: Maximum number of prompt tokens that are computed while others wait.
    """

    def __init__(self, worth_tokens: int = WORTH_TOKENS, ahead_tokens: int = AHEAD_TOKENS) -> None:
        self._worth_tokens, self._ahead_tokens = worth_tokens, ahead_tokens
        # State while requests wait: the number of each prompt, the prompt number of each request
        # (because hashing a long prompt is slow), and the request that computes each prompt.
        self._numbers: dict[tuple[str | None, tuple[int, ...], tuple[str, ...]], int] = {}
        self._prompt_of: dict[int, int] = {}
        self._first: dict[int, Request] = {}

    def due(self, queued: Sequence[Request], is_computing: Callable[[int], bool]) -> list[Request]:
        """Returns the requests to start now, given which started ones still compute prompts."""
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
            request
            for request in queued
            if request.request_id in begins or prompt_of[request.request_id] not in waits
        ]
        if len(due) == len(queued):
            self.forget()
        for request in due:  # a later request with another prompt may reuse the id
            prompt_of.pop(request.request_id, None)
        return due

    def _undecided(self, queued: Sequence[Request]) -> dict[int, list[Request]]:
        """Returns the requests of each prompt that several requests share and no request computes
        yet, by the prompt's number; empty if waiting would save little.
        """
        numbers, prompt_of = self._numbers, self._prompt_of
        found: dict[int, list[Request]] = {}
        for request in queued:
            if (prompt := prompt_of.get(request.request_id)) is None:
                images = tuple(content.key for content in request.contents)
                # Keys and values depend on the adapter.
                key = request.adapter, request.prompt, images
                prompt = numbers.setdefault(key, len(numbers))
                prompt_of[request.request_id] = prompt
            if prompt not in self._first:
                found.setdefault(prompt, []).append(request)
        shared = {prompt: same for prompt, same in found.items() if len(same) > 1}
        saved = sum((len(same) - 1) * (len(same[0].prompt) - 1) for same in shared.values())
        # If other requests already wait, the additional pass takes place anyway.
        return shared if self._first or saved >= self._worth_tokens else {}

    def forget(self) -> None:
        for known in (self._numbers, self._prompt_of, self._first):
            known.clear()
