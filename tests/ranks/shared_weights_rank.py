"""One rank of training on weights in shared memory: `shared_weights_rank.py RANK WORLD PORT_FILE
WAY`; prints a JSON line.

WAY is `shared`, `refused` (rank 1 gets no anonymous memory), `slots` (it gets it for the weights,
not for the gradients), `dies` (rank 1 is gone in its second backward) or `differs` (instead of it,
rank 1 enters a sum of numbers).
"""

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.ranks.sum_rank import port_of
from unisono.trainer.config.schema import OptimSection
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.training import process_group, sharding
from unisono.trainer.training.optim import build_optimizers
from unisono.trainer.training.process_group import Listener, Ranks, close_group
from unisono.trainer.training.sharding import Sharded, SharedWeights, full_tensor, shard_weights

STEPS, MICROS, WIDTH = 3, 2, 7


class Odd(torch.nn.Module):
    """Rows that no number of ranks divides, a tied weight, one that rank 0 does not reach unless
    `is_even`, and one that none reaches.
    """

    def __init__(self, *, is_even: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_even = is_even
        self.table = torch.nn.Embedding(11, WIDTH)
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.sometimes = torch.nn.Linear(WIDTH, 1)
        self.never = torch.nn.Linear(WIDTH, 3)
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.head = torch.nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight

    def loss(self, rank: int, number: int) -> torch.Tensor:
        """Of a micro batch, other rows on each rank."""
        rows = torch.arange(5) * (rank + 2) + number
        x = torch.tanh(self.inner(self.table(rows % 11))) * self.gain
        found: torch.Tensor = torch.logsumexp(self.head(x), 1).sum()
        return found if rank == 0 and not self.is_even else found + self.sometimes(x).sum()


def train_alone(world: int, model: Odd) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """The gradients of each step, and the final weights, of one process that computes the micro
    batches of all ranks.
    """
    optimizers = build_optimizers(
        OptimSection.model_validate({"lr": 0.1}), dict(model.named_parameters()), not_matrices=set()
    )
    gradients = []
    for step in range(STEPS):
        for rank in range(world):
            for micro in range(MICROS):
                model.loss(rank, step * MICROS + micro).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
        optimizers.step()
        optimizers.zero_grad()
    return gradients, {name: p.detach() for name, p in model.named_parameters()}


def join(rank: int, world: int, file: Path) -> Ranks:
    """The group of the ranks."""
    listener = Listener("127.0.0.1") if rank == 0 else None
    if listener is not None:
        file.with_suffix(".new").write_text(str(listener.port))
        file.with_suffix(".new").rename(file)
    store = ("127.0.0.1", port_of(file))
    return Ranks("weights", rank=rank, world_size=world, device=torch.device("cpu"), store=store, listener=listener)  # fmt: skip


def take_memory(way: str) -> None:
    """Takes what a rank needs for shared memory: what the slots of its gradients are in, or all
    that it sees of others.
    """
    if way in ("refused", "slots"):
        del os.memfd_create
    if way == "refused":
        process_group._memory_at = lambda address, size: None


@dataclass
class Steps:
    """The steps of one rank."""

    model: Odd
    sharded: Sharded
    group: Ranks
    way: str

    def run(self, step: int) -> None:
        """Forward and backward of a step's micro batches."""
        self.sharded.begin_step()
        for micro in range(MICROS):
            loss = self.sharded.module(partial(self.model.loss, self.group.rank, step * MICROS + micro))
            if self.group.rank == 1 and (step, micro) == (1, 1) and self.way in ("dies", "differs"):
                if self.way == "differs":
                    self.group.sum(torch.zeros(3))  # as many as rank 0 sends with its first bucket
                os._exit(9)
            loss.backward()
        self.sharded.finish_step()


def are_equal(parameters: dict[str, torch.nn.Parameter], wanted: dict[str, Any]) -> bool:
    """Whether the summed gradients are the wanted ones; of none, zeros are equal, too."""
    equal = True
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            found = full_tensor(parameter.grad)
            expected = torch.zeros_like(found) if wanted[name] is None else wanted[name]
            equal &= torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    return equal


def main() -> None:
    """Some steps, each of several micro batches, and a look at the weights between them."""
    rank, world, file, way = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    sharding._BUCKET_ELEMENTS = 16
    group = join(rank, world, file)
    if rank == 1:
        take_memory(way)
    is_even = way in ("refused", "slots")  # FSDP2 needs the same weights to be reached on all ranks
    model: Any = Odd(is_even=is_even)
    model._no_split_modules = []
    loaded = LoadedModel(model, model, None, {}, 0)
    loaded.collect_trainable()
    sharded = shard_weights(loaded, group, group.device)
    section = OptimSection.model_validate({"lr": 0.1})
    optimizers = build_optimizers(section, loaded.trainable, not_matrices=set())
    gradients, weights = train_alone(world, Odd(is_even=is_even))
    steps = Steps(model, sharded, group, way)
    are_gradients_equal, unreached = True, list[str]()
    for step in range(STEPS):
        try:
            steps.run(step)
        except RuntimeError as error:
            print(json.dumps({"error": str(error)}))
            os._exit(0)
        unreached = [name for name, parameter in loaded.trainable.items() if parameter.grad is None]
        are_gradients_equal &= are_equal(loaded.trainable, gradients[step])
        optimizers.step()
        optimizers.zero_grad()
        with torch.no_grad():
            sharded.module(partial(model.loss, rank, 0))
        sharded.reshard()
    found = {name: full_tensor(parameter).detach() for name, parameter in loaded.trainable.items()}
    print(json.dumps({
        "shared": isinstance(sharded, SharedWeights), "gradients": are_gradients_equal, "none": unreached,
        "weights": all(torch.allclose(value, weights[name], rtol=1e-3, atol=1e-4) for name, value in found.items()),
    }))  # fmt: skip
    close_group(orderly=True)


if __name__ == "__main__":
    main()
