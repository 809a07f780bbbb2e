"""Who comes, who does not, and who has no business here. Run: pytest tests/jobs/nodes/test_joining.py"""

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.jobs.nodes.fronts import together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Ground, Own
from tests.jobs.nodes.verdict_checks import named, refused, same_words

pytestmark = pytest.mark.ranks

# Accepts, and says what its argument says, or nothing; holds the port until it is killed.
_LISTENER = """
import socket, sys, time
s = socket.socket(); s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind((sys.argv[1], int(sys.argv[2]))); s.listen(); print("listening", flush=True)
kept = []
while True:
    c, _ = s.accept(); kept.append(c)
    if sys.argv[3]: c.sendall(sys.argv[3].encode())
"""
_CALLER = """
import random, socket, sys, time
draw = random.Random(0)
for n in range(int(sys.argv[3])):
    try:
        s = socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)
        s.sendall(draw.choice([b"GET / HTTP/1.1\\r\\n\\r\\n", draw.randbytes(200), b"\\xff" * 8, b"\\0\\0\\0\\x02{}", b""]))
        if n % 2: s.close()
        else: kept = s
    except OSError:
        time.sleep(0.05)
print("called", flush=True)
"""


_STALE = """
import sys
from unisono.guard.control.channel_ends import NodeLink
from unisono.base.errors import Disagreed
try:
    NodeLink.connect(host=sys.argv[1], port=int(sys.argv[2]), token=sys.argv[3].encode(), node_rank=1, node_host="bob",
                     timeout_s=20, nodes=2, run_nonce="0" * 32, epoch=0)
    print("it was let in", flush=True)
except Disagreed as error:
    print(error.verdict.cause, error.verdict.summary, flush=True)
"""


@pytest.fixture
def stranger(ground: Ground) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Runs a foreign program on a node."""
    with contextlib.ExitStack() as stack:

        def run(node: int, script: str, *words: str) -> "subprocess.Popen[str]":
            command = ground.command(node, [sys.executable, "-c", script, *words], Own())
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        yield run


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.fault("a node never comes (--join-timeout 6)")
def test_a_node_that_never_calls_is_named_early_and_again_at_the_end(trio: Job) -> None:
    early = trio.start(1, json=False)
    early.wait_for("retrying")  # the head's limit is not one on this front's start
    fronts = [trio.start(0, "--join-timeout", "6", json=True), early]
    seen = early.wait_for("node 2 has never connected")
    assert seen - fronts[0].started < 20
    verdict = refused(fronts, "node_missing", within_s=60)
    assert "node 2" in verdict.summary
    assert f"0 ({fronts[0].host})" in verdict.summary


def test_a_late_node_is_waited_for(pair: Job) -> None:
    """The head waits, says for whom, and goes on when it comes."""
    pair.config(1, optim={"lr": 1e-5})  # a difference, so that nothing is trained
    head = pair.start(0, json=False)
    head.wait_for("node 1 has never connected")
    refused([head, pair.start(1, json=True)], "config_mismatch")


def test_a_process_of_an_earlier_start_is_not_let_in(
    pair: Job, stranger: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """It knows the token, and says to which start it belongs; the head waits on for the right
    one.
    """
    pair.config(1, optim={"lr": 1e-5})
    head = pair.start(0, json=False)
    head.wait_for("node 1 has never connected")
    process = stranger(1, _STALE, pair.ground.address(0), str(pair.port), pair.token)
    assert first_line(process).startswith("stale_process"), first_line(process)
    head.wait_for("refused a call from")
    refused([head, pair.start(1, json=True)], "config_mismatch")


def test_who_comes_after_the_verdict_receives_it(trio: Job) -> None:
    first = [trio.start(node, "--join-timeout", "3", json=node == 1) for node in (0, 1)]
    assert first[1].wait() == 3
    late = trio.start(2, "--join-timeout", "3", json=True)
    assert together([*first, late]) == [3, 3, 3], trio.transcript()
    (verdict,) = late.verdicts
    assert verdict.cause in ("node_missing", "head_unreachable")  # the second only if it came much later


@pytest.mark.fault("two nodes of one rank")
def test_two_nodes_of_one_rank_are_both_named(trio: Job) -> None:
    fronts = [trio.start(node, "--join-timeout", "120", json=False) for node in (0, 1)]
    fronts[0].wait_for("2 of 3 nodes are here")
    second = trio.start(1, "--join-timeout", "120", place=2, json=True)
    assert second.wait() == 3, second.text()
    verdict = named([second]).verdict
    assert verdict.cause == "node_duplicate"
    assert fronts[1].host in verdict.summary
    fronts[0].wait_for("refused a call from")
    assert [front.exit_code for front in fronts] == [None, None]


@pytest.mark.fault("the head is down (--join-timeout 3)")
def test_without_a_head_the_others_report_where_they_called(pair: Job) -> None:
    front = pair.start(1, "--join-timeout", "3", json=True)
    assert front.wait() == 3, front.text()
    verdict = named([front]).verdict
    assert verdict.cause == "head_unreachable"
    assert pair.head in verdict.summary
    assert "refused" in str(verdict.to_json()).lower()


@pytest.mark.fault("foreign program on the port of the head")
def test_a_stranger_on_the_heads_port_is_named_at_the_head(
    pair: Job, stranger: Callable[..., "subprocess.Popen[str]"]
) -> None:
    process = stranger(0, _LISTENER, pair.ground.address(0), str(pair.port), "")
    assert first_line(process) == "listening"
    front = pair.start(0, json=True)
    assert front.wait() == 3, front.text()
    verdict = named([front]).verdict
    assert verdict.cause == "port_in_use"
    assert str(process.pid) in str(verdict.to_json())
    assert str(pair.port) in verdict.summary


@pytest.mark.parametrize("word", ["", "HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_a_stranger_where_the_head_should_be_is_seen_by_the_others(
    pair: Job, stranger: Callable[..., "subprocess.Popen[str]"], word: str
) -> None:
    assert first_line(stranger(0, _LISTENER, pair.ground.address(0), str(pair.port), word)) == "listening"
    front = pair.start(1, "--join-timeout", "5", json=True)
    assert front.wait() == 3, front.text()
    (verdict,) = front.verdicts
    assert verdict.cause in ("port_in_use", "head_unreachable")
    assert pair.head in verdict.summary


@pytest.mark.fault("garbage on the port while nodes join, and optim.lr differs")
def test_garbage_on_the_port_changes_nothing(
    pair: Job, stranger: Callable[..., "subprocess.Popen[str]"]
) -> None:
    pair.config(1, optim={"lr": 1e-5})
    head = pair.start(0)
    caller = stranger(1, _CALLER, pair.ground.address(0), str(pair.port), "120")
    assert first_line(caller) == "called"
    verdict = refused([head, pair.start(1)], "config_mismatch")
    assert "optim.lr" in verdict.summary


@pytest.mark.fault("wrong token on one node")
def test_a_wrong_token_is_reported_on_both_sides(pair: Job) -> None:
    fronts = [
        pair.start(0),
        pair.start(1, env={"UNISONO_TOKEN": "another" * 8}, json=True),
    ]
    assert together(fronts) == [3, 3], pair.transcript()
    there = named(fronts[1:]).verdict
    assert there.cause == "token_rejected"
    reported = fronts[0].verdicts[-1]
    assert reported.cause == "token_rejected", pair.transcript()
    assert pair.token not in pair.transcript()
    assert "another" * 8 not in pair.transcript()


def test_several_nodes_without_a_token_are_refused_with_how_to_make_one(pair: Job) -> None:
    front = pair.start(0, env={"UNISONO_TOKEN": ""})
    assert front.wait() == 2, front.text()
    assert "UNISONO_TOKEN" in front.text()
    assert "--token-file" in front.text()
    assert not pair.out.exists()


def test_a_token_file_that_others_can_read_is_refused(pair: Job) -> None:
    path = pair.folder / "token"
    path.write_text(pair.token)
    path.chmod(0o644)
    front = pair.start(0, "--token-file", str(path), env={"UNISONO_TOKEN": ""})
    assert front.wait() == 2, front.text()
    assert "chmod 600" in front.text()
    assert pair.token not in front.text()


def test_a_token_file_is_as_good_as_the_variable(pair: Job) -> None:
    path = pair.folder / "token"
    path.write_text(pair.token + "\n")
    path.chmod(0o600)
    pair.config(1, optim={"lr": 1e-5})
    fronts = [pair.start(0), pair.start(1, "--token-file", str(path), env={"UNISONO_TOKEN": ""})]
    refused(fronts, "config_mismatch")


def test_the_words_are_the_same_for_programs_and_for_people(trio: Job) -> None:
    trio.config(2, optim={"lr": 1e-5})
    fronts = [trio.start(0, json=False), trio.start(1, json=True), trio.start(2, json=False)]
    together(fronts)
    same_words(fronts)


def test_nobody_finds_the_token_in_a_file_or_a_command_line(pair: Job) -> None:
    pair.config(1, optim={"lr": 1e-5})
    fronts = pair.start_all()
    words: list[str] = []
    for process in pair.processes():
        with contextlib.suppress(psutil.Error):  # it has just ended
            words += process.cmdline()
    together(fronts)
    assert not any(pair.token in word for word in words)
    files = [path for path in pair.folder.rglob("*") if path.is_file()]
    assert not [path for path in files if pair.token.encode() in Path(path).read_bytes()]


def test_a_port_that_is_free_again_is_used_again(pair: Job) -> None:
    """What an ended start leaves in TIME_WAIT does not hold the port."""
    pair.config(1, optim={"lr": 1e-5})
    for _ in range(2):
        refused(pair.start_all(), "config_mismatch")
    with socket.socket() as probe:
        assert probe.fileno() >= 0
