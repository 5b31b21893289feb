"""Plays tasks of verifiers 0.4 (package `verifiers`) with their own programs, tools and rewards.

The programs call verifiers' interception server, which passes their requests on to the endpoint of
the run, as chat completions or as token ids. The endpoint records what was sampled, and verifiers
scores the episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import verifiers.v1 as vf

from hybridrl.agents.tasks import AgentTask

CLIENTS = ("chat", "tokens")

_served: dict[str, asyncio.Future[vf.Env]] = {}  # environments of this process, by configuration
_holders: set[asyncio.Task[None]] = set()  # keep the environments' servers until the process ends


async def play(
    task: AgentTask,
    env: Mapping[str, Any],
    client: str = "chat",
    tokenizer: str | None = None,
    renderer: Mapping[str, Any] | None = None,
) -> float:
    """Plays one task and returns the sum of its weighted rewards.

    Args:
        env: Section `env` of a verifiers configuration, with `taskset.id`.
        client: Form of the requests to the endpoint: "chat" for the API that the program uses, or
            "tokens" for token ids that verifiers renders itself.
        tokenizer: Directory of the tokenizer with which verifiers renders.
        renderer: Configuration of the package `renderers`, such as {"name": "qwen3"}; default: the
            renderer of the model's name, or one that knows no tools.

    Raises:
        ValueError: The options are wrong, or several trainable agents took part.
        RuntimeError: The episode failed.
    """
    context = vf.ModelContext(model=task.model, client=_client(task, client, tokenizer, renderer))
    environment = await _serving(env)
    task_type = type(environment.taskset).task_type()
    data = task_type.data_type().model_validate(task.columns["task"])
    (slot,) = environment.slots(task_type(data, environment.config.taskset.task))
    episode = await environment.run_slot(slot, context)
    if not episode.ok:
        errors = [*(e for trace in episode.traces for e in trace.errors), *episode.errors]
        raise RuntimeError(_text_of(errors))
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) != 1:
        names = ", ".join(trace.agent.name for trace in trained) or "none"
        raise ValueError(f"trainable agents of an episode: got {names}; allowed: one agent")
    return float(trained[0].reward)


def rows(env: Mapping[str, Any], **_: Any) -> Iterator[dict[str, Any]]:
    environment = vf.load_environment(vf.resolve_env_config(dict(env)))
    name = environment.config.taskset.id
    for one in environment.taskset:
        data = one.data.model_dump(mode="json")
        yield {"prompt": f"{name} {data['idx']}", "task": data}


def _text_of(errors: Sequence[vf.Error]) -> str:
    """Returns the last line of the last error; a program's error ends with its traceback."""
    if not errors:
        return "the episode ended without a result"
    lines = [line for line in errors[-1].message.splitlines() if line.strip()]
    return f"{errors[-1].type}: {lines[-1] if lines else 'no message'}"


def _client(
    task: AgentTask, client: str, tokenizer: str | None, renderer: Mapping[str, Any] | None
) -> vf.ClientConfig:
    if client not in CLIENTS:
        raise ValueError(f"client: got {client!r}; allowed: {', '.join(CLIENTS)}")
    if (tokenizer is None) == (client == "tokens") or (renderer and client == "chat"):
        raise ValueError("tokenizer, renderer: no value with client=chat, a directory with tokens")
    # verifiers reads API keys from environment variables, which other programs could see.
    where: dict[str, Any] = {
        "base_url": f"{task.base_url}/v1",
        "api_key_var": "HYBRIDRL_NO_KEY",
        "headers": {"x-session-token": task.api_key},
    }
    if client == "chat":
        return vf.EvalClientConfig(**where)
    chosen = {} if renderer is None else {"renderer": dict(renderer)}
    return vf.TrainClientConfig(**where, **chosen, renderer_model_name=tokenizer)


async def _serving(env: Mapping[str, Any]) -> vf.Env:
    """Returns an environment whose servers run until the process ends."""
    config = vf.resolve_env_config(dict(env))
    key = config.model_dump_json()
    if key not in _served:
        ready = _served[key] = asyncio.get_running_loop().create_future()

        async def hold() -> None:
            try:
                environment = vf.load_environment(config)
                async with environment.serving():
                    ready.set_result(environment)
                    await asyncio.Event().wait()
            except Exception as error:  # the environment's code may raise anything
                if not ready.done():
                    ready.set_exception(error)

        _holders.add(asyncio.create_task(hold()))
    return await asyncio.shield(_served[key])
