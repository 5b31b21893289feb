"""Plays environments behind a server of OpenEnv 0.10 (package `openenv`).

The server runs anywhere: in a container, or in a separate Python environment. Observations become
messages of the user, turns of the model become actions, and the reward is the sum of the rewards of
all steps.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

from openenv.core import GenericEnvClient

from hybridrl.agents.connectors.limits import until_a_limit
from hybridrl.agents.tasks import AgentTask

TIMEOUT_S = 60.0  # of one message to the server
CONNECT_S = 30.0
FORM = "Reply with one JSON object of this schema, and nothing else:\n"


async def play(
    task: AgentTask,
    url: str,
    observation: str | None = None,
    explains: bool = True,
    shows_prompt: bool = True,
    max_turns: int = 20,
    max_tokens: int | None = None,
    num_rows: int | None = None,
    prompt: str | None = None,
) -> float:
    """Plays one episode and returns the sum of its rewards.

    Args:
        task: Task whose row may have a column `reset` with the arguments of the reset.
        url: Address of the server, such as http://127.0.0.1:8000.
        observation: Field of the observation that the model sees; default: all fields, as JSON.
        explains: Whether the first message contains the schema of actions.
        shows_prompt: Whether the row's prompt, a text, precedes the first observation.

    Raises:
        ValueError: The observation lacks the field.
    """
    schema = await asyncio.to_thread(_action_schema, url)
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    model, total = task.client(), 0.0
    client = GenericEnvClient(
        base_url=url, connect_timeout_s=CONNECT_S, message_timeout_s=TIMEOUT_S
    )
    async with client as env:
        result = await env.reset(**(task.columns.get("reset") or {}))
        total += float(result.reward or 0.0)
        parts = [str(task.prompt)] if task.prompt and shows_prompt else []
        parts += [FORM + json.dumps(schema)] if explains else []
        text = "\n\n".join([*parts, _seen(result.observation, observation)])
        messages: list[Any] = [{"role": "user", "content": text}]
        for _ in range(max_turns):
            if result.done:
                break
            reply = None
            with until_a_limit():
                reply = await model.chat.completions.create(
                    model=task.model, messages=messages, **limit
                )
            if reply is None:
                break
            content = reply.choices[0].message.content or ""
            messages.append({"role": "assistant", "content": content})
            if (action := action_of(content, schema)) is None:
                messages.append({"role": "user", "content": FORM + json.dumps(schema)})
                continue
            try:
                result = await env.step(action)
            except RuntimeError as error:  # the server refused the action
                messages.append({"role": "user", "content": f"The action was refused: {error}"})
                continue
            total += float(result.reward or 0.0)
            seen = _seen(result.observation, observation)
            messages.append({"role": "user", "content": seen})
    return total


def rows(
    num_rows: int = 1000, prompt: str = "Episode {seed}.", **_: Any
) -> Iterator[dict[str, Any]]:
    """Yields rows that reset the environment with seeds 0, 1, ..., which `prompt` may contain."""
    for seed in range(num_rows):
        yield {"prompt": prompt.replace("{seed}", str(seed)), "reset": {"seed": seed}}


def action_of(text: str, schema: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the action that a turn contains: a JSON object, which may be in a fenced block. If
    the action has only one required field, any other text is the value of this field. Returns None
    if the turn contains no action.
    """
    text = text.strip()
    if text.startswith("```") and text.endswith("```") and "\n" in text:
        text = text.partition("\n")[2][:-3].strip()
    try:
        found: Any = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    if isinstance(found, dict):
        return found
    required = schema.get("required", [])
    if len(required) != 1:
        return None
    form = schema.get("properties", {}).get(required[0], {})
    is_text = form.get("type") == "string" and not isinstance(found, str)
    return {required[0]: text if is_text else found}


def _action_schema(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url.rstrip('/')}/schema", timeout=CONNECT_S) as answer:
        schema: dict[str, Any] = json.load(answer)["action"]
    fields = {n: one for n, one in schema.get("properties", {}).items() if n != "metadata"}
    return {**schema, "properties": fields}


def _seen(observation: Mapping[str, Any], field: str | None) -> str:
    if field is None:
        return json.dumps({n: one for n, one in observation.items() if n != "metadata"})
    if field not in observation:
        raise ValueError(f"observation: got {field!r}; allowed: {', '.join(observation)}")
    value = observation[field]
    return value if isinstance(value, str) else json.dumps(value)
