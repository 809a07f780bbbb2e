"""What the front makes of what dead ranks have kept: a checkpoint, or a word that there is none.

Run: pytest tests/jobs/runs/test_rescue.py
"""

import mmap
import os
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.checkpoint.states import load_state
from unisono.base.messages import StepMessage, message_of
from unisono.guard.places.ranks import DeviceChoice, NodePlace, RankPlace
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import MetricsWriter, read_metrics
from unisono.guard.supervise.decision import Decision, NodeLoss
from unisono.guard.supervise.local_ranks import RankEnd, SharedMemory
from unisono.guard.supervise.rank_supervisor import Attempt
from unisono.jobs.remote_checkpoint.rescue import RescuedStep, choose_pieces, rescue, snapshot_ranks
from unisono.trainer.checkpoint.snapshot import (
    SlotLayout,
    Slots,
    StepSnapshot,
    TensorEntry,
    needed_bytes,
    slot_text,
)
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.config import RunConfig
from unisono.trainer.plan import RunPlan

CPU = DeviceChoice(kind="cpu", name="cpu", memory_bytes=10**10, bfloat16=True)
ROWS = 3


def plan_of(world_size: int, *, strategy: str = "ddp", adapter: bool = True, per_node: int = 8) -> RunPlan:
    """A plan of which only some things are looked at."""
    ranks = [
        RankPlace(
            rank=r, node_rank=r // per_node, local_rank=r % per_node, host="abc"[r // per_node], device=CPU
        )
        for r in range(world_size)
    ]
    nodes = [
        NodePlace(node_rank=n, host="abc"[n], address="127.0.0.1", nproc=per_node, nproc_origin="--nproc")
        for n in range(-(-world_size // per_node))
    ]
    config = RunConfig.model_validate(
        {"model": "m", "data": {"train": "x"}, "adapter": {} if adapter else None, "output_dir": "o"}
    )
    looked_at: Any = {
        "config": config, "world_size": world_size, "ranks": ranks, "nodes": nodes, "strategy": strategy, "resume": None,
        "run_id": "run-a", "config_digest": "c", "threads": 1, "host": "a",
    }  # fmt: skip
    return RunPlan.model_construct(**looked_at)


def line(step: int, **more: Any) -> dict[str, Any]:
    return {"step": step, "loss": 1 / step, **more}


class Rank:
    """Writes into its memory as a rank does: a tensor, or its rows of one."""

    def __init__(self, fd: int, rank: int, ranks: int, *, sharded: bool) -> None:
        whole = (ROWS * ranks, 4) if sharded else (ROWS, 4)
        self.rank = rank
        self.layout = SlotLayout(
            ("trainable", "optimizer-adamw"),
            (TensorEntry("trainable", "w", "F32", (ROWS, 4), whole, (ROWS * rank if sharded else 0, 0)),),
        )
        size = needed_bytes(self.layout, text_bytes=1000)
        os.ftruncate(fd, size)
        self.memory = mmap.mmap(fd, size)
        self.slots = Slots(memoryview(self.memory), self.layout)
        self._sequence = 0

    def keep(self, step: int, *lines: dict[str, Any], dies: bool = False) -> None:
        writing = self.slots.begin(self._sequence)
        self._sequence += 1
        content = random.Random(step).randbytes(4 * 4 * ROWS)
        writing.tensors[: len(content)] = content
        if dies:
            return
        writing.note(self.layout.tensor_bytes)
        text = slot_text({"train": {"step": step}, "optimizer": {}}, lines or [line(step)])
        self.slots.commit(writing, step=step, text=text)


class Ground:
    """A run's directory, the memory of its ranks, and what a rescue says."""

    def __init__(self, folder: Path, plan: RunPlan) -> None:
        self.plan = plan
        self.run = RunDir(folder)
        self.store = CheckpointStore(self.run.checkpoints, key=b"k" * 32)
        self.memory = SharedMemory(snapshot_ranks(plan, 0))
        sharded = plan.strategy == "fsdp"
        self.ranks = [
            Rank(fd, rank, plan.world_size, sharded=sharded)
            for rank in self.memory.ranks
            if (fd := self.memory.fd(rank)) is not None
        ]
        self.shown: list[Any] = []
        self.attempt = Attempt(0, 0, None)
        killed = RankEnd(rank=plan.world_size - 1, returncode=-9, last=None, phase="train", step=0)
        self.attempt.decision = Decision(culprit=killed)

    def metrics(self, *lines: dict[str, Any], torn: str = "") -> None:
        writer = MetricsWriter(self.run.metrics)
        for entry in lines:
            writer.append(entry)
            if "loss" in entry:
                self.attempt.note(message_of(StepMessage, entry))
        writer.close()
        with self.run.metrics.open("a") as file:
            file.write(torn)

    def rescue(self) -> bool:
        return rescue(
            self.run,
            self.plan,
            self.attempt,
            RescuedStep.of_node(self.memory),
            store=self.store,
            show=self.shown.append,
        )

    def of_kind(self, kind: str) -> list[str]:
        return [str(message.get("text")) for message in self.shown if message["kind"] == kind]

    def saved(self) -> list[int]:
        return [int(path.name.removeprefix("step-")) for path in self.store.list()]


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path, plan_of(2))


def test_the_newest_step_becomes_a_checkpoint_and_it_is_reported(ground: Ground) -> None:
    for step in (1, 2):
        for rank in ground.ranks:
            rank.keep(step)
    ground.metrics(line(1), line(2))
    assert ground.rescue()
    path = ground.store.path(2)
    assert ground.store.verify(path, run_id="run-a") == []
    tensors, values = load_state(path)
    assert tensors["trainable"]["w"].numpy().tobytes() == random.Random(2).randbytes(4 * 4 * ROWS)
    assert tensors["optimizer-adamw"] == {}
    assert values == {"train": {"step": 2}, "optimizer": {}}
    (printed,) = ground.of_kind("note")
    assert "rank 1" in printed
    assert "died: step 2 was saved from memory as checkpoint step-00000002; nothing is lost" in printed
    assert (ground.attempt.step, ground.attempt.checkpoint) == (2, str(path))


def test_kept_step_not_yet_written_down_is_written_down_once(ground: Ground) -> None:
    ground.ranks[0].keep(3)
    ground.metrics(line(1), line(2), torn='{"step": 3, "lo')
    assert ground.rescue()
    assert read_metrics(ground.run.metrics) == [line(1), line(2), line(3)]
    assert [message["step"] for message in ground.shown if message["kind"] == "step"] == [3]


def test_a_step_and_its_evaluation_are_there_once(ground: Ground) -> None:
    evaluation = {"step": 2, "eval_loss": 0.5}
    ground.ranks[0].keep(2)
    ground.ranks[0].keep(2, line(2), evaluation)
    ground.metrics(line(1), line(2), evaluation)
    assert ground.rescue()
    assert read_metrics(ground.run.metrics) == [line(1), line(2), evaluation]
    assert not [message for message in ground.shown if message["kind"] == "step"]


def test_an_evaluation_that_is_to_be_done_again_leaves_no_line(ground: Ground) -> None:
    ground.ranks[0].keep(2)
    ground.metrics(line(1), line(2), {"step": 2, "eval_loss": 0.5})
    assert ground.rescue()
    assert read_metrics(ground.run.metrics) == [line(1), line(2)]


def test_a_rank_that_came_further_than_the_other_is_taken(ground: Ground) -> None:
    for step in (1, 2, 3):
        ground.ranks[1].keep(step)
    ground.ranks[0].keep(1)
    ground.ranks[0].keep(2)
    ground.ranks[0].keep(3, dies=True)
    ground.metrics(line(1), line(2))
    assert ground.rescue()
    assert ground.saved() == [3]


def test_nothing_is_made_where_the_disk_has_as_much(ground: Ground) -> None:
    ground.ranks[0].keep(2)
    ground.metrics(line(1), line(2))
    assert ground.rescue()
    ground.shown.clear()
    assert not ground.rescue()
    assert ground.shown == []


def test_nothing_is_made_where_nothing_was_kept(ground: Ground) -> None:
    assert not ground.rescue()
    assert ground.shown == []


def test_nothing_is_made_of_a_run_that_ended_with_a_result(ground: Ground) -> None:
    ground.ranks[0].keep(2)
    ground.attempt.decision = None
    ground.attempt.note({"kind": "result", "exit_code": 4})
    assert not ground.rescue()


@pytest.mark.parametrize("place", [0, 200, -70_000])
def test_damaged_step_is_refused_and_the_one_before_is_taken(tmp_path: Path, place: int) -> None:
    """What is lost is reported."""
    ground = Ground(tmp_path, plan_of(1, strategy="single"))
    (rank,) = ground.ranks
    rank.keep(1)
    rank.keep(2)
    half = len(rank.memory) // 2
    used = [i for i in range(half, 2 * half) if rank.memory[i]]
    rank.memory[used[place % len(used)]] ^= 4
    ground.metrics(line(1), line(2))
    assert ground.rescue()
    assert ground.saved() == [1]
    (warning,) = ground.of_kind("warning")
    assert "the snapshot of rank 0 in memory is not used" in warning
    assert "as checkpoint step-00000001; the 1 after it are lost" in ground.of_kind("note")[0]


def test_where_all_is_damaged_the_run_goes_back_to_its_checkpoint(tmp_path: Path) -> None:
    ground = Ground(tmp_path, plan_of(1, strategy="single"))
    (rank,) = ground.ranks
    for step in (1, 2):
        rank.keep(step)
    for half in (0, len(rank.memory) // 2):
        rank.memory[half + 20] ^= 1
    assert not ground.rescue()
    assert len(ground.of_kind("warning")) == 2
    assert ground.saved() == []


def test_where_it_cannot_be_saved_it_is_reported_and_the_run_continues(ground: Ground) -> None:
    ground.ranks[0].keep(2)
    ground.run.checkpoints.write_text("a file where the folder belongs")
    assert not ground.rescue()
    (warning,) = ground.of_kind("warning")
    assert "step 2 from memory cannot be saved" in warning


def test_parts_of_one_step_make_a_checkpoint_of_parts(tmp_path: Path) -> None:
    ground = Ground(tmp_path, plan_of(3, strategy="fsdp"))
    for step in (1, 2):
        for rank in ground.ranks:
            rank.keep(step)
    ground.ranks[0].keep(3)
    ground.ranks[1].keep(3, dies=True)
    ground.metrics(line(1), line(2))
    ground.attempt.decision = Decision(loss=NodeLoss(1, "b", "gone"))
    assert ground.rescue()
    assert ground.saved() == [2]
    tensors, _ = load_state(ground.store.path(2))
    assert tensors["trainable"]["w"].numpy().tobytes() == random.Random(2).randbytes(4 * 4 * ROWS) * 3
    assert ground.of_kind("note")[0].startswith("node 1 (b) is lost: step 2 was saved")


def kept(*sequences: int) -> list[StepSnapshot]:
    layout = SlotLayout((), ())
    return [StepSnapshot(n, n, layout, memoryview(b""), {}, []) for n in sorted(sequences, reverse=True)]


@pytest.mark.parametrize(
    ("steps", "holders", "chosen"),
    [
        ({0: [4, 5], 1: [3, 4]}, [[0, 1]], [5]),
        ({0: [], 1: [3, 4]}, [[0, 1]], [4]),
        ({}, [[0, 1]], []),
        ({0: [4, 5], 1: [3, 4]}, [[0], [1]], [4, 4]),
        ({0: [4, 5], 1: [5]}, [[0], [1]], [5, 5]),
        ({0: [4, 5]}, [[0], [1]], []),
        ({0: [4, 5], 1: [2, 3]}, [[0], [1]], []),
    ],
)
def test_the_newest_state_that_all_its_holders_have_is_chosen(
    steps: dict[int, Sequence[int]], holders: list[list[int]], chosen: list[int]
) -> None:
    found = choose_pieces({rank: kept(*sequences) for rank, sequences in steps.items()}, holders=holders)
    assert [piece.sequence for piece in found] == chosen


def test_who_keeps_its_steps() -> None:
    assert snapshot_ranks(plan_of(1, strategy="single"), 0) == [0]
    assert snapshot_ranks(plan_of(8, per_node=4), 0) == [0, 1]
    assert snapshot_ranks(plan_of(8, per_node=4), 1) == []
    assert snapshot_ranks(plan_of(8, per_node=4, strategy="fsdp"), 1) == [4, 5, 6, 7]
    assert snapshot_ranks(plan_of(8, per_node=4, adapter=False), 0) == []


def test_the_memory_has_no_name_and_goes_with_its_owner() -> None:
    with SharedMemory([0]) as memory:
        fd = memory.fd(0)
        assert fd is not None
        assert "memfd" in str(Path(f"/proc/self/fd/{fd}").readlink())
        assert not os.get_inheritable(fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
