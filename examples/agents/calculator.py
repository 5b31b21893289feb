"""Agent that multiplies two numbers and may use a calculator.

The configuration grpo.yaml calls `multiply` for each response. Run as a program, the same agent
reads its task from a file.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from typing import Any

from openai import AsyncOpenAI


async def answer(client: AsyncOpenAI, model: str, prompt: str) -> str:
    """Returns the model's answer, after at most one call of the calculator."""
    messages: list[Any] = [{"role": "user", "content": prompt}]
    for _ in range(2):
        reply = await client.chat.completions.create(model=model, messages=messages)
        text = reply.choices[0].message.content or ""
        if (call := re.fullmatch(r"\[(\d+)\*(\d+)\]", text)) is None:
            break
        product = str(int(call[1]) * int(call[2]))
        messages += [{"role": "assistant", "content": text}]
        messages += [{"role": "tool", "content": product, "tool_call_id": "calculator"}]
    return text


async def multiply(task: Any) -> float:
    """Returns the reward: 1 for the right product."""
    return float(await answer(task.client(), task.model, task.prompt) == task.columns["answer"])


if __name__ == "__main__":
    with open(os.environ["HYBRIDRL_TASK"], encoding="utf-8") as file:
        row = json.load(file)
    found = asyncio.run(answer(AsyncOpenAI(), os.environ["OPENAI_MODEL"], row["prompt"]))
    with open(os.environ["HYBRIDRL_RESULT"], "w", encoding="utf-8") as file:
        json.dump({"reward": float(found == row["columns"]["answer"])}, file)
