"""Runs the ranks of `hybridrl serve`: an endpoint over a trained model.

Who waits for whom: the first rank of the first replica has the endpoint. Between engine steps it
sends new requests to the other ranks of its replica, which wait for it. The ranks of other replicas
only stay alive. The ranks run until a signal ends them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hybridrl.agents.backend import Arrivals, SamplingTerms, TurnQueue
from hybridrl.agents.chat_template import ChatTemplate
from hybridrl.agents.endpoint import Endpoint
from hybridrl.agents.samples import Budgets
from hybridrl.agents.sessions import Sessions
from hybridrl.agents.template_check import template_notes
from hybridrl.agents.tool_formats import TurnReader
from hybridrl.config.schema import Config
from hybridrl.data.end_tokens import end_tokens
from hybridrl.generation.agent_episodes import turn_request
from hybridrl.loop.agent_setup import max_stop_tokens
from hybridrl.loop.trainer import Trainer
from hybridrl.parallel.replica import ReplicaGroup
from hybridrl.rollout.engine import RolloutEngine, SamplingParams, request_seed
from hybridrl.rollout.registry import ENGINES

IDLE_S = 1.0  # longest wait for a request between messages to the other ranks of the replica
MAX_KEPT = 2000  # turns of the session that later requests can continue


@dataclass(frozen=True)
class Address:
    """Address of the endpoint. Port 0 is any free port; `names` are further names of this host."""

    host: str
    port: int
    names: tuple[str, ...] = ()


def serve_rank(
    config: Config,
    checkpoint: Path | None,
    address: Address,
    tool_format: str,
    announce: Callable[[Mapping[str, Any]], None],
) -> NoReturn:
    """Runs one rank of `hybridrl serve`. Raises UserError if the address or `tool_format` is wrong.

    Args:
        config: Configuration. Its layout may differ from that of the checkpoint's run.
        checkpoint: Checkpoint folder; None for the run's newest, or for the initial weights if it
            has none.
        tool_format: Name of the format of tool calls, or `auto`.
        announce: Function that receives `url`, `key`, `model`, `checkpoint` and `notes` when the
            endpoint listens; called on the rank that has it.
    """
    trainer = Trainer(config, trains=False)
    folder = trainer.store.newest() if checkpoint is None else checkpoint
    if folder is not None:
        trainer.load_checkpoint(folder)
    trainer.reshard()
    layout, world = trainer.sampler.layout, trainer.world
    replica = ReplicaGroup(layout, world.rank, world.heartbeat)
    place, queue = layout.assignment[world.rank], None
    with world.all_agree("starting the endpoint for agents"):
        if place == (0, 0):
            queue, endpoint, key, notes = _opened(trainer, address, tool_format)
            model = trainer.config.model.path or trainer.config.model.init
            found = {"url": endpoint.url, "key": key, "model": model, "notes": notes}
            announce({**found, "checkpoint": None if folder is None else str(folder)})
    if place is None or place[0]:
        while True:
            time.sleep(IDLE_S)
    sampling, seed = trainer.sampler.sampling, trainer.config.run.seed
    answer_forever(trainer.engine, replica, queue, sampling, seed)


def answer_forever(
    engine: RolloutEngine,
    replica: ReplicaGroup,
    queue: TurnQueue | None,
    sampling: SamplingParams,
    seed: int,
) -> NoReturn:
    """Samples the turns of a queue, on a replica's first rank; all its ranks call it together."""
    while True:
        arrivals = Arrivals()
        if queue is not None:
            if not engine.has_unfinished:
                queue.wait(IDLE_S)
            arrivals = queue.take()
        arrivals = replica.broadcast_object(arrivals)
        if arrivals.aborted:
            left = [one for one in engine.pending() if one.request_id not in arrivals.aborted]
            engine.clear()  # drops no completion, because all were collected after the last step
            engine.submit(left)
        turns = arrivals.requests
        seeds = [request_seed(seed, 0, turn.sample_key, turn.turn) for turn in turns]
        engine.submit([turn_request(turn, sampling, seeds[i]) for i, turn in enumerate(turns)])
        if engine.has_unfinished:
            engine.step()
        done = engine.collect()
        if queue is not None:
            queue.finish(done)


def _opened(
    trainer: Trainer, address: Address, tool_format: str
) -> tuple[TurnQueue, Endpoint, str, list[str]]:
    """Returns the queue, the listening endpoint, the key for clients, and notes for the user."""
    config, tokenizer = trainer.config, trainer.tokenizer
    ends = end_tokens(config.model, trainer.source.hf_config, tokenizer)
    rollout, traits = config.rollout, ENGINES[config.rollout.engine]
    template, notes = None, ["the model has no chat template, so it answers only token ids"]
    reader = TurnReader.for_template("", tool_format)
    if getattr(tokenizer, "chat_template", None):
        arguments = config.data.template_arguments
        template = ChatTemplate(tokenizer, ends, arguments, trainer.images)
        reader = TurnReader.for_template(template.source, tool_format)
        notes = template_notes(template, reader)
    terms = SamplingTerms(
        temperature=rollout.temperature,
        max_context=config.longest_request(),
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        may_differ=True,
        takes_stop_strings=traits.ends_by_text,
        lowest_temperature=traits.lowest_temperature,
        max_stop_tokens=max_stop_tokens(rollout, ends),
    )
    queue, sessions = TurnQueue(terms), Sessions(terms.max_context, template)
    endpoint = Endpoint(
        sessions,
        queue,
        tokenizer,
        vocab_size=trainer.source.shape.vocab_size,
        host=address.host,
        port=address.port,
        reader=reader,
        allowed_hosts=address.names,
    ).start()
    budgets = Budgets(max_turn_tokens=rollout.max_new_tokens)
    session = sessions.open(0, budgets=budgets, max_kept=MAX_KEPT)
    return queue, endpoint, session.token, notes
