"""Which word counts for where a front stands, and how a job is asked for.

Run: pytest tests/jobs/slurm/test_slurm_facts.py
"""

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from unisono.base.errors import UsageError
from unisono.guard.facts import Environment
from unisono.guard.facts.network import SystemNetwork
from unisono.guard.facts.slurm import SlurmStep
from unisono.guard.places.topology import Accelerators, Placed, Topology, TopologyRequest, read_topology
from unisono.guard.rendezvous.remote_fronts import placed_by_slurm, token_of_step
from unisono.jobs.launchers.slurm_job_request import JobRequest, batch_script, job_request
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.config import RunConfig

ORIGINS = {"nodes": "the step", "node_rank": "SLURM_NODEID", "head": "its first host"}
PLACED = Placed(4, 2, "gpu1", 20_007, ORIGINS)
STEP = SlurmStep("7", "0", 0, 2, 2, 1, "127.0.0.1,b")


def read(variables: dict[str, str] | None = None, **asked: Any) -> Topology:
    return read_topology(TopologyRequest(**asked), variables or {}, Accelerators(0), placed=PLACED)


def test_the_step_reports_where_a_front_stands() -> None:
    found = read()
    assert (found.nodes, found.node_rank, found.head_host, found.head_port) == (4, 2, "gpu1", 20_007)
    assert {name: found.origins[name] for name in ORIGINS} == ORIGINS


def test_what_a_batch_script_exports_to_all_nodes_alike_is_left_over() -> None:
    found = read({"NODE_RANK": "0", "MASTER_ADDR": "login", "MASTER_PORT": "1"})
    assert (found.node_rank, found.head_host) == (2, "gpu1")
    assert not found.used_variables


def test_flags_and_nnodes_count_before_the_step() -> None:
    assert (read(nodes="3:4").nodes, read(nodes="3:4").least_nodes, read(nodes="3:4").node_rank) == (4, 3, 2)
    assert (read(node_rank=1, head="x:5").node_rank, read(node_rank=1, head="x:5").head_host) == (1, "x")
    declared = read({"NNODES": "4", "NODE_RANK": "3", "MASTER_ADDR": "x"})
    assert (declared.node_rank, declared.head_host, declared.origins["nodes"]) == (3, "x", "NNODES")
    assert read(nodes="1").nodes == 1


def test_a_step_of_one_node_or_of_several_tasks_each_places_nobody() -> None:
    network = SystemNetwork()
    assert placed_by_slurm(None, network) is None
    assert placed_by_slurm(replace(STEP, nodes=1, tasks=1, node=0), network) is None
    assert placed_by_slurm(replace(STEP, tasks=4), network) is None
    assert placed_by_slurm(replace(STEP, nodelist="-x,b"), network) is None
    one, two = placed_by_slurm(STEP, network), placed_by_slurm(replace(STEP, job="8"), network)
    assert one is not None
    assert two is not None
    assert one.head_port != two.head_port


def test_the_secret_is_the_steps_and_the_users_own(tmp_path: Path) -> None:
    mine = Environment(settings_dir=tmp_path / "mine", slurm_step=STEP)
    first = token_of_step(mine)
    assert first is not None
    assert first == token_of_step(mine)
    others = [
        replace(mine, settings_dir=tmp_path / "yours"), replace(mine, slurm_step=replace(STEP, step="1")),
        replace(mine, slurm_step=replace(STEP, restart=1)),
    ]  # fmt: skip
    assert len({first, *map(token_of_step, others)}) == 4
    assert token_of_step(Environment(settings_dir=tmp_path)) is None


def asked(
    folder: Path, *, partition: str | None = None, time: str | None = None, **request: Any
) -> JobRequest:
    config = RunConfig.model_validate({"model": "m", "data": {"train": "d"}, "output_dir": str(folder)})
    return job_request(
        TrainRequest(Path("c.yaml"), launcher="slurm", **request),
        config,
        partition=partition,
        time_limit=time,
        gpus=bool(request.get("devices")),
    )


def run_script(script: str, folder: Path, *, nodes: int) -> tuple[Path, list[str]]:
    """Runs a batch script in a folder of its own, with an srun that notes its words and its input;
    gives both.
    """
    fake, here = folder / "bin", folder / "here"
    for made in (fake, here):
        made.mkdir()
    (fake / "srun").write_text('#!/bin/bash\nprintf "%s\\n" "$@" > args\ncat > config\n')
    (fake / "srun").chmod(0o755)
    done = subprocess.run(
        ["bash", "-s"], input=script, text=True, cwd=here, capture_output=True, check=False, timeout=60,
        env={"PATH": f"{fake}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": str(nodes)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return here, (here / "args").read_text().splitlines()


def test_fronts_wait_for_as_many_nodes_of_min_to_max_as_slurm_has_given(tmp_path: Path) -> None:
    _, words = run_script(batch_script(asked(tmp_path / "run", nodes="6:8"), "x"), tmp_path, nodes=7)
    assert words[words.index("--nodes") + 1] == "6:7"
    folder = tmp_path / "one"
    folder.mkdir()
    _, words = run_script(batch_script(asked(tmp_path / "run", nodes="6"), "x"), folder, nodes=6)
    assert "--nodes" not in words


def test_nothing_written_in_a_path_or_override_is_run_by_the_script(tmp_path: Path) -> None:
    folder = tmp_path / 'it\'s a "run"; touch $(echo bad) `echo bad` %j'
    job = asked(
        folder, overrides=("a=$(touch bad)", "b='x'; touch bad"), nodes="2", partition="a,b", time="1:00:00"
    )
    config = "model: $(touch bad)\nEND_OF_CONFIG\n`touch bad`"
    script = batch_script(job, config)
    here, words = run_script(script, tmp_path, nodes=2)
    assert {path.name for path in here.iterdir()} == {"args", "config"}
    assert (here / "config").read_text() == config + "\n"
    assert "a=$(touch bad)" in words
    assert "b='x'; touch bad" in words
    assert {path.name for path in (folder / "slurm").iterdir()} == {"lines.7"}
    assert "%%j" in script


def test_what_slurm_is_requested_comes_from_the_options(tmp_path: Path) -> None:
    lines = batch_script(
        asked(tmp_path, nodes="6:8", nproc=4, partition="gpu", time="2-0", devices="0,1,2,3"), "x"
    ).splitlines()
    for wanted in (
        "--nodes=6-8",
        "--cpus-per-task=4",
        "--gpus-per-node=4",
        "--partition=gpu",
        "--time=2-0",
        "--no-kill",
        "--requeue",
        "--signal=B:USR1@40",
    ):
        assert f"#SBATCH {wanted}" in lines, wanted
    with pytest.raises(UsageError, match="the number for each node is not given"):
        asked(tmp_path, nodes="2", devices="0")
    for wrong in (
        {"partition": "a b"},
        {"partition": "a,,b"},
        {"time": "-1"},
        {"time": "1;x"},
        {"nodes": "3:2"},
        {"nodes": "0"},
        {"time": "1"},
    ):
        with pytest.raises(UsageError):
            asked(tmp_path, **wrong)


def test_a_checkpoint_that_was_not_finished_is_not_a_progress(tmp_path: Path) -> None:
    """Else a job whose saves never come to their end would be queued again for ever."""
    line = next(
        line for line in batch_script(asked(tmp_path), "x").splitlines() if line.startswith("newest()")
    )
    for name in (
        "step-00000100",
        "step-00000090",
        "step-00000120.tmp-9f3a",
        "step-00000110.aside-1",
        "latest",
    ):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    done = subprocess.run(["bash", "-c", f"{line}\nnewest"], text=True, capture_output=True, check=True)
    assert done.stdout == "step-00000100\n"
