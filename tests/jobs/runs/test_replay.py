"""Steps are run again from a checkpoint, and give the same bits.

Run: pytest tests/jobs/runs/test_replay.py
"""

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests import front_server
from unisono.guard.rundir import RunDir
from unisono.jobs.runs.replay import Difference, Replayed, changed_versions, compare

pytestmark = pytest.mark.slow


def train(front: Any, model: Path, rows: Path, *words: str, **sections: Any) -> None:
    """A run of 8 steps that keeps the checkpoints of steps 4, 6 and 8."""
    body = {
        "model": {"path": str(model), "dtype": "float32"}, "adapter": {"rank": 4, "dropout": 0.1}, "optim": {"lr": 1e-2},
        "duration": "8 steps", "batch": {"global": 8}, "checkpoint": {"every": "2 steps"}, "eval": {"every": "3 steps"},
        **sections,
    }  # fmt: skip
    front.config(train=str(rows), **body)
    config = json.loads((front.folder / "c.yaml").read_text())
    config["data"] |= {"eval": 0.1, "max_length": 64}
    (front.folder / "c.yaml").write_text(json.dumps(config))
    process = front.start(*words, faults={"real": True})
    _, printed = process.communicate(timeout=300)
    assert process.returncode == 0, printed


def replay(front: Any, *words: str, steps: int = 3, env: dict[str, str] | None = None) -> Any:
    command = [sys.executable, "-m", "unisono", "checkpoint", "verify", str(front.out), *words]
    return front_server.run(
        [*command, "--replay", str(steps)], env=front.environment | (env or {}), timeout=300
    )


def contents(folder: Path) -> dict[str, str]:
    """The digest of every file of the run, but for the record of readings."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "verified.json"
    }


def change_metrics(front: Any, step: int, name: str, factor: float) -> None:
    path = front.out / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["step"] == step and name in line:
            line[name] *= factor
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def damage(front: Any, *steps: int) -> None:
    for step in steps:
        (file,) = (front.out / "checkpoints" / f"step-{step:08d}").glob("trainable*.safetensors")
        file.write_bytes(file.read_bytes()[:-1] + b"?")


def test_steps_run_again_give_the_same_bits_and_what_does_not_is_named(
    front: Any, model_dir: Path, rows_file: Path
) -> None:
    rows = front.folder / "rows.jsonl"
    rows.write_bytes(rows_file.read_bytes())
    train(front, model_dir, rows)
    before = contents(front.out)
    done = replay(front, env={"OMP_NUM_THREADS": "2"})  # the plan's number counts
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "steps 5-7 give the same losses and gradient norms, bit for bit"
    assert "running steps 5-7 again from step 4: 1 rank" in done.stderr
    assert contents(front.out) == before
    assert list((front.folder / "tmp").iterdir()) == []

    change_metrics(front, 6, "grad_norm", 1 + 1e-9)
    done = replay(front, "--json")
    assert done.returncode == 7
    found = json.loads(done.stdout)["replay"]
    assert (found["step"], found["steps"], found["equal"], found["right"]) == (4, [5, 7], False, False)
    assert [(one["step"], one["name"]) for one in found["differences"]] == [(6, "grad_norm")]

    done = replay(front, "--step", "8")
    assert done.returncode == 2
    assert "checkpoint step 8 has no 3 logged steps after it" in done.stderr
    assert "metrics.jsonl ends with step 8" in done.stderr
    assert "without --step, step 4 is used" in done.stderr

    rows.write_text(rows.read_text().replace("red", "blue"))
    done = replay(front)
    assert done.returncode == 2
    assert "the data differ from the run's" in done.stderr

    damage(front, 4, 6)
    done = replay(front)
    assert done.returncode == 7
    assert "step-00000004/trainable.safetensors" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.ranks
@pytest.mark.long
@pytest.mark.parametrize(("strategy", "adapter"), [("ddp", {"rank": 4, "dropout": 0.1}), ("fsdp", None)])
def test_two_ranks_replay_bit_exact_and_each_checkpoint_can_be_exported(
    front: Any, model_dir: Path, rows_file: Path, strategy: str, adapter: dict[str, Any] | None
) -> None:
    train(
        front,
        model_dir,
        rows_file,
        "--nproc",
        "2",
        parallel={"strategy": strategy},
        adapter=adapter,
        optim={"lr": 1e-3},
    )
    before = contents(front.out)
    done = replay(front)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "steps 5-7 give the same losses and gradient norms, bit for bit"
    assert f"running steps 5-7 again from step 4: 2 ranks ({strategy})" in done.stderr
    assert contents(front.out) == before

    command = [sys.executable, "-m", "unisono", "checkpoint", "export", str(front.out)]
    weights = []
    for step in (6, 8):
        out = front.folder / f"step-{step}"
        done = subprocess.run(
            [*command, str(out), "--step", str(step)], env=front.environment, capture_output=True, text=True, timeout=300,
            check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        (file,) = out.glob("*model.safetensors")
        weights.append(load_file(file))
    results: list[Path] = [
        *front.out.glob("adapter/*.safetensors"),
        *front.out.glob("model/*.safetensors"),
    ]
    (file,) = results
    final = load_file(file)
    assert set(weights[0]) == set(weights[1]) == set(final)
    assert all(torch.equal(weights[1][name], final[name]) for name in final)
    assert not all(torch.equal(weights[0][name], final[name]) for name in final)


LOGGED = {n: {"step": n, "loss": 1.0 / n, "grad_norm": 0.5} for n in (5, 6, 7)}


def again(**changed: float | None) -> dict[int, dict[str, Any]]:
    """The logged lines, with other figures in that of step 6."""
    return {n: {**line, **(changed if n == 6 else {})} for n, line in LOGGED.items()}


def test_a_last_bit_is_a_difference_and_not_a_number_is_itself() -> None:
    assert compare(LOGGED, again()) == ()
    assert compare({6: again(loss=None)[6]}, {6: again(loss=None)[6]}) == ()
    loss = LOGGED[6]["loss"]
    nearly = math.nextafter(loss, 1.0)
    assert compare(LOGGED, again(loss=nearly)) == (Difference(6, "loss", loss, nearly),)
    assert not Replayed(4, 5, 7, compare(LOGGED, again(loss=nearly))).is_right


@pytest.mark.parametrize(
    ("loss", "excuses", "right"),
    [(0.1667, ("another torch",), True), (0.1667, (), False), (0.3, ("another torch",), False), (None, ("another torch",), False)],
)  # fmt: skip
def test_rounding_is_right_only_where_there_is_a_reason_for_it(
    loss: float | None, excuses: tuple[str, ...], *, right: bool
) -> None:
    found = Replayed(4, 5, 7, compare(LOGGED, again(loss=loss)), excuses)
    assert found.is_right == right
    assert "loss of step 6 is" in found.lines()[0]
    if right:
        assert found.lines()[1:] == list(excuses)
        return
    (problem,) = found.error("runs/demo").problems
    assert problem.what == found.lines()[0]
    assert ("another torch" if excuses else "no known change") in problem.why
    assert "please report" in problem.fix


def test_other_packages_are_a_line_each(tmp_path: Path) -> None:
    now = {"python": "3.12", "torch": "2.0", "left-pad": "1"}
    (tmp_path / "environment.json").write_text(
        json.dumps({"packages": {"python": "3.12", "torch": "1.0", "left-pad": "0"}})
    )
    assert changed_versions(RunDir(tmp_path), now) == ["torch is 2.0, and was 1.0"]
    (tmp_path / "environment.json").unlink()
    assert "cannot be read" in changed_versions(RunDir(tmp_path), now)[0]
