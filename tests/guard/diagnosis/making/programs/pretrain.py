# ruff: noqa: ANN001, ANN201, C901, DTZ005, ICN001, LOG015, PLW1508, PTH123, SIM300, SIM401
# mypy: ignore-errors
"""A small DDP loop on gloo into which one fault can be put: FAULT, FAULT_RANK, FAULT_STEP; STYLE is
how it talks.
"""

import datetime
import json
import logging
import os
import signal
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
FAULT, AT = os.environ.get("FAULT", ""), int(os.environ.get("FAULT_STEP", 6))
HERE = FAULT if RANK == int(os.environ.get("FAULT_RANK", 0)) else ""
STEPS, STYLE = int(os.environ.get("STEPS", 24)), os.environ.get("STYLE", "log")
LIMIT = datetime.timedelta(seconds=float(os.environ.get("LIMIT", 20)))


class Corpus(Dataset):
    """Samples of eight numbers and a label."""

    def __len__(self):
        return 8 * STEPS

    def __getitem__(self, i):
        row = {"input_ids": torch.randint(0, 32, (8,)), "labels": i % 4, "text": "{}"}
        if i == 8 * AT:
            spoil(row)
        parsed = json.loads(row["text"])
        return {"input_ids": row["input_ids"], "labels": row["labels"] + len(parsed)}


def spoil(row):
    """Make this row what the fault wants."""
    if HERE == "key":
        row.pop("labels")
    elif HERE == "json":
        row["text"] = '{"messages": [{"role": "user", '
    elif HERE == "width":
        row["input_ids"] = row["input_ids"][:5]
    elif HERE == "label":
        row["labels"] = 17
    elif HERE == "vocab":
        row["input_ids"][3] = 32


class Model(nn.Module):
    """An embedding and two layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.up = nn.Linear(128, 64)
        self.adapter = nn.Linear(64, 64)
        self.head = nn.Linear(64, 4)

    def forward(self, ids, skip=False):
        h = self.up(self.embed(ids).flatten(1)).relu()
        return self.head(h if skip else self.adapter(h))


def notify(text, step=None, loss=None):
    """One line, in the wanted manner."""
    if STYLE == "log":
        logging.info(text)
    elif STYLE == "ansi":
        now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
        print(
            f"\033[32m{now}\033[0m | \033[1mINFO    \033[0m | \033[36m__main__\033[0m:\033[36msay\033[0m -"
            f" \033[1m{text}\033[0m",
            file=sys.stderr,
            flush=True,
        )
    elif STYLE == "json":
        print(
            json.dumps({"ts": round(time.time(), 3), "rank": RANK, "msg": text, "step": step, "loss": loss}),
            flush=True,
        )
    elif STYLE == "bar" and step is not None:
        done = int(10 * step / STEPS)
        print(
            f"\r{100 * step // STEPS:3d}%|{'█' * done}{' ' * (10 - done)}| {step}/{STEPS}"
            f" [00:0{step % 10}<00:04,  3.1it/s, loss={loss:.3f}]",
            end="",
            file=sys.stderr,
            flush=True,
        )
    else:
        print(f"[Rank {RANK}] {text}" if STYLE == "rank" else text, flush=True)


def before_step(step):
    """What goes wrong between two steps."""
    if step != AT:
        return
    if HERE == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif HERE == "segv":
        import ctypes

        ctypes.string_at(0)
    elif HERE == "abort":
        os.abort()
    elif HERE == "bus":
        os.kill(os.getpid(), signal.SIGBUS)
    elif HERE == "fpe":
        os.kill(os.getpid(), signal.SIGFPE)
    elif HERE == "exit0":
        os._exit(0)
    elif HERE == "exit3":
        sys.exit(3)
    elif HERE == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif HERE == "stall":
        refresh_cache()
    elif HERE == "tokenize":
        tokenize_again()
    elif HERE == "download":
        fetch_again()
    elif HERE == "barrier":
        dist.barrier()
    elif HERE == "broadcast":
        dist.broadcast(torch.zeros(7), src=RANK)
    elif HERE == "gather":
        dist.all_gather([torch.zeros(3) for _ in range(WORLD)], torch.zeros(3))
    elif HERE == "size":
        dist.all_reduce(torch.zeros(11))
    elif FAULT == "save_full" and RANK == 0:
        torch.save({"w": torch.zeros(4_000_000)}, os.environ["TARGET"] + "/model.pt")
    elif FAULT == "write_full" and RANK == 0:
        with open(os.environ["TARGET"] + "/optimizer.bin", "wb") as f:
            f.write(bytes(16_000_000))
    elif HERE == "alloc":
        hold = [torch.ones(400_000_000) for _ in range(64)]
        notify(str(len(hold)))
    elif HERE == "assert":
        check_batch(-1)
    elif HERE == "chain":
        load_shard("shard-00017.bin")


def check_batch(n):
    """A check of a user's own."""
    assert n >= 0, f"negative token count {n} in batch"


def load_shard(name):
    """An exception that hides another."""
    try:
        open(f"/data/none/{name}").close()
    except OSError as e:
        raise RuntimeError(f"cannot decode {name}: unexpected magic number") from e


def refresh_cache():
    """Stand still for a while."""
    time.sleep(float(os.environ.get("STALL", 60)))


def tokenize_again():
    """Be busy with the data while the others wait."""
    for i in range(600):
        print(
            f"\rRunning tokenizer on dataset: {i:3d}%|{'#' * (i // 10)}| {i * 1000}/100000 [00:{i:02d}<01:40,"
            " 998.2 examples/s]",
            end="",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(1)


def fetch_again():
    """Try something again and again."""
    for i in range(600):
        logging.warning(
            "GET https://data.example.org/shards/0042.parquet failed (503), retrying in 2 s (attempt %d)",
            i + 1,
        )
        time.sleep(2)


def start():
    """Join the group, if there is one to join."""
    if FAULT == "nccl":
        dist.init_process_group("nccl", timeout=LIMIT)
    elif FAULT == "device":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    elif FAULT == "import" or HERE == "import_here":
        import flash_linear_attention  # noqa: F401
    if HERE == "late":
        time.sleep(60)
    dist.init_process_group("gloo", timeout=LIMIT)
    notify(f"rank {RANK} of {WORLD} ready")


def load(model):
    """Take the last checkpoint."""
    path = os.environ.get("RESUME")
    if path:
        notify(f"loading {path}")
        state = torch.load(path)
        model.load_state_dict(state["model"] if "model" in state else state)


def train():
    """The loop."""
    torch.manual_seed(3)
    net = Model()
    load(net)
    static = FAULT == "unused"
    model = DistributedDataParallel(net)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    steps = STEPS - 4 if HERE == "unequal" else STEPS
    workers = int(os.environ.get("WORKERS", 0))
    loader = DataLoader(Corpus(), batch_size=8, num_workers=workers)
    notify(f"{steps} steps, {sum(p.numel() for p in model.parameters()):,} parameters")
    for step, batch in enumerate(loader):
        if step == steps:
            break
        before_step(step)
        loss = nn.functional.cross_entropy(model(batch["input_ids"], static), batch["labels"])
        if FAULT == "nan" and step >= AT:
            loss = loss * float("nan")
        if FAULT == "anomaly" and step >= AT:
            with torch.autograd.set_detect_anomaly(True):
                (torch.sqrt(-loss.detach() + 0 * loss)).backward()
        if FAULT == "twice":
            (model(batch["input_ids"]).sum() + loss).backward()
        loss.backward()
        opt.step()
        opt.zero_grad()
        time.sleep(0.02)
        if step % 4 == 0 and (RANK == 0 or STYLE in ("rank", "json")):
            notify(f"step {step}/{steps} loss {loss.item():.4f}", step, loss.item())
    notify(f"finished {steps} steps")


def end():
    """Leave the group."""
    if FAULT == "no_barrier":
        dist.barrier()
    dist.destroy_process_group()
    if FAULT == "destroy_twice":
        dist.destroy_process_group()
    if FAULT == "terminate":
        import ctypes

        ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()


def main():
    """Start, train, end; a restart behaves well where ONCE is set."""
    global FAULT, HERE
    logging.basicConfig(level=logging.INFO, format="%(asctime)s [%(levelname)s] %(name)s: %(message)s")
    if os.environ.get("ONCE") and os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        FAULT = HERE = ""
    start()
    train()
    end()


if __name__ == "__main__":
    main()
