"""A hub on loopback: repositories with commits and a main branch that can move."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Files = dict[str, bytes]


class FakeHub:
    """Serves what `snapshot_download` and `datasets` request, and records paths in `asked`.

    Main moves to the commit that `moves` has for a repository after the first request.
    """

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Files]] = {}
        self.main: dict[str, str] = {}
        self.asked: list[str] = []
        self.moves: dict[str, str] = {}

        hub = self

        class Handler(_Handler):
            def find(self) -> tuple[int, dict[str, str], bytes]:
                return hub.answer(self)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def commit(self, repository: str, files: Files, is_main: bool = True) -> str:
        """Adds a commit; a data set's repository begins with 'datasets/'."""
        text = b"".join(name.encode() + files[name] for name in sorted(files))
        sha = hashlib.sha1(repository.encode() + text).hexdigest()
        self.commits.setdefault(repository, {})[sha] = files
        if is_main:
            self.main[repository] = sha
        return sha

    def commit_folder(self, repository: str, folder: Path, is_main: bool = True) -> str:
        """Adds a commit of a folder's files."""
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        return self.commit(repository, files, is_main)

    def num_questions(self, repository: str) -> int:
        """Returns how often anybody asked which commit main is."""
        kind = repository if repository.startswith("datasets/") else f"models/{repository}"
        return self.asked.count(f"/api/{kind}/revision/main")

    def answer(self, request: _Handler) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and body."""
        path = unquote(urlsplit(request.path).path)
        self.asked.append(path)
        is_api = path.startswith("/api/")
        path = path.removeprefix("/api/").removeprefix("models/").lstrip("/")
        known = next((name for name in self.commits if path.startswith(f"{name}/")), None)
        if known is None:
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        what, revision, *rest = path.removeprefix(f"{known}/").split("/")
        commit = self.main[known] if revision == "main" else revision
        if revision == "main" and known in self.moves:
            self.main[known] = self.moves.pop(known)
        files = self.commits[known].get(commit)
        if files is None:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b""
        if not is_api:
            return _file(commit, files.get("/".join(rest)))
        entries = [_entry(name, content) for name, content in files.items()]
        if what == "revision":
            siblings = [{"rfilename": name} for name in files]
            found: object = {"id": known, "sha": commit, "siblings": siblings}
        elif what == "tree":
            found = entries
        else:  # paths-info
            wanted = parse_qs(request.body.decode()).get("paths", [])
            found = [entry for entry in entries if entry["path"] in wanted]
        return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    body = b""

    def find(self) -> tuple[int, dict[str, str], bytes]:
        raise NotImplementedError

    def reply(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, headers, content = self.find()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_GET = do_HEAD = do_POST = reply  # noqa: N815

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def _file(commit: str, content: bytes | None) -> tuple[int, dict[str, str], bytes]:
    if content is None:
        return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit}, b""
    digest = hashlib.sha1(content).hexdigest()
    return 200, {"ETag": f'"{digest}"', "X-Repo-Commit": commit}, content


def _entry(name: str, content: bytes) -> dict[str, object]:
    digest = hashlib.sha1(content).hexdigest()
    return {"type": "file", "path": name, "size": len(content), "oid": digest}


def settings(url: str, cache: Path) -> list[tuple[Any, str, Any]]:
    """Returns (module, name, value) to patch, because libraries read the environment only once."""
    import datasets.config
    from huggingface_hub import constants

    models = url + "/{repo_id}/resolve/{revision}/{filename}"
    data_sets = url + "/datasets/{repo_id}/resolve/{revision}/{path}"
    return [
        (constants, "ENDPOINT", url),
        (constants, "HUGGINGFACE_CO_URL_TEMPLATE", models),
        (constants, "HF_HUB_CACHE", str(cache / "hub")),
        (datasets.config, "HF_ENDPOINT", url),
        (datasets.config, "HUB_DATASETS_URL", data_sets),
        (datasets.config, "HF_DATASETS_CACHE", cache / "datasets"),
    ]


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Serves a hub as long as the block runs."""
    hub = FakeHub()
    thread = threading.Thread(target=hub.server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.server.shutdown()
        hub.server.server_close()
        thread.join()
