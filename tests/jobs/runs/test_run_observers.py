"""Work beside the ranks that cannot begin, or must end early.

Run: pytest tests/jobs/runs/test_run_observers.py
"""

import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.base.errors import UsageError
from unisono.base.messages import ShardWrittenMessage, message_of
from unisono.guard.control.file_transfer import Content, Offer, OfferRefused
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.lock import RunLock
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.interrupts import Interrupts
from unisono.jobs.remote_checkpoint.storage import Uploads
from unisono.jobs.remote_checkpoint.transfers import ShardArrivals
from unisono.jobs.remote_checkpoint.verification import FirstCheckpoint
from unisono.jobs.runs import preparation as claiming

SLEEPS = Programs(task=(sys.executable, "-c", "import time; time.sleep(600)"))


def uploading(
    tmp_path: Path, interrupts: Interrupts, printed: list[Any], *, grace: str = "1 second"
) -> Uploads:
    run = RunDir(tmp_path / "out")
    run.checkpoint(3).mkdir(parents=True)
    section = SimpleNamespace(storage=f"file://{tmp_path}/copies", keep=3, best=None)
    plan: Any = SimpleNamespace(
        config=SimpleNamespace(checkpoint=section, grace=grace), run_id="r", keep_every=None
    )
    return Uploads(plan, run, programs=SLEEPS, leftovers={}, interrupts=interrupts, show=printed.append)


def test_signal_during_the_last_upload_leaves_only_the_grace_time(
    tmp_path: Path,
) -> None:
    interrupts, printed = Interrupts(), list[Any]()
    later = threading.Timer(0.5, lambda: interrupts.request_stop(signal.SIGTERM, where="node 1 (b)"))
    began = time.monotonic()
    with uploading(tmp_path, interrupts, printed) as upload:
        later.start()
        upload.wait()
    assert time.monotonic() - began < 20
    assert [message["code"] for message in printed if message["kind"] == "warning"] == ["upload_failed"]


def test_no_room_for_temporary_files_is_reported_and_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed: list[Any] = []
    plan: Any = SimpleNamespace(rehearse=True, rehearsed_step=1, run_id="r")
    first = FirstCheckpoint(plan, programs=SLEEPS, leftovers={}, show=printed.append)
    first.on_message(0, {"kind": "checkpoint", "step": 1, "path": str(tmp_path), "bytes": 1, "seconds": 0.1})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    assert first.look() is None
    assert first.look() is None
    with uploading(tmp_path, Interrupts(), printed) as upload:
        assert upload.look() is None
        assert upload.look() is None
    assert [message["code"] for message in printed] == ["rehearsal_died", "upload_failed"]
    assert all("cannot be started" in message["text"] for message in printed)


@pytest.mark.parametrize(
    "odd",
    [
        {"rank": 0}, {"rank": "1"}, {"rank": None}, {"temporary": "../out"}, {"temporary": "step-00000001"}, {"temporary": None},
        {"temporary": "step-00000001.tmp-a/../.."}, {"temporary": "step-00000001.tmp-a\n"}, {"name": "../trainable.shard-00001-of-00002.safetensors"},
        {"name": "trainable.shard-00000-of-00002.safetensors"}, {"name": ".trainable.shard-00001-of-00002.safetensors"}, {"name": "manifest.json"},
        {"name": "/etc/passwd"}, {"name": "a\0.shard-00001-of-00002.safetensors"}, {"name": ["trainable"]},
    ],
)  # fmt: skip
def test_node_puts_only_its_own_parts_into_a_checkpoint_being_written(
    tmp_path: Path, odd: dict[str, Any]
) -> None:
    plan: Any = SimpleNamespace(on_node=lambda _: [SimpleNamespace(rank=1)], world_size=2)
    (tmp_path / "step-00000001.tmp-a").mkdir()
    good: dict[str, Any] = {
        "kind": "shard",
        "rank": 1,
        "temporary": "step-00000001.tmp-a",
        "name": "trainable.shard-00001-of-00002.safetensors",
    }
    arrivals, content = ShardArrivals(plan, tmp_path), Content(1, "0" * 32)
    assert arrivals.place(Offer(1, "b", 0, content, good)) == (tmp_path / "step-00000001.tmp-a", good["name"])
    with pytest.raises(OfferRefused):
        arrivals.place(Offer(1, "b", 0, content, {**good, **odd}))


def test_what_is_not_a_list_of_files_is_refused_as_unreadable(tmp_path: Path) -> None:
    nodes = [SimpleNamespace(node_rank=rank, shares_output=rank == 0) for rank in range(2)]
    places = [SimpleNamespace(node_rank=rank) for rank in range(2)]
    plan: Any = SimpleNamespace(nodes=nodes, node=nodes.__getitem__, ranks=places)
    arrivals = ShardArrivals(plan, tmp_path)
    for files in (["a"], {"a": "b"}, "a"):
        with pytest.raises(ValueError, match="files"):
            arrivals.confirmed(
                1, message_of(ShardWrittenMessage, {"temporary": "step-00000001.tmp-a", "files": files})
            )


def test_a_start_that_is_refused_takes_nothing_of_a_quicker_one_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, make = RunDir(tmp_path / "out"), claiming._make

    def quicker(of: RunDir) -> None:  # another start, between this one's look and its making of the directory
        make(of)
        other.acquire("other", 1)

    other = RunLock(run.lock)
    monkeypatch.setattr(claiming, "_make", quicker)
    monkeypatch.setattr(claiming, "decide_start", lambda *_, **__: None)
    config: Any = SimpleNamespace(output_dir=str(run.root))
    refused = claiming.claim(config, host="here", resume=False, fresh=False, notify=print)
    with pytest.raises(UsageError, match="is active"), refused:
        pass
    assert run.lock.exists()
    other.release()
