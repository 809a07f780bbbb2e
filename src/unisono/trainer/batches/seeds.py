"""Seeds of random streams: pure functions of the run's seed, the name of a stream and an index."""

import hashlib

import torch

_MASK = (1 << 63) - 1


def stream_seed(seed: int, name: str, index: int = 0) -> int:
    """The seed of a random stream, e.g. for the dropout of the micro batch that begins at a global
    sequence index.
    """
    material = hashlib.sha256(f"unisono {name} {seed} {index}".encode()).digest()
    return int.from_bytes(material[:8], "big") & _MASK


def seed_torch(seed: int, name: str, index: int = 0) -> None:
    """Seeds torch's global generators, CPU and GPU, with the seed of a random stream."""
    value = stream_seed(seed, name, index)
    # Not torch.manual_seed: it formats the call stack once for each kind of device that is absent,
    # about 1 ms, and this is in every forward.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(value)
