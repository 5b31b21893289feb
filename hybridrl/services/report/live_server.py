"""Serves the report page on the loopback interface, and follows runs in progress.

It answers only requests whose Host is a loopback name, so that another site cannot read the page
through a domain name that resolves to this machine; it accepts no input except the path.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hybridrl.config.files import RUN_FILE
from hybridrl.errors import DataError, UserError
from hybridrl.services.report.html_page import content_security_policy, embedded, page, page_data

LOOPBACK = "127.0.0.1"
NAMES = (LOOPBACK, "localhost")
FOLLOWED = ("metrics.jsonl", "summary.json", "config.yaml", RUN_FILE)
FOLLOWED_PATTERNS = ("rollouts/step_*.jsonl", "traces/*.phases.json")


class LiveReport:
    """Response bodies, computed once for each state of the folders; DataError without metrics."""

    def __init__(
        self, folders: Sequence[Path], planned_gib: Sequence[Mapping[str, float]] = ()
    ) -> None:
        self._folders, self._planned_gib = folders, planned_gib
        self._lock = threading.Lock()
        self._tag, self._data = "", dict[str, Any]()
        self.newest()

    def newest(self) -> tuple[str, dict[str, Any]]:
        """Returns the folders' state as an ETag, and the page data for that state."""
        with self._lock:
            tag = self._state()
            if tag != self._tag:
                self._data = page_data(self._folders, self._planned_gib)
                self._tag = tag
            return self._tag, self._data

    def _state(self) -> str:
        found = []
        for folder in self._folders:
            paths = [folder / name for name in FOLLOWED]
            paths += [path for pattern in FOLLOWED_PATTERNS for path in folder.glob(pattern)]
            for path in sorted(paths):
                try:
                    about = path.stat()
                except OSError:  # the file is missing, or was deleted since it was listed
                    continue
                found.append((str(path), about.st_size, about.st_mtime_ns))
        return f'"{hashlib.sha256(repr(found).encode()).hexdigest()[:32]}"'


def make_server(report: LiveReport, port: int) -> ThreadingHTTPServer:
    """Returns a server on a loopback port, 0 for any; UserError if it cannot listen there."""

    class Handler(_Handler):
        live = report

    try:
        return ThreadingHTTPServer((LOOPBACK, port), Handler)
    except (OSError, OverflowError) as error:
        remedy = "Choose another port, or 0 for any free port."
        raise UserError("--port", f"{port} ({error})", "a free port", remedy) from error


class _Handler(BaseHTTPRequestHandler):
    live: LiveReport
    server_version, sys_version = "hybridrl", ""

    def do_GET(self) -> None:
        host = self.headers.get("Host", "")
        if host.partition(":")[0] not in NAMES:
            found = b"Use http://localhost or http://127.0.0.1 with this port.\n"
            self._answer(403, "text/plain", found)
        elif self.path not in ("/", "/data.json"):
            found = b"Not found. Available: / (the page) and /data.json (its data).\n"
            self._answer(404, "text/plain", found)
        else:
            try:
                tag, data = self.live.newest()
            except DataError as error:  # a folder was deleted, or its run is restarting
                self._answer(503, "text/plain", str(error).encode("utf-8", errors="replace"))
                return
            self._answer_with(tag, data)

    def _answer_with(self, tag: str, data: Mapping[str, Any]) -> None:
        if self.path == "/":
            self._answer(200, "text/html", page(data, tag))
        elif self.headers.get("If-None-Match") == tag:
            self._answer(304, "application/json", b"", tag)
        else:
            text = embedded(data).encode("utf-8", errors="backslashreplace")
            self._answer(200, "application/json", text, tag)

    def _answer(self, code: int, kind: str, body: bytes, tag: str = "") -> None:
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", content_security_policy(is_live=True))
        if tag:
            self.send_header("ETag", tag)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Logs nothing, because the page sends a request every few seconds."""
