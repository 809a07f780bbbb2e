"""Nodes with disks of their own, and what must be true of a run's checkpoints then."""

from pathlib import Path
from typing import Any

from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Own
from unisono.base.user_key import user_key
from unisono.trainer.checkpoint.manifest import MANIFEST, Manifest
from unisono.trainer.checkpoint.store import CheckpointStore


def start_apart(job: Job, *words: str, hidden: Path | None = None, **named: Any) -> list[Front]:
    """All nodes, each with a disk of its own where the config's output_dir is; that of the head is
    `job.out`.

    Args:
        job: of these nodes.
        words: of their command lines.
        hidden: another directory that only the head has; the others have an empty one there.
        named: for all of them.
    """
    owns = [Own(), *(_own(job, node, hidden) for node in range(1, job.nodes))]
    return [job.start(node, *words, own=own, **named) for node, own in enumerate(owns)]


def _own(job: Job, node: int, hidden: Path | None) -> Own:
    binds = [(disk(job, node), job.out), *([(disk(job, node, "hidden"), hidden)] if hidden else [])]
    for source, target in binds:
        source.mkdir(exist_ok=True)
        target.mkdir(exist_ok=True)
    return Own(binds=binds)


def disk(job: Job, node: int, name: str = "disk") -> Path:
    """What a node has in place of one of the head's directories."""
    return job.home(node) / name


def store_in(folder: Path, caches: Path) -> CheckpointStore:
    """Checkpoints in a folder, with the head's key."""
    return CheckpointStore(folder, key=user_key(caches / "place0" / "settings" / "unisono"))


def assert_whole_at_the_head(job: Job, caches: Path, *, last: int) -> list[Manifest]:
    """Every checkpoint is in the head's output_dir, intact; nothing of any is elsewhere, and
    nothing half is here.
    """
    store = store_in(job.out / "checkpoints", caches)
    assert store.list()[-1].name == f"step-{last:08d}", job.transcript()
    assert len(store.list()) >= 2
    assert not any(store.verify(path) for path in store.list())
    assert not list((job.out / "checkpoints").glob("*.tmp-*"))
    for node in range(1, job.nodes):
        assert not (disk(job, node) / "checkpoints").exists(), list(disk(job, node).rglob("*"))
    return [Manifest.from_bytes((path / MANIFEST).read_bytes()) for path in store.list()]
