"""What the board's server answers, and whom.

Run: .venv/bin/python -m pytest tests/front/board/test_server.py
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
import pytest

from tests.front.board.boards import RunningBoard, board_of
from tests.front.board.made_runs import append, make_run, write
from tests.front_server import run as run_front
from tests.needs import need, need_namespaces
from tests.ports import free_port
from tests.sshd import ssh_server
from unisono.front.board.page import NO_ICON
from unisono.front.board.regions import REGIONS


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBoard]:
    """A board of a run and of a directory with two."""
    folder = tmp_path_factory.mktemp("runs")
    one = make_run(folder / "one")
    make_run(folder / "more" / "two", outcome="stalled")
    make_run(folder / "more" / "three", steps=5)
    with board_of(one, folder / "more") as made:
        yield made


def unisono(*words: str) -> "subprocess.CompletedProcess[str]":
    return run_front([sys.executable, "-m", "unisono", *words])


def test_the_first_line_has_the_address_and_the_runs(board: RunningBoard) -> None:
    assert set(board.line) == {"kind", "schema", "url", "port", "runs"}
    assert board.url.startswith(f"http://127.0.0.1:{board.port}/?token=")
    assert [run["name"] for run in board.line["runs"]] == ["one", "three", "two"]


def test_every_region_of_every_run_is_given_as_json(board: RunningBoard) -> None:
    listed = board.json("/api/runs")
    assert (listed["schema"], [run["name"] for run in listed["runs"]]) == (1, ["one", "three", "two"])
    for region in REGIONS:
        assert board.json(f"/api/runs/two/{region}")["schema"] == 1
    assert len(board.json("/api/runs/one/curves?points=10")["series"]["loss"]["steps"]) <= 10
    assert board.json("/api/runs/one/curves?points=nan&from=x&since=-3&to=%00")["lines"] == 44


@pytest.mark.parametrize(
    "path", ["/", "/static/board.js", "/api/runs", "/api/runs/one/status", "/events", "/no/such"]
)
def test_without_the_token_nothing_is_given(board: RunningBoard, path: str) -> None:
    assert board.ask(path, cookie=False).status == 401
    assert board.ask(path, cookie=False, Cookie=f"unisono-board-{board.port}=wrong").status == 401
    assert board.ask(f"{path}?token=wrong", cookie=False).status == 401
    if path != "/":
        assert board.ask(f"{path}?token={board.token}", cookie=False).status == 401


def test_token_becomes_a_cookie_closed_to_scripts_and_other_sites(board: RunningBoard) -> None:
    answer = board.ask(f"/?token={board.token}&lang=zh", cookie=False)
    cookie = answer.getheader("Set-Cookie") or ""
    assert answer.status == 200
    assert "HttpOnly" in cookie
    assert "samesite=strict" in cookie.lower()
    assert board.token not in cookie
    assert 'url=/?lang=zh"' in answer.text  # type: ignore[attr-defined]
    assert NO_ICON in answer.text, "a browser asks for /favicon.ico if the next page is long in coming"  # type: ignore[attr-defined]
    assert len(board.token) >= 43, "32 bytes"


def test_other_names_origins_and_methods_are_refused(board: RunningBoard) -> None:
    assert board.ask("/", Host="evil.example").status == 421
    assert board.ask("/", Host=f"evil.example:{board.port}").status == 421
    assert board.ask("/", Host="localhost:9999").status == 200, "a tunnel has another port"
    assert board.ask("/api/runs", Origin="http://evil.example").status == 403
    assert board.ask("/api/runs", Origin="null").status == 403
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        answer = board.ask("/api/runs", method=method)
        assert (answer.status, answer.getheader("Allow")) == (405, "GET, HEAD")
    head = board.ask("/api/runs", method="HEAD")
    assert (head.status, head.text) == (200, "")  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("header", "value"),
    [("Host", "a{b}.evil.com"), ("Host", "[::1"), ("Host", "127.0.0.1@evil"), ("Host", "\xff"), ("Origin", "http://["), ("Origin", "http://a{b}")],
)  # fmt: skip
def test_headers_that_cannot_be_parsed_are_refused(board: RunningBoard, header: str, value: str) -> None:
    headers: dict[str, Any] = {header: value}
    assert board.ask("/api/runs", **headers).status == 400


def test_a_name_that_is_no_file_name_is_refused_without_a_traceback(board: RunningBoard) -> None:
    assert board.ask("/static/" + "a" * 5000).status == 400
    assert board.ask("/static/" + "%ff" * 5000).status == 400


def test_runs_of_any_name_are_listed_under_a_name_that_leads_to_them(tmp_path: Path) -> None:
    names = [
        "a?b",
        "c#d",
        "e\x1b[31mred",
        "f\ng",
        "h%2fi",
        "j k",
        "\u202eo",
        "p'\"<q>",
        "..r",
        "%3f",
        "s" * 200,
    ]
    for name in names:
        make_run(tmp_path / "runs" / name)
    make_run(tmp_path / "runs" / "z")
    os.rename(tmp_path / "runs" / "z", os.fsencode(tmp_path / "runs") + b"/z\xff\xfe")  # noqa: PTH104 - not UTF-8
    (tmp_path / "runs" / "e").mkdir()
    with board_of(tmp_path / "runs" / "e" / "..") as made:
        listed = [run["name"] for run in made.json("/api/runs")["runs"]]
        assert len(set(listed)) == len(names) + 1
        for name in listed:
            assert made.json(f"/api/runs/{quote(name, safe='')}/status")["schema"] == 1


def test_run_given_as_a_path_ending_in_dots_is_named_after_its_directory(tmp_path: Path) -> None:
    make_run(tmp_path / "demo")
    (tmp_path / "demo" / "logs").mkdir(exist_ok=True)
    with board_of(tmp_path / "demo" / "logs" / "..") as made:
        assert [run["name"] for run in made.json("/api/runs")["runs"]] == ["demo"]


def test_every_answer_has_a_strict_policy(board: RunningBoard) -> None:
    for answer in (board.ask("/"), board.ask("/", cookie=False), board.ask("/none")):
        policy = answer.getheader("Content-Security-Policy") or ""
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy
        assert answer.getheader("X-Content-Type-Options") == "nosniff"
        assert answer.getheader("Cache-Control") == "no-store"


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "one%2f..", "one/../two", "..%2f..%2fetc%2fpasswd", "%00", "nope"]
)
def test_no_name_leads_anywhere_else(board: RunningBoard, name: str) -> None:
    for path in (f"/api/runs/{name}/status", f"/api/runs/one/{name}", f"/static/{name}"):
        assert board.ask(path).status == 404


def test_what_is_appended_is_announced_within_two_seconds(board: RunningBoard) -> None:
    board.json("/api/runs")
    root = Path(board.line["runs"][0]["path"])
    with socket.create_connection(("127.0.0.1", board.port), timeout=20) as stream:
        stream.sendall(f"GET /events HTTP/1.1\r\nHost: localhost\r\nCookie: {board.cookie}\r\n\r\n".encode())
        received = until(stream, b"event: hello")
        append(root, {"step": 41, "loss": 0.1})
        began = time.monotonic()
        received = until(stream, b"event: change")
        assert time.monotonic() - began < 10, "five times the bound, on a busy machine"
    assert b'"curves"' in received
    assert board.json("/api/runs/one/curves")["series"]["loss"]["steps"][-1] == 41


def until(stream: socket.socket, wanted: bytes, *, limit_s: float = 30) -> bytes:
    """What a stream sends until some bytes come."""
    received = b""
    limit = time.monotonic() + limit_s
    while wanted not in received:
        assert time.monotonic() < limit, received[-300:]
        if select.select([stream], [], [], 1)[0]:
            received += stream.recv(65_536)
    return received


def test_at_most_64_connections_and_a_silent_one_is_dropped(board: RunningBoard) -> None:
    board.json("/api/runs")
    opened = [socket.create_connection(("127.0.0.1", board.port), timeout=30) for _ in range(90)]
    try:
        closed = [one for one in opened if is_closed(one, 0.2 if one is not opened[-1] else 5)]
        assert len(closed) >= 90 - 64
        kept = [one for one in opened if one not in closed]
        assert is_closed(kept[0], 60), "half-open: no request came"
    finally:
        for one in opened:
            one.close()
    deadline = time.monotonic() + 30
    while True:
        try:
            assert board.ask("/api/runs").status == 200
            break
        except OSError:
            assert time.monotonic() < deadline


def is_closed(one: socket.socket, limit_s: float) -> bool:
    """Whether the other side closes a connection in time."""
    one.settimeout(limit_s)
    try:
        return one.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_client_that_never_reads_is_dropped_and_delays_nobody(tmp_path: Path) -> None:
    with board_of(make_run(tmp_path / "run", steps=20_000)) as board:
        board.json("/api/runs")
        server = psutil.Process(board.process.pid)
        before = server.memory_info().rss
        deaf = []
        for path in ("/api/runs/run/curves?points=20000", "/events"):
            one = socket.socket()
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.connect(("127.0.0.1", board.port))
            one.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nCookie: {board.cookie}\r\n\r\n".encode())
            deaf.append(one)
        port = deaf[0].getsockname()[1]
        limit = time.monotonic() + 120
        while any(kept.raddr and kept.raddr.port == port for kept in server.net_connections()):
            assert time.monotonic() < limit, "it is still connected"
            assert board.ask("/api/runs/run/status").status == 200
            time.sleep(0.5)
        assert server.memory_info().rss - before < 30e6
        for one in deaf:
            one.close()


def test_the_page_and_its_events_come_through_an_ssh_tunnel(board: RunningBoard, tmp_path: Path) -> None:
    with ssh_server(tmp_path) as ssh:
        port = free_port()
        words = [*ssh, "-N", "-L", f"127.0.0.1:{port}:127.0.0.1:{board.port}", "127.0.0.1"]
        tunnel = subprocess.Popen(words, stdin=subprocess.DEVNULL)
        try:
            far = RunningBoard(board.process, {**board.line, "port": port})
            limit = time.monotonic() + 60
            while not far.cookie.startswith("unisono"):
                assert time.monotonic() < limit
                far.cookie = ""
                with contextlib.suppress(OSError):
                    assert far.json("/api/runs")["schema"] == 1
            with socket.create_connection(("127.0.0.1", port), timeout=20) as stream:
                head = f"GET /events HTTP/1.1\r\nHost: localhost:{port}\r\nCookie: {far.cookie}\r\n\r\n"
                stream.sendall(head.encode())
                until(stream, b"event: hello")
                append(Path(board.line["runs"][0]["path"]), {"step": 42, "loss": 0.1})
                until(stream, b"event: change")
        finally:
            tunnel.terminate()
            tunnel.wait(20)


def test_another_address_is_reached_from_another_network(tmp_path: Path) -> None:
    need("ip", "curl", root=True)
    name, third = f"board{os.getpid()}", os.getpid() % 250 + 1
    need_namespaces(name)
    ours, theirs = f"10.213.{third}.1", f"10.213.{third}.2"
    inside = ["ip", "netns", "exec", name]
    link = f"vb{os.getpid()}"
    for words in (
        ["ip", "netns", "add", name],
        ["ip", "link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name],
        ["ip", "address", "add", f"{ours}/30", "dev", link],
        ["ip", "link", "set", link, "up"],
        [*inside, "ip", "address", "add", f"{theirs}/30", "dev", "eth0"],
        [*inside, "ip", "link", "set", "eth0", "up"],
    ):
        subprocess.run(words, check=True)
    try:
        with board_of(make_run(tmp_path / "run"), options=("--host", ours)) as board:
            assert board.url.startswith(f"http://{ours}:{board.port}/?token=")
            curl = [*inside, "curl", "--silent", "--max-time", "60", "--cookie-jar", str(tmp_path / "jar")]
            curl += ["--cookie", str(tmp_path / "jar"), "--write-out", "%{http_code}"]

            def ask(path: str, *more: str) -> str:
                address = f"http://{ours}:{board.port}{path}"
                return subprocess.run(
                    [*curl, *more, address], check=True, capture_output=True, text=True
                ).stdout

            assert ask("/api/runs").endswith("401")
            assert ask("/", "--header", "Host: evil.example").endswith("421")
            assert ask(f"/?token={board.token}").endswith("200")
            assert '"run"' in ask("/api/runs")
            # Not by a connection to 127.0.0.1: there the same port may be that of another program.
            open_now = psutil.Process(board.process.pid).net_connections("tcp")
            assert {one.laddr for one in open_now if one.status == psutil.CONN_LISTEN} == {(ours, board.port)}
    finally:
        subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_once_with_exit_0(tmp_path: Path, number: signal.Signals) -> None:
    with board_of(make_run(tmp_path / "run", steps=3)) as board:
        board.json("/api/runs")
        with socket.create_connection(("127.0.0.1", board.port), timeout=20) as stream:
            stream.sendall(
                f"GET /events HTTP/1.1\r\nHost: localhost\r\nCookie: {board.cookie}\r\n\r\n".encode()
            )
            until(stream, b"event: hello")
            began = time.monotonic()
            board.process.send_signal(number)
            assert board.process.wait(120) == 0
            assert time.monotonic() - began < 10, "1.8 s were seen on a busy machine"


def test_what_cannot_be_shown_ends_with_exit_2_and_nothing_is_written(tmp_path: Path) -> None:
    root, out = make_run(tmp_path / "run", steps=3), tmp_path / "out.html"
    (tmp_path / "empty").mkdir()
    for words in (
        [str(tmp_path / "none"), "--out", str(out)],
        [str(tmp_path / "empty"), "--out", str(out)],
        [str(root / "plan.json"), "--out", str(out)],
    ):
        ended = unisono("board", *words)
        assert (ended.returncode, out.exists()) == (2, False), ended.stderr
        assert "is not a run" in ended.stderr
    out.write_text("mine")
    ended = unisono("board", str(root), "--out", str(out))
    assert (ended.returncode, out.read_text()) == (2, "mine")


def test_a_port_that_is_taken_is_refused_with_its_holder(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_port()))
        taken.listen()
        ended = unisono("board", str(root), "--port", str(taken.getsockname()[1]))
    assert ended.returncode == 2
    assert f"process {os.getpid()}" in ended.stderr


def test_the_file_is_reported_as_json_and_needs_no_extra(tmp_path: Path) -> None:
    root, out = make_run(tmp_path / "run", steps=3), tmp_path / "out.html"
    program = (
        "import sys; sys.modules['starlette'] = sys.modules['uvicorn'] = None; from unisono.front.cli.app import"
        " main; main(sys.argv[1:])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, "board", "--json", str(root), "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, json.loads(ended.stdout)) == (
        0,
        {"kind": "board", "schema": 1, "runs": [{"name": "run", "path": str(root)}]},
    )
    assert out.read_text().startswith("<!doctype html>")


def test_missing_extra_is_refused_with_the_command_that_installs_it(tmp_path: Path) -> None:
    root = make_run(tmp_path / "run", steps=3)
    program = "import sys; sys.modules['uvicorn'] = None; from unisono.front.cli.app import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", program, "board", str(root)]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "pip install 'unisono[board]'" in ended.stderr


def test_another_version_of_a_file_of_a_run_disturbs_no_other_region(board: RunningBoard) -> None:
    root = Path(board.line["runs"][2]["path"])
    write(root / "data.json", {"schema": 9, "sources": [], "new": {"a": [1]}})
    value: dict[str, Any] = board.json("/api/runs/two/data")
    assert "schema is 9" in value["problems"][0]
    assert board.json("/api/runs/two/status")["problems"] == []
