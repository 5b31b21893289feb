"""The section `agent`: programs that the policy plays through an HTTP endpoint. No torch."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from hybridrl.config.section import Section

# Knobs that do not change which samples a run generates.
NOT_IDENTITY = {
    *("concurrency", "workers", "python", "timeout_s", "lease_s", "host", "port", "log_steps"),
    *("server", "env", "sandbox"),
}
REWARD = "agent"
"""Reward function that returns the reward that the agent reported."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
ROWS = ("all", "last", "longest")
OWNERS = "command, function or server"


class AgentConfig(Section):
    """Agents: programs with their own loop and tools, which call the policy over the OpenAI or Anthropic API. Set one of command, function and server. reward.on_error decides what happens when an agent fails."""

    command: str | list[str] | None = None
    """Program that is started for each response: a list of arguments, or one text for /bin/sh. It finds the endpoint in OPENAI_BASE_URL and OPENAI_API_KEY (or ANTHROPIC_BASE_URL and ANTHROPIC_AUTH_TOKEN), and its task in the JSON file that HYBRIDRL_TASK names. By default there is no program."""
    function: str | None = None
    """Async function 'package.module:function' that is called for each response in a worker process. By default there is none."""
    python: str | None = None
    """Python interpreter of the environment in which the function runs, such as /opt/verifiers/bin/python. The environment needs Python 3.11 and the packages that the function imports, but neither hybridrl nor torch. By default the function runs in the environment of the run."""
    server: bool = False
    """Whether programs outside of the run play the episodes. They fetch tasks over HTTP from the endpoint and report results; their addresses and tokens are in the folder agents of the run. The default is false."""
    options: dict[str, Any] = {}
    """Keyword arguments of the function. By default the function's own defaults apply."""
    env: dict[str, str] = {}
    """Additional environment variables of the program. Programs inherit only PATH, the locale and similar variables, so that they see no secrets. By default there are none."""
    concurrency: int = Field(64, ge=1)
    """Maximum number of agents that run at the same time on an engine replica. The default, 64, keeps an engine busy while most agents wait for the policy."""
    workers: int = Field(1, ge=1)
    """Number of processes per engine replica in which a function runs. The default, 1, is enough if the function mostly waits."""
    timeout_s: float = Field(600.0, gt=0)
    """Time limit of one agent, in seconds. Time while the engine sleeps because the policy trains does not count. The default, 600, ends agents that hang without ending slow ones."""
    max_turns: int | None = Field(100, ge=1)
    """Maximum number of requests of one agent; null means no limit. The default, 100, ends agents that repeat themselves."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Maximum number of sampled tokens in one turn. By default a turn may use the rest of the context, which is data.max_prompt_tokens + rollout.max_new_tokens."""
    max_sampled_tokens: int | None = Field(None, ge=1)
    """Maximum number of sampled tokens in all conversations of one agent. By default there is no limit besides max_turns and the context."""
    rows: str = "all"
    """Conversations on which the policy trains: 'all', 'last', 'longest', or 'package.module:function' for your own choice. The default is 'all', because subagents and earlier parts of a compacted conversation also earned the reward."""
    reward_sees: Literal["last_turn", "response"] = "last_turn"
    """Part of the last conversation that reward functions receive: 'last_turn' is the text of the last turn; 'response' is everything after the first prompt. The default is 'last_turn', so that a tool's result is never mistaken for an answer."""
    tool_format: str = "auto"
    """Format of the model's tool calls, such as hermes. The default, 'auto', is the format that the chat template shows."""
    lease_s: float = Field(60.0, gt=0)
    """Number of seconds after which a task is given to another program, and its episode begins again, if the program that fetched it is not heard of. The default, 60, is long enough for pauses of a busy host."""
    port: int = Field(0, ge=0, le=65535)
    """Port of the endpoint. Replica N of the engine uses port + N. The default, 0, uses any free port."""
    host: str = "127.0.0.1"
    """Address on which the endpoint listens. The default, 127.0.0.1, can be reached only from the same host."""
    sandbox: Literal["none", "bubblewrap"] = "none"
    """Isolation of the program: 'bubblewrap' makes all files except its working folder read-only and hides other processes; it needs the program bwrap. The default is 'none', because bwrap is rarely installed; programs then have the rights of the run."""
    log_steps: int = Field(10, ge=0)
    """Number of steps for which the output of the agents stays in logs/agents of the run folder. The default, 10, limits the number of files."""

    @property
    def is_on(self) -> bool:
        return self.command is not None or self.function is not None or self.server

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if [self.command is not None, self.function is not None, self.server].count(True) > 1:
            raise ValueError("command, function, server: only one of them")
        if self.command is not None and not self.command:
            raise ValueError("command: at least one word")
        if not self.is_on:
            for name, field in AgentConfig.model_fields.items():
                if getattr(self, name) != field.get_default():
                    raise ValueError(f"{name}: no value unless agent.{OWNERS} is set")
        owners = {"python": "function", "options": "function", "workers": "function"}
        for name, owner in {**owners, "env": "command", "lease_s": "server"}.items():
            field = AgentConfig.model_fields[name]
            if not getattr(self, owner) and getattr(self, name) != field.get_default():
                raise ValueError(f"{name}: no value unless agent.{owner} is set")
        if self.sandbox != "none" and self.command is None:
            raise ValueError("sandbox: none unless agent.command is set")
        if self.rows not in ROWS and ":" not in self.rows:
            raise ValueError(f"rows: {', '.join(ROWS)} or package.module:function")
        return self
