"""Builds the endpoint and the runner of agents on the first rank of each replica. Collective."""

from __future__ import annotations

import copy
import ipaddress
from collections.abc import Callable
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from hybridrl.agents.backend import SamplingTerms, TurnQueue
from hybridrl.agents.chat_template import ChatTemplate
from hybridrl.agents.check import check_agent, find_picker
from hybridrl.agents.command import Bubblewrap, CommandRunner, EpisodeLogs
from hybridrl.agents.functions import FunctionRunner
from hybridrl.agents.host import AgentHost
from hybridrl.agents.samples import Budgets
from hybridrl.agents.sessions import Sessions
from hybridrl.agents.tasks import AgentClocks, Runner, take_token
from hybridrl.agents.template_check import template_notes
from hybridrl.agents.tool_formats import TurnReader
from hybridrl.config.agent import AgentConfig
from hybridrl.config.identity import run_folder
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, UserError
from hybridrl.generation.agent_episodes import LONGEST_WAIT_S, SHORT_WAIT_S, AgentEpisodes
from hybridrl.parallel.groups import World
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.rollout.registry import ENGINES

if TYPE_CHECKING:
    from hybridrl.agents.task_server import TaskServer

MODEL_NAME = "policy"


def make_agent_episodes(
    config: Config,
    world: World,
    replica: ReplicaGroup,
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[int, ...],
    vocab_size: int,
    needs_report: bool,
    notify: Callable[[str], None],
) -> AgentEpisodes:
    """Starts the endpoint of this rank's replica and builds the object that runs agents.

    Args:
        ends: Tokens that end a turn.
        vocab_size: Number of tokens of the model.
        needs_report: Whether agents must report a reward.
        notify: Receives notes on the chat template.

    Raises:
        UserError: A value of the section `agent` is wrong, or the endpoint cannot listen. Raised on
            all ranks.
    """
    with world.all_agree("starting the endpoint for agents") as agreement:
        host = None
        check_hosts(config.agent, world.num_hosts)
        if replica.is_first:
            host, agreement.value = _host(config, world.rank, replica, tokenizer, ends, vocab_size)
        elif config.agent.server:
            take_token()
    for note in next((notes for notes in agreement.values if notes), ()):
        notify(f"agents: {note}")
    # With a lag, other replicas wait for this one every few engine steps.
    waits_s = SHORT_WAIT_S if config.steps.max_policy_lag else LONGEST_WAIT_S
    return AgentEpisodes(replica, host, config.run.seed, waits_s, needs_report)


def check_hosts(agent: AgentConfig, num_hosts: int) -> None:
    """Checks that programs outside of the run can reach the replicas on all hosts.

    Raises:
        UserError: They fetch tasks, and the endpoints of several hosts listen on loopback.
    """
    if not agent.server or num_hosts == 1:
        return
    name = agent.host.strip("[]")
    try:
        is_loopback = ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_loopback = name == "localhost"
    if is_loopback:
        raise UserError(
            "agent.host",
            agent.host,
            f"with agent.server on {num_hosts} hosts, an address that other hosts can reach",
            "Set agent.host=0.0.0.0, and restrict agent.port to trusted hosts.",
        )


def _host(
    config: Config,
    rank: int,
    group: ReplicaGroup,
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[int, ...],
    vocab_size: int,
) -> tuple[AgentHost, list[str]]:
    """Returns the host of this rank's replica, and notes on the chat template."""
    replica = group.number
    assert replica is not None
    agent, rollout, logs = config.agent, config.rollout, run_folder(config) / "logs"
    if found := check_agent(agent):
        raise ConfigError(found)
    # aiohttp is an optional package, which `check_agent` requires.
    from hybridrl.agents.endpoint import Endpoint

    # The endpoint renders in its own thread, and tokenizers must not be shared by threads.
    own = copy.deepcopy(tokenizer)
    has_template = bool(getattr(own, "chat_template", None))
    template = ChatTemplate(own, ends, config.data.template_arguments) if has_template else None
    sessions = Sessions(config.longest_request(), template)
    terms = SamplingTerms(
        temperature=rollout.temperature,
        max_context=config.longest_request(),
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        takes_stop_strings=ENGINES[rollout.engine].ends_by_text,
        max_stop_tokens=max_stop_tokens(rollout, ends),
    )
    queue, clocks = TurnQueue(terms), AgentClocks()
    reader = TurnReader.for_template(template.source if template else "", agent.tool_format)
    notes = [] if template is None else template_notes(template, reader)
    tasks: TaskServer | None = None
    if agent.server:
        from hybridrl.agents.task_server import TaskServer

        tasks = TaskServer(
            timeout_s=agent.timeout_s,
            lease_s=agent.lease_s,
            clocks=clocks,
            address_file=run_folder(config) / "agents" / f"replica_{replica}.json",
            replicas=group.num_replicas,
        )
    endpoint = Endpoint(
        sessions,
        queue,
        own,
        vocab_size=vocab_size,
        host=agent.host,
        port=agent.port + replica if agent.port else 0,
        reader=reader,
        model=MODEL_NAME,
        more_routes=() if tasks is None else tasks.routes(),
    ).start()
    if tasks is not None:
        tasks.publish(endpoint.url)
        notes.append(f"programs can fetch tasks; see {run_folder(config) / 'agents'}")
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
            max_row_tokens=config.data.max_prompt_tokens + rollout.max_new_tokens,
        ),
        picker=find_picker(agent),
        concurrency=agent.concurrency,
        status_file=logs / f"rank_{rank}.agents",
    )
    return host, notes


def max_stop_tokens(rollout: RolloutConfig, ends: tuple[int, ...]) -> int | None:
    """Returns how many stop tokens a client may add to `ends`; None means any number."""
    most = ENGINES[rollout.engine].max_stop_tokens
    return None if most is None or not rollout.min_new_tokens else max(0, most - len(ends))


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
