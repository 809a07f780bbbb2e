"""Cases from transformers' Trainer, TRL, accelerate, Lightning and DeepSpeed's launcher."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

from tests.guard.diagnosis.making.record import PROGRAMS, Want, case, neutral, run, squeeze

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

SOURCE = (
    "made: transformers 5.23, trl 1.16, accelerate 1.15, lightning 2.6, deepspeed 0.19, torch 2.13 CPU"
    " (gloo); paths and hosts rewritten"
)
ACCELERATE = [
    "accelerate",
    "launch",
    "--cpu",
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
]


def torchrun(n: int) -> list[str]:
    return ["torchrun", "--standalone", "--nproc-per-node", str(n)]


def keep(name: str, want: Want, text: str, work: Path, place: int) -> dict[str, object]:
    text = neutral(text, place, work, "train.py").replace("hf_sft.py", "run_sft.py")
    return case(name, want, {"train.log": squeeze(text, 19_000)}, SOURCE)


def renamed(made: dict[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """The case with other names in its files."""
    text = json.dumps(made["files"])
    for old, new in names.items():
        text = text.replace(old, new)
    return made | {"files": json.loads(text)}


def hf(
    base: Path, name: str, want: Want, place: int = 0, launcher: list[str] | None = None, **env: str
) -> dict[str, object]:
    work = base / name
    work.mkdir(parents=True, exist_ok=True)
    env = {"OUT": str(work / "out"), "HF_HOME": str(work / "hf"), "HF_HUB_OFFLINE": "0"} | env
    text = run([*(launcher or torchrun(2)), str(PROGRAMS / "hf_sft.py")], env, work, 150)
    return keep(name, want, text, work, place)


class Hub(http.server.BaseHTTPRequestHandler):
    """A hub that refuses: 401 and gated, or 404."""

    code, word = 403, "GatedRepo"

    def do_HEAD(self) -> None:
        self.send_response(self.code)
        self.send_header("X-Error-Code", self.word)
        self.send_header(
            "X-Error-Message",
            (
                "Access to model acme/large-8b is restricted and you are not in the authorized list."
                if self.word == "GatedRepo"
                else "Repository not found"
            ),
        )
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()

    def log_message(self, *args: object) -> None:
        pass


def hub(base: Path, name: str, want: Want, code: int, word: str, place: int) -> dict[str, object]:
    """A model asked of a hub of our own on loopback; code 0 is a closed port."""
    kind = type("Kind", (Hub,), {"code": code, "word": word})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        at = f"http://127.0.0.1:{server.server_address[1]}"
        if code:
            threading.Thread(target=server.serve_forever, daemon=True).start()
        else:
            server.server_close()
        made = hf(base, name, want, place, launcher=[sys.executable], MODEL="acme/large-8b", HF_ENDPOINT=at)
        if code:
            server.shutdown()
    return renamed(made, {at: "https://huggingface.co", at.removeprefix("http://"): "huggingface.co"})


@functools.cache
def saved(base: Path) -> Path:
    """A tiny model on the disk."""
    path = base / "tiny-llama"
    env = {"OUT": str(base / "o"), "WRITE": str(path), "STEPS": "1", "NO_BAR": "1"}
    run([sys.executable, str(PROGRAMS / "hf_sft.py")], env, base / "save", 120)
    return path


def spoilt(base: Path, how: str, name: str, want: Want, place: int) -> dict[str, object]:
    """A model on the disk that is not whole, or not the wanted one."""
    path = base / f"model-{how}"
    shutil.copytree(saved(base), path)
    weights, config = path / "model.safetensors", json.loads((path / "config.json").read_text())
    if how == "cut":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif how == "lfs":
        weights.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0b3e\nsize 112000\n")
    elif how == "gone":
        weights.unlink()
    elif how == "wider":
        config["intermediate_size"] = 128
    elif how == "arch":
        config["model_type"] = "qwen9_moe"
    (path / "config.json").write_text(json.dumps(config))
    mode = "flash" if how == "flash" else ""
    made = hf(
        base, name, want, place, launcher=[sys.executable] if place % 2 else None, MODEL=str(path), MODE=mode
    )
    return renamed(made, {str(path): "/data/models/tiny-llama"})


def no_path(base: Path, name: str, want: Want) -> dict[str, object]:
    return hf(base, name, want, 3, MODEL="/mnt/nfs/models/mistral-7b-v3")


def full(base: Path, name: str, want: Want) -> dict[str, object]:
    disk = base / "disk"
    disk.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60k", "tmpfs", str(disk)], check=True)
    try:
        made = hf(base, name, want, 2, MODE="save", OUT=str(disk / "out"))
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    return renamed(made, {str(disk): "/mnt/ckpt"})


def light(base: Path, name: str, want: Want, place: int, **env: str) -> dict[str, object]:
    text = run([sys.executable, str(PROGRAMS / "light_fit.py")], env, base / name, 120)
    return keep(name, want, text, base / name, place)


def deepspeed(base: Path, name: str, want: Want, place: int, **env: str) -> dict[str, object]:
    argv = ["deepspeed", "--num_gpus", "2", "--master_port", "29655", str(PROGRAMS / "pretrain.py")]
    text = run(argv, {"DS_ACCELERATOR": "cpu", "STYLE": "rank"} | env, base / name, 90)
    return keep(name, want, text, base / name, place)


def cases(base: Path) -> Iterator[tuple[str, object]]:
    """Names and how to make them."""
    _gone, killed, user = ("rank_died_first",), ("host_oom_killed",), "user_code_error"
    yield (
        "h-gated",
        lambda: hub(base, "h-gated", Want("gated_model", evidence="gated repo"), 403, "GatedRepo", 0),
    )
    yield (
        "h-404",
        lambda: hub(
            base,
            "h-404",
            Want(
                "model_path_missing",
                evidence="is not a valid model identifier",
                also=("gated_model", "hub_unreachable"),
                fix=(),
            ),
            404,
            "RepoNotFound",
            1,
        ),
    )
    yield (
        "h-offline",
        lambda: hub(
            base,
            "h-offline",
            Want("hub_unreachable", evidence="couldn't connect to", also=("model_path_missing",)),
            0,
            "",
            2,
        ),
    )
    yield (
        "h-cut",
        lambda: spoilt(base, "cut", "h-cut", Want("corrupt_checkpoint", evidence="deserializing header"), 0),
    )
    yield (
        "h-lfs",
        lambda: spoilt(base, "lfs", "h-lfs", Want("corrupt_checkpoint", evidence="deserializing header"), 1),
    )
    yield (
        "h-gone",
        lambda: spoilt(
            base,
            "gone",
            "h-gone",
            Want("model_path_missing", evidence="no file named", also=("corrupt_checkpoint",)),
            3,
        ),
    )
    yield (
        "h-wider",
        lambda: spoilt(base, "wider", "h-wider", Want("checkpoint_mismatch", evidence="size mismatch"), 2),
    )
    yield (
        "h-arch",
        lambda: spoilt(
            base,
            "arch",
            "h-arch",
            Want(
                "version_mismatch",
                evidence="does not recognize this architecture",
                also=("missing_dependency",),
            ),
            1,
        ),
    )
    yield (
        "h-flash",
        lambda: spoilt(
            base,
            "flash",
            "h-flash",
            Want("flash_attn_missing", evidence="FlashAttention2 has been toggled on"),
            4,
        ),
    )
    yield (
        "h-path",
        lambda: no_path(
            base,
            "h-path",
            Want("model_path_missing", evidence="/mnt/nfs/models/mistral-7b-v3", also=("hub_unreachable",)),
        ),
    )
    yield (
        "h-need",
        lambda: hf(
            base, "h-need", Want("version_mismatch", evidence="but found transformers=="), 1, MODE="need"
        ),
    )
    yield (
        "h-bnb",
        lambda: hf(
            base,
            "h-bnb",
            Want("missing_dependency", evidence="No module named 'bitsandbytes'", also=("bnb_no_gpu",)),
            0,
            MODE="import",
        ),
    )
    yield "h-full", lambda: full(base, "h-full", Want("disk_full", 0, also=("corrupt_checkpoint",)))
    yield "h-ok-acc", lambda: hf(base, "h-ok-acc", Want("healthy"), 3, [*ACCELERATE, "--num_processes", "2"])
    yield "h-ok-trl", lambda: hf(base, "h-ok-trl", Want("healthy"), 4, TOOL="trl")
    yield "h-nan", lambda: hf(base, "h-nan", Want("nan_loss", evidence="nan"), 0, MODE="nan")
    yield (
        "h-nan-trl",
        lambda: hf(
            base, "h-nan-trl", Want("nan_loss", evidence="nan"), 2, TOOL="trl", MODE="nan", NO_BAR="1"
        ),
    )
    yield "h-coll", lambda: hf(base, "h-coll", Want(user, 1), 1, MODE="collator")
    yield (
        "h-column",
        lambda: hf(base, "h-column", Want(user, evidence="text", also=()), 3, TOOL="trl", MODE="column"),
    )
    yield (
        "h-segv-trl",
        lambda: hf(
            base,
            "h-segv-trl",
            Want("rank_died_first", 0, evidence="SIGSEGV"),
            0,
            TOOL="trl",
            MODE="segv",
            BAD_RANK="0",
        ),
    )
    yield (
        "h-exit",
        lambda: hf(
            base, "h-exit", Want("rank_died_first", 1, also=("unequal_steps",)), 1, torchrun(3), MODE="exit"
        ),
    )
    yield (
        "h-vocab",
        lambda: hf(
            base,
            "h-vocab",
            Want("tokenizer_mismatch", evidence="index out of range in self", also=(user,)),
            2,
            MODE="vocab",
        ),
    )
    yield "l-ok", lambda: light(base, "l-ok", Want("healthy"), 0)
    yield "l-exc", lambda: light(base, "l-exc", Want(user, 1, evidence="pixel_values"), 1, MODE="exc")
    yield "l-kill", lambda: light(base, "l-kill", Want("rank_died_first", 1, also=killed), 2, MODE="kill")
    yield (
        "l-unused",
        lambda: light(
            base,
            "l-unused",
            Want("unused_parameters_ddp", evidence="not used in producing the loss"),
            3,
            MODE="unused",
        ),
    )
    yield (
        "l-nan",
        lambda: light(base, "l-nan", Want("nan_loss", evidence="returned nan values"), 4, MODE="nan"),
    )
    yield "d-ok", lambda: deepspeed(base, "d-ok", Want("healthy"), 0)
    yield (
        "d-key",
        lambda: deepspeed(
            base, "d-key", Want(user, 0, evidence="KeyError: 'labels'"), 1, FAULT="key", FAULT_RANK="0"
        ),
    )
    yield (
        "d-kill",
        lambda: deepspeed(
            base, "d-kill", Want("rank_died_first", 0, also=killed), 2, FAULT="kill", FAULT_RANK="0"
        ),
    )
