"""Gives a model the tools of MCP servers (package `mcp` 2.x).

`play` is a complete agent: the model calls tools until it answers. `open_tools` is for agents of
your own. A server that is started by a command belongs to one episode.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from mcp import Client, StdioServerParameters

from hybridrl.agents.connectors.limits import until_a_limit
from hybridrl.agents.tasks import AgentTask

SERVER = 'with "command" and optionally "args", "env" and "cwd", or with "url"'


class Tools:
    """Tools of connected servers, with the client of each by its name and OpenAI's `specs`."""

    def __init__(self, clients: Mapping[str, Client], specs: list[dict[str, Any]]) -> None:
        self._clients, self.specs = clients, specs

    async def call(self, name: str, arguments: str | Mapping[str, Any]) -> str:
        """Calls a tool with an object or JSON text. Returns its text, or the model's mistake."""
        if name not in self._clients:
            return f"There is no tool {name!r}. Tools: {', '.join(self._clients)}."
        try:
            given = json.loads(arguments) if isinstance(arguments, str) else dict(arguments)
        except (ValueError, RecursionError) as error:
            return f"The arguments are not valid JSON: {error}"
        if not isinstance(given, dict):
            return "The arguments must be a JSON object."
        try:
            found = await self._clients[name].call_tool(name, given)
        except Exception as error:
            return f"The tool failed: {error}"
        texts = [getattr(part, "text", f"[{part.type}]") for part in found.content]
        return "\n".join(texts)


@asynccontextmanager
async def open_tools(servers: Mapping[str, Mapping[str, Any]]) -> AsyncIterator[Tools]:
    """Async context manager that connects to servers, as in the section `mcpServers` of other
    programs, and lists their tools. Raises ValueError if the description of a server is wrong, or
    two servers have a tool of one name.
    """
    clients: dict[str, Client] = {}
    specs = []
    async with AsyncExitStack() as stack:
        for name, server in servers.items():
            client = await stack.enter_async_context(Client(_server(name, server)))
            cursor: str | None = None
            while True:
                page = await client.list_tools(cursor=cursor)
                for tool in page.tools:
                    if tool.name in clients:
                        raise ValueError(f"tool {tool.name!r}: two servers have it; one is {name}")
                    clients[tool.name] = client
                    function = {"name": tool.name, "description": tool.description or ""}
                    function["parameters"] = tool.input_schema
                    specs.append({"type": "function", "function": function})
                if (cursor := page.next_cursor) is None:
                    break
        yield Tools(clients, specs)


async def play(
    task: AgentTask,
    servers: Mapping[str, Mapping[str, Any]],
    system: str | None = None,
    max_turns: int = 10,
    max_tokens: int | None = None,
) -> None:
    """Lets the model call tools until a turn has no call. Reports no reward, so that
    `reward.function` scores the last turn.

    Args:
        system: System prompt for rows whose prompt is a text.
    """
    messages: list[Any] = []
    if isinstance(task.prompt, str):
        messages += [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": task.prompt})
    else:
        messages += task.prompt
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    client = task.client()
    async with open_tools(servers) as tools:
        for _ in range(max_turns):
            reply = None
            with until_a_limit():
                reply = await client.chat.completions.create(
                    model=task.model, messages=messages, tools=tools.specs, **limit
                )
            if reply is None:
                break
            message = reply.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                text = await tools.call(call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": text})


def _server(name: str, server: Mapping[str, Any]) -> str | StdioServerParameters:
    is_command = set(server) <= {"command", "args", "env", "cwd"} and "command" in server
    if not is_command and set(server) != {"url"}:
        raise ValueError(f"servers.{name}: got {sorted(server)}; allowed: an object {SERVER}")
    if not is_command:
        return str(server["url"])
    command = sys.executable if server["command"] == "python" else server["command"]
    return StdioServerParameters(**{**server, "command": command})
