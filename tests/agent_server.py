"""An endpoint over a scripted model, and the check that training receives what was sampled."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from typing import Any

from agent_templates import FAMILIES, chat_template, end_ids, tokenizer_of

from hybridrl.agents.backend import SamplingTerms, TurnQueue, TurnRequest
from hybridrl.agents.endpoint import Endpoint
from hybridrl.agents.samples import SessionResult
from hybridrl.agents.sessions import Sessions
from hybridrl.rollout.engine import Completion

ENDLESS_S, SLOW_S = 60.0, 0.5
LAST_USER = re.compile(r".*<\|im_start\|>user\n(.*?)<\|im_end\|>", re.DOTALL)
RESPONSE = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
PICTURE = re.compile(r"<\|vision_start\|>(<\|image_pad\|>)+<\|vision_end\|>")
THOUGHT = "<think>\nI think.\n</think>\n\n"


def written(prompt: str) -> tuple[str, float]:
    """Returns what the model writes after a prompt, and the seconds that it takes."""
    found = LAST_USER.fullmatch(prompt[: prompt.rindex("<|im_end|>") + len("<|im_end|>")])
    assert found is not None, prompt
    last = found[1].strip()
    took_s = ENDLESS_S if "endless" in last else SLOW_S if "slow" in last else 0.0
    if results := RESPONSE.findall(last):
        return f"{THOUGHT}The result is {' '.join(results)}.", took_s
    if last == "malformed":
        return f'{THOUGHT}<tool_call>\n{{"name": "add", "arguments": {{"a": 1', took_s
    if numbers := re.search(r"(add|both) (\d+) (\d+)", last):
        arguments = {"b": int(numbers[3]), "a": int(numbers[2])}
        call = json.dumps({"name": "add", "arguments": arguments})
        calls = [f"<tool_call>\n{call}\n</tool_call>"] * (1 + (numbers[1] == "both"))
        return THOUGHT + "\n".join(calls), took_s
    return f"{THOUGHT}Answer to {last}", took_s


class ScriptedRank(threading.Thread):
    """A rank's loop over a model that writes what `written` says.

    `done` has the request and completion of each finished turn, `aborted` numbers of aborted ones.
    """

    def __init__(self, queue: TurnQueue, family: str) -> None:
        super().__init__(daemon=True)
        self.queue, self.family = queue, family
        self.done: dict[int, tuple[TurnRequest, Completion]] = {}
        self.aborted: list[int] = []
        self._waiting: dict[int, tuple[float, TurnRequest, Completion]] = {}
        self._stops = False

    def run(self) -> None:
        while not self._stops:
            self.queue.wait(0.01 if self._waiting else 0.1)
            arrivals = self.queue.take()
            for number in arrivals.aborted:
                self.aborted.append(number)
                self._waiting.pop(number, None)
            for request in arrivals.requests:
                completion, took_s = self._sampled(request)
                due = time.monotonic() + took_s
                self._waiting[request.request_id] = (due, request, completion)
            for number, (due, request, completion) in list(self._waiting.items()):
                if due <= time.monotonic():
                    del self._waiting[number]
                    self.done[number] = (request, completion)
                    self.queue.finish([completion])

    def _sampled(self, request: TurnRequest) -> tuple[Completion, float]:
        tokenizer, end = tokenizer_of(self.family), end_ids(self.family)[0]
        text, took_s = written(PICTURE.sub("(a picture)", tokenizer.decode(list(request.tokens))))
        tokens = [*tokenizer(text, add_special_tokens=False)["input_ids"], end]
        tokens = tokens[: request.max_new_tokens]
        rng = random.Random(request.request_id)
        logps = tuple(-rng.random() for _ in tokens)
        version, num = 2 * (len(self.done) // 3), len(tokens)
        # Every third turn begins before an update of the weights and ends after it.
        is_split = num > 1 and request.request_id % 3 == 0
        versions = ((version, num // 2), (version + 1, num - num // 2)) if is_split else ()
        reason: Any = "stop" if tokens[-1] == end else "length"
        done = Completion(
            request.request_id, tuple(tokens), logps, reason, version, versions=versions
        )
        return done, took_s

    def stop(self) -> None:
        self._stops = True
        self.join(5)


class Served:
    """An endpoint with its scripted rank, and the template of a family."""

    def __init__(
        self,
        terms: SamplingTerms | None = None,
        has_template: bool = True,
        family: str = "qwen3",
        **options: Any,
    ) -> None:
        assert FAMILIES["qwen3"].thinks
        terms = terms or SamplingTerms(temperature=1.0, max_context=8000)
        self.queue = TurnQueue(terms)
        self.rank = ScriptedRank(self.queue, family)
        self.sessions = Sessions(terms.max_context, chat_template(family) if has_template else None)
        usual = {"grace_s": 1.5, "keep_alive_s": 0.2}
        self.endpoint = Endpoint(
            self.sessions,
            self.queue,
            tokenizer_of(family),
            vocab_size=len(tokenizer_of(family)),
            **{**usual, **options},
        )

    def __enter__(self) -> Served:
        self.rank.start()
        self.endpoint.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.endpoint.close()
        self.rank.stop()

    def close(self, session: Any, picker: Any = None) -> SessionResult:
        """Ends a session, and checks its rows against what the rank sampled."""
        turns = session.turns
        result = self.sessions.close(session, picker)
        trained: dict[int, list[tuple[int, int, float, int]]] = {}
        for row in result.rows:
            whole = row.prompt + row.tokens
            versions = [version for version, count in row.versions for _ in range(count)]
            assert len(versions) == len(row.tokens) == len(row.logps) == len(row.observed)
            is_sampled, images = [False] * len(row.tokens), row.contents
            for span in row.spans:
                request, done = self.rank.done[turns[span.turn].completion.request_id]
                start = len(row.prompt) + span.start
                assert whole[:start] == request.tokens
                assert request.session_id == session.session_id
                seen = [one for one in images if one.start < start]
                assert list(request.contents) == seen
                runs = [version for version, count in done.runs for _ in range(count)]
                for i in range(span.num_tokens):
                    at = span.start + i
                    is_sampled[at] = True
                    assert row.tokens[at] == done.tokens[i] and versions[at] == runs[i]
                    if not row.observed[at]:
                        found = (i, row.tokens[at], row.logps[at], versions[at])
                        trained.setdefault(done.request_id, []).append(found)
            assert all(
                observed or own for observed, own in zip(row.observed, is_sampled, strict=True)
            )
        for number, found in trained.items():
            done = self.rank.done[number][1]
            runs = [version for version, count in done.runs for _ in range(count)]
            assert sorted(found) == list(
                zip(range(len(done.tokens)), done.tokens, done.logps, runs, strict=True)
            )
        if picker is None:
            delivered = {turn.completion.request_id for turn in turns if turn.is_delivered}
            assert trained.keys() == delivered
        return result
