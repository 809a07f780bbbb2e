"""`--launcher` and what belongs to one launcher. Run: pytest tests/jobs/runs/test_launchers.py"""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from unisono.base.errors import UsageError
from unisono.jobs.launchers.launchers import prepare_launcher
from unisono.jobs.runs.train_request import TrainRequest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"launcher": "rai"}, "unknown launcher rai"),
        ({"launcher_options": {"ray_address": "a:6379"}}, "--ray-address requires --launcher ray"),
        ({"launcher": "ray", "launcher_options": {"time": "1"}}, "--time requires --launcher slurm"),
        ({"launcher": "ray", "launcher_options": {"queue": "x"}}, "the launcher has no option queue"),
        (
            {"launcher": "ray", "hosts": "a,b", "head": "a"},
            "starts the nodes itself, without --head, --hosts",
        ),
        ({"launcher": "ray", "token_file": "t"}, "without --token-file"),
        ({"launcher": "local", "nodes": "2"}, "--launcher local runs on one node"),
    ],
)
def test_options_of_a_different_launcher_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        prepare_launcher(TrainRequest(Path("c.yaml"), **options))


def test_the_nearest_launcher_is_offered() -> None:
    with pytest.raises(UsageError) as refused:
        prepare_launcher(TrainRequest(Path("c.yaml"), launcher="rays"))
    assert refused.value.problems[0].fix == "did you mean `ray`?"


def test_a_front_does_not_import_ray() -> None:
    """Also not one that is asked to start on Ray: that is its driver's."""
    code = (
        "import sys, unisono.jobs.launchers.ray_job, unisono.jobs.launchers.ray_driver; sys.exit('ray' in sys.modules or"
        " 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


@pytest.mark.parametrize("words", [["train", "c.yaml"], ["run", "--output-dir", "out"]], ids=["train", "run"])
def test_launcher_nodes_is_refused_if_no_nodes_are_given(tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "c.yaml").write_text("model: builtin:tiny\ndata: {train: rows.jsonl}\noutput_dir: out\n")
    program = ["--", "touch", "started"] if words[0] == "run" else []
    command = [sys.executable, "-m", "unisono", *words, "--launcher", "nodes", *program]
    reported = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=tmp_path)
    assert reported.returncode == 2, reported.stderr
    assert "--launcher nodes is for several nodes, but none are given" in reported.stderr
    assert "--hosts A,B" in reported.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["c.yaml"]
