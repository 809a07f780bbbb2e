"""A node is lost while a program runs under `unisono run` on two.

Run: pytest tests/guard/programs/test_lost_node.py
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import front_server
from tests.guard.programs.guarded import LIMIT_S, Guarded
from tests.guard.programs.node_loss import (
    LAUNCHED,
    WITHOUT_LAUNCHER,
    cut,
    kill,
    lose_power,
    training_on_two_nodes,
)
from tests.guard.programs.test_one_node import until
from tests.jobs.nodes.network_namespaces import Ground, Namespaces, why_no_namespaces
from tests.ports import free_port

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]

NAMED_S = 60.0  # some 8 s of silence are due
SILENT_S = 3.0


@pytest.fixture
def apart(ground: Ground) -> Namespaces:
    """Nodes whose network can be cut."""
    if not isinstance(ground, Namespaces):
        pytest.skip(why_no_namespaces())
    return ground


@pytest.fixture
def both(apart: Namespaces, tmp_path: Path) -> Iterator[list[Guarded]]:
    """A rank on each of two nodes, in the midst of a training."""
    with training_on_two_nodes(apart, tmp_path, WITHOUT_LAUNCHER) as begun:
        yield begun


@pytest.fixture
def both_launched(apart: Namespaces, tmp_path: Path) -> Iterator[list[Guarded]]:
    """The same below a torchrun on each."""
    with training_on_two_nodes(apart, tmp_path, LAUNCHED) as begun:
        yield begun


@pytest.mark.parametrize("blow", [pytest.param(lose_power, marks=pytest.mark.long), kill, cut])
def test_a_node_that_is_lost_is_named_and_nothing_of_the_program_is_left(
    blow: Callable[[Namespaces, int], None], both: list[Guarded], apart: Namespaces
) -> None:
    blow(apart, 1)
    ended = both[0].ended(since=time.monotonic())
    assert ended.verdict is not None, both[0].front.text()
    assert (ended.verdict.cause, ended.verdict.hosts) == ("node_unreachable", (apart.host(1),))
    assert ended.exit_code == 4
    assert ended.named_s is not None
    assert ended.named_s < NAMED_S
    seconds = ended.verdict.named_after_s
    assert seconds is not None
    assert (seconds < SILENT_S) == (blow is kill), (
        "silence is counted, and a broken connection is seen at once"
    )
    both[1].front.wait(limit_s=LIMIT_S)
    until(lambda: not any(apart.pids(node) for node in range(2)), "nothing is left on either node")


@pytest.mark.parametrize(
    "blow",
    [kill, pytest.param(lose_power, marks=pytest.mark.long), pytest.param(cut, marks=pytest.mark.long)],
)
def test_node_that_loses_the_head_reports_which_is_gone_and_ends_its_ranks(
    blow: Callable[[Namespaces, int], None], both_launched: list[Guarded], apart: Namespaces
) -> None:
    both = both_launched
    blow(apart, 0)
    ended = both[1].ended(since=time.monotonic())
    assert ended.verdict is not None, both[1].front.text()
    assert ended.verdict.cause == "node_unreachable"
    assert ended.verdict.hosts == (apart.host(0 if blow is kill else 1),), (
        "a closed connection is the head's end; where nothing is heard, this node is cut off"
    )
    assert ended.exit_code == 4
    both[0].front.wait(limit_s=LIMIT_S)
    until(lambda: not any(apart.pids(node) for node in range(2)), "nothing is left on either node")


def test_remaining_node_records_the_end_of_a_dead_heads_run(
    tmp_path: Path,
) -> None:
    """Head and node share a folder: the node writes the verdict and the result there."""
    program = "import os, pathlib, time; pathlib.Path(f'here-{os.getpid()}').touch(); time.sleep(600)"
    head = ["--nodes", "2", "--nproc", "1", "--head", f"127.0.0.1:{free_port()}", "--output-dir", "out"]
    fronts = [
        front_server.start(
            [sys.executable, "-m", "unisono", "run", *head, "--node-rank", str(node), "--", sys.executable, "-c", program],
            cwd=tmp_path, env={**os.environ, "UNISONO_TOKEN": "0123456789abcdef0123456789abcdef"}, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for node in range(2)
    ]  # fmt: skip
    try:
        until(lambda: len(list(tmp_path.glob("here-*"))) == 2, "the program runs on both nodes")
        fronts[0].kill()
        reported, _ = fronts[1].communicate(timeout=LIMIT_S)
        assert fronts[1].returncode == 4, reported
        verdict = json.loads((tmp_path / "out" / "verdict.json").read_text())
        assert verdict["summary"].startswith("node 0 ("), reported
        result = json.loads((tmp_path / "out" / "result.json").read_text())
        assert (result["outcome"], result["exit_code"]) == ("stalled", 4)
    finally:
        for front in fronts:
            front.kill()
            front.communicate(timeout=LIMIT_S)
