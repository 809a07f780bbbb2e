"""Nodes come together, or all of them hear in the same words why not.

Run: pytest tests/jobs/runs/test_meeting.py

Fronts are processes here, on addresses of the loopback network; namespaces are in tests/jobs/nodes.
"""

import contextlib
import json
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import front_server
from tests.ports import free_port
from unisono.base.causes import Verdict
from unisono.guard.control.connection import SILENCE_S
from unisono.guard.places.topology import Topology
from unisono.guard.rendezvous.meeting import Meeting
from unisono.guard.rendezvous.party import Party
from unisono.guard.supervise.node_messages import JobEnded

ROOT = Path(__file__).parents[3]
LIMIT_S = 90.0


class Node:
    """A front as a process; what it said so far."""

    def __init__(self, script: dict[str, Any], folder: Path) -> None:
        self.rank = script["rank"]
        self.path = folder / f"node-{self.rank}-{secrets.token_hex(4)}.out"
        with self.path.open("wb") as out:
            self.process = front_server.start(
                [sys.executable, "-m", "tests.jobs.runs.standins.meeting_node", json.dumps(script)], cwd=ROOT, stdout=out,
                stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.started = time.monotonic()

    @property
    def text(self) -> str:
        return self.path.read_text(errors="replace")

    def messages_of(self, kind: str) -> list[dict[str, Any]]:
        lines = [line for line in self.text.splitlines() if line.startswith("{") and line.endswith("}")]
        return [message for message in map(json.loads, lines) if message["kind"] == kind]

    @property
    def shown(self) -> list[str]:
        """The kinds of what it has shown."""
        return [message["message"]["kind"] for message in self.messages_of("shown")]

    @property
    def notes(self) -> list[str]:
        shown = [message["message"] for message in self.messages_of("shown")]
        return [message["text"] for message in shown if message["kind"] == "note"]

    def wait(self) -> int:
        try:
            return self.process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"node {self.rank} did not end; it said:\n{self.text}") from None

    def until(self, seen: Callable[[], object], what: str) -> None:
        limit = time.monotonic() + LIMIT_S
        while not seen():
            late = time.monotonic() > limit or self.process.poll() is not None
            assert not late or seen(), f"node {self.rank} never said {what}; it said:\n{self.text}"
            time.sleep(0.02)

    def is_here(self) -> None:
        """Waits until it has called (the head: listens); it then makes its report."""
        self.until(lambda: "phase" in self.shown, "that it makes its report")

    @property
    def verdict(self) -> Verdict:
        (error,) = self.messages_of("error")
        assert error["verdict"] is not None, self.text
        return Verdict.from_json(error["verdict"])


class Job:
    """Starts the nodes of one job."""

    def __init__(self, folder: Path, nodes: int = 3) -> None:
        self.folder = folder
        self.nodes = nodes
        self.head, self.port = "127.0.0.1", free_port()
        self.token = secrets.token_hex(16)
        self.started: list[Node] = []

    def start(self, rank: int, **changes: Any) -> Node:
        script = {
            "rank": rank, "nodes": self.nodes, "head": self.head, "port": self.port, "token": self.token,
            "host": chr(ord("a") + rank), "join_timeout": 60.0, **changes,
        }  # fmt: skip
        self.started.append(Node(script, self.folder))
        return self.started[-1]

    def start_early(self, rank: int, **changes: Any) -> Node:
        """Starts a node before the head, which then has it almost at once: the limit of such a head
        is not one on a start of Python.
        """
        node = self.start(rank, **changes)
        node.until(lambda: node.notes, "that it calls")
        return node

    def start_all(self, **changes: Any) -> list[Node]:
        return [self.start(rank, **changes) for rank in range(self.nodes)]

    @property
    def transcript(self) -> str:
        return "\n".join(f"--- node {node.rank}\n{node.text}" for node in self.started)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path)
    yield made
    for node in made.started:
        with contextlib.suppress(ProcessLookupError):
            node.process.kill()
        node.process.wait()


def disagree(job: Job, nodes: list[Node], cause: str, *, within_s: float = 45.0) -> Verdict:
    """All end with exit code 3 and the same verdict."""
    codes = [node.wait() for node in nodes]
    assert codes == [3] * len(nodes), job.transcript
    reported = {node.verdict.model_copy(update={"named_after_s": None}).model_dump_json() for node in nodes}
    assert len(reported) == 1, job.transcript
    assert {json.dumps(node.messages_of("error")[0]["lines"]) for node in nodes}, job.transcript
    verdict = nodes[0].verdict
    assert verdict.cause == cause, job.transcript
    assert time.monotonic() - nodes[-1].started < within_s
    assert "Traceback" not in job.transcript
    return verdict


@pytest.mark.slow
@pytest.mark.ranks
def test_three_nodes_meet_try_network_and_collective_and_go_on_together(job: Job) -> None:
    nodes = job.start_all()
    assert [node.wait() for node in nodes] == [0, 0, 0], job.transcript
    (met,) = nodes[0].messages_of("met")
    status = {check["id"]: check["status"] for check in met["checks"]}
    assert status["network.dial"] == "pass", met
    assert status["network.collective"] == "pass", met
    assert nodes[0].messages_of("gathered")[0]["of"] == [1, 2]
    for node in nodes[1:]:
        assert node.messages_of("met")[0]["welcome"]["head_host"] == "a"
        assert node.messages_of("met")[0]["welcome"]["nonce_file"] == "x"
        assert node.messages_of("last")[0]["result"] == {"step": 1}


def test_what_differs_is_reported_in_the_same_words_everywhere(job: Job) -> None:
    nodes = [job.start(0), job.start(1), job.start(2, report={"config": {"optim.lr": 1.0}})]
    verdict = disagree(job, nodes, "config_mismatch")
    assert verdict.hosts == ("c",)
    assert verdict.named_after_s is not None
    assert verdict.named_after_s < 8.0, "no silence is waited for"


@pytest.mark.slow
def test_a_head_that_all_others_have_left_gathers_from_nobody() -> None:
    shape = Topology(2, 0, "127.0.0.1", 0, 1, nproc_declared=True, nproc_origin="--nproc", least_nodes=1)
    party = Party(shape, b"a-secret-of-more-than-16-bytes", "ada", lambda _message: None)
    with Meeting(party) as meeting:
        meeting.leave_out(1, "is lost")
        assert meeting.gather("here_again_1", timeout_s=5.0) == {}
        meeting.end(JobEnded(exit_code=0))


def test_a_node_that_never_calls_is_named_while_one_waits_and_at_the_end(job: Job) -> None:
    early = job.start_early(1)
    nodes = [job.start(0, join_timeout=4.0), early]
    verdict = disagree(job, nodes, "node_missing")
    assert "node 2 has never connected" in verdict.summary
    for node in nodes:  # the head's line is shown by the others, too
        assert any(
            "2 of 3 nodes are here" in note and "node 2 has never connected" in note for note in node.notes
        ), job.transcript


def test_who_comes_after_the_verdict_hears_it(job: Job) -> None:
    first = [job.start(0, join_timeout=3.0), job.start(1)]
    first[1].until(lambda: first[1].messages_of("error"), "its end")
    late = job.start(2, join_timeout=10.0)  # not long: where it comes much later, nobody is there any more
    late_code = late.wait()
    assert late_code == 3, job.transcript
    assert [node.wait() for node in first] == [3, 3]
    assert late.verdict.cause in ("node_missing", "head_unreachable")


def test_a_different_token_ends_the_meeting_on_both_sides_at_once(job: Job) -> None:
    nodes = [job.start(0), job.start(1, token="another-token-of-16-bytes")]
    assert [node.wait() for node in nodes] == [3, 3], job.transcript
    assert [node.verdict.cause for node in nodes] == ["token_rejected"] * 2
    assert "another-token" not in job.transcript
    assert job.token not in job.transcript


def test_a_different_number_of_nodes_ends_the_meeting_on_both_sides(job: Job) -> None:
    nodes = [job.start(0), job.start(1, nodes=4)]
    assert [node.wait() for node in nodes] == [3, 3], job.transcript
    assert [node.verdict.cause for node in nodes] == ["world_mismatch"] * 2
    assert nodes[0].verdict.summary == nodes[1].verdict.summary


def test_second_node_of_one_rank_is_turned_away_and_the_meeting_continues(job: Job) -> None:
    first = [job.start(0), job.start(1)]
    first[1].is_here()
    second = job.start(1, host="twin")
    assert second.wait() == 3
    assert second.verdict.cause == "node_duplicate"
    assert "b" in second.verdict.summary
    last = job.start(2, report={"config": {"optim.lr": 1.0}})
    disagree(job, [*first, last], "config_mismatch")
    assert any("twin" in note for note in first[0].notes)


def test_front_that_refuses_keeps_its_code_and_the_others_hear_its_words(job: Job) -> None:
    nodes = [job.start(0), job.start(1)]
    nodes[1].is_here()
    refusing = job.start(2, refuses="unknown key `data.max_lenght`")
    assert refusing.wait() == 2, job.transcript
    verdict = disagree(job, nodes, "node_refused")
    assert verdict.hosts == ("c",)
    assert "unknown key `data.max_lenght`" in verdict.summary
    assert "node 2 (c)" in verdict.summary


def test_a_head_that_refuses_by_itself_reports_who_calls(job: Job) -> None:
    others = [job.start(1), job.start(2)]
    head = job.start(0, refuses="output_dir holds another run")
    assert head.wait() == 2, job.transcript
    verdict = disagree(job, others, "node_refused")
    assert "node 0 (a)" in verdict.summary
    assert "output_dir holds another run" in verdict.summary


@pytest.mark.parametrize("rank", [0, 2])
def test_a_refusal_after_the_call_ends_all_alike(job: Job, rank: int) -> None:
    nodes = [
        job.start(r, **({"report_fails": "no such file: rows.jsonl"} if r == rank else {})) for r in range(3)
    ]
    verdict = disagree(job, nodes, "node_refused")
    assert verdict.hosts == (chr(ord("a") + rank),)
    assert "no such file: rows.jsonl" in verdict.summary


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize(
    ("script", "rank", "cause"), [("head_raises", 0, "node_refused"), ("node_raises", 1, "plan_mismatch")]
)
def test_what_goes_wrong_after_the_meeting_is_asked_to_all(
    job: Job, script: str, rank: int, cause: str
) -> None:
    nodes = [job.start(r, **({script: "the data are refused"} if r == rank else {})) for r in range(3)]
    verdict = disagree(job, nodes, cause)
    assert "the data are refused" in verdict.summary


def test_a_head_that_dies_is_named_by_the_others(job: Job) -> None:
    nodes = job.start_all(reports_after=str(job.folder / "never"))
    for node in nodes:
        node.is_here()
    nodes[0].process.kill()
    assert [node.wait() for node in nodes[1:]] == [3, 3], job.transcript
    assert {node.verdict.cause for node in nodes[1:]} == {"head_unreachable"}


@pytest.mark.slow
def test_a_head_that_is_stopped_is_silent_and_named_within_its_limit(job: Job) -> None:
    head, node = job.start(0), job.start(1)
    node.is_here()
    head.process.send_signal(signal.SIGSTOP)
    stopped = time.monotonic()
    assert node.wait() == 3, job.transcript
    assert node.verdict.cause == "head_unreachable"
    assert "silent" in node.verdict.summary
    assert node.verdict.named_after_s is not None
    assert node.verdict.named_after_s > SILENCE_S - 1, "counted from the last sign of life"
    assert time.monotonic() - stopped < 45
    head.process.send_signal(signal.SIGCONT)


@pytest.mark.slow
def test_node_that_came_and_left_is_not_reported_as_never_connected(job: Job) -> None:
    second = job.start(2, reports_after=str(job.folder / "never"))
    first = job.start_early(1)
    head = job.start(0, join_timeout=5.0)
    second.is_here()
    second.process.kill()
    verdict = disagree(job, [head, first], "node_missing")
    assert "node 2 (c) was connected, and left before the start" in verdict.summary
    assert verdict.hosts == ("c",)
    assert any("node 2 (c) was here and has left" in note for note in head.notes)


def test_a_node_that_leaves_before_all_are_here_may_come_again(job: Job) -> None:
    head, first = job.start(0), job.start(1, reports_after=str(job.folder / "never"))
    first.is_here()
    first.process.kill()
    head.until(lambda: any("node 1 (b) was here and has left" in note for note in head.notes), "that it left")
    again = [job.start(1), job.start(2, report={"config": {"optim.lr": 1.0}})]
    disagree(job, [head, *again], "config_mismatch")


@pytest.mark.parametrize("rank", [0, 1])
def test_ctrl_c_before_the_ranks_ends_the_job_everywhere(job: Job, rank: int) -> None:
    nodes = [job.start(0), job.start(1)]
    nodes[1].is_here()
    nodes[rank].process.send_signal(signal.SIGINT)
    assert [node.wait() for node in nodes] == [130, 130], job.transcript
    (stopped,) = nodes[1 - rank].messages_of("stopped")
    assert (stopped["signal"], stopped["where"]) == ("SIGINT", f"node {rank} ({'ab'[rank]})")


def test_garbage_and_other_peoples_calls_change_nothing(job: Job) -> None:
    head = job.start(0)
    head.is_here()
    for data in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 300, b"unisono", b""):
        with socket.create_connection((job.head, job.port), timeout=10) as call:
            call.sendall(data)
    disagree(job, [head, job.start(1), job.start(2, report={"config": {"optim.lr": 1.0}})], "config_mismatch")


def test_node_without_a_head_reports_its_address_and_gives_up_in_time(job: Job) -> None:
    node = job.start(1, join_timeout=3.0)
    assert node.wait() == 3
    assert node.verdict.cause == "head_unreachable"
    assert f"127.0.0.1:{job.port}" in node.verdict.summary
    assert any("retrying" in note for note in node.notes)


def test_a_head_that_is_another_machines_address_is_refused(job: Job) -> None:
    head = job.start(0, head="192.0.2.7")
    assert head.wait() == 3
    assert head.verdict.cause == "head_unreachable"
    assert "192.0.2.7" in head.verdict.summary


def test_a_taken_port_is_named_with_its_owner(job: Job) -> None:
    with socket.socket() as taken:
        taken.bind((job.head, job.port))
        taken.listen()
        head = job.start(0)
        assert head.wait() == 3
    assert head.verdict.cause == "port_in_use"
    assert str(job.port) in head.verdict.summary


def test_a_report_that_cannot_be_read_is_other_code(job: Job) -> None:
    """A node of another version: it sends a field that this head does not know."""
    from unisono.guard.control.channel_ends import NodeLink

    job.nodes = 2
    head = job.start(0)
    link = NodeLink.connect(
        host=job.head,
        port=job.port,
        token=job.token.encode(),
        node_rank=1,
        node_host="b",
        timeout_s=30,
        nodes=2,
    )
    try:
        link.send({"kind": "report", "report": {"what": "is this"}})
        assert head.wait() == 3, job.transcript
        assert head.verdict.cause == "code_mismatch"
        assert head.verdict.hosts == ("b",)
    finally:
        link.close()
