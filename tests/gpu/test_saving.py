"""Saves beside training on a CUDA device. Run: pytest -m gpu tests/gpu"""

from pathlib import Path

import pytest
import torch

from unisono.trainer.training.saver import Files, RankTensor, Save, Saver, Staging

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_saved_state_is_that_of_the_start_while_the_device_computes_on() -> None:
    """The copies run on a stream of their own; neither earlier work in the queue nor the next
    update may reach them.
    """
    device = torch.device("cuda", 0)
    saver = Saver(Staging(device))
    weights = {f"w{n}": torch.zeros(1 << 20, device=device) for n in range(8)}
    work = torch.randn(4096, 4096, device=device)
    for step in range(1, 20):
        for weight in weights.values():
            work = work @ work / work.norm()  # keeps the queue long
            weight.fill_(step)
        found: dict[str, bytes] = {}

        def write(save: Save, files: Files, found: dict[str, bytes] = found) -> Path:
            found.update({part.name: bytes(part.read()) for part in files["trainable"]})
            return Path(f"step-{save.step}")

        groups = {"trainable": [RankTensor(n, t, tuple(t.shape), (0,)) for n, t in weights.items()]}
        save = saver.begin(step, groups, write)
        saver.before_update()
        for weight in weights.values():
            weight.fill_(-1)
        assert saver.wait()
        assert save.path == Path(f"step-{step}")
        wanted = torch.full((1 << 20,), float(step)).numpy().tobytes()
        assert all(found[name] == wanted for name in weights)
