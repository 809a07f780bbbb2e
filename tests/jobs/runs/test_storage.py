"""Copies of checkpoints in checkpoint.storage, and a run that goes on from them elsewhere.

Run: pytest tests/jobs/runs/test_storage.py
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from tests import front_server, needs
from tests.jobs.runs.conftest import tasks_of
from unisono.base.user_key import user_key
from unisono.guard.rundir import RunDir
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.task_process import TaskProcess, run_request, run_task
from unisono.jobs.remote_checkpoint.storage import storage_tried
from unisono.trainer.checkpoint.manifest import MANIFEST, Manifest
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.config import RunConfig
from unisono.trainer.config.training_sections import CheckpointSection
from unisono.trainer.plan.task_requests import FindCopy

Until = Callable[[Callable[[], bool]], None]


@pytest.fixture
def copies(front: Any) -> Path:
    """A second directory, to which the front's config points."""
    folder = front.folder / "copies"
    folder.mkdir()
    use(front, folder)
    return folder


def use(front: Any, folder: Path, **checkpoint: Any) -> None:
    data = {"train": "rows", "eval": 0.1 if "best" in checkpoint else None}
    section = {"every": "3 steps", "storage": f"file://{folder}", **checkpoint}
    front.config(train="rows", data=data, checkpoint=section)


def stored(copies: Path, front: Any) -> list[Path]:
    """The checkpoints there that count, oldest first."""
    run_id = front.read("plan.json")["run_id"]
    return sorted(path.parent for path in (copies / "out" / run_id).glob(f"step-*/{MANIFEST}"))


def findings(path: Path, front: Any) -> list[Any]:
    return CheckpointStore(path.parent, key=user_key(front.folder / "settings" / "unisono")).verify(path)


def test_the_newest_checkpoint_is_there_whole_at_the_end(front: Any, copies: Path) -> None:
    done = front.run()
    assert done.returncode == 0, done.stderr
    there = stored(copies, front)
    assert there[-1].name == "step-00000010"
    assert len(there) <= 3
    assert [findings(path, front) for path in there] == [[]] * len(there)
    run_id = front.read("plan.json")["run_id"]
    assert f"copies of checkpoints: file://{copies}/out/{run_id}" in done.stderr
    assert f"step-00000010 is in file://{copies}/out/{run_id}: " in done.stderr
    assert json.loads((there[-1].parent / "plan.json").read_text())["run_id"] == run_id


@pytest.mark.long
def test_what_is_pruned_here_is_pruned_there(front: Any, copies: Path) -> None:
    """Except the newest `keep`, which stay there also where this machine never had them."""
    use(front, copies, keep=2)
    for steps in (3, 6, 9):
        assert front.run("--resume", f"duration={steps} steps").returncode == 0
    assert [path.name[-2:] for path in stored(copies, front)] == ["03", "06", "09"]
    for step in (3, 6, 9):
        shutil.rmtree(front.out / "checkpoints" / f"step-{step:08d}")
    assert front.run("--resume").returncode == 0
    assert [path.name[-2:] for path in stored(copies, front)] == ["09", "10"]


@pytest.mark.long
def test_what_is_kept_for_ever_stays_also_if_a_run_continues_elsewhere(front: Any, copies: Path) -> None:
    use(front, copies, keep=1, keep_every="3 steps")
    for steps in (3, 6):
        assert front.run("--resume", f"duration={steps} steps").returncode == 0
    shutil.rmtree(front.out)
    assert front.run("--resume").returncode == 0
    there = [path.name[-2:] for path in stored(copies, front)]
    assert there[:2] == ["03", "06"]
    assert there[-1] == "10"


@pytest.mark.long
def test_the_best_stays_there_also_where_a_run_continues_elsewhere(front: Any, copies: Path) -> None:
    """And what is not the best any more goes."""
    use(front, copies, keep=1, best="eval_loss")
    for steps, loss in ((3, 0.5), (6, 0.9), (9, 0.4)):
        assert front.run("--resume", f"duration={steps} steps").returncode == 0
        with (front.out / "metrics.jsonl").open("a") as metrics:  # the stand-in evaluates nothing
            metrics.write(json.dumps({"step": steps, "eval_loss": loss}) + "\n")
        if steps == 6:
            assert front.run("--resume", "duration=7 steps").returncode == 0  # and the line is in the storage
            shutil.rmtree(front.out)
            assert front.run("--resume", "duration=8 steps").returncode == 0
            there = [path.name[-2:] for path in stored(copies, front)]
            assert "03" in there
            assert "06" not in there
    shutil.rmtree(front.out / "checkpoints" / "step-00000008")
    assert front.run("--resume").returncode == 0
    there = [path.name[-2:] for path in stored(copies, front)]
    assert "03" not in there
    assert there[-1] == "10"


def test_a_different_machine_continues_from_there(front: Any, copies: Path) -> None:
    del copies
    front.run("duration=6 steps")
    run_id = front.read("plan.json")["run_id"]
    shutil.rmtree(front.out)
    done = front.run("--resume")
    assert done.returncode == 0, done.stderr
    assert f"step 6 of run {run_id} is downloaded from" in done.stderr
    assert front.read("plan.json")["run_id"] == run_id
    assert front.read("plan.json")["resume"]["step"] == 6
    assert front.steps() == list(range(1, 11))


@pytest.mark.long
def test_without_resume_a_new_run_begins_and_the_old_copies_stay(front: Any, copies: Path) -> None:
    front.run("duration=6 steps")
    shutil.rmtree(front.out)
    assert front.run("duration=3 steps").returncode == 0
    assert front.read("plan.json")["resume"] is None
    assert len(list((copies / "out").iterdir())) == 2


@pytest.mark.long
def test_a_run_whose_own_checkpoints_are_damaged_continues_from_the_copy(front: Any, copies: Path) -> None:
    del copies
    front.run("duration=6 steps")
    for path in (front.out / "checkpoints").glob("step-*/state.json"):
        path.write_text("something else")
    done = front.run("--resume")
    assert done.returncode == 0, done.stderr
    assert front.read("plan.json")["resume"]["step"] == 6
    assert front.steps() == list(range(1, 11))


@pytest.mark.long
def test_a_strangers_copies_are_refused_without_trust(front: Any, copies: Path) -> None:
    del copies
    front.run("duration=6 steps")
    shutil.rmtree(front.out)
    shutil.rmtree(front.folder / "settings")
    done = front.run("--resume")
    assert done.returncode == 7
    assert "is not signed with your key" in done.stderr
    assert "copy checkpoint.key" in done.stderr
    assert not front.out.exists()
    assert front.run("--resume", "--trust").returncode == 0
    assert front.read("plan.json")["resume"]["step"] == 6


def test_a_damaged_copy_is_named_and_an_older_one_is_taken(front: Any, copies: Path) -> None:
    for steps in (3, 6):
        front.run("--resume", f"duration={steps} steps", faults={"weighs": 10_000})
    newest = stored(copies, front)[-1] / "trainable.safetensors"
    data = bytearray(newest.read_bytes())
    data[5000] ^= 1
    newest.write_bytes(data)
    shutil.rmtree(front.out)
    done = front.run("--resume")
    assert done.returncode == 0, done.stderr
    assert f"{newest} does not match its manifest" in done.stderr
    assert front.read("plan.json")["resume"]["step"] == 3
    assert not list((front.out / "checkpoints").glob("*.tmp-*"))


@pytest.mark.long
def test_nothing_there_is_reported_and_the_run_begins(front: Any, copies: Path) -> None:
    del copies
    done = front.run("--resume")
    assert done.returncode == 0
    assert "holds no complete checkpoint of a run of this name" in done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """One MiB of disk."""
    with needs.small_disk(tmp_path / "small", "size=1m") as disk:
        yield disk


def test_a_full_storage_is_a_warning_and_nothing_there_counts(front: Any, small_disk: Path) -> None:
    use(front, small_disk)
    done = front.run(faults={"weighs": 2 << 20})
    assert done.returncode == 0, done.stderr
    assert front.steps() == list(range(1, 11))
    assert "No space left on device" in done.stderr
    assert "it is complete in output_dir; the next start that resumes the run uploads it" in done.stderr
    assert stored(small_disk, front) == []


def test_unwritable_storage_ends_the_run_before_its_first_step(front: Any) -> None:
    use(front, Path("/proc/nowhere"))
    done = front.run()
    assert done.returncode == 6, done.stderr
    assert "error: file:///proc/nowhere/out cannot be written" in done.stderr
    assert "where: checkpoint.storage" in done.stderr
    assert "why:   FileNotFoundError: " in done.stderr
    assert "that directory does not take new files" in done.stderr
    assert "fix:   name a directory in which you may create files" in done.stderr
    assert "or train without copies: checkpoint.storage=null" in done.stderr
    assert not front.out.exists()


def test_dry_run_refuses_a_bad_storage_and_leaves_nothing_in_a_good_one(front: Any, copies: Path) -> None:
    use(front, Path("/proc/nowhere"))
    done = front.run("--dry-run")
    assert done.returncode == 6, done.stderr
    assert "error: file:///proc/nowhere/out cannot be written" in done.stderr
    use(front, copies)
    assert front.run("--dry-run").returncode == 0
    assert list(copies.iterdir()) == []
    assert not front.out.exists()


def test_a_storage_that_cannot_be_written_any_more_is_a_warning(
    front: Any, copies: Path, started: Any, until: Until
) -> None:
    process = started(faults={"wait": 2})
    until(front.waits_before(2))
    (copies / "out").write_text("a file where a directory should be")
    process.send_signal(signal.SIGTERM)
    _, reported = process.communicate(timeout=60)
    assert process.returncode == 75, reported
    assert f"was not copied to file://{copies}/out: " in reported
    assert "a file is where a directory is needed" in reported
    assert "it is complete in output_dir" in reported


def test_a_start_that_comes_to_nothing_leaves_nothing_in_the_storage(front: Any, copies: Path) -> None:
    use(front, copies)
    assert front.run("data.train=refuse").returncode == 2
    assert front.run("data.train=rows", faults={"refuse": 1}).returncode == 2
    assert list(copies.iterdir()) == []


def test_a_storage_that_does_not_answer_is_not_waited_for_beyond_its_time(tmp_path: Path) -> None:
    """A pipe that nobody reads stands where the object is to be."""
    config = RunConfig.model_validate(
        {"model": "m", "data": {"train": "t"}, "output_dir": "out", "checkpoint": {"storage": f"file://{tmp_path}"}}
    )  # fmt: skip
    place = tmp_path / "out" / "run"
    place.mkdir(parents=True)
    os.mkfifo(place / "tried")
    printed: list[Any] = []
    with storage_tried(
        config, RunDir(tmp_path / "out"), "run", programs=Programs(), leftovers={}, show=printed.append, patience_s=6.0
    ):  # fmt: skip
        assert not printed
    assert [message["kind"] for message in printed] == ["note", "warning"]
    assert printed[0]["text"].startswith(f"waiting for file://{tmp_path}/out to answer; at most ")
    assert "was not tested before the first step: no answer within 6.0 s" in printed[1]["text"]
    assert "training starts, and each failed copy is reported" in printed[1]["text"]


@pytest.mark.parametrize(
    "moment", ["adopted", *(pytest.param(one, marks=pytest.mark.long) for one in ("fetched", "placed"))]
)
def test_start_killed_while_it_brings_a_run_back_is_in_nobodys_way(
    front: Any, copies: Path, moment: str
) -> None:
    """SIGKILL between the checkpoint's name and the plan's, before and after; the next start goes
    on all the same.
    """
    del copies
    front.run("duration=6 steps")
    shutil.rmtree(front.out)
    _, _, *words = front.arguments("--resume")
    killer = Path(__file__).parent / "standins" / "killed_download.py"
    command = [sys.executable, str(killer), moment, *words]
    killed = front_server.run(command, cwd=front.folder, env=front.environment, timeout=60)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (front.out / "checkpoints" / "step-00000006").exists() == (moment != "fetched")
    assert (front.out / "plan.json").exists() == (moment == "placed")
    done = front.run("--resume")
    assert done.returncode == 0, done.stderr
    assert (f"removed the incomplete download of a killed start from {front.out}" in done.stderr) == (
        moment != "placed"
    )
    assert front.read("plan.json")["resume"]["step"] == 6
    assert front.steps() == list(range(1, 11))
    assert not [path.name for path in front.out.iterdir() if path.name.startswith(".")]


@pytest.mark.long
def test_after_such_a_kill_a_start_without_resume_starts_again(front: Any, copies: Path) -> None:
    front.run("duration=6 steps")
    shutil.rmtree(front.out)
    _, _, *words = front.arguments("--resume")
    killer = Path(__file__).parent / "standins" / "killed_download.py"
    command = [sys.executable, str(killer), "adopted", *words]
    subprocess.run(
        command, cwd=front.folder, env=front.environment, capture_output=True, timeout=60, check=False
    )
    done = front.run()
    assert done.returncode == 0, done.stderr
    assert front.read("plan.json")["resume"] is None
    assert front.steps() == list(range(1, 11))
    assert len(list((copies / "out").iterdir())) == 2


@pytest.mark.long
def test_a_fetch_that_takes_long_reports_how_far_it_is(
    front: Any, copies: Path, started: Any, until: Until
) -> None:
    """The child that fetches is stopped for longer than the first line takes."""
    front.run("duration=3 steps", faults={"weighs": 256 << 20})
    shutil.rmtree(front.out)
    process = started("--resume")
    until(lambda: any(path.stat().st_size for path in front.out.glob("checkpoints/*.tmp-*/trainable*")))
    (child,) = [one for one in tasks_of(process.pid) if "storage" in one.cmdline()]
    child.suspend()
    stopped = time.monotonic()
    until(lambda: time.monotonic() - stopped > 2.5)  # longer than the first line takes
    child.resume()
    _, reported = process.communicate(timeout=60)
    assert process.returncode == 0, reported
    run_id = front.read("plan.json")["run_id"]
    line = rf"downloading step 3 of run {run_id} from file://{copies}/out: [\d.]+ [kM]?B of 268 MB"
    assert re.search(line, reported), reported


@pytest.mark.long
def test_with_resume_a_storage_that_cannot_be_read_is_not_an_empty_one(front: Any, copies: Path) -> None:
    """A run that began anew would go beside the one that is there."""
    copies.rmdir()
    copies.write_text("a file where a directory should be")
    done = front.run("--resume")
    assert done.returncode == 6, done.stderr
    assert "cannot be read" in done.stderr
    assert not front.out.exists()


def test_a_storage_that_blocks_is_named_and_not_waited_for_beyond_grace(
    front: Any, copies: Path, started: Any, until: Until
) -> None:
    """A pipe that nobody reads stands where the file is to be: the upload of step 3 hangs, as on a
    dead network disk.
    """
    process = started("grace=6 seconds", faults={"wait": 2})
    until(front.waits_before(2))
    run_id = front.read("plan.json")["run_id"]
    place = copies / "out" / run_id / "step-00000002"
    place.mkdir(parents=True)
    os.mkfifo(place / "state.json")
    process.send_signal(signal.SIGTERM)
    _, reported = process.communicate(timeout=30)
    assert process.returncode == 75, reported
    assert "step-00000002, is not in" in reported
    assert "it is complete in output_dir" in reported
    assert findings(front.out / "checkpoints" / "step-00000002", front) == []
    assert stored(copies, front) == []


def test_an_upload_that_is_killed_leaves_nothing_that_counts(front: Any, copies: Path, until: Until) -> None:
    """SIGKILL in the middle; what was there before is taken.

    A pipe that nobody reads stands where the plan is to be, which comes between the weights and the
    manifest: it is over no sooner.
    """
    front.run("--resume", "duration=3 steps")
    run_id = front.read("plan.json")["run_id"]
    front.run("--resume", "duration=6 steps", "checkpoint.storage=null", faults={"weighs": 192 << 20})
    url = f"file://{copies}/out"
    request = {
        "action": "upload", "url": url, "run_id": run_id, "path": str(front.out / "checkpoints" / "step-00000006"), "keep": 3, "keep_every": None,
        "best": None, "beside": str(front.out),
    }  # fmt: skip
    half = copies / "out" / run_id / "step-00000006" / "trainable.safetensors"
    pipe = copies / "out" / run_id / "plan.json"
    pipe.unlink()
    os.mkfifo(pipe)
    with TaskProcess("storage", request) as task:
        until(lambda: half.exists() and half.stat().st_size > 0)
        task.close(patience_s=0)
    assert not (half.parent / MANIFEST).exists()
    pipe.unlink()
    found = run_request(FindCopy(url=url, run_id=None, before=None), programs=Programs())
    assert found["step"] == 3
    uploaded: Any = run_task("storage", request)
    assert uploaded["bytes"] > 192 << 20  # the next try is whole
    assert [path.name for path in stored(copies, front)] == ["step-00000003", "step-00000006"]
    Manifest.from_bytes((half.parent / MANIFEST).read_bytes())


@pytest.mark.parametrize(
    ("storage", "words"),
    [
        ("/mnt/copies", "is not a URL; write s3://bucket/runs or file:///mnt/copies"),
        ("s3:bucket", "is not a URL"),
        ("s3://", "is not a URL"),
        ("file://copies", "has no absolute path; write file:///copies"),
    ],
)
def test_a_storage_that_is_none_is_refused(storage: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        CheckpointSection(storage=storage)


def test_credentials_in_the_url_are_refused_and_not_repeated(front: Any) -> None:
    front.config(train="rows", checkpoint={"storage": "s3://key:secret@bucket/runs"})
    done = front.run()
    assert done.returncode == 2
    assert "checkpoint.storage holds a URL with credentials" in done.stderr
    assert "AWS_ACCESS_KEY_ID" in done.stderr
    assert "secret@" not in done.stderr
