"""output_dir shared or not, and machines that are too small.

Run: pytest tests/jobs/nodes/test_storage.py
"""

import json
from pathlib import Path

import pytest

from tests.jobs.nodes.fronts import together
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Ground, Namespaces, Own
from tests.jobs.nodes.verdict_checks import refused

pytestmark = [pytest.mark.ranks, pytest.mark.slow]


def private(job: Job, node: int) -> Own:
    """The node's own disk, in place of what is shared."""
    disk = job.home(node) / "disk"
    disk.mkdir()
    job.out.mkdir(exist_ok=True)
    return Own(binds=[(disk, job.out)])


def test_a_node_that_has_a_disk_of_its_own_keeps_copies_of_the_verdict(
    networks: Namespaces, pair: Job
) -> None:
    del networks
    own = private(pair, 1)
    pair.config(1, optim={"lr": 1e-5})
    fronts = [pair.start(0), pair.start(1, own=own)]
    refused(fronts, "config_mismatch")
    there = pair.home(1) / "disk"
    for name in ("verdict.json", "result.json"):
        assert (there / name).exists(), list(there.iterdir())
        kept, first = (json.loads((folder / name).read_text()) for folder in (there, pair.out))
        assert kept == first, name
    assert pair.read("agreement.json")["nodes"][1]["output"]["shared"] is False


def test_what_nodes_share_is_seen_to_be_shared(ground: Ground, pair: Job) -> None:
    del ground
    pair.config(1, optim={"lr": 1e-5})
    refused(pair.start_all(), "config_mismatch")
    assert [node["output"]["shared"] for node in pair.read("agreement.json")["nodes"]] == [True, True]


def test_a_place_that_one_node_cannot_write_is_named(networks: Namespaces, pair: Job) -> None:
    """Mounted read-only there, found before anything is trained instead of at the first
    checkpoint.
    """
    del networks
    readonly = pair.home(1) / "readonly"
    readonly.write_text("a file where a directory should be")
    pair.config(1, output_dir=str(readonly / "out"))
    fronts = pair.start_all()
    codes = together(fronts)
    assert codes[0] == 3, pair.transcript()
    assert codes[1] in (2, 3, 6), pair.transcript()
    assert fronts[1].label in fronts[0].text()
    assert str(readonly) in fronts[1].text()


def test_a_node_that_cannot_keep_the_plan_ends_all_with_its_own_words(ground: Ground, pair: Job) -> None:
    """It agreed, and fails after the plan was made, while the head's own ranks start: nobody may
    wait for it.
    """
    del ground
    own = pair.home(1) / "out"
    own.mkdir()
    (own / "nodes").write_text("a file where the folder of the plan's copy would be")
    pair.config(1, output_dir=str(own))
    fronts = pair.start_all()
    verdict = refused(fronts, "node_refused", hosts=[fronts[1].host])
    assert "copy of the plan cannot be written" in verdict.summary
    assert fronts[1].label in verdict.summary


def test_a_small_shared_memory_is_reported(networks: Namespaces, pair: Job) -> None:
    """A container's 64 MB of /dev/shm; NCCL needs more. On a CPU it is worth a warning at most."""
    del networks
    pair.config(1, optim={"lr": 1e-5})
    fronts = [pair.start(0), pair.start(1, own=Own(small=[(Path("/dev/shm"), 1 << 20)]))]
    refused(fronts, "config_mismatch")
    agreement = pair.read("agreement.json")
    assert agreement["nodes"][1]["limits"]["shm_bytes"] == 1 << 20
    checks = [check for check in agreement["checks"] if "shm" in check["id"] + check["text"]]
    assert checks
    assert any("/dev/shm" in check["text"] for check in checks)
