"""What ranks find in their environment. Run: pytest tests/jobs/runs/test_rank_environment.py"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from unisono.guard.places.ranks import DeviceChoice, RankPlace
from unisono.jobs.runs.rank_environment import rank_environments
from unisono.trainer.plan import RunPlan

CPU = DeviceChoice(kind="cpu", name="cpu", memory_bytes=1, bfloat16=False)


def plan(folder: Path, *, world: int) -> RunPlan:
    """As much of a plan as ranks' environments depend on."""
    places = [
        RankPlace(rank=rank, node_rank=0, local_rank=rank, host="h", device=CPU) for rank in range(world)
    ]
    known: dict[str, Any] = {"ranks": places, "world_size": world, "threads": 1, "output_dir": str(folder)}
    return RunPlan.model_construct(**known)


def environments(plan: RunPlan, *, debug_comm: bool = False) -> list[dict[str, str]]:
    return rank_environments(plan, 0, variables={}, interface=None, debug_comm=debug_comm)


def test_flight_recorder_keeps_some_collectives_unless_the_user_sets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    assert {found["TORCH_FR_BUFFER_SIZE"] for found in environments(plan(tmp_path, world=2))} == {"200"}
    assert "TORCH_FR_BUFFER_SIZE" not in environments(plan(tmp_path, world=1))[0]
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    assert environments(plan(tmp_path, world=2))[1]["TORCH_FR_BUFFER_SIZE"] == "7"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ],
)
def test_waiting_threads_spin_briefly_unless_the_user_says_how_they_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], wanted: dict[str, str]
) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    (found,) = environments(plan(tmp_path, world=1))
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    assert {name: found[name] for name in names if name in found} == wanted


def test_debugging_is_alike_on_all_ranks_but_for_the_file_that_nccl_writes(tmp_path: Path) -> None:
    first, second = environments(plan(tmp_path / "run", world=2), debug_comm=True)
    files = [Path(one.pop("NCCL_DEBUG_FILE")) for one in (first, second)]
    assert files == [tmp_path / "run" / "evidence" / f"nccl-rank-0000{rank}.log" for rank in (0, 1)]
    assert files[0].parent.stat().st_mode & 0o777 == 0o700
    assert {name for name in first if first[name] != second[name]} == {"RANK", "LOCAL_RANK"}
    assert first["TORCH_DISTRIBUTED_DEBUG"] == "DETAIL"


def test_where_no_file_can_be_made_nccl_reports_it_in_the_log(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    assert "NCCL_DEBUG_FILE" not in environments(plan(tmp_path / "run", world=2), debug_comm=True)[0]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_deterministic_run_on_a_gpu_sets_what_torch_requires_of_cublas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, deterministic: bool
) -> None:
    """Without it torch refuses the first product: "Deterministic behavior was enabled ...

    CUBLAS_WORKSPACE_CONFIG=:4096:8".
    """
    name = "CUBLAS_WORKSPACE_CONFIG"
    monkeypatch.delenv(name, raising=False)
    gpu = DeviceChoice(kind="cuda", uuid="GPU-1", name="gpu", memory_bytes=1, bfloat16=True)
    made = plan(tmp_path, world=1)
    made = made.model_copy(
        update={
            "ranks": [made.ranks[0].model_copy(update={"device": gpu})],
            "config": SimpleNamespace(deterministic=deterministic),
        }
    )
    (found,) = environments(made)
    assert found["CUDA_VISIBLE_DEVICES"] == "GPU-1"
    assert found.get(name) == (":4096:8" if deterministic else None)
    monkeypatch.setenv(name, ":16:8")
    assert environments(made)[0][name] == ":16:8"
