# ruff: noqa: ANN001, ANN201, PLW1508
# mypy: ignore-errors
"""Ray Train on CPU workers; MODE is what goes wrong."""

import os
import signal
import time

import ray
import torch
from ray import train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

MODE, N = os.environ.get("MODE", ""), int(os.environ.get("WORKERS", 2))


def loop(config):
    import torch.distributed as dist

    rank = train.get_context().get_world_rank()
    for step in range(6):
        if step == 3 and rank == config["rank"]:
            if config["mode"] == "exc":
                batch = {"input_ids": torch.zeros(4)}
                batch["attention_mask"].sum()
            if config["mode"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if config["mode"] == "exit":
                os._exit(1)
        x = torch.ones(1)
        dist.all_reduce(x)
        train.report({"loss": 1.0 / (step + 1)})
        time.sleep(0.1)
    if config["mode"] == "destroy":
        dist.destroy_process_group()
        dist.destroy_process_group()


if __name__ == "__main__":
    ray.init(num_cpus=int(os.environ.get("CPUS", 4)), include_dashboard=False, log_to_driver=True)
    trainer = TorchTrainer(
        loop,
        train_loop_config={"mode": MODE, "rank": int(os.environ.get("BAD_RANK", 1))},
        scaling_config=ScalingConfig(
            num_workers=N,
            use_gpu=MODE == "gpu",
            resources_per_worker={"CPU": int(os.environ.get("EACH", 1))}
            | ({"GPU": 1} if MODE == "gpu" else {}),
        ),
        run_config=RunConfig(storage_path=os.environ["OUT"], failure_config=FailureConfig(max_failures=0)),
    )
    result = trainer.fit()
    print("Training completed", result.metrics)
