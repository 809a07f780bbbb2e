"""A job on a Ray cluster of one node. Run: pytest tests/jobs/ray/test_one_node.py"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.jobs.ray.cluster import RayCluster

pytestmark = pytest.mark.timeout(1800)  # a cluster may take long to come up on a loaded machine

Config = Callable[..., str]


@pytest.fixture(scope="module")
def cluster(cluster_of: Callable[[list[int]], RayCluster]) -> RayCluster:
    return cluster_of([2])


def test_two_ranks_on_ray_leave_a_whole_run_at_the_place_of_the_command(
    cluster: RayCluster, config: Config
) -> None:
    path = config(cluster)
    front = cluster.type(
        "train", path, "--launcher", "ray", "--nproc", "2", "--no-first-checkpoint", speaks_json=False
    )
    assert front.wait(limit_s=600) == 0, front.text()
    assert f"placed by Ray: node 0 on {cluster.ground.host(0)}" in front.text()
    out = cluster.out_of(path)
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert json.loads((out / "result.json").read_text())["outcome"] == "completed"
    assert sorted(path.name for path in (out / "checkpoints").glob("step-*")) == [
        "step-00000002",
        "step-00000004",
    ]
    assert (out / "adapter/adapter_model.safetensors").exists()
    cluster.nothing_left()


@pytest.mark.slow
def test_two_ranks_train_an_image_model_on_ray(
    cluster: RayCluster, config: Config, image_sections: dict[str, Any]
) -> None:
    path = config(cluster, **image_sections)
    front = cluster.type("train", path, "--launcher", "ray", "--nproc", "2", speaks_json=False)
    assert front.wait(limit_s=600) == 0, front.text()
    out = cluster.out_of(path)
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 6
    assert (out / "adapter/pytorch_lora_weights.safetensors").exists()
    assert json.loads((out / "result.json").read_text())["read_back"]["compared"] == "predictions"
    assert "read back in" in front.text()
    cluster.nothing_left()


@pytest.mark.slow
def test_a_llamafactory_file_trains_on_ray(cluster: RayCluster, model_dir: Path, rows_file: Path) -> None:
    """Its directories are relative to where it was typed; the fronts on the nodes get our
    config.
    """
    here = cluster.on_disk(0, cluster.disk)
    (here / "data").mkdir()
    entry = {"file_name": str(rows_file), "columns": {"prompt": "prompt", "response": "completion"}}
    (here / "data/dataset_info.json").write_text(json.dumps({"mine": entry}))
    keys = {
        "model_name_or_path": str(model_dir), "stage": "sft", "do_train": True, "finetuning_type": "lora", "dataset": "mine",
        "template": "alpaca", "cutoff_len": 64, "output_dir": "lf", "save_steps": 2, "max_steps": 4, "learning_rate": 1e-2,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True, "ray_num_workers": 2,
    }  # fmt: skip
    (here / "x.json").write_text(json.dumps(keys))
    front = cluster.type(
        "train",
        "x.json",
        "lora_rank=4",
        "--launcher",
        "ray",
        "--nproc",
        "2",
        "--no-first-checkpoint",
        speaks_json=False,
    )
    assert front.wait(limit_s=600) == 0, front.text()
    assert "x.json is a LLaMA-Factory file" in front.text()
    assert "= 2 × 2 × 2 ranks" in front.text()
    steps = [json.loads(line)["step"] for line in (here / "lf/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    settings = json.loads((here / "lf/adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
