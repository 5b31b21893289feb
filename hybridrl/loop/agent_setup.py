"""Builds the endpoint and the runner of agents on the first rank of each replica. Collective."""

from __future__ import annotations

import copy
import ipaddress
from collections.abc import Callable
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from hybridrl.agents.backend import SamplingTerms
from hybridrl.agents.host_pool import HostPool, num_processes
from hybridrl.agents.host_process import CannotMove, HostProcess
from hybridrl.agents.host_settings import HostSettings, make_host
from hybridrl.agents.tasks import take_token
from hybridrl.config.agent import AgentConfig
from hybridrl.config.identity import run_folder
from hybridrl.config.rollout import RolloutConfig
from hybridrl.config.schema import Config
from hybridrl.data.images import ImageTokens
from hybridrl.errors import UserError, error_text
from hybridrl.generation.agent_episodes import LONGEST_WAIT_S, SHORT_WAIT_S, AgentEpisodes, Host
from hybridrl.parallel.groups import World
from hybridrl.parallel.host_cores import cores_of_rank
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.rollout.registry import ENGINES


def make_agent_episodes(
    config: Config,
    world: World,
    replica: ReplicaGroup,
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[int, ...],
    vocab_size: int,
    images: ImageTokens | None,
    needs_report: bool,
    notify: Callable[[str], None],
) -> AgentEpisodes:
    """Starts the endpoint of this rank's replica and builds the object that runs agents.

    Each of the tokens `ends` ends a turn. With `needs_report`, agents must report a reward. Raises
    UserError on all ranks if a value of the section `agent` is wrong, or the endpoint cannot
    listen.
    """
    with world.all_agree("starting the endpoint for agents") as agreement:
        host = None
        check_hosts(config.agent, world.num_hosts)
        if replica.is_first:
            settings = _settings(config, world.rank, replica, tokenizer, ends, vocab_size, images)
            num_cores = cores_of_rank(len(world.host_ranks))
            host, agreement.value = _host(settings, num_processes(config.agent, num_cores))
        elif config.agent.server:
            take_token()
    for note in next((notes for notes in agreement.values if notes), ()):
        notify(f"agents: {note}")
    # With a lag, other replicas wait for this one every few engine steps.
    waits_s = SHORT_WAIT_S if config.steps.max_policy_lag else LONGEST_WAIT_S
    return AgentEpisodes(replica, host, config.run.seed, waits_s, needs_report, images)


def check_hosts(agent: AgentConfig, num_hosts: int) -> None:
    """Raises UserError if several hosts' endpoints for outside programs are on loopback."""
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


def _host(settings: HostSettings, num_processes: int) -> tuple[Host, list[str]]:
    host: HostProcess | HostPool
    try:
        if num_processes == 1:
            host = HostProcess(settings)
        else:
            host = HostPool.start(settings, num_processes)
    except CannotMove as error:
        found, notes = make_host(replace(settings, tokenizer=_copied(settings.tokenizer, error)))
        note = "the endpoint slows the engine, because it runs in the same process: the tokenizer "
        return found, [*notes, f"{note}cannot be sent to another process ({error})"]
    return host, list(host.notes)


def _copied(tokenizer: PreTrainedTokenizerBase, obstacle: CannotMove) -> PreTrainedTokenizerBase:
    """Returns a copy of the tokenizer for the endpoint in this process, or raises UserError."""
    try:
        return copy.deepcopy(tokenizer)
    except Exception as error:  # a user's tokenizer may raise anything
        kind = type(tokenizer).__name__
        raise UserError(
            "model.tokenizer",
            f"a {kind} that can be neither pickled ({obstacle}) nor copied ({error_text(error)})",
            "with agents, a tokenizer that pickle.dumps or copy.deepcopy supports",
            "Make it picklable: its attributes must not hold functions, locks or open files.",
        ) from error


def _settings(
    config: Config,
    rank: int,
    group: ReplicaGroup,
    tokenizer: PreTrainedTokenizerBase,
    ends: tuple[int, ...],
    vocab_size: int,
    images: ImageTokens | None,
) -> HostSettings:
    rollout = config.rollout
    assert group.number is not None
    return HostSettings(
        agent=config.agent,
        tokenizer=tokenizer,
        ends=ends,
        vocab_size=vocab_size,
        terms=SamplingTerms(
            temperature=rollout.temperature,
            max_context=config.longest_request(),
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            takes_stop_strings=ENGINES[rollout.engine].ends_by_text,
            max_stop_tokens=max_stop_tokens(rollout, ends),
        ),
        max_row_tokens=config.data.max_prompt_tokens + rollout.max_new_tokens,
        template_arguments=config.data.template_arguments,
        run_folder=run_folder(config),
        images=images,
        rank=rank,
        replica=group.number,
        num_replicas=group.num_replicas,
        task_token=take_token() if config.agent.server else None,
    )


def max_stop_tokens(rollout: RolloutConfig, ends: tuple[int, ...]) -> int | None:
    """Returns how many stop tokens a client may add to `ends`; None for any number."""
    most = ENGINES[rollout.engine].max_stop_tokens
    return None if most is None or not rollout.min_new_tokens else max(0, most - len(ends))
