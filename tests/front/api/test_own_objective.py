"""Objectives in a file of the user's own, on the command line and from Python.

Run: pytest tests/front/api/test_own_objective.py

That nodes with different files do not start is in tests/jobs/nodes/test_files.py.
"""

import json
import re
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import unisono
from tests import front_server
from tests.session_server import cache_with_kernels

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.ranks

LIMIT_S = 240.0  # of a loaded machine
OURS = """\
import torch
import unisono


class Plain(unisono.Objective):
    def loss(self, forward, micro, *, counts, known=0.0):
        log_probs = forward.log_probs(micro.rows)
        loss = -log_probs.sum() / counts.loss_tokens
        return unisono.Part(loss, loss.new_zeros(0))


class Focal(unisono.Objective):
    metrics = ("probability",)

    def __init__(self, power):
        self.power = power

    @classmethod
    def of(cls, config):
        return cls(power=2 + config.seed)

    def loss(self, forward, micro, *, counts, known=0.0):
        log_probs = forward.log_probs(micro.rows)
        probs = log_probs.exp()
        loss = -((1 - probs) ** self.power * log_probs).sum() / counts.loss_tokens
        sums = torch.stack([probs.detach().sum(), probs.new_tensor(float(len(probs)))])
        return unisono.Part(loss, sums)
"""


class Place:
    def __init__(self, folder: Path, model: Path, rows: Path) -> None:
        self.folder, self.model, self.rows = folder, model, rows
        self.file = folder / "ours.py"
        self.file.write_text(OURS)

    def config(self, out: str, **more: Any) -> unisono.Config:
        keys: Any = {
            "model": str(self.model), "data": {"train": str(self.rows), "max_length": 64}, "batch": {"global": 8},
            "optim": {"lr": 1e-2}, "adapter": {"rank": 4, "alpha": 8}, "duration": "4 steps", "device": "cpu",
            "checkpoint": {"every": "2 steps"}, "output_dir": str(self.folder / out), "objective": f"{self.file}:Focal",
        }  # fmt: skip
        return unisono.Config(**{**keys, **more})

    def train(self, out: str, nproc: int = 1, **more: Any) -> unisono.Result:
        return unisono.train(self.config(out, **more), nproc=nproc, trust_code=True, resume=True)

    def command(self, config: unisono.Config, *words: str) -> "subprocess.CompletedProcess[str]":
        (self.folder / "c.yaml").write_text(config.to_yaml())
        command = [sys.executable, "-m", "unisono", "--json", "train", "c.yaml", *words]
        return front_server.run(command, cwd=self.folder, timeout=LIMIT_S)

    def replay(self, result: unisono.Result, *words: str) -> "subprocess.CompletedProcess[str]":
        command = [*(sys.executable, "-m", "unisono", "checkpoint", "verify", str(result.output_dir), "--replay", "2"), *words]  # fmt: skip
        return front_server.run(command, cwd=self.folder, timeout=LIMIT_S)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_dir: Path, rows_file: Path) -> Place:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache_with_kernels(tmp_path / "cache")))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return Place(tmp_path, model_dir, rows_file)


def steps(result: unisono.Result) -> list[dict[str, Any]]:
    return [line for line in result.metrics if "loss" in line]


def test_it_trains_on_one_and_two_ranks_and_resumes_if_file_is_unchanged(
    place: Place,
) -> None:
    """The resumed run equals the whole one bit for bit."""
    constant: Any = {"optim": {"lr": 1e-2, "schedule": "constant"}}  # the same for any duration
    whole = place.train("whole", **constant)
    assert whole.outcome == "completed"
    assert all(0 < line["probability"] < 1 for line in steps(whole))

    two = place.train("two", nproc=2, **constant)
    assert [line["loss"] for line in steps(two)] == pytest.approx(
        [line["loss"] for line in steps(whole)], rel=1e-4
    )

    half = place.train("half", duration="2 steps", **constant)
    assert half.step == 2
    text = place.file.read_text()
    place.file.write_text(text + "# changed\n")
    with pytest.raises(unisono.UsageError) as raised:
        place.train("half", **constant)
    assert any("has changed" in problem.what for problem in raised.value.problems)
    assert any("--allow objective" in problem.fix for problem in raised.value.problems)
    place.file.write_text(text)
    resumed = place.train("half", **constant)
    assert resumed.step == 4
    assert [line["loss"] for line in steps(resumed)] == [line["loss"] for line in steps(whole)]
    assert resumed.adapter is not None
    assert whole.adapter is not None
    name = "adapter_model.safetensors"
    assert (resumed.adapter / name).read_bytes() == (whole.adapter / name).read_bytes()

    # A run names the file, and may be that of somebody else: a replay executes it only with trust.
    refused = place.replay(whole)
    assert refused.returncode == 2, refused.stderr
    assert "has not been trusted" in refused.stderr
    assert str(place.folder / "whole" / "plan.json") in refused.stderr
    assert "--trust-code" in refused.stderr
    trusted = place.replay(whole, "--trust-code")
    assert trusted.returncode == 0, trusted.stderr
    assert "bit for bit" in trusted.stdout


def test_the_plain_cross_entropy_as_an_own_objective_has_the_losses_of_sft(place: Place) -> None:
    own = place.train("own", objective=f"{place.file}:Plain")
    ours = place.train("ours", objective="sft")
    found, wanted = ([line["loss"] for line in steps(result)] for result in (own, ours))
    assert found[0] == pytest.approx(wanted[0], rel=1e-6)
    # Ours sums over blocks of the vocabulary; AdamW's first updates are as large for the rounding
    # of a gradient near 0 as for its sign.
    assert found == pytest.approx(wanted, rel=1e-3)


def test_without_trust_it_is_refused_before_anything_is_executed(place: Place) -> None:
    place.file.write_text(f"open({str(place.folder / 'executed')!r}, 'w')\n{OURS}")
    with pytest.raises(unisono.UsageError, match="not been trusted") as raised:
        unisono.train(place.config("out"))
    assert "trust_code=True" in raised.value.problems[0].fix
    refused = place.command(place.config("out"))
    assert refused.returncode == 2
    assert "--trust-code" in json.loads(refused.stdout.splitlines()[-1])["problems"][0]["fix"]
    assert place.command(place.config("out"), "--trust-code", "--dry-run").returncode == 0
    assert not (place.folder / "executed").exists()
    assert not (place.folder / "out").exists()
    assert place.command(place.config("out"), "--trust-code").returncode == 0
    assert (place.folder / "executed").exists()


@pytest.mark.parametrize(
    ("change", "name", "line", "what"),
    [
        (("class Focal(unisono.Objective):", "class Focal(unisono.Objective:"), "Focal", 12, "not Python"),
        (("", ""), "Fokal", 0, "no class Fokal"),
        (("class Focal(unisono.Objective)", "class Focal"), "Focal", 12, "is not an objective"),
        (("import torch", f"x = 1{' + 1' * 200_000}\nimport torch"), "Focal", 0, "nested too deep"),
        (("import torch", "import torch_that_is_not_there"), "Focal", 1, "ModuleNotFoundError"),
        (("    def loss(", "    def losses("), "Plain", 5, "has no loss"),
        (("known=0.0):\n        log_probs = forward.log_probs(micro.rows)\n        loss", "):\n        loss"), "Plain", 6, "other arguments"),
        (("power=2 + config.seed", "power=config.nothing"), "Focal", 20, "AttributeError"),
        (("    metrics = (", "    sides = (0, 1)\n    metrics = ("), "Focal", 12, "needs pairs"),
    ],
    ids=["syntax", "no-class", "no-objective", "terms", "import", "no-loss", "arguments", "of", "pairs"],
)  # fmt: skip
def test_a_bad_file_is_refused_with_its_line(
    place: Place, change: tuple[str, str], name: str, line: int, what: str
) -> None:
    place.file.write_text(OURS.replace(*change))
    with pytest.raises(unisono.UsageError) as raised:
        place.train("out", objective=f"{place.file}:{name}")
    assert raised.value.exit_code == 2
    problem = raised.value.problems[0]
    assert what in problem.what
    assert problem.where.split(" ")[-1] == (f"{place.file}:{line}" if line else str(place.file))
    if name == "Fokal":
        assert "Focal" in problem.fix


APART = """
class Apart(Plain):
    group = None

    def loss(self, forward, micro, *, counts, known=0.0):
        if self.group is None:
            self.group = torch.distributed.new_group()
        if torch.distributed.get_rank() == 0:
            torch.distributed.all_reduce(torch.ones(3), group=self.group)
        return super().loss(forward, micro, counts=counts)
"""


def test_a_collective_that_one_rank_enters_is_reported_before_the_first_step_has_ended(place: Place) -> None:
    place.file.write_text(OURS + APART)
    config = place.config("out", objective=f"{place.file}:Apart", watch={"stall_after": "40 seconds"})
    done = place.command(config, "--nproc", "2", "--trust-code", "--restarts", "0")
    messages = [json.loads(line) for line in done.stdout.splitlines()]
    warnings = [message for message in messages if message["kind"] == "warning"]
    (warning,) = [message for message in warnings if message["code"] == "collective_mismatch"]
    assert 30 <= warning["verdict"]["named_after_s"] < 38
    assert "rank 0, node 0" in warning["text"]
    assert "all_reduce #1 [[3]]" in warning["text"]
    assert messages[-1]["verdict"]["cause"] == "collective_mismatch"
    assert done.returncode == 4


def test_an_exception_in_the_loss_is_a_verdict_with_its_line(place: Place) -> None:
    place.file.write_text(OURS.replace("probs = log_probs.exp()", "probs = log_probs.expp()"))
    result = place.train("out", restarts=0)
    assert result.exit_code == 5
    assert result.verdict is not None
    assert result.verdict.cause == "user_code_error"
    assert f"{place.file}:24" in str(result.verdict.to_json())


@pytest.mark.parametrize(
    ("change", "line", "said"),
    [
        (("import torch\n", "import os\nos._exit(0)\n"), "", "exit status 0, without a final message, while it executed"),
        (("return unisono.Part(loss, sums)", "import os; os._exit(0)"), "", "whose likely origin is"),
        (("return unisono.Part(loss, sums)", "return None"), ":22", "loss of the objective gives NoneType"),
    ],
    ids=["ends at import", "ends in the loss", "gives nothing"],
)  # fmt: skip
def test_verdict_of_a_rank_ended_by_the_objective_is_about_its_file(
    place: Place, change: tuple[str, str], line: str, said: str
) -> None:
    place.file.write_text(OURS.replace(*change))
    result = place.train("out", restarts=0)
    assert result.exit_code == 5
    assert result.verdict is not None
    assert result.verdict.cause == "user_code_error"
    assert said in result.verdict.summary
    assert f"{place.file}{line}" in result.verdict.summary
    assert len(result.verdict.fix) == 1
    assert f"{place.file}{line}" in result.verdict.fix[0]


def test_file_of_the_how_to_trains_and_is_not_needed_to_load_the_result(place: Place) -> None:
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "python.md").read_text()
    (focal,) = re.findall(r"```python\n(# focal.py\n.*?)```", page, re.DOTALL)
    place.file.write_text(focal)
    result = place.train("out", duration="2 steps")
    place.file.unlink()
    shutil.copytree(result.output_dir, place.folder / "copy")
    model, _ = unisono.load(place.folder / "copy")
    assert model is not None
