"""Requests, clients and programs that mean harm: none reaches the model, ends it or delays others.

Run: pytest tests/front/serve/test_hostile.py
"""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch

from tests import front_server
from tests.front.serve.conftest import LIMIT_S, TEMPLATE, Serve, Served, wait_until
from tests.ports import free_port

pytestmark = pytest.mark.slow
CHAT = "/v1/chat/completions"
LOOP = (
    "{% if messages[0]['content'] == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor"
    " %}{% endfor %}{% endif %}"
)


def raw(served: Served, text: str | bytes) -> bytes:
    """What a connection answers to bytes that no client library would send."""
    data = text.encode("latin-1") if isinstance(text, str) else text
    with socket.create_connection(served.address, timeout=LIMIT_S) as connection:
        connection.sendall(data)
        answer = b""
        while part := connection.recv(65_536):
            answer += part
        return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    return error


def get(served: Served, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers)
    return raw(served, f"GET /v1/models HTTP/1.1\r\n{lines}connection: close\r\n\r\n")


def post_raw(served: Served, body: bytes, kind: str = "application/json") -> bytes:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: {kind}\r\ncontent-length:"
        f" {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return raw(served, head.encode() + body)


@pytest.fixture
def watched(server: Served) -> Iterator[Served]:
    """A server whose model's process must outlive the test, and answer after it."""
    before = server.task().pid
    yield server
    assert server.post(max_tokens=2).status == 200
    assert server.task().pid == before


# ---- the port


def test_until_the_model_is_loaded_requests_get_503_and_afterwards_answers(
    own_cache: None, endless: Path
) -> None:
    port = free_port()
    command = [sys.executable, "-m", "unisono", "serve", str(endless), "--port", str(port), "--json"]
    process = front_server.start(command, text=True)
    served = Served(process, f"http://127.0.0.1:{port}", str(endless))
    try:
        wait_until(lambda: can_connect(port))
        first = get(served, "host: 127.0.0.1")
        assert status_of(first) == 503
        assert error_of(first)["code"] == "loading"
        assert b"retry-after: " in first
        assert (
            status_of(raw(served, "GET /nothing HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n"))
            == 503
        )
        wait_until(lambda: status_of(get(served, "host: 127.0.0.1")) == 200)
    finally:
        process.kill()
        process.wait(LIMIT_S)


def can_connect(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("command", ["serve", "board"])
def test_a_port_that_is_taken_ends_a_server_at_once_with_its_holder(
    command: str, own_cache: None, tmp_path: Path, endless: Path
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("0.0.0.0", 0))
        other.listen()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "metrics.jsonl").touch()
        target = endless if command == "serve" else tmp_path / "run"
        words = [sys.executable, "-m", "unisono", command, str(target), "--port", str(other.getsockname()[1])]
        done = front_server.run(words, timeout=LIMIT_S)
    assert done.returncode == 2
    assert f"taken by process {psutil.Process().pid}" in done.stderr
    assert "serving" not in done.stdout
    assert "Traceback" not in done.stderr


def test_a_second_server_on_the_port_names_the_first(server: Served) -> None:
    words = [sys.executable, "-m", "unisono", "serve", server.model, "--port", str(server.address[1])]
    done = front_server.run(words, timeout=LIMIT_S)
    assert done.returncode == 2
    assert f"taken by process {server.process.pid}" in done.stderr
    assert "loading" not in done.stderr


def test_program_bound_to_the_port_cannot_take_it_while_the_model_loads(
    own_cache: None, endless: Path
) -> None:
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        thief.bind(("127.0.0.1", 0))
        port = thief.getsockname()[1]
        command = [sys.executable, "-m", "unisono", "serve", str(endless), "--port", str(port)]
        process = front_server.start(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            assert process.stderr is not None
            assert process.stdout is not None
            assert "looking for" in process.stderr.readline()
            with pytest.raises(OSError, match="in use"):
                thief.listen()
            assert process.stdout.readline().startswith("serving ")
        finally:
            process.kill()
            process.communicate(timeout=LIMIT_S)


# ---- numbers


@pytest.mark.parametrize(
    "numbers",
    [
        {"temperature": 5e-324}, {"temperature": 1e-300}, {"temperature": 1e-10}, {"temperature": -0.0}, {"temperature": 1e-30, "top_k": 1},
        {"repetition_penalty": 1e-300}, {"repetition_penalty": 5e-324}, {"repetition_penalty": 1e-38}, {"repetition_penalty": 0.01},
        {"repetition_penalty": 100.0}, {"temperature": 5e-324, "repetition_penalty": 0.01}, {"top_p": 5e-324, "temperature": 2.0},
        {"top_k": 2**31}, {"top_k": 2**70, "temperature": 1}, {"seed": 2**63}, {"seed": -(2**63), "temperature": 1}, {"seed": 10**4000, "temperature": 1},
        {"max_tokens": 2**62}, {"max_tokens": 10**400}, {"stop": "x" * 1_000_000}, {"stop": ["\0"]}, {"top_p": 10**400}, {"prompt": [2**70]}, {"prompt": [-1]},
    ],
    ids=str,
)  # fmt: skip
def test_no_number_ends_the_model(watched: Served, numbers: dict[str, Any]) -> None:
    reply = watched.post(**({"max_tokens": 3} | numbers))
    assert reply.status in (200, 400)
    if reply.status == 400:
        assert reply.body["error"]["param"] in numbers


def test_the_smallest_temperature_is_the_most_likely_token(watched: Served) -> None:
    wanted = watched.post(max_tokens=12, temperature=0).body["choices"][0]["text"]
    assert watched.post(max_tokens=12, temperature=5e-324).body["choices"][0]["text"] == wanted


def test_logits_that_are_not_finite_fail_their_request_and_no_other(
    serve: Serve, endless: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(endless, tmp_path / "broken")
    weights = safetensors.torch.load_file(broken / "model.safetensors")
    weights["model.norm.weight"].fill_(3e38)  # finite, and what it multiplies is not
    safetensors.torch.save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    served = serve(broken)
    task = served.task().pid
    for temperature in (0, 1):
        reply = served.post(max_tokens=3, temperature=temperature)
        assert (reply.status, reply.body["error"]["code"]) == (500, "model_error")
        assert "finite" in reply.body["error"]["message"]
        assert ".py:" not in reply.body["error"]["message"], "files of the server are the operator's alone"
    assert served.task().pid == task
    assert served.end() == 0
    printed = served.process.stderr.read() if served.process.stderr else ""
    assert "a request failed" in printed


# ---- what is sent


@pytest.mark.parametrize(
    "host",
    ["", "a{b}.evil.com", "127.0.0.1@evil.com", "[::1", "127.0.0.1:x", "local host", "a\xff", "127.0.0.1:123456", "http://127.0.0.1", "x" * 300],
)  # fmt: skip
def test_a_host_that_cannot_be_parsed_is_refused(watched: Served, host: str) -> None:
    assert status_of(get(watched, f"host: {host}")) == 400


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://[", 400), ("http://[::1", 400), ("http://127.0.0.1:99999999", 400), ("\xff", 400), ("localhost", 400), ("http://localhost/x", 400),
        ("null", 403), ("http://evil.com", 403), ("file://localhost", 403), ("http://localhost.evil.com", 403), ("http://localhost:3000", 200),
    ],
)  # fmt: skip
def test_an_origin_that_is_not_this_machine_is_refused(watched: Served, origin: str, status: int) -> None:
    assert status_of(get(watched, "host: 127.0.0.1", f"origin: {origin}")) == status


@pytest.mark.parametrize(
    "kind",
    ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", "text/json"],
)
def test_a_page_on_another_port_cannot_send_a_request_without_asking(watched: Served, kind: str) -> None:
    body = json.dumps({"model": watched.model, "messages": [{"role": "user", "content": "x"}]}).encode()
    answer = post_raw(watched, body, kind)
    assert status_of(answer) == 415
    assert error_of(answer)["code"] == "content_type"


SURROGATE = '"\\ud800"'


@pytest.mark.parametrize(
    "message",
    [
        f'{{"role": "user", "content": {SURROGATE}}}', f'{{"role": "user", "content": [{{"type": "text", "text": {SURROGATE}}}]}}',
        f'{{"role": "user", "content": "x", {SURROGATE}: 1}}', f'{{"role": "user", "content": "x", "name": {SURROGATE}}}',
        '{"role": "user", "content": "x", "y": NaN}', '{"role": "user", "content": "x", "y": 1e999}',
        '{"role": "user", "content": "x", "y": ' + "[" * 990 + "]" * 990 + "}", '{"role": "user", "content": "x", "y": ' + "[" * 99_999 + "]" * 99_999 + "}",
    ],
    ids=["content", "part", "key", "name", "nan", "infinity", "deep", "deeper"],
)  # fmt: skip
def test_json_that_cannot_be_passed_on_is_refused(watched: Served, message: str) -> None:
    answer = post_raw(
        watched, f'{{"model": "{watched.model}", "max_tokens": 2, "messages": [{message}]}}'.encode()
    )
    assert status_of(answer) == 400
    assert error_of(answer)["code"] == "invalid_json"


def test_bytes_that_are_not_utf_8_are_refused(watched: Served) -> None:
    for body in (b'{"model": "\xff"}', b'{"model": "\xed\xa0\x80"}', "{}".encode("utf-16")):
        assert status_of(post_raw(watched, body)) == 400


# ---- what takes long


class Listening:
    """Reads a stream in a thread, and notes when its events come."""

    def __init__(self, served: Served) -> None:
        self._events = served.stream(max_tokens=8000).events()
        next(self._events)
        self.times = [time.monotonic()]
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(OSError):  # the test has ended, and closed the connection
            for event in self._events:
                if "choices" not in event:
                    return
                self.times.append(time.monotonic())

    def longest_gap_s(self, since: float, until: float) -> float:
        times = [since, *(moment for moment in list(self.times) if since < moment < until), until]
        return max(later - earlier for earlier, later in pairwise(times))


def test_a_prompt_of_15_megabytes_is_refused_and_delays_no_stream(watched: Served) -> None:
    listening, since = Listening(watched), time.monotonic()
    for path, prompt in (
        ("/v1/completions", {"prompt": "ab " * 5_000_000}),
        (CHAT, {"messages": [{"role": "user", "content": "ab " * 5_000_000}]}),
    ):
        status, body = post_json(watched, path, {"model": watched.model, "max_tokens": 1, **prompt})
        assert status == 413
        assert body["error"]["code"] == "context_length_exceeded"
    until = time.monotonic()
    assert until - since < 20.0, "it took 35 s to encode"
    assert listening.longest_gap_s(since, until) < 5.0


def post_json(served: Served, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection(*served.address, timeout=LIMIT_S)
    try:
        connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def test_a_template_that_never_ends_for_a_conversation_delays_no_stream(
    serve: Serve, endless: Path, tmp_path: Path
) -> None:
    model = shutil.copytree(endless, tmp_path / "model")
    (model / "chat_template.jinja").write_text(LOOP + TEMPLATE)
    served = serve(model)
    listening, since = Listening(served), time.monotonic()
    message = {"role": "user", "content": "loop"}
    status, body = post_json(served, CHAT, {"model": served.model, "max_tokens": 1, "messages": [message]})
    assert status == 400
    assert "does not terminate" in body["error"]["message"]
    assert listening.longest_gap_s(since, time.monotonic()) < 5.0
    message["content"] = "what"
    status, body = post_json(served, CHAT, {"model": served.model, "max_tokens": 1, "messages": [message]})
    assert status == 200


def test_a_reader_of_prompts_that_dies_is_replaced(watched: Served) -> None:
    (reader,) = watched.task().children()
    reader.kill()
    wait_until(lambda: reader.status() == psutil.STATUS_ZOMBIE)
    assert watched.post(max_tokens=2).status == 200
    assert watched.task().children()[0].pid != reader.pid


# ---- connections


def test_600_connections_that_are_half_open_delay_nobody(watched: Served) -> None:
    for _ in range(600):
        watched.connect("POST /v1/completions HTTP/1.1\r\nhost: 127")
    since = time.monotonic()
    assert watched.post(max_tokens=2).status == 200
    assert time.monotonic() - since < 5.0


def test_a_head_that_comes_a_byte_at_a_time_is_dropped(watched: Served) -> None:
    slow = watched.connect("GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ")
    slow.settimeout(0.5)
    since = time.monotonic()
    is_open = True
    while is_open and time.monotonic() - since < 30.0:
        try:
            slow.sendall(b"a")
            is_open = bool(slow.recv(1))
        except TimeoutError:
            continue
        except OSError:
            is_open = False
    assert not is_open
