"""`hybridrl serve`: an endpoint for agents over a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from hybridrl.cli.eval import evaluated_config, untrained_warning
from hybridrl.cli.options import (
    CheckpointFolder,
    Json,
    ModelSource,
    Overrides,
    World,
    json_only,
    refuse_other_job,
    torchrun_world,
)
from hybridrl.config.schema import Config
from hybridrl.console import say
from hybridrl.loop.preflight import validate_serving
from hybridrl.parallel.failure import is_launched
from hybridrl.services.launch.local_ranks import is_rank, launch_without_run
from hybridrl.services.launch.pinning import laid_out, with_commits

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def serve(
    source: ModelSource,
    overrides: Overrides = None,
    world: World = None,
    checkpoint: CheckpointFolder = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 for any free port.")] = 8000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="Further name that clients use for this host; may be repeated."),
    ] = None,
    tool_format: Annotated[
        str, typer.Option(help="Format of the model's tool calls; auto reads the chat template.")
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Serve a model with the APIs of OpenAI and Anthropic, to try an agent before and after
    training. An answer has at most rollout.max_new_tokens tokens, and messages and answer together
    data.max_prompt_tokens more.
    """
    refuse_other_job(world)
    given = overrides or []
    loaded, used = evaluated_config(source, given, checkpoint)
    loaded = with_commits(loaded)
    if is_rank():
        if not is_launched():
            validate_serving(loaded, torchrun_world(world), used)
        _serve_rank(loaded, used, host, port, tuple(allow_host or ()), tool_format, as_json)
        return
    loaded, laid, world_size = laid_out(loaded, world)
    validate_serving(loaded, world_size, used)
    if used is None and (warning := untrained_warning(loaded, source)):
        say(warning.replace("is evaluated", "is served"))
    if host not in LOOPBACK:
        needed = "They need the key, and the connection is not encrypted."
        say(f"WARNING: --host {host} lets other hosts send requests. {needed}")
    arguments = ["serve", str(source), *given, *laid, "--host", host, "--port", str(port)]
    arguments += ["--tool-format", tool_format]
    arguments += ["--checkpoint", str(checkpoint)] if checkpoint else []
    for name in allow_host or ():
        arguments += ["--allow-host", name]
    arguments += ["--json"] if as_json else []
    raise typer.Exit(launch_without_run(arguments, world_size))


def _serve_rank(
    config: Config,
    checkpoint: Path | None,
    host: str,
    port: int,
    names: tuple[str, ...],
    tool_format: str,
    as_json: bool,
) -> None:
    from hybridrl.loop.serve import Address, serve_rank

    with json_only(as_json) as emit:
        announce: Callable[[Mapping[str, Any]], None] = emit if as_json else _say
        serve_rank(config, checkpoint, Address(host, port, names), tool_format, announce)


def _say(found: Mapping[str, Any]) -> None:
    for note in found["notes"]:
        typer.echo(f"note: {note}", err=True)
    url, key = found["url"], found["key"]
    what = f" of {found['checkpoint']}" if found["checkpoint"] else ""
    lines = (
        f"serving {found['model']}{what}; stop with Ctrl-C",
        f"OPENAI_BASE_URL={url}/v1",
        f"OPENAI_API_KEY={key}",
        f"ANTHROPIC_BASE_URL={url}",
        f"ANTHROPIC_AUTH_TOKEN={key}",
    )
    typer.echo("\n".join(lines))
