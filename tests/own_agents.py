"""Functions that tests run as agents."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

from agent_programs import png, uri


async def rewarded(task: Any, reward: float = 0.5) -> float:
    print("sample", task.sample)
    return reward + task.sample


async def silent(task: Any) -> None:
    return None


async def wrong(task: Any) -> float:
    raise ValueError(f"sample {task.sample} is wrong\nsecond line")


async def sleeping(task: Any) -> float:
    await asyncio.sleep(60)
    return 1.0


async def napping(task: Any) -> float:
    print("begun")
    await asyncio.sleep(0.5)
    return 1.0


async def blocking(task: Any) -> float:
    if task.sample == 0:
        time.sleep(60)
    await asyncio.sleep(60)
    return 1.0


async def dying(task: Any) -> float:
    sys.exit(3) if task.sample else os._exit(4)


async def text(task: Any) -> Any:
    return "much"


async def unsendable(task: Any) -> Any:
    """Returns something of which JSON text cannot be made, too long for a report."""

    class Odd(set[int]):
        def __str__(self) -> str:
            return f"{set(self)} \ud800" + "x" * (2 << 20)

    print("\ud800")
    return Odd([1])


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


async def unprintable(task: Any) -> None:
    raise Unprintable


async def variables(task: Any) -> float:
    return float("HYBRIDRL_TEST_SECRET" in os.environ)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def said(task: Any, messages: list[Any], **more: Any) -> str:
    """Returns the model's answer to the messages, and appends it to them."""
    reply = await task.client().chat.completions.create(model=task.model, messages=messages, **more)
    content = reply.choices[0].message.content or ""
    messages.append({"role": "assistant", "content": content})
    return content


async def branching(task: Any) -> float:
    """Has two turns, then two subagents that continue them, and a conversation of its own."""
    messages = [user(task.prompt)]
    await said(task, messages)
    messages.append(user("12*3="))
    await said(task, messages)
    branches = [[*messages, user(text)] for text in ("4*5=", "67=")]
    await asyncio.gather(*(said(task, branch) for branch in branches))
    await said(task, [user("1=")], max_tokens=3)
    return float(task.sample % 2)


async def seeing(task: Any) -> float:
    """Looks at the row's picture, gets another one from a tool, and branches at a third."""
    messages = list(task.prompt)
    await said(task, messages, max_tokens=3)
    shown = [{"type": "text", "text": "What shape ?"}, picture(task.sample % 3)]
    messages.append({"role": "tool", "tool_call_id": "c", "content": shown})
    await said(task, messages, max_tokens=4)
    branches = [[*messages, user([picture(level)])] for level in (7, 8)]
    await asyncio.gather(*(said(task, branch, max_tokens=5) for branch in branches))
    return float(task.sample % 2)


def picture(level: int) -> dict[str, Any]:
    """Returns a part of a message with a picture, all of whose sizes are equal."""
    return {"type": "image_url", "image_url": {"url": uri(png(level, size=32))}}


async def quiet_for_some(task: Any) -> float:
    """Requests no turn for every other sample."""
    if task.sample % 2 == 0:
        await said(task, [user(task.prompt)])
    return 1.0


async def slow_for_some(task: Any, folder: str) -> float:
    """Waits between two turns until a file exists, in every other group of four samples."""
    messages = [user(task.prompt)]
    await said(task, messages)
    while (task.sample // 4) % 2 and not task.is_evaluation:
        if (Path(folder) / "go_on").exists():
            break
        await asyncio.sleep(0.02)
    messages.append(user("12*3="))
    await said(task, messages)
    return float(task.sample % 2)


async def greedy(task: Any) -> float:
    """Requests turns until a request is refused."""
    messages = [user(task.prompt)]
    while True:
        await said(task, messages)
        messages.append(user("1="))


async def packages(task: Any) -> float:
    """Returns whether a package of the run's environment can be imported."""
    return float(importlib.util.find_spec("pydantic") is not None)


async def twice(task: Any, folder: str) -> float:
    """Has a conversation of two turns, and notes which replica served it."""
    messages = [user(task.prompt)]
    await said(task, messages)
    await said(task, [*messages, user("1=")])
    kind = "evaluation" if task.is_evaluation else "training"
    (Path(folder) / f"{kind}_{task.base_url.rpartition(':')[2]}").touch()
    return float(task.sample % 2)


async def grouped(task: Any) -> float:
    raise ExceptionGroup("several", [ExceptionGroup("inner", [KeyError("first")]), ValueError("b")])
