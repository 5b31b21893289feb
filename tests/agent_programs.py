"""Agent programs against the SDKs of OpenAI and Anthropic alone: runs with other versions of them.

`python agent_programs.py PROGRAM API URL TOKEN`
"""

from __future__ import annotations

import base64
import json
import struct
import sys
import threading
import zlib
from typing import Any

TOOL = {
    "name": "add",
    "description": "Adds two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    },
}


class ChatApi:
    """A conversation over chat completions."""

    def __init__(self, url: str, token: str, **options: Any) -> None:
        import openai

        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, **options)
        self.messages: list[Any] = [{"role": "system", "content": "Be brief."}]

    def user(self, content: Any) -> None:
        self.messages.append({"role": "user", "content": content})

    def result(self, call_id: str, content: Any) -> None:
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})

    def picture(self, file: bytes, text: str) -> list[Any]:
        image = {"type": "image_url", "image_url": {"url": uri(file), "detail": "low"}}
        return [image, {"type": "text", "text": text}]

    def ask(self, tools: bool = True, stream: bool = False, **options: Any) -> dict[str, Any]:
        """Returns text and calls of the next turn, and appends it to the messages."""
        if tools:
            options["tools"] = [{"type": "function", "function": TOOL}]
        request = {"model": "m", "messages": self.messages, **options}
        if not stream:
            message = self.client.chat.completions.create(**request).choices[0].message
            self.messages.append(message.model_dump(exclude_none=True))
            calls = [
                (call.id, call.function.name, json.loads(call.function.arguments))
                for call in message.tool_calls or []
            ]
            return {"text": message.content or "", "calls": calls}
        text, thought, parts = "", "", {}
        usage = {"include_usage": True}
        for chunk in self.client.chat.completions.create(
            **request, stream=True, stream_options=usage
        ):
            if not chunk.choices:
                assert chunk.usage.completion_tokens > 0
                continue
            delta = chunk.choices[0].delta
            text += delta.content or ""
            thought += getattr(delta, "reasoning_content", None) or ""
            for call in delta.tool_calls or []:
                parts[call.index] = (call.id, call.function.name, call.function.arguments)
        calls = list(parts.values())
        self.messages.append(
            {
                "role": "assistant",
                "content": text,
                "reasoning_content": thought,
                "tool_calls": [
                    {"id": i, "type": "function", "function": {"name": n, "arguments": a}}
                    for i, n, a in calls
                ],
            }
        )
        return {"text": text, "calls": [(i, n, json.loads(a)) for i, n, a in calls]}


class ResponsesApi:
    """A conversation over responses."""

    def __init__(self, url: str, token: str, **options: Any) -> None:
        import openai

        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=token, **options)
        self.messages: list[Any] = []

    def user(self, content: Any) -> None:
        self.messages.append({"role": "user", "content": content})

    def result(self, call_id: str, content: Any) -> None:
        item = {"type": "function_call_output", "call_id": call_id, "output": content}
        self.messages.append(item)

    def picture(self, file: bytes, text: str) -> list[Any]:
        image = {"type": "input_image", "image_url": uri(file), "detail": "low"}
        return [image, {"type": "input_text", "text": text}]

    def ask(self, tools: bool = True, stream: bool = False, **options: Any) -> dict[str, Any]:
        """Returns text and calls of the next turn, and appends its items to the input."""
        if tools:
            options["tools"] = [{"type": "function", **TOOL}]
        if "max_tokens" in options:
            options["max_output_tokens"] = options.pop("max_tokens")
        request = {"model": "m", "input": self.messages, "instructions": "Be brief.", **options}
        if stream:
            deltas, whole = "", None
            for one in self.client.responses.create(**request, stream=True):
                deltas += one.delta if one.type == "response.output_text.delta" else ""
                if one.type in ("response.completed", "response.incomplete"):
                    whole = one.response
            assert whole is not None and deltas == whole.output_text
        else:
            whole = self.client.responses.create(**request)
        self.messages += [item.model_dump(exclude_none=True) for item in whole.output]
        calls = [
            (item.call_id, item.name, json.loads(item.arguments))
            for item in whole.output
            if item.type == "function_call"
        ]
        return {"text": whole.output_text, "calls": calls}


class MessagesApi:
    """A conversation over Anthropic's messages."""

    def __init__(self, url: str, token: str, **options: Any) -> None:
        import anthropic

        self.client = anthropic.Anthropic(base_url=url, auth_token=token, **options)
        self.messages: list[Any] = []

    def user(self, content: Any) -> None:
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        for block in blocks:
            self._append(block)

    def result(self, call_id: str, content: Any) -> None:
        self._append({"type": "tool_result", "tool_use_id": call_id, "content": content})

    def picture(self, file: bytes, text: str) -> list[Any]:
        data = base64.b64encode(file).decode()
        source = {"type": "base64", "media_type": "image/png", "data": data}
        return [{"type": "image", "source": source}, {"type": "text", "text": text}]

    def _append(self, block: dict[str, Any]) -> None:
        if not self.messages or self.messages[-1]["role"] != "user":
            self.messages.append({"role": "user", "content": []})
        self.messages[-1]["content"].append(block)

    def ask(self, tools: bool = True, stream: bool = False, **options: Any) -> dict[str, Any]:
        """Returns text and calls of the next turn, and appends it to the messages."""
        if tools:
            schema = {"input_schema": TOOL["parameters"]}
            options["tools"] = [{k: TOOL[k] for k in ("name", "description")} | schema]
        request = {"model": "m", "max_tokens": 200, "system": "Be brief.", **options}
        request["messages"] = self.messages
        if stream:
            with self.client.messages.stream(**request) as events:
                message = events.get_final_message()
        else:
            message = self.client.messages.create(**request)
        blocks = [block.model_dump(exclude_none=True) for block in message.content]
        self.messages.append({"role": "assistant", "content": blocks})
        calls = [(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
        text = "".join(block["text"] for block in blocks if block["type"] == "text")
        return {"text": text, "calls": calls}


def uri(file: bytes) -> str:
    """Returns the data URI of a PNG file."""
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"


def png(level: int, size: int = 16) -> bytes:
    """Returns the file of a grey square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    rows = zlib.compress((b"\0" + bytes([level]) * size) * size)
    head = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    chunks = chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


APIS = {"chat": ChatApi, "responses": ResponsesApi, "messages": MessagesApi}


def solve(talk: Any, **options: Any) -> str:
    """Runs the tool until the model answers; returns the answer."""
    for _ in range(20):
        turn = talk.ask(**options)
        if not turn["calls"]:
            return str(turn["text"])
        for call_id, name, arguments in turn["calls"]:
            assert name == "add"
            talk.result(call_id, str(arguments["a"] + arguments["b"]))
    raise RuntimeError("no answer")


def single(api: Any, url: str, token: str) -> None:
    talk = api(url, token)
    talk.user("Hello")
    assert talk.ask(tools=False)["text"] == "Answer to Hello"


def tools(api: Any, url: str, token: str) -> None:
    for stream in (False, True):
        talk = api(url, token)
        talk.user("add 1 2")
        assert solve(talk, stream=stream) == "The result is 3."
        talk.user("both 10 20")
        assert solve(talk, stream=stream) == "The result is 30 30."


def ten_turns(api: Any, url: str, token: str) -> None:
    talk = api(url, token)
    for number in range(10):
        talk.user(f"Question {number}")
        assert talk.ask()["text"] == f"Answer to Question {number}"


def subagents(api: Any, url: str, token: str) -> None:
    failures = []

    def work(number: int) -> None:
        try:
            talk = api(url, token)
            for turn in range(3):
                talk.user(f"slow add {number} {turn}")
                assert solve(talk) == f"The result is {number + turn}."
        except BaseException as error:  # reported below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def compaction(api: Any, url: str, token: str) -> None:
    talk = api(url, token)
    for number in range(3):
        talk.user(f"add {number} 1")
        solve(talk)
    talk.user("Summarise")
    summary = talk.ask()["text"]
    after = api(url, token)
    after.user(f"So far: {summary}")
    after.ask()
    after.user("add 4 4")
    assert solve(after) == "The result is 8."


def changed_tools(api: Any, url: str, token: str) -> None:
    talk = api(url, token)
    talk.user("add 1 1")
    solve(talk)
    talk.user("Without tools")
    assert talk.ask(tools=False)["text"] == "Answer to Without tools"


def malformed(api: Any, url: str, token: str) -> None:
    talk = api(url, token)
    talk.user("malformed")
    turn = talk.ask()
    assert not turn["calls"] and turn["text"].startswith("<tool_call>")
    talk.user("add 2 2")
    assert solve(talk) == "The result is 4."


def retry(api: Any, url: str, token: str) -> None:
    """The client's time limit ends before the turn does, so that the SDK asks again."""
    talk = api(url, token, timeout=0.3, max_retries=5)
    talk.user("slow Hello")
    assert talk.ask()["text"] == "Answer to slow Hello"
    talk.user("Next")
    assert talk.ask()["text"] == "Answer to Next"


def abort(api: Any, url: str, token: str) -> None:
    """The client gives up, and asks something else."""
    talk = api(url, token, timeout=0.2, max_retries=0)
    talk.user("endless")
    try:
        talk.ask()
    except Exception as error:
        assert "imed out" in str(error), error
    else:
        raise RuntimeError("the turn ended")
    other = api(url, token)
    other.user("Hello")
    assert other.ask()["text"] == "Answer to Hello"


def crash(api: Any, url: str, token: str) -> None:
    """The program ends in the middle of a turn."""
    import os

    talk = api(url, token)
    talk.user("add 5 5")
    talk.ask()
    if __name__ == "__main__":
        threading.Timer(0.3, os._exit, [1]).start()
        talk.user("endless")
        talk.ask()


def overflow(api: Any, url: str, token: str) -> None:
    talk = api(url, token)
    talk.user("too long " * 2000)
    try:
        talk.ask()
    except Exception as error:
        assert getattr(error, "status_code", None) == 400, error
        wanted = "prompt is too long" if api is MessagesApi else "maximum context length"
        assert wanted in str(error), error
        if api is not MessagesApi:
            assert error.code == "context_length_exceeded"  # type: ignore[attr-defined]
    else:
        raise RuntimeError("the messages were accepted")


def cut(api: Any, url: str, token: str) -> None:
    talk = api(url, token)
    talk.user("Hello")
    assert talk.ask(tools=False, max_tokens=18)["text"] != "Answer to Hello"
    talk.user("Go on")
    assert talk.ask(tools=False)["text"] == "Answer to Go on"


def pictures(api: Any, url: str, token: str) -> None:
    """Shows a picture, gets one from a tool, and then another one in a second conversation."""
    for level in (200, 201):
        talk = api(url, token)
        talk.user(talk.picture(png(100), "add 1 2"))
        ((call_id, *_),) = talk.ask()["calls"]
        talk.result(call_id, talk.picture(png(level), "here"))
        assert talk.ask()["text"].endswith("The result is (a picture)here.")
        talk.user("Hello")
        assert talk.ask()["text"].endswith("Answer to Hello")
    talk = api(url, token, max_retries=0)
    talk.user(talk.picture(b"no picture", "Hello"))
    try:
        talk.ask()
    except Exception as error:
        assert getattr(error, "status_code", None) == 400, error
        assert "not an image; allowed: a PNG" in str(error), error
    else:
        raise RuntimeError("the picture was accepted")


PROGRAMS = {
    program.__name__: program
    for program in (
        *(single, tools, ten_turns, subagents, compaction, changed_tools, malformed),
        *(retry, abort, crash, overflow, cut),
    )
}

if __name__ == "__main__":
    (PROGRAMS | {"pictures": pictures})[sys.argv[1]](APIS[sys.argv[2]], *sys.argv[3:])
