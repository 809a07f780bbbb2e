"""Saves beside training: what is saved is the state at the beginning, and nothing waits that need
not.

Run: pytest tests/trainer/training/test_saver.py
"""

import errno
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.training import saver as saving
from unisono.trainer.training.saver import Files, Groups, RankTensor, Save, Saver, Staging

LIMIT_S = 30.0


def _groups(tensors: dict[str, torch.Tensor]) -> Groups:
    return {"trainable": [RankTensor(n, t, tuple(t.shape), (0,) * t.ndim) for n, t in tensors.items()]}


def _keep(found: dict[str, bytes]) -> Callable[[Save, Files], Path]:
    def write(save: Save, files: Files) -> Path:
        found.update({part.name: bytes(part.read()) for part in files["trainable"]})
        return Path(f"step-{save.step}")

    return write


class Held(Staging):
    """Copies when it is told to."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.may_copy = threading.Event()

    def copy(self, groups: Groups) -> Files:
        assert self.may_copy.wait(LIMIT_S)
        return super().copy(groups)


class Poor(Staging):
    """On a machine without the memory for copies."""

    def has_room(self, groups: Groups) -> bool:
        del groups
        return False


@pytest.mark.parametrize("staging", [Staging, Poor])
def test_saved_state_is_that_of_the_start_whatever_training_does_later(
    staging: type[Staging],
) -> None:
    """Three hundred saves of tensors that change at once; the buffers are kept from one to the
    next.
    """
    saver = Saver(staging(torch.device("cpu")))
    tensors = {"a": torch.zeros(5000), "b": torch.zeros(3, 7, dtype=torch.bfloat16), "step": torch.zeros(())}
    for step in range(300):
        for tensor in tensors.values():
            tensor.fill_(step)
        found: dict[str, bytes] = {}
        save = saver.begin(step, _groups(tensors), _keep(found))
        saver.before_update()
        for tensor in tensors.values():
            tensor.fill_(-1)
        assert saver.wait()
        assert save.path == Path(f"step-{step}")
        assert found["a"] == torch.full((5000,), float(step)).numpy().tobytes()
        assert found["step"] == torch.tensor(float(step)).numpy().tobytes()
        assert found["b"] == torch.full((21,), step, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()


def test_training_continues_before_copies_and_the_update_waits_for_them() -> None:
    staging = Held()
    saver = Saver(staging)
    weight = torch.ones(10)
    found: dict[str, bytes] = {}
    save = saver.begin(1, _groups({"w": weight}), _keep(found))
    assert not save.copied.is_set()  # and yet `begin` has returned

    begun, updated = threading.Event(), threading.Event()

    def update() -> None:
        begun.set()
        saver.before_update()
        weight.fill_(2)
        updated.set()

    trains = threading.Thread(target=update)
    trains.start()
    assert begun.wait(LIMIT_S)
    assert not updated.wait(0.2)
    staging.may_copy.set()
    assert updated.wait(LIMIT_S)
    trains.join()
    assert saver.wait()
    assert found["w"] == torch.ones(10).numpy().tobytes()
    assert save.blocking_s > 0


def test_an_update_does_not_wait_for_the_writing() -> None:
    saver = Saver(Staging(torch.device("cpu")))
    may_write = threading.Event()

    def write(save: Save, files: Files) -> None:
        del save, files
        assert may_write.wait(LIMIT_S)

    save = saver.begin(1, _groups({"w": torch.ones(10)}), write)
    saver.before_update()
    assert not save.done.is_set()
    may_write.set()
    assert saver.wait()


def test_a_save_that_makes_no_progress_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "STUCK_S", 0.3)
    saver = Saver(Staging(torch.device("cpu")))
    may_write = threading.Event()

    def write(save: Save, files: Files) -> None:
        del files
        save.advance("writing to a disk that does not answer")
        assert may_write.wait(LIMIT_S)

    save = saver.begin(1, _groups({"w": torch.ones(10)}), write)
    assert not saver.wait()
    assert save.activity == "writing to a disk that does not answer"
    may_write.set()
    assert save.done.wait(LIMIT_S)
    assert saver.wait()


def test_an_error_of_ours_in_the_thread_reaches_the_training() -> None:
    saver = Saver(Staging(torch.device("cpu")))

    def write(save: Save, files: Files) -> None:
        del save, files
        raise OSError(errno.EIO, "broken")

    saver.begin(1, _groups({"w": torch.ones(10)}), write)
    with pytest.raises(OSError, match="broken"):
        saver.wait()


def test_tensors_that_come_later_and_views_are_saved_too() -> None:
    """Optimizer state appears with the first update; a slice of a larger tensor is not
    contiguous.
    """
    rng = random.Random(0)
    saver = Saver(Staging(torch.device("cpu")))
    tensors: dict[str, torch.Tensor] = {}
    for step in range(20):
        tensors[f"t{step}"] = torch.randn(rng.randint(1, 40), 12)[:, ::2]
        found: dict[str, bytes] = {}
        saver.begin(step, _groups(tensors), _keep(found))
        assert saver.wait()
        assert found == {n: t.contiguous().numpy().tobytes() for n, t in tensors.items()}


def test_the_buffers_of_a_save_are_those_of_the_next_one() -> None:
    saver = Saver(Staging(torch.device("cpu")))
    tensors = {"a": torch.zeros(5000), "b": torch.zeros(3, 7)[:, ::2], "step": torch.zeros(())}
    places: list[dict[str, int]] = []

    def write(save: Save, files: Files) -> None:
        del save
        parts = files["trainable"]
        places.append(
            {part.name: torch.frombuffer(part.read(), dtype=torch.uint8).data_ptr() for part in parts}
        )

    for step in range(3):
        saver.begin(step, _groups(tensors), write)
        assert saver.wait()
    assert places[0] == places[1] == places[2]
    assert not set(places[0].values()) & {tensor.data_ptr() for tensor in tensors.values()}


def test_a_save_that_is_due_while_one_is_in_flight_waits_for_it(
    train_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save begins to write when the step after it is done, and so is in flight when the next
    one is due.
    """
    done = [threading.Event() for _ in range(6)]
    in_flight, most = [0], [0]
    save = CheckpointStore.save

    def late(self: CheckpointStore, step: int, *args: Any, **named: Any) -> Path:
        in_flight[0] += 1
        most[0] = max(most[0], in_flight[0])
        assert step == 6 or done[step].wait(5)  # less than STUCK_S
        path = save(self, step, *args, **named)
        in_flight[0] -= 1
        return path

    def on_message(message: dict[str, Any], stop: object) -> None:
        del stop
        if message["kind"] == "step":
            done[message["step"] - 1].set()

    monkeypatch.setattr(CheckpointStore, "save", late)
    run = train_here(on_message=on_message, checkpoint={"every": "1 steps"})
    assert [message["step"] for message in run.of_kind("checkpoint")] == [1, 2, 3, 4, 5, 6]
    assert most == [1]


def test_a_save_that_is_due_while_one_hangs_is_left_out_and_reported(
    train_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "STUCK_S", 0.3)
    left_out = threading.Event()
    save = CheckpointStore.save

    def late(self: CheckpointStore, *args: Any, **named: Any) -> Path:
        assert left_out.wait(LIMIT_S)
        return save(self, *args, **named)

    def on_message(message: dict[str, Any], stop: object) -> None:
        del stop
        if message["kind"] == "warning" and message["code"] == "checkpoint_skipped":
            monkeypatch.setattr(saving, "STUCK_S", LIMIT_S)  # it hangs no more, however slow the machine is
            left_out.set()

    monkeypatch.setattr(CheckpointStore, "save", late)
    run = train_here(on_message=on_message, checkpoint={"every": "3 steps"}, duration="9 steps")
    (warning,) = [m for m in run.of_kind("warning") if m["code"] == "checkpoint_skipped"]
    assert warning["text"].startswith("step 6 is not saved: the save of step 3 has made no progress")
    assert [message["step"] for message in run.of_kind("checkpoint")] == [3, 9]
    assert len(run.losses) == 9


def test_old_checkpoints_that_cannot_be_deleted_do_not_end_the_run(
    train_here: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where they are in a lower layer of a container's file system, which a directory cannot be
    renamed in.
    """

    def refuse(self: CheckpointStore, path: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link", str(path))

    monkeypatch.setattr(CheckpointStore, "_delete", refuse)
    run = train_here(checkpoint={"every": "2 steps", "keep": 1})
    assert run.result["outcome"] == "completed"
    assert run.result["checkpoint"].endswith("step-00000006")
    assert {m["code"] for m in run.of_kind("warning")} >= {"prune_failed"}


def test_an_exception_in_a_step_does_not_cost_the_save_in_flight(
    train_here: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = threading.Event()
    save = CheckpointStore.save

    def late(self: CheckpointStore, *args: Any, **named: Any) -> Path:
        assert died.wait(5)  # less than STUCK_S
        return save(self, *args, **named)

    def die(message: dict[str, Any], stop: object) -> None:
        del stop
        if message["kind"] == "step" and message["step"] == 3:
            threading.Timer(0.5, died.set).start()
            raise ValueError("user code")

    monkeypatch.setattr(CheckpointStore, "save", late)
    directory = tmp_path / "run"
    with pytest.raises(ValueError, match="user code"):
        train_here(directory=directory, on_message=die, checkpoint={"every": "2 steps"})
    assert (directory / "checkpoints" / "step-00000002" / "manifest.json").is_file()


def test_save_hanging_over_live_tensors_is_abandoned_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without memory for copies the update would wait for the storage; what was read by then must
    not be published.
    """
    monkeypatch.setattr(saving, "STUCK_S", 0.3)
    saver = Saver(Poor(torch.device("cpu")))
    may_write, abandoned = threading.Event(), []

    def write(save: Save, files: Files) -> None:
        del files
        assert may_write.wait(LIMIT_S)
        abandoned.append(save.is_abandoned)

    save = saver.begin(1, _groups({"w": torch.ones(10)}), write)
    saver.before_update()
    assert save.is_abandoned
    assert not save.done.is_set()
    may_write.set()
    assert save.done.wait(LIMIT_S)
    assert abandoned == [True]
