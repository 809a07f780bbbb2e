"""How long a save keeps training waiting, and what digests cost: ours, torch.save,
torch.distributed.checkpoint's save and async_save.

    python bench/checkpoint.py [--rounds 5]

A random Llama of 135 M parameters in float32 trains on one core's worth of threads, with AdamW: 1.6
GB a checkpoint. All ways take turns in one process, after a first save of each that does not count.
Blocking is what the training thread spends on a save: the call, and any waiting before the next
update (async_save's staging is over when it returns, so its state may change). Results go to
bench/results/checkpoint.json; ratios within the run are what to look at.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM
from workload import MODELS  # type: ignore[import-not-found]  # beside this script

from unisono.trainer.checkpoint.state import optimizer_tensors
from unisono.trainer.checkpoint.store import CheckpointStore
from unisono.trainer.checkpoint.writer import (
    STATE,
    TensorFile,
    group_file,
    state_text,
    write_files,
    write_tensor_file,
)
from unisono.trainer.training.saver import Files, RankTensor, Save, Saver, Staging, in_place

ROWS, LENGTH = 2, 128
PAIRS = 9  # of writes; a disk that others use, too, is seldom as quick twice
WRITING = {"run_id": "bench", "config_digest": "c", "world_size": 1, "threads": 1, "holder": "host"}


class Training:
    """A model that trains, and its state by group."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(LlamaConfig(**MODELS["m135"]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.names = [name for name, _ in self.model.named_parameters()]

    def gradient(self) -> None:
        """Forward and backward."""
        ids = torch.randint(0, 49152, (ROWS, LENGTH))
        self.model(input_ids=ids, labels=ids).loss.backward()

    def update(self) -> None:
        """What a save must not see half of."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """The live tensors."""
        weights = {name: p.detach() for name, p in self.model.named_parameters()}
        return {"trainable": weights, "optimizer-adamw": optimizer_tensors(self.optimizer, self.names)[0]}


def ours(training: Training, saver: Saver, root: Path) -> tuple[float, float]:
    """Seconds of blocking, and from the beginning to the published checkpoint."""
    store = CheckpointStore(root / "ours", key=b"k" * 32)
    shutil.rmtree(store.root, ignore_errors=True)
    began = time.perf_counter()
    groups = {
        group: [RankTensor(name, t, tuple(t.shape), (0,) * t.ndim) for name, t in members.items()]
        for group, members in training.tensors().items()
    }
    text = state_text(sorted(groups), {"step": 1})

    def write(save: Save, files: Files) -> Path:
        named = [TensorFile(group_file(group, 0, 1), parts) for group, parts in files.items()]
        return store.save(1, lambda folder: write_files(folder, named, {STATE: text}), **WRITING)  # type: ignore[arg-type]

    save = saver.begin(1, groups, write)
    blocking = time.perf_counter() - began
    training.gradient()
    waiting = time.perf_counter()
    saver.before_update()
    blocking += time.perf_counter() - waiting
    training.update()
    save.done.wait()
    assert save.error is None, save.error
    return blocking, save.moved - save.began


def torch_save(training: Training, root: Path) -> tuple[float, float]:
    """torch.save and fsync."""
    target = root / "torch.pt"
    target.unlink(missing_ok=True)
    began = time.perf_counter()
    with target.open("wb") as file:
        torch.save(training.tensors(), file)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - began
    training.gradient()
    training.update()
    return seconds, seconds


def dcp_save(training: Training, root: Path) -> tuple[float, float]:
    """torch.distributed.checkpoint, waiting."""
    shutil.rmtree(root / "dcp", ignore_errors=True)
    began = time.perf_counter()
    dcp.save(training.tensors(), checkpoint_id=root / "dcp", no_dist=True)
    seconds = time.perf_counter() - began
    training.gradient()
    training.update()
    return seconds, seconds


def dcp_async(training: Training, root: Path) -> tuple[float, float]:
    """torch.distributed.checkpoint, in the background as it comes."""
    shutil.rmtree(root / "async", ignore_errors=True)
    began = time.perf_counter()
    future: Any = dcp.async_save(training.tensors(), checkpoint_id=root / "async", no_dist=True)
    blocking = time.perf_counter() - began
    training.gradient()
    training.update()
    future.result()
    return blocking, time.perf_counter() - began


def bare_write(parts: Files, root: Path) -> float:
    """The same bytes into the same files, synced, without a digest: what there is at least."""
    began = time.perf_counter()
    for group, members in parts.items():
        with (root / f"bare-{group}").open("xb", buffering=0) as file:
            for part in members:
                content = part.read()
                for start in range(0, content.nbytes, 8 << 20):
                    file.write(content[start : start + (8 << 20)])
            os.fsync(file.fileno())
    return time.perf_counter() - began


def digested_write(parts: Files, root: Path) -> float:
    """As a save does it."""
    began = time.perf_counter()
    for group, members in parts.items():
        write_tensor_file(root / f"digested-{group}", members)
    return time.perf_counter() - began


def costs(training: Training, root: Path, rounds: int) -> dict[str, Any]:
    """What digests add to writing: in pairs, either way first in turn, each with nothing of the
    other left to be written.
    """
    parts = in_place({
        group: [RankTensor(name, t, tuple(t.shape), (0,) * t.ndim) for name, t in members.items()]
        for group, members in training.tensors().items()
    })  # fmt: skip
    pairs: list[dict[str, float]] = []
    for turn in range(rounds + 1):
        found = {}
        for way in (bare_write, digested_write)[:: 1 if turn % 2 else -1]:
            os.sync()
            found[way.__name__] = way(parts, root)
            for file in [*root.glob("bare-*"), *root.glob("digested-*")]:
                file.unlink()
        if turn:  # the first does not count
            pairs.append(found)
    bare, digested = ([pair[way.__name__] for pair in pairs] for way in (bare_write, digested_write))
    added = sorted(after / before - 1 for before, after in zip(bare, digested, strict=True))
    digest = _digest_seconds(parts)
    return {
        "write_s": statistics.median(bare), "digested_write_s": statistics.median(digested),
        "digest_adds": {"median": statistics.median(added), "quartiles": statistics.quantiles(added, n=4)[::2], "pairs": len(added)},
        "digest_alone_s": digest, "digest_alone_share_of_write": digest / statistics.median(bare),
    }  # fmt: skip


def _digest_seconds(parts: Files) -> float:
    """The digests alone, into a file that keeps nothing."""
    found = []
    for _ in range(3):
        began = time.perf_counter()
        for members in parts.values():
            _into_nothing(members)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def _into_nothing(members: list[Any]) -> None:
    import xxhash

    whole = xxhash.xxh3_128()
    for part in members:
        own = xxhash.xxh3_64()
        content = part.read()
        for start in range(0, content.nbytes, 8 << 20):
            piece = content[start : start + (8 << 20)]
            whole.update(piece)
            own.update(piece)


def _drop_caches() -> None:
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1")


def reading(root: Path) -> float:
    """Seconds in which the disk gives the same bytes to a program that does nothing with them: what
    there is at least.
    """
    _drop_caches()
    began = time.perf_counter()
    for path in (root / "ours" / "step-00000001").iterdir():
        with path.open("rb", buffering=0) as file:
            while file.read(1 << 22):
                pass
    return time.perf_counter() - began


def verifying(root: Path, *, cold: bool) -> float:
    """Seconds that reading the checkpoint through takes; cold: with nothing of it in the page
    cache.
    """
    store = CheckpointStore(root / "ours", key=b"k" * 32)
    if cold:
        _drop_caches()
    began = time.perf_counter()
    assert store.verify(store.path(1)) == []
    return time.perf_counter() - began


def main() -> None:
    """Runs the rounds and writes the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    training, saver = Training(), Saver(Staging(torch.device("cpu")))
    training.gradient()
    training.update()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        ways: dict[str, Any] = {
            "unisono": lambda: ours(training, saver, root),
            "torch.save": lambda: torch_save(training, root),
            "dcp.save": lambda: dcp_save(training, root),
            "dcp.async_save": lambda: dcp_async(training, root),
        }
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for turn in range(arguments.rounds + 1):
            for name, way in ways.items():
                found = way()
                print(f"{name}: blocked {found[0]:.3f} s, whole {found[1]:.2f} s", flush=True)
                if turn:
                    taken[name].append(found)
        n_bytes = sum(file.stat().st_size for file in (root / "ours" / "step-00000001").iterdir())
        warm = statistics.median(verifying(root, cold=False) for _ in range(arguments.rounds))
        pairs = (
            [(verifying(root, cold=True), reading(root)) for _ in range(PAIRS)] if os.geteuid() == 0 else []
        )
        cold, read = ([pair[place] for pair in pairs] for place in (0, 1))
        share = costs(training, root, max(arguments.rounds, PAIRS))
    rows: dict[str, Any] = {
        name: {
            "blocking_s": {
                "median": statistics.median(b for b, _ in found),
                "largest": max(b for b, _ in found),
            },
            "whole_s": statistics.median(w for _, w in found),
        }
        for name, found in taken.items()
    }
    own = rows["unisono"]
    result: dict[str, Any] = {
        "command": f"python bench/checkpoint.py --rounds {arguments.rounds}",
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}", "load": load, "torch": torch.__version__, "threads": torch.get_num_threads(), "bytes": n_bytes,
        "rounds": arguments.rounds, "ways": rows,
        "async_save_blocks_times_as_long": rows["dcp.async_save"]["blocking_s"]["median"] / own["blocking_s"]["median"],
        "verify_warm_s": warm, "verify_warm_share_of_save": warm / own["whole_s"], **share,
    }  # fmt: skip
    if pairs:  # only root may empty the page cache
        result |= {
            "verify_cold_s": statistics.median(cold), "verify_cold_share_of_save": statistics.median(cold) / own["whole_s"],
            "read_cold_s": statistics.median(read), "verify_cold_to_reading": statistics.median(one / other for one, other in pairs),
        }  # fmt: skip
    target = Path(__file__).parent / "results" / "checkpoint.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
