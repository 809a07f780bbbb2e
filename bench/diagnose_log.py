"""A synthetic log of any length that looks like a real one: loss lines, bars, NCCL INFO, warnings,
data preparation, prefixes of ranks.
"""

import argparse
import random
from collections.abc import Iterator
from pathlib import Path

BLOCK_LINES = 20_000
SEED = 7

END = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/u/train.py", line 181, in <module>
[rank3]:     trainer.train()
[rank3]:   File "/home/u/train.py", line 96, in collate
[rank3]:     return torch.stack(rows)
[rank3]: RuntimeError: stack expects each tensor to be equal size, but got [512] at entry 0 and [498] at entry 3
[rank0]:[E1122 04:11:31.881 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=8812, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000) ran for 600061 milliseconds before timing out.
"""
"""What the log ends with: rank 3 raises, rank 0 waits in vain."""


def blocks(total_bytes: int) -> Iterator[bytes]:
    """The log in blocks, `END` last; `total_bytes` are met to one block.

    The blocks repeat with other steps and times.
    """
    random.seed(SEED)
    template = "".join(_line() for _ in range(BLOCK_LINES)).encode()
    written = number = 0
    while written < total_bytes - len(END):
        block = template.replace(b"@@@@@@", b"%06d" % number)
        number += 1
        written += len(block)
        yield block
    yield END.encode()


def write_log(path: Path, total_bytes: int) -> int:
    """Writes the log; gives its bytes."""
    with path.open("wb") as file:
        for block in blocks(total_bytes):
            file.write(block)
    return path.stat().st_size


def _line() -> str:
    kind, rank, pick = random.random(), random.randrange(8), random.random
    clock = (
        f"2026-11-22 04:{random.randrange(60):02d}:{random.randrange(60):02d},{random.randrange(1000):03d}"
    )
    if kind < 0.30:
        return (
            f"node-{rank // 4}:{4000 + rank}:{4100 + rank} [{rank % 4}] NCCL INFO Channel"
            f" {random.randrange(16):02d}/0 : {rank}[{rank % 4}] -> {(rank + 1) % 8}[{(rank + 1) % 4}] via"
            " P2P/CUMEM/read @@@@@@\n"
        )
    if kind < 0.50:
        return (
            f"[rank{rank}]: {clock} - INFO - user.loader - fetched"
            f" shard-@@@@@@-{random.randrange(9999):05d}.tar in {pick():.3f} s, {random.randrange(1, 99)}"
            " MB/s\n"
        )
    if kind < 0.62:
        return (
            f"{{'loss': {pick() + 1:.4f}, 'grad_norm': {pick():.4f}, 'learning_rate': {pick() * 1e-4:.3e},"
            f" 'epoch': {pick():.2f}}}\n"
        )
    if kind < 0.72:
        share = random.randrange(100)
        return (
            f"\r{share:3d}%|{'█' * (share // 10):<10}| {share * 10}/1000 [02:11<01:15, {pick() * 4:.2f}it/s]"
        )
    if kind < 0.92:
        return f"[rank{rank}]: {clock} DEBUG:trainer:step=@@@@@@ micro={random.randrange(8)} tokens={random.randrange(4096)} " + "x" * random.randrange(90) + "\n"  # fmt: skip
    if kind < 0.97:
        return (
            f"{clock} [WARNING] [real_accelerator.py:162:get_accelerator] a setting that does nothing was"
            f" ignored: key_{random.randrange(999)}\n"
        )
    if kind < 0.995:
        return "\n"
    return f"tokens: {' '.join(str(random.randrange(32000)) for _ in range(400))}\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("path", type=Path)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    arguments = parser.parse_args()
    print(write_log(arguments.path, arguments.bytes))
