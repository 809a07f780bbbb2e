"""What a person sees who starts a run again on damaged checkpoints.

Run: pytest tests/jobs/damage/test_user_path.py
"""

import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import front_server
from tests.conftest import Trained as RanHere
from tests.jobs.damage.conftest import STEPS, Trained
from tests.jobs.damage.damages import OF_A_DIRECTORY, OF_A_FILE, How, Injected, damage, files_of
from tests.jobs.nodes.fronts import Front
from tests.jobs.nodes.harness import Job
from tests.jobs.nodes.network_namespaces import Loopback
from unisono.base.errors import IntegrityError

pytestmark = [pytest.mark.ranks, pytest.mark.slow]

MORE = 2


@pytest.fixture
def again(trained: Trained, tmp_path: Path) -> Job:
    """The run, moved to another folder, with two steps more to make."""
    job = Job(Loopback(), tmp_path, model=tmp_path, rows=tmp_path, caches=trained.job.folder / "caches", nodes=1)  # fmt: skip
    shutil.copytree(trained.job.out, job.out)
    config = json.loads((trained.job.home(0) / "c.yaml").read_text()) | {"output_dir": str(job.out)}
    (job.home(0) / "c.yaml").write_text(json.dumps(config))
    return job


def _start(job: Job) -> Front:
    return job.start(
        0, "--nproc", "2", "--resume", f"duration={STEPS + MORE} steps", topology=False, json=False
    )


def _damage(trained: Trained, job: Job, how: How, *, seed: int) -> Injected:
    path = max((job.out / "checkpoints").glob("step-*"))
    chance = random.Random(seed)
    return damage(trained.specimen, path, chance.choice(files_of(path)), how, chance)


def _says(front: Front, injected: Injected) -> bool:
    """Whether a line names the checkpoint, a file that was hit, and a tensor where any was; of a
    whole file that is another's, whose.
    """
    place = f"{injected.path.name}: "
    another = injected.how.startswith("file of another")
    lines = [line for line in front.text().splitlines() if place in line]
    return any(
        file in line
        and (not injected.tensors or another or any(tensor in line for tensor in injected.tensors))
        for line in lines
        for file in injected.files
    )


def _names_and_goes_on(trained: Trained, job: Job, how: How, *, seed: int) -> None:
    injected = _damage(trained, job, how, seed=seed)
    front = _start(job)
    assert front.wait() == 0, front.text()
    assert _says(front, injected), front.text()
    assert job.read("plan.json")["resume"]["step"] == STEPS - 1
    assert [line["step"] for line in job.metrics()] == list(range(1, STEPS + MORE + 1))
    mine, straight = ([line["loss"] for line in run.metrics()] for run in (job, trained.job))
    assert mine[:STEPS] == straight
    assert f"from step {STEPS - 1}" in front.text()


def test_start_names_the_damage_and_continues_from_last_intact_checkpoint(
    trained: Trained, again: Job
) -> None:
    _names_and_goes_on(trained, again, "flipped bit", seed=3)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("how", [*OF_A_FILE, *OF_A_DIRECTORY])
def test_a_start_names_each_damage_and_continues(trained: Trained, again: Job, how: How, seed: int) -> None:
    _names_and_goes_on(trained, again, how, seed=seed)


def test_a_start_on_nothing_but_damage_is_refused_with_all_that_is_wrong(
    trained: Trained, again: Job
) -> None:
    paths = sorted((again.out / "checkpoints").glob("step-*"))
    for path in paths:
        damage(trained.specimen, path, "state.json", "flipped bit", random.Random(0))
    before = {file: file.read_bytes() for path in paths for file in path.iterdir()}
    front = _start(again)
    assert front.wait() == 7, front.text()
    assert all(f"{path.name}: state.json" in front.text() for path in paths), front.text()
    assert "--fresh" in front.text()
    assert "Traceback" not in front.text()
    assert before == {file: file.read_bytes() for path in paths for file in path.iterdir()}


@pytest.mark.parametrize("how", ["flipped bit", "missing file"])
def test_verify_names_the_file_and_the_tensor(trained: Trained, again: Job, how: How) -> None:
    injected = _damage(trained, again, how, seed=5)
    command = [sys.executable, "-m", "unisono", "checkpoint", "verify", str(again.out)]
    done = front_server.run(command, env=again._environment(0, {}))
    assert done.returncode == 7, done.stderr
    names = sorted(path.name for path in (again.out / "checkpoints").glob("step-*"))
    (final,) = (path.name for path in again.out.iterdir() if path.name in ("adapter", "model"))
    assert done.stdout.split() == [
        *(word for name in names[:-1] for word in (name, "intact")), names[-1], "DAMAGED", final, "intact",
    ]  # fmt: skip
    assert f"{names[-1]}/{injected.files[0]}: " in done.stderr
    assert all(tensor in done.stderr for tensor in sorted(injected.tensors)[:3])
    assert f"step {STEPS - 1} is recent enough" in done.stderr


@pytest.mark.parametrize("name", ["trainable.safetensors", "optimizer-adamw.safetensors", "state.json"])
def test_rank_refuses_a_checkpoint_damaged_after_its_front_looked(
    train_here: Callable[..., RanHere], tmp_path: Path, name: str
) -> None:
    run = train_here(directory=tmp_path / "run", duration="4 steps", checkpoint={"every": "2 steps"})
    (path,) = (run.directory / "checkpoints").glob("step-00000004")
    file = bytearray((path / name).read_bytes())
    file[-2] ^= 1
    (path / name).write_bytes(file)
    with pytest.raises(IntegrityError) as raised:
        train_here(directory=run.directory, duration="6 steps", resume=(4, path))
    assert [problem.where for problem in raised.value.problems] == [str(path / name)]
