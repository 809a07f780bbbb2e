"""Ray Train's TorchTrainer, the second: as many workers as --ranks, each a rank of one gloo
group.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any


def loop(settings: dict[str, Any]) -> None:
    """What a worker does."""
    import torch
    import torch.distributed as dist
    from ray.train.torch import prepare_model

    sys.path.insert(0, settings["programs"])
    from program_options import Losses

    rank = dist.get_rank()
    torch.manual_seed(0)
    model = prepare_model(torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(rank)
    losses = Losses(argparse.Namespace(**settings["asked"]), rank)
    for step in range(
        1, settings["asked"]["steps"] - (3 if settings["asked"]["fault"] == "steps" and rank == 1 else 0) + 1
    ):
        inputs = torch.randn(4, 8, generator=draw)
        loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.add(step, loss.item())
    dist.barrier()
    if settings["asked"]["fault"] == "destroy":
        dist.destroy_process_group()


def main() -> None:
    """Starts a Ray of its own on this machine, and trains."""
    sys.path.insert(0, str(Path(__file__).parent))
    import ray
    from program_options import parse
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    options = parse()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    settings = {"programs": str(Path(__file__).parent), "asked": {**vars(options), "out": options.out}}
    TorchTrainer(
        loop, train_loop_config=settings, torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=int(os.environ.get("WORKERS", "2"))),
        run_config=RunConfig(storage_path=str(options.out / "ray"), name="run"),
    ).fit()  # fmt: skip
    ray.shutdown()


if __name__ == "__main__":
    main()
