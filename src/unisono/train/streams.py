"""Named random streams from one seed, and a watch on the global generators that nobody should move."""

import hashlib
import random
from typing import Any

import numpy as np
import torch

_MASK = (1 << 63) - 1
_TORCH = "torch's default generator"


def stream_seed(seed: int, name: str, index: int = 0) -> int:
    """The seed of a stream, for example of the dropout of the micro batch that begins at a global sequence index."""
    material = hashlib.sha256(f"unisono {name} {seed} {index}".encode()).digest()
    return int.from_bytes(material[:8], "big") & _MASK


def seed_torch(seed: int, name: str, index: int = 0) -> None:
    """Sets torch's global generators, of CPU and GPU, to the start of a stream."""
    torch.manual_seed(stream_seed(seed, name, index))


class GlobalStateWatch:
    """Tells when python's, numpy's or, where nothing of ours draws from it, torch's global generator has moved.

    Our own streams are set anew before each use, so a run stays exact; but code that draws from a global state (a model's
    own Python code, say) is not resumed exactly, and its owner should know.
    """

    def __init__(self, *, torch_is_used: bool) -> None:
        self._torch_is_used = torch_is_used
        self._seen = self._fingerprints()
        self._told: set[str] = set()

    def torch_was_seeded(self) -> None:
        """Says that the state torch's generator has now is ours."""
        if not self._torch_is_used:
            self._seen[_TORCH] = _torch_state()

    def moved(self) -> list[str]:
        """The generators that have moved since the last call; each is told once a run."""
        now = self._fingerprints()
        found = [name for name, value in now.items() if value != self._seen[name] and name not in self._told]
        self._seen = now
        self._told.update(found)
        return found

    def _fingerprints(self) -> dict[str, int]:
        state: Any = np.random.get_state()
        found = {
            "python's random": hash(random.getstate()),
            "numpy.random": hash((state[1].tobytes(), state[2])),
        }
        if not self._torch_is_used:
            found[_TORCH] = _torch_state()
        return found


def _torch_state() -> int:
    return hash(torch.random.get_rng_state().numpy().tobytes())
