"""`--launcher slurm` writes, submits and follows one job. Run: pytest tests/jobs/slurm/test_launcher.py

A real Slurm on network namespaces; skipped with the reason where there is none.
"""

import json
import stat
from typing import Any

import pytest

from tests.jobs.slurm.harness import SlurmJob

pytestmark = pytest.mark.timeout(1800)  # a cluster may take long to come up on a loaded machine
TWO = ("--launcher", "slurm", "--nodes", "2")


@pytest.mark.slow
@pytest.mark.ranks
def test_job_of_two_nodes_is_submitted_followed_and_ends_with_its_code(job: SlurmJob) -> None:
    front = job.type(*TWO, "--nproc", "1", json=False)
    assert front.wait(limit_s=1000) == 0, front.text()
    folder = job.out / "slurm"
    script = folder / "job.sh"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert all(line.strip() in front.text() for line in script.read_text().splitlines())
    for printed in (
        "submitted as job",
        "runs on ada, bob",
        "2: 1 on ada (--nproc), 1 on bob (--nproc)",
        "completed: step 4",
        "read back in",
    ):
        assert printed in front.text(), (printed, front.text())
    assert [line["step"] for line in job.metrics()] == [1, 2, 3, 4]
    assert [node["host"] for node in job.read("plan.json")["nodes"]] == ["ada", "bob"]
    whole = "".join(path.read_text() for path in folder.iterdir())
    assert "UNISONO_TOKEN=" in whole
    assert "token_urlsafe(32))')" in script.read_text()  # what makes one, and none itself


@pytest.mark.slow
@pytest.mark.ranks
def test_an_image_model_is_trained_by_a_job(job: SlurmJob, image_sections: dict[str, Any]) -> None:
    job.config(**image_sections)
    front = job.type(*TWO, "--nproc", "1", json=False)
    assert front.wait(limit_s=1000) == 0, front.text()
    assert [line["step"] for line in job.metrics()] == [1, 2, 3, 4, 5, 6]
    assert (job.out / "adapter/pytorch_lora_weights.safetensors").exists()
    assert "predictions differ from the trained model's by" in front.text()


@pytest.mark.slow
@pytest.mark.ranks
def test_a_llamafactory_file_is_trained_by_a_job(job: SlurmJob) -> None:
    """The job gets the file as it is, with its directories relative to where it was submitted."""
    home = job.home(0)
    (home / "data").mkdir()
    entry = {"file_name": str(job.rows), "columns": {"prompt": "prompt", "response": "completion"}}
    (home / "data/dataset_info.json").write_text(json.dumps({"mine": entry}))
    keys = {
        "model_name_or_path": str(job.model), "stage": "sft", "do_train": True, "finetuning_type": "lora", "dataset": "mine",
        "template": "alpaca", "cutoff_len": 64, "output_dir": str(job.out), "save_steps": 2, "max_steps": 4, "learning_rate": 1e-2,
        "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "use_cpu": True, "overwrite_output_dir": True,
    }  # fmt: skip
    (home / "c.yaml").write_text(json.dumps(keys))
    front = job.type("lora_rank=4", *TWO, "--nproc", "1", json=False)
    assert front.wait(limit_s=1000) == 0, front.text()
    assert "completed: step 4" in front.text()
    assert "= 2 × 2 × 2 ranks" in front.text()
    assert [line["step"] for line in job.metrics()] == [1, 2, 3, 4]
    settings = json.loads((job.out / "adapter/adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (4, 8)
