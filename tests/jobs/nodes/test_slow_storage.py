"""A checkpoint that is slow on its way to the head, and moves, is waited for.

Run: pytest tests/jobs/nodes/test_slow_storage.py
"""

import json
from pathlib import Path

import pytest

import tests.jobs.nodes.hurried.sitecustomize as hurried
from tests.jobs.nodes.fronts import together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Namespaces, Own

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.long]

OTHERS_S = 8.0
RATE = "4mbit"  # 0.5 MB a second


def slow_to_the_head(networks: Namespaces, node: int) -> None:
    """What the node's front sends the head is slow; its ranks' collectives are as quick as ever."""
    to = ("dev", "eth0", "parent", "1:")
    port = str(networks.head_port())
    for words in (
        ("qdisc", "add", "dev", "eth0", "root", "handle", "1:", "htb", "default", "10"),
        ("class", "add", *to, "classid", "1:10", "htb", "rate", "10gbit"),
        ("class", "add", *to, "classid", "1:20", "htb", "rate", RATE),
        (
            "filter",
            "add",
            *to,
            "protocol",
            "ip",
            "u32",
            "match",
            "ip",
            "dport",
            port,
            "0xffff",
            "flowid",
            "1:20",
        ),
    ):
        networks.inside(node, "tc", *words)


@pytest.mark.fault("the way to the head's disk is slow, and a checkpoint takes longer than any limit")
def test_last_checkpoint_comes_though_its_way_exceeds_the_usual_patience(
    networks: Namespaces, pair: Job, tmp_path: Path
) -> None:
    pair.config(
        duration="2 steps", restarts=0, checkpoint={"every": "2 steps"}, parallel={"strategy": "fsdp"}, grace="5 seconds",
        adapter={"rank": 2048, "alpha": 8},
    )  # fmt: skip
    own = tmp_path / "disk"
    own.mkdir()
    pair.out.mkdir(exist_ok=True)
    env = {
        "PYTHONPATH": str(Path(hurried.__file__).parent),
        "HURRIED": json.dumps(
            {
                "unisono.trainer.training.saver.OTHERS_S": OTHERS_S,
                "unisono.trainer.training.saver.STUCK_S": OTHERS_S,
            }
        ),
    }
    slow_to_the_head(networks, 1)
    try:
        fronts = [pair.start(0, env=env), pair.start(1, env=env, own=Own(binds=[(own, pair.out)]))]
        assert together(fronts, limit_s=450) == [0, 0], pair.transcript()
    finally:
        networks.inside(1, "tc", "qdisc", "del", "dev", "eth0", "root")
    (reported,) = fronts[0].messages("checkpoint")
    assert reported["step"] == 2
    assert reported["seconds"] > 2 * OTHERS_S, "it was not slow enough to tell anything"
    assert pair.read("result.json")["checkpoint"].endswith("step-00000002")
    assert not [message for front in fronts for message in front.messages("verdict")], pair.transcript()
    pair.wait_gone()
