"""Builds the endpoint, the runner and the host of agents for one replica. Does not import torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.agents.backend import SamplingTerms, TurnQueue
from hybridrl.agents.chat_template import ChatTemplate
from hybridrl.agents.check import check_agent, find_picker
from hybridrl.agents.command import Bubblewrap, CommandRunner, EpisodeLogs
from hybridrl.agents.functions import FunctionRunner
from hybridrl.agents.host import AgentHost
from hybridrl.agents.samples import Budgets
from hybridrl.agents.sessions import Sessions
from hybridrl.agents.tasks import AgentClocks, Runner
from hybridrl.agents.template_check import template_notes
from hybridrl.agents.tool_formats import TurnReader
from hybridrl.config.agent import AgentConfig
from hybridrl.data.images import ImageTokens
from hybridrl.errors import ConfigError

if TYPE_CHECKING:
    from hybridrl.agents.task_server import TaskServer

MODEL_NAME = "policy"


@dataclass(frozen=True)
class HostSettings:
    """What `make_host` needs.

    Args:
        tokenizer: Tokenizer of the model. No thread outside of the endpoint may use it.
        images: How the model's tokens contain images; None if it reads only text.
        part, num_parts: Number of this process among the processes that divide the replica's
            programs, and their number.
        task_token: Token with which programs outside of the run fetch tasks; None for a random
            token.
    """

    agent: AgentConfig
    tokenizer: Any = field(repr=False)
    ends: tuple[int, ...]
    vocab_size: int
    terms: SamplingTerms
    max_row_tokens: int
    template_arguments: Mapping[str, Any]
    run_folder: Path
    images: ImageTokens | None = None
    rank: int = 0
    replica: int = 0
    num_replicas: int = 1
    part: int = 0
    num_parts: int = 1
    task_token: str | None = field(default=None, repr=False)


def make_host(settings: HostSettings) -> tuple[AgentHost, list[str]]:
    """Starts the endpoint. Returns the host of agents, and notes on the chat template.

    Raises:
        UserError: A value of the section `agent` is wrong, or the endpoint cannot listen.
    """
    agent, folder = settings.agent, settings.run_folder
    if found := check_agent(agent):
        raise ConfigError(found)
    # aiohttp is an optional package, which `check_agent` requires.
    from hybridrl.agents.endpoint import Endpoint

    template = None
    if getattr(settings.tokenizer, "chat_template", None):
        arguments, images = settings.template_arguments, settings.images
        template = ChatTemplate(settings.tokenizer, settings.ends, arguments, images)
    request_ids = itertools.count(settings.part, settings.num_parts)
    sessions = Sessions(settings.terms.max_context, template, request_ids)
    queue, clocks = TurnQueue(settings.terms), AgentClocks()
    reader = TurnReader.for_template(template.source if template else "", agent.tool_format)
    notes = [] if template is None else template_notes(template, reader)
    tasks: TaskServer | None = None
    if agent.server:
        from hybridrl.agents.task_server import TaskServer

        tasks = TaskServer(
            timeout_s=agent.timeout_s,
            lease_s=agent.lease_s,
            clocks=clocks,
            address_file=folder / "agents" / f"replica_{settings.replica}.json",
            replicas=settings.num_replicas,
            token=settings.task_token,
        )
    endpoint = Endpoint(
        sessions,
        queue,
        settings.tokenizer,
        vocab_size=settings.vocab_size,
        host=agent.host,
        port=agent.port + settings.replica if agent.port else 0,
        reader=reader,
        model=MODEL_NAME,
        more_routes=() if tasks is None else tasks.routes(),
    ).start()
    if tasks is not None:
        tasks.publish(endpoint.url)
        notes.append(f"programs can fetch tasks; see {folder / 'agents'}")
    logs, part = folder / "logs", f"_{settings.part}" if settings.part else ""
    host = AgentHost(
        sessions=sessions,
        queue=queue,
        endpoint=endpoint,
        runner=tasks or _runner(agent, clocks, EpisodeLogs(logs / "agents", agent.log_steps)),
        clocks=clocks,
        model=MODEL_NAME,
        budgets=Budgets(
            max_turns=agent.max_turns,
            max_turn_tokens=agent.max_turn_tokens,
            max_sampled_tokens=agent.max_sampled_tokens,
            max_row_tokens=settings.max_row_tokens,
        ),
        picker=find_picker(agent),
        concurrency=agent.concurrency,
        status_file=logs / f"rank_{settings.rank}{part}.agents",
    )
    return host, notes


def _runner(agent: AgentConfig, clocks: AgentClocks, logs: EpisodeLogs) -> Runner:
    if agent.function is not None:
        return FunctionRunner(
            path=agent.function,
            python=agent.python,
            options=agent.options,
            workers=agent.workers,
            timeout_s=agent.timeout_s,
            clocks=clocks,
            logs=logs,
        )
    assert agent.command is not None
    return CommandRunner(
        command=agent.command,
        env=agent.env,
        timeout_s=agent.timeout_s,
        clocks=clocks,
        logs=logs,
        sandbox=Bubblewrap() if agent.sandbox == "bubblewrap" else None,
    )
