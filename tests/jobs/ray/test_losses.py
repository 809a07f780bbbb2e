"""What Ray says of a lost node, and of its own head. Run: pytest tests/jobs/ray/test_losses.py"""

import itertools
import json
import socket
import threading
from pathlib import Path

from tests.jobs.runs.test_culprits import plan
from unisono.base.causes import Verdict
from unisono.guard.supervise.decision import Decision, NodeLoss
from unisono.guard.supervise.rank_supervisor import Attempt
from unisono.jobs.launchers.ray_node_fronts import (
    JobNode,
    RayHead,
    RayLossFiles,
    loss_file,
    lost_node_verdict,
    ray_head_lost,
)
from unisono.jobs.runs.attempt_end import with_launcher_cause
from unisono.jobs.runs.run_records import Ending, ending_of

OF_MEMORY = (
    "The actor is dead because its worker process has died. Task was killed due to the node running low on"
    " memory."
)


def lost(words: str) -> Verdict:
    """The verdict on node 1, of which Ray says that."""
    return lost_node_verdict(JobNode(1, None, facts={"host": "bob"}, lost=words))


def ended(reported: Verdict | None) -> Ending:
    """The ending of a run of two nodes whose second one is gone, where that is known of it."""

    class Told:
        def of_lost(self, node_rank: int) -> tuple[Verdict, float] | None:
            assert node_rank == 1
            return None if reported is None else (reported, 0.5)

    attempt = Attempt(0, 7, None)
    attempt.decision = Decision(loss=NodeLoss(1, "bob", "connection closed"), after_s=0.25)
    two = plan(4)
    return with_launcher_cause(ending_of(attempt, two), attempt, two, Told())


def test_node_out_of_memory_is_named_with_its_ranks_and_rays_words() -> None:
    ending = ended(lost(OF_MEMORY))
    assert ending.verdict is not None
    verdict = ending.verdict
    assert (ending.exit_code, verdict.cause, verdict.ranks, verdict.hosts) == (
        5,
        "host_oom_killed",
        (2, 3),
        ("bob",),
    )
    assert verdict.named_after_s == 0.75
    assert [item.where for item in verdict.evidence] == ["Ray, on node 1 (bob)", "the control channel"]
    assert "running low on memory" in verdict.evidence[0].text


def test_node_that_left_the_cluster_has_the_heads_verdict_and_cites_ray() -> None:
    ending, alone = ended(lost("The actor died because its node has died.")), ended(None)
    assert ending.verdict is not None
    assert alone.verdict is not None
    assert (ending.exit_code, ending.verdict.cause, ending.verdict.summary) == (
        4,
        "node_unreachable",
        alone.verdict.summary,
    )
    assert ending.verdict.evidence[0].where == "Ray, on node 1 (bob)"
    assert ending.verdict.evidence[1:] == alone.verdict.evidence
    assert set(alone.verdict.fix) < set(ending.verdict.fix)


def test_the_word_on_a_node_is_waited_for_until_it_is_whole(tmp_path: Path) -> None:
    path = Path(loss_file(tmp_path, 1))
    text = json.dumps(lost(OF_MEMORY).to_json())
    looks = itertools.count()

    def clock() -> float:  # each look is followed by one, and the file grows by one look
        looked = next(looks)
        if looked >= 1:
            path.write_text(text[: len(text) * looked // 4])
        return looked / 10

    assert RayLossFiles(tmp_path, clock).of_lost(1) == (lost(OF_MEMORY), 0.5)


def test_a_word_that_does_not_come_is_not_waited_for_long(tmp_path: Path) -> None:
    Path(loss_file(tmp_path, 2)).write_text(json.dumps(lost(OF_MEMORY).to_json()))
    clock = itertools.count()
    assert RayLossFiles(tmp_path, lambda: float(next(clock))).of_lost(1) is None


def test_a_head_that_goes_is_silent_from_then_on_and_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        now = itertools.count(10.0)
        head = RayHead(address, "ada", lambda: next(now))
        head.probe()
        assert (head.silent_s, head.why) == (0.0, "")
    head.probe()
    head.probe()
    assert head.silent_s > 0
    verdict = ray_head_lost(head, message="GCS is gone")
    assert verdict.hosts == ("ada",)
    assert f"Ray's head (ada, {address}) is lost: Connection refused" in verdict.summary
    assert [item.text for item in verdict.evidence] == ["Connection refused", "GCS is gone"]


def test_a_head_that_is_back_is_not_silent_any_more() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    head = RayHead(f"127.0.0.1:{port}")
    head.probe()
    assert head.silent_s > 0
    with socket.create_server(("127.0.0.1", port)):
        head.probe()
    assert (head.silent_s, head.why) == (0.0, "")


def test_a_head_that_ends_a_moment_later_is_seen_to_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        head = RayHead(f"127.0.0.1:{server.getsockname()[1]}")

        def end() -> None:
            server.accept()[0].close()  # the first call is answered
            server.close()

        ending = threading.Thread(target=end)
        ending.start()
        head.probe_for(60.0)
        ending.join()
    assert head.why == "Connection refused"
