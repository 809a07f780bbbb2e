# ruff: noqa: PTH110, PTH123, ANN001, ANN201, PLW1508
# mypy: ignore-errors
"""Ray Train, Ray Tune or plain tasks on CPU; FAULT is what goes wrong, on rank BAD."""

import os
import signal
import sys
import tempfile
import time

import ray
from ray import train
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

FAULT, N = os.environ.get("FAULT", ""), int(os.environ.get("WORKERS", 2))


def loop(config):
    import torch
    from torch import nn

    rank, bad = train.get_context().get_world_rank(), config["bad"]
    model = train.torch.prepare_model(nn.Linear(8, 1))
    opt = torch.optim.SGD(model.parameters(), lr=0.01)
    if config["fault"] == "package" and rank == bad:
        import megatron_fused_ops  # noqa: F401
    for epoch in range(3):
        for step in range(4):
            if epoch == 1 and step == 2 and rank == bad:
                hurt(config["fault"])
            loss = model(torch.randn(4, 8)).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        with tempfile.TemporaryDirectory() as folder:
            if rank == 0:
                torch.save({"w": torch.zeros(3_000_000), "m": model.state_dict()}, folder + "/model.pt")
            train.report(
                {"loss": loss.item(), "epoch": epoch},
                checkpoint=Checkpoint.from_directory(folder) if rank == 0 else None,
            )
    if config["fault"] == "twice":
        torch.distributed.destroy_process_group()


def hurt(fault):
    mark = os.environ.get("MARK", "")
    if fault == "once" and not os.path.exists(mark):
        open(mark, "w").close()
        os._exit(1)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "row":
        {"input_ids": [1]}["labels"]
    if fault == "slow":
        time.sleep(120)
    if fault == "memory":
        hold = [bytearray(100_000_000) for _ in range(400)]
        print(len(hold))


def tune_one(config):
    for step in range(3):
        if FAULT == "tune_row" and config["lr"] > 0.05:
            raise ValueError(f"learning rate {config['lr']} is not supported by this schedule")
        ray.tune.report({"score": step * config["lr"]})


def main():
    address = os.environ.get("ADDRESS")
    ray.init(**({"address": address} if address else {"num_cpus": 4, "include_dashboard": False}))
    if FAULT.startswith("tune"):
        from ray import tune

        tuner = tune.Tuner(
            tune_one,
            param_space={"lr": tune.grid_search([0.01, 0.1])},
            run_config=tune.RunConfig(storage_path=os.environ["OUT"], name="sweep"),
        )
        print("Best:", tuner.fit().get_best_result("score", "max").metrics["score"])
        return
    trainer = TorchTrainer(
        loop,
        train_loop_config={"fault": FAULT, "bad": int(os.environ.get("BAD", 1))},
        scaling_config=ScalingConfig(
            num_workers=N, resources_per_worker={"CPU": int(os.environ.get("EACH", 1))}
        ),
        run_config=RunConfig(
            name="ft",
            storage_path=os.environ["OUT"],
            failure_config=FailureConfig(max_failures=int(os.environ.get("AGAIN", 0))),
        ),
    )
    print(trainer.fit())


if __name__ == "__main__":
    sys.exit(main())
