"""The HTTP scorer against a server on the loopback that behaves well, badly, or not at all."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from hybridrl.rewards.remote import Remote, RemoteError

Answer = Callable[[BaseHTTPRequestHandler, dict], None]


class Server:
    """What it was asked, and how it answers."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.headers: list[dict] = []
        self.answer: Answer = reply({"reward": 0.5})
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                outer.headers.append(dict(self.headers))
                outer.answer(self, body)

            def log_message(self, *arguments: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/score?v=1"


def reply(content: object, status: int = 200) -> Answer:
    def answer(handler: BaseHTTPRequestHandler, body: dict) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(data)

    return answer


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.http.serve_forever, daemon=True).start()
    yield made
    made.http.shutdown()
    made.http.server_close()


def ask(server: Server, **options: object) -> float:
    options = {"wait_s": 0.01, "attempt_s": 0.5, **options}
    return Remote(server.url, **options)("1+1=", "2", {"answer": "2"})  # type: ignore[arg-type]


def test_a_sample_is_posted_and_its_score_returned(server):
    assert ask(server, headers={"Authorization": "key"}) == 0.5
    assert server.asked == [{"prompt": "1+1=", "response": "2", "columns": {"answer": "2"}}]
    assert server.headers[0]["Authorization"] == "key"
    server.answer = reply({"score": 2})
    assert ask(server, reward_key="score") == 2


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_a_server_with_a_certificate_is_asked_over_tls(server, tmp_path, monkeypatch):
    pair, key = tmp_path / "pair.pem", tmp_path / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost"
    command += f" -addext subjectAltName=DNS:localhost -keyout {key} -out {pair}"
    subprocess.run(command.split(), check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair, key)
    server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
    server.url = f"https://localhost:{server.http.server_port}/score"
    with pytest.raises(RemoteError, match="CERTIFICATE_VERIFY_FAILED"):
        ask(server, retries=0, attempt_s=10)
    monkeypatch.setenv("SSL_CERT_FILE", str(pair))
    assert ask(server, attempt_s=10) == 0.5


def test_what_may_pass_is_tried_again(server):
    def answer(handler, body):
        code = {1: 503, 2: 429}.get(len(server.asked), 200)
        reply({"reward": 1.0}, code)(handler, body)

    server.answer = answer
    assert ask(server) == 1.0
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("content", "status", "said", "attempts"),
    [
        ({"reward": 1}, 500, "no score in 3 attempts, the last: status 500", 3),
        ({"error": "who are you"}, 403, "status 403", 1),
        (b"<html>", 200, "answer is not JSON: b'<html>'", 1),
        ({"score": 1}, 200, "has no number as 'reward'", 1),
        ({"reward": "1"}, 200, "has no number", 1),
        ({"reward": True}, 200, "has no number", 1),
        ({"reward": None}, 200, "has no number", 1),
        ([1], 200, "has no number", 1),
        (b'{"reward": Infinity}', 200, "not finite", 1),
        (b'{"reward": NaN}', 200, "not finite", 1),
        (b'{"reward": 1, "x": "' + b"y" * (2 << 20) + b'"}', 200, "answer is not JSON", 1),
    ],
)
def test_an_answer_against_the_schema_is_an_error(server, content, status, said, attempts):
    server.answer = reply(content, status)
    with pytest.raises(RemoteError, match=said):
        ask(server, retries=2)
    assert len(server.asked) == attempts


def drips_head(handler: BaseHTTPRequestHandler, body: dict) -> None:
    for letter in "HTTP/1.0 200 OK\r\nA: " + "b" * 100:
        handler.wfile.write(letter.encode())
        time.sleep(0.1)


def drips_body(handler: BaseHTTPRequestHandler, body: dict) -> None:
    handler.send_response(200)
    handler.end_headers()
    for letter in '{"reward": 1' + " " * 100 + "}":
        handler.wfile.write(letter.encode())
        time.sleep(0.1)


@pytest.mark.parametrize(
    "answer",
    [lambda handler, body: time.sleep(3), drips_head, drips_body],
    ids=["silent", "head", "body"],
)
def test_no_attempt_outlasts_its_limit(server, answer):
    server.answer = answer
    began = time.monotonic()
    with pytest.raises(RemoteError, match="2 attempts, the last: .*[tT]ime"):
        ask(server, retries=1, attempt_s=0.3)
    assert time.monotonic() - began < 2.5  # 3 s for each answer otherwise


def remote_threads() -> int:
    return sum(thread.name == "reward remote" for thread in threading.enumerate())


@pytest.mark.parametrize("answer", [drips_head, drips_body], ids=["head", "body"])
def test_threads_of_late_attempts_end(server, answer):
    # The server would keep each of them for 10 s.
    server.answer = answer
    with pytest.raises(RemoteError, match="2 attempts"):
        ask(server, retries=1, attempt_s=0.3)
    ends = time.monotonic() + 3
    while remote_threads() and time.monotonic() < ends:
        time.sleep(0.02)
    assert remote_threads() == 0


def test_a_late_attempt_sends_nothing(server, monkeypatch):
    resolve = socket.getaddrinfo

    def slow(*arguments, **more):
        time.sleep(0.6)
        return resolve(*arguments, **more)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with pytest.raises(RemoteError, match="2 attempts"):
        ask(server, retries=1, attempt_s=0.2)
    ends = time.monotonic() + 3
    while remote_threads() and time.monotonic() < ends:
        time.sleep(0.02)
    assert remote_threads() == 0 and server.asked == []


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[int]:
    """A port that takes connections and sends this, byte by byte, and then nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def drip(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                for byte in answer:
                    connection.sendall(bytes([byte]))
                    time.sleep(0.05)
                connection.recv(1 << 20)
                time.sleep(5)

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    threading.Thread(target=drip, args=(connection,), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


# A TLS record of 16 KiB, of which the server sends the head and, slowly, some bytes.
RECORD = b"\x16\x03\x03\x40\x00" + b"\x02" * 60


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("answer", [b"", RECORD], ids=["silent", "drips"])
def test_no_handshake_outlasts_the_limit_and_no_thread_stays(scheme, answer):
    with listening(answer) as port:
        began = time.monotonic()
        remote = Remote(f"{scheme}://127.0.0.1:{port}/", retries=1, wait_s=0.01, attempt_s=0.4)
        with pytest.raises(RemoteError, match="2 attempts, the last: .*[tT]ime"):
            remote("", "", {})
        assert time.monotonic() - began < 4  # 5 s for each answer otherwise
        until = time.monotonic() + 5
        while remote_threads() and time.monotonic() < until:
            time.sleep(0.05)
        assert remote_threads() == 0
