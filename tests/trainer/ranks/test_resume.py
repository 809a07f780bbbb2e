"""A run goes on from the checkpoint of any number of ranks.

Run: pytest tests/trainer/ranks/test_resume.py
"""

from pathlib import Path

import pytest
import torch

from tests.trainer.ranks.conftest import Resumed
from unisono.trainer.checkpoint.state import CheckpointReader

pytestmark = pytest.mark.ranks

Pairs = dict[tuple[str, str, str], Resumed]


@pytest.mark.parametrize("way", ["ddp", "fsdp"])
@pytest.mark.parametrize("kind", ["dropout", "compact", "rollouts", "grpo", "experts"])
def test_two_ranks_continue_from_their_own_checkpoint_to_the_same_bits(
    resumed: Pairs, kind: str, way: str
) -> None:
    """With dropout, moments in bfloat16, generated rows, router losses: the random numbers of every
    rank are exact, too.
    """
    pair = resumed[kind, way, way]
    assert pair.resumed.losses == pair.straight.losses[7:]
    mine, wanted = pair.resumed.weights(), pair.straight.weights()
    assert all(torch.equal(mine[name], tensor) for name, tensor in wanted.items())


@pytest.mark.parametrize(
    ("kind", "source", "way"),
    [
        ("full", "ddp", "fsdp"),
        ("lora", "fsdp", "ddp"),
        ("lora", "one", "ddp"),
        ("full", "one", "fsdp"),
        ("lora", "ddp", "one"),
        ("full", "fsdp", "one"),
    ],
)
def test_other_number_of_ranks_or_strategy_continues_equal_to_rounding(
    resumed: Pairs, kind: str, source: str, way: str
) -> None:
    pair = resumed[kind, source, way]
    assert pair.resumed.losses == pytest.approx(pair.straight.losses[7:], abs=1e-5)
    seen = [(m["step"], m["tokens"]) for m in pair.resumed.metrics if "loss" in m]
    assert seen == [(m["step"], m["tokens"]) for m in pair.straight.metrics if m["step"] > 7 and "loss" in m]


@pytest.mark.parametrize("key", [("full", "fsdp", "one"), ("lora", "ddp", "one")])
def test_a_checkpoint_holds_the_same_whoever_wrote_it(resumed: Pairs, key: tuple[str, str, str]) -> None:
    """Shards write parts and one rank writes whole tensors; what is read is whole either way."""
    pair = resumed[key]
    first, second = (_last(run.directory) for run in (pair.straight, pair.resumed))
    assert first.groups == second.groups
    assert first.values["train"].keys() == second.values["train"].keys()


def test_each_shard_writes_a_file_of_its_own(resumed: Pairs) -> None:
    names = {path.name for path in _newest(resumed["full", "fsdp", "one"].straight.directory).iterdir()}
    shards = {
        f"{group}.shard-{rank:05d}-of-00002.safetensors"
        for group in ("trainable", "optimizer-adamw")
        for rank in (0, 1)
    }
    assert names == {"manifest.json", "state.json", *shards}


def _last(directory: Path) -> CheckpointReader:
    return CheckpointReader(_newest(directory))


def _newest(directory: Path) -> Path:
    return max((directory / "checkpoints").glob("step-*"))
