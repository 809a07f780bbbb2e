"""What the tests of this room share: a store, and a small checkpoint in it.

Run: pytest tests/checkpoint
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from unisono.trainer.checkpoint.store import CheckpointStore

Save = Callable[..., Path]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    (tmp_path / "run").mkdir()
    return CheckpointStore(tmp_path / "run" / "checkpoints", key=b"k" * 32)


@pytest.fixture
def save(store: CheckpointStore) -> Save:
    """Saves a checkpoint of a step: two files whose content is the step's own."""

    def write(step: int, *, run_id: str = "run-a", by: CheckpointStore | None = None, text: str = "") -> Path:
        def fill(directory: Path) -> None:
            (directory / "weights.safetensors").write_bytes(f"weights {step} {text}".encode() * 1000)
            (directory / "state.json").write_text(f'{{"step": {step}}}')

        return (by or store).save(
            step, fill, run_id=run_id, config_digest="c", world_size=1, threads=1, holder="host-a"
        )

    return write
