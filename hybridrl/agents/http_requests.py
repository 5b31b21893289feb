"""Reads HTTP requests of agents. Does not import torch."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from hybridrl.agents.conversation import BadRequest
from hybridrl.config.files import parse_json
from hybridrl.errors import error_text


async def json_body(request: web.Request) -> tuple[dict[str, Any], bytes]:
    """Returns a request's body as JSON, and its bytes. Raises BadRequest unless it is an object."""
    try:
        raw = await request.read()
    except web.RequestPayloadError as error:  # such as wrong compression
        raise BadRequest(f"The body cannot be read: {error_text(error, 200)}") from error
    try:
        body = parse_json(raw)
    except ValueError as error:
        raise BadRequest(f"The body is not valid JSON: {error_text(error)}") from error
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body, raw


def bearer_token(request: web.Request) -> str | None:
    kind, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if kind.lower() == "bearer" else None


def host_name(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()
