"""Notes on a model's chat template for runs with agents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hybridrl.agents.chat_template import ChatTemplate
from hybridrl.agents.template_check import template_notes
from hybridrl.agents.tool_formats import TurnReader
from hybridrl.config.schema import Config


def agent_notes(config: Config, tokenizer: Any, ends: Sequence[int]) -> Iterator[str]:
    """Yields what the user should know before agents are trained.

    Args:
        tokenizer: Tokenizer of the run.
        ends: Tokens that end a turn.

    Raises:
        UserError: `agent.tool_format` names no format.
    """
    if not config.agent.is_on:
        return
    if not getattr(tokenizer, "chat_template", None):  # not every TextEncoder has one
        yield "agents: the model has no chat template, so agents must send token ids"
        return
    template = ChatTemplate(tokenizer, ends, config.data.template_arguments)
    reader = TurnReader.for_template(template.source, config.agent.tool_format)
    for note in template_notes(template, reader):
        yield f"agents: {note}"
