"""Whether replicas are still equal: now and then every rank tells a digest of what it trains, and the head compares them.

Ranks of a ddp run begin with the same bits, get the same sums, and make the same updates. A digest costs no collective, so it cannot hang.
"""

import platform
from collections.abc import Iterable

import torch
import xxhash

from unisono.train.run import Run

_CHUNK = 1 << 20  # words of a device at a time: its temporary memory is 16 MiB, whatever is trained


def tell_digest(run: Run) -> None:
    """Tells the front a digest of all trained weights, where it is due: after the update, every so many steps, and after the last step."""
    every, step = run.plan.digest_every, run.state.step
    if every is None or (step % every != 0 and step != run.plan.total_steps):
        return
    digest = weights_digest(run.forward.loaded.trainable.values())
    run.report.send("digest", step=step, digest=digest, arithmetic=arithmetic(run.device))


def weights_digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of the bytes of float32 tensors, in order. On a CPU xxh3; on a device two sums, so that only they are copied from it."""
    tensors = [tensor.detach() for tensor in tensors]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        digest = xxhash.xxh3_128()
        for tensor in tensors:
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()
    sums = torch.stack([_sums(tensor) for tensor in tensors]).cpu()  # the one wait for the device
    return xxhash.xxh3_128(sums.numpy()).hexdigest()


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """(2,) int64: Σ w, and Σ w·place, modulo 2⁶⁴, over the 4-byte words w; made where the tensor is."""
    words = tensor.contiguous().view(-1).view(torch.int32)
    place = torch.arange(1, _CHUNK + 1, device=words.device)  # int64
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for number, chunk in enumerate(words.split(_CHUNK)):
        plain = chunk.sum(dtype=torch.int64)
        total[0] += plain
        total[1] += (chunk * place[: len(chunk)]).sum() + plain * (number * _CHUNK)
    return total


def arithmetic(device: torch.device) -> str:
    """What decides how sums are rounded: the device's name, or which instructions torch uses on this CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}"
