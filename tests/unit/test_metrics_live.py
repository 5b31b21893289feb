"""The report as it is served: to this machine, and with what is new."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hybridrl.errors import UserError
from hybridrl.metrics.sinks import JsonlSink
from hybridrl.services.report.live_server import LiveReport, make_server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write(tmp_path / "run", 1)
    return tmp_path / "run"


def write(folder: Path, step: int) -> None:
    sink = JsonlSink(folder / "metrics.jsonl", last_step=step - 1)
    sink.write(step, {"policy/loss": 0.5 * step})
    sink.close()


@pytest.fixture
def port(run: Path) -> Iterator[int]:
    with make_server(LiveReport([run]), 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def ask(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, dict(answer.getheaders()), answer.read()
    connection.close()
    return found


def steps(body: bytes) -> list[int]:
    data: dict[str, Any] = json.loads(body)
    return data["runs"][0]["steps"]


def test_data_follow_the_run(run: Path, port: int) -> None:
    code, headers, body = ask(port, "/data.json")
    assert code == 200 and steps(body) == [1]
    known = {"If-None-Match": headers["ETag"]}
    assert ask(port, "/data.json", **known)[::2] == (304, b"")
    write(run, 2)
    code, _, body = ask(port, "/data.json", **known)
    assert code == 200 and steps(body) == [1, 2]
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step_000002.jsonl").write_text('{"prompt": "p"}\n')
    assert len(json.loads(ask(port, "/data.json")[2])["runs"][0]["samples"]) == 1


def test_page_may_ask_its_own_server_only(port: int) -> None:
    code, headers, body = ask(port, "/")
    assert code == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    policy = headers["Content-Security-Policy"]
    assert policy.startswith("default-src 'none';") and policy.endswith("connect-src 'self'")
    tag = ask(port, "/data.json")[1]["ETag"]
    assert f'"tag":{json.dumps(tag)}'.encode() in body


@pytest.mark.parametrize("host", ["example.org", "127.0.0.1.example.org", "", "[::1]:80"])
def test_other_names_of_this_machine_are_refused(port: int, host: str) -> None:
    for path in ("/", "/data.json"):
        code, _, body = ask(port, path, Host=host)
        assert code == 403 and b"policy/loss" not in body


def test_a_port_that_is_taken_is_a_users_error(run: Path, port: int) -> None:
    for wrong in (port, 70000):
        with pytest.raises(UserError, match="--port"):
            make_server(LiveReport([run]), wrong)
