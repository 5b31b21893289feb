"""vLLM's token form, for clients that render conversations themselves. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hybridrl.agents.asked import (
    LENGTH,
    STOP,
    Answer,
    Asked,
    check_sampling,
    event,
    list_in,
    malformed,
    object_in,
    stop_strings,
    whole_number,
)
from hybridrl.agents.backend import SamplingTerms
from hybridrl.agents.openai_chat import OpenAiErrors

STOPS = "sampling_params.stop_token_ids"
NOT_SUPPORTED = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")


class TokenForm(OpenAiErrors):
    """`POST /inference/v1/generate`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def asked(self, body: Mapping[str, Any], terms: SamplingTerms) -> Asked:
        for name in NOT_SUPPORTED:
            if body.get(name):
                raise malformed(name, body[name], "no value; this endpoint takes text only")
        sampling = object_in(body, "sampling_params")
        if not (tokens := list_in(body, "token_ids")):
            raise malformed("token_ids", tokens, "a list with at least one token id")
        stops = self._token_ids(list_in(sampling, "stop_token_ids", STOPS), STOPS)
        most = terms.max_stop_tokens
        if most is not None and len(set(stops)) > most:
            allowed = f"at most {most} tokens, because rollout.min_new_tokens is set"
            raise malformed(STOPS, list(stops), allowed)
        # A longer list is refused because of its length, so the rest need not be checked.
        self._token_ids(tokens[: terms.max_context], "token_ids")
        return Asked(
            tokens=tuple(tokens),
            max_tokens=whole_number(sampling, "max_tokens"),
            stop_strings=stop_strings(sampling, "stop", terms),
            stop_token_ids=stops,
            streams=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            sampling=check_sampling(sampling, terms),
        )

    def answer(self, asked: Asked, answer: Answer) -> dict[str, Any]:
        done = answer.turn.completion
        content: list[dict[str, Any]] = [
            {"token": f"token_id:{token}", "logprob": logp, "bytes": None, "top_logprobs": []}
            for token, logp in zip(done.tokens, done.logps, strict=True)
        ]
        choice = {
            "index": 0,
            "token_ids": list(done.tokens),
            "logprobs": {"content": content},
            "finish_reason": LENGTH if answer.finish == LENGTH else STOP,
        }
        num_prompt, num_sampled = answer.num_prompt, len(done.tokens)
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_sampled}
        return {
            "request_id": answer.number,
            "choices": [choice],
            "usage": usage | {"total_tokens": num_prompt + num_sampled},
            "prompt_token_ids": list(answer.prompt),
        }

    def events(self, asked: Asked, answer: Answer) -> Iterator[str]:
        yield event(json.dumps(self.answer(asked, answer)))
        yield event("[DONE]")

    def _token_ids(self, given: Sequence[Any], where: str) -> tuple[int, ...]:
        wrong = [
            token for token in given if type(token) is not int or not 0 <= token < self._vocab_size
        ]
        if wrong:
            raise malformed(where, wrong[0], f"token ids from 0 to {self._vocab_size - 1}")
        return tuple(given)
