"""Cases from the tools themselves, whole or broken from outside: LLaMA-Factory, ms-swift,
torchtune, TRL.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from tests.guard.diagnosis.making.record import PROGRAMS, Want
from tests.guard.diagnosis.making.spaces import NET
from tests.guard.diagnosis.making.stage import ENVS, TINY, Part, Stage, folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

Case = dict[str, object]
USER, DIED = "user_code_error", "rank_died_first"
KILLED = ("host_oom_killed", "rank_killed")
SILENT = Want("undetermined", also=("rank_stalled", "rank_stopped"))
"""A log that stops: nothing in it tells more."""
STALLED = ("rank_stopped", "user_code_stuck", "data_starved", "io_blocked")
ROWS = [
    {"instruction": a, "input": "", "output": b}
    for a, b in (("Say hi", "hi there"), ("Count to three", "one two three"), ("Name a fruit", "an apple"))
] * 16
HOLD = (
    "import socket, time; s = socket.socket(); s.setsockopt(1, 2, 1); s.bind(('0.0.0.0', {port}));"
    " s.listen(); time.sleep({s})"
)


def holder(port: int, seconds: int = 40) -> Part:
    """Somebody who has the port; prints nothing."""
    return Part(("python", "-c", HOLD.format(port=port, s=seconds)))


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A file system that is soon full."""
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def signal_after(words: str, rank: int, sign: int) -> Callable[[Stage], None]:
    """Give the rank a signal soon after these words."""

    def during(stage: Stage) -> None:
        stage.await_words(words)
        time.sleep(0.5)
        stage.send(rank, sign)

    return during


def terminate_after(words: str, program: bytes) -> Callable[[Stage], None]:
    """End a launcher as a scheduler does."""

    def during(stage: Stage) -> None:
        stage.await_words(words)
        time.sleep(0.7)
        stage.send_to(program, signal.SIGTERM)

    return during


# LLaMA-Factory

OTHER_VISION = {"PYTHONPATH": str(ENVS / "vision")}
"""A torchvision that was built for another torch."""


def lf_config(stage: Stage, **keys: object) -> str:
    """The YAML of a small run, and its data."""
    work = stage.work
    (work / "demo.json").write_text(json.dumps(ROWS))
    (work / "dataset_info.json").write_text(json.dumps({"demo": {"file_name": "demo.json"}}))
    given: dict[str, object] = {
        "model_name_or_path": str(TINY),
        "stage": "sft",
        "do_train": True,
        "finetuning_type": "full",
        "dataset": "demo",
        "dataset_dir": str(work),
        "template": "default",
        "cutoff_len": 64,
        "output_dir": str(work / "saves"),
        "logging_steps": 5,
        "max_steps": 20,
        "save_steps": 500,
        "overwrite_output_dir": True,
        "per_device_train_batch_size": 2,
        "learning_rate": 1.0e-4,
        "report_to": "none",
        "use_cpu": True,
        "ddp_timeout": 12,
        "preprocessing_num_workers": 1,
    }
    file = work / "sft.yaml"
    file.write_text(json.dumps(given | keys, indent=1))  # JSON is YAML
    return file.name


def lf_env(n: int = 1, node: int = 0, nodes: int = 1, **more: str) -> dict[str, str]:
    """How LLaMA-Factory is told to start torchrun."""
    base = {"DISABLE_VERSION_CHECK": "1", "FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(n)}
    if nodes > 1:
        base |= {
            "NNODES": str(nodes),
            "NODE_RANK": str(node),
            "MASTER_ADDR": f"{NET}.1",
            "MASTER_PORT": "29511",
        }
    return base | more


def lf(
    base: Path,
    name: str,
    want: Want,
    *,
    n: int = 2,
    layout: str = "train.log",
    during: Callable[[Stage], None] | None = None,
    env: Mapping[str, str] | None = None,
    prepare: Callable[[Stage], None] | None = None,
    limit_s: float = 90,
    command: str = "train",
    front: tuple[str, ...] = (),
    held: int = 0,
    memory_mb: int = 0,
    **keys: object,
) -> Case:
    """One node; `n` is 0 for a run without torchrun."""
    stage = Stage(name, base, "lf", limit_s=limit_s, memory_mb=memory_mb)
    file = lf_config(stage, **keys)
    if prepare:
        prepare(stage)
    more = lf_env(n) if n else {"DISABLE_VERSION_CHECK": "1"}
    held_by = [holder(held)] if held else []
    stage.play(
        *held_by,
        Part(
            (*front, "llamafactory-cli", command, file), env=more | dict(env or {}), after_s=2 if held else 0
        ),
        during=during,
    )
    return stage.keep(want, laid(stage, layout))


def laid(stage: Stage, layout: str) -> dict[str, str]:
    """One file in some shape."""
    if layout == "k8s":
        return {"trainer-0.log": stage.prefixed("{t} stderr F ")}
    if layout == "compose":
        return {"docker-compose.log": stage.prefixed("trainer-{i}  | ")}
    if layout == "srun":
        return {"slurm-88213.out": stage.prefixed("{i}: ")}
    if layout == "pdsh":
        return {"pdsh.log": stage.prefixed("{host}: ")}
    if layout == "dmesg":
        return {"train.log": stage.one(), "dmesg.txt": stage.clean(stage.kernel)}
    if layout == "nodes":
        return {f"{stage.hosts[p.node]}.log": t for p, t in zip(stage.parts, stage.texts(), strict=True)}
    if layout == "names":
        return {
            f"job-88213-{stage.hosts[p.node]}-{p.env.get('RANK', i)}.err": t
            for i, (p, t) in enumerate(zip(stage.parts, stage.texts(), strict=True))
        }
    if layout == "ranks":
        return {
            f"rank_{p.env.get('RANK', i)}.log": t
            for i, (p, t) in enumerate(zip(stage.parts, stage.texts(), strict=True))
        }
    if layout.startswith("last:"):
        return {"nohup.out": "\n".join(stage.one().split("\n")[-int(layout[5:]) :])}
    return {layout: stage.one()}


def lf_nodes(
    base: Path,
    name: str,
    want: Want,
    ranks: tuple[int, ...] = (1, 1),
    layout: str = "nodes",
    loopback: tuple[int, ...] = (),
    bridge: str = "",
    env: Mapping[int, Mapping[str, str]] | None = None,
    during: Callable[[Stage], None] | None = None,
    only: tuple[int, ...] | None = None,
    limit_s: float = 90,
    **keys: object,
) -> Case:
    """A node each with so many ranks."""
    stage = Stage(name, base, "lf", size=len(ranks), loopback=loopback, bridge=bridge, limit_s=limit_s)
    file = lf_config(stage, **keys)
    if loopback:
        env = {i: {"MASTER_ADDR": stage.hosts[0]} | dict((env or {}).get(i, {})) for i in range(len(ranks))}
    stage.play(
        *(
            Part(
                ("llamafactory-cli", "train", file),
                i,
                lf_env(n, i, len(ranks)) | dict((env or {}).get(i, {})),
            )
            for i, n in enumerate(ranks)
            if only is None or i in only
        ),
        during=during,
    )
    if want.host:
        want = Want(want.cause, want.rank, stage.hosts[int(want.host)], want.evidence, want.also, want.fix)
    return stage.keep(want, laid(stage, layout))


def lf_full(base: Path, name: str, layout: str) -> Case:
    with small_disk(base / "disk", "1m") as disk:
        return lf(
            base, name, Want("disk_full", 0), layout=layout, save_steps=10, output_dir=str(disk / "saves")
        )


def lf_bad_json(stage: Stage) -> None:
    text = (stage.work / "demo.json").read_text()
    (stage.work / "demo.json").write_text(text[: len(text) // 2])


def lf_no_instruction(stage: Stage) -> None:
    (stage.work / "demo.json").write_text(json.dumps([{"question": "a", "answer": "b"}] * 20))


def lf_versions(base: Path, name: str, layout: str) -> Case:
    """By hand, a process a node; the second node has a torchvision of another build."""
    stage = Stage(name, base, "lf", size=2, limit_s=60)
    file = lf_config(stage)
    launcher = (
        "import sys; from llamafactory.launcher import *; from llamafactory.train.tuner import run_exp;"
        " run_exp()"
    )
    parts = []
    for i, other in enumerate(({}, OTHER_VISION)):
        env = other | {
            "RANK": str(i), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": f"{NET}.1", "MASTER_PORT": "29512",
            "DISABLE_VERSION_CHECK": "1",
        }  # fmt: skip
        parts.append(Part(("python", "-c", launcher, file), i, env))
    stage.play(*parts)
    want = Want(
        "version_mismatch",
        1 if layout == "names" else None,
        stage.hosts[1],
        evidence="torchvision::nms",
        also=("missing_dependency",),
    )
    return stage.keep(want, laid(stage, layout))


def lf_cases(base: Path) -> Iterator[tuple[str, object]]:
    ok = Want("healthy")
    step = "'loss':"
    yield "lf-ok", lambda: lf(base, "lf-ok", ok, n=0)
    yield "lf-ok-two", lambda: lf(base, "lf-ok-two", ok, layout="k8s")
    yield "lf-ok-nodes", lambda: lf_nodes(base, "lf-ok-nodes", ok)
    yield "lf-ok-uneven", lambda: lf_nodes(base, "lf-ok-uneven", ok, (2, 1), layout="pdsh")
    yield "lf-ok-flash", lambda: lf(base, "lf-ok-flash", ok, n=0, flash_attn="fa2", layout="last:40")
    yield (
        "lf-dataset",
        lambda: lf(base, "lf-dataset", Want(USER, evidence="Undefined dataset"), dataset="alpaca_de"),
    )
    yield "lf-key", lambda: lf(base, "lf-key", Want(USER), layout="compose", lora_ranks=8)
    yield (
        "lf-json",
        lambda: lf(base, "lf-json", Want(USER, also=("corrupt_checkpoint",)), prepare=lf_bad_json),
    )
    yield (
        "lf-columns",
        lambda: lf(base, "lf-columns", Want(USER), n=0, prepare=lf_no_instruction, layout="srun"),
    )
    yield (
        "lf-path",
        lambda: lf(
            base,
            "lf-path",
            Want("model_path_missing", also=("hub_unreachable",)),
            model_name_or_path="/mnt/models/Qwen2-7B",
        ),
    )
    yield (
        "lf-vocab",
        lambda: lf(
            base, "lf-vocab", Want("tokenizer_mismatch", evidence="index out of range"), template="llama3"
        ),
    )
    yield (
        "lf-nan",
        lambda: lf(
            base,
            "lf-nan",
            Want("nan_loss"),
            learning_rate=1e30,
            max_grad_norm=0,
            lr_scheduler_type="constant",
        ),
    )
    yield "lf-full", lambda: lf_full(base, "lf-full", "train.log")
    yield "lf-full-k8s", lambda: lf_full(base, "lf-full-k8s", "k8s")
    yield (
        "lf-kill",
        lambda: lf(
            base,
            "lf-kill",
            Want(DIED, 1, also=KILLED),
            during=signal_after(step, 1, signal.SIGKILL),
            max_steps=4000,
        ),
    )
    yield (
        "lf-kill-nodes",
        lambda: lf_nodes(
            base,
            "lf-kill-nodes",
            Want(DIED, 1, also=KILLED),
            during=signal_after(step, 1, signal.SIGKILL),
            max_steps=4000,
            layout="pdsh",
        ),
    )
    yield (
        "lf-stop",
        lambda: lf(
            base,
            "lf-stop",
            SILENT,
            during=signal_after(step, 1, signal.SIGSTOP),
            max_steps=4000,
            limit_s=50,
        ),
    )
    yield (
        "lf-term",
        lambda: lf(
            base,
            "lf-term",
            Want("preempted_sigterm"),
            during=terminate_after(step, b"torchrun"),
            max_steps=9000,
            layout="k8s",
        ),
    )
    yield (
        "lf-loopback",
        lambda: lf_nodes(
            base, "lf-loopback", Want("hostname_loopback", also=("dns_failure",)), loopback=(0, 1), limit_s=60
        ),
    )
    yield (
        "lf-iface",
        lambda: lf_nodes(
            base, "lf-iface", Want("nccl_socket_iface", also=("address_unreachable",)), bridge="docker0",
            env={0: {"GLOO_SOCKET_IFNAME": "docker0"}, 1: {"GLOO_SOCKET_IFNAME": "docker0"}}, limit_s=70,
        ),
    )  # fmt: skip
    yield (
        "lf-iface-absent",
        lambda: lf_nodes(
            base,
            "lf-iface-absent",
            Want("nccl_socket_iface", host="1"),
            env={1: {"GLOO_SOCKET_IFNAME": "bond0"}},
            limit_s=60,
        ),
    )
    yield (
        "lf-torchvision",
        lambda: lf(
            base,
            "lf-torchvision",
            Want("version_mismatch", evidence="torchvision::nms", also=("missing_dependency",)),
            env=OTHER_VISION,
        ),
    )
    yield "lf-versions-names", lambda: lf_versions(base, "lf-versions-names", "names")
    yield "lf-versions-pdsh", lambda: lf_versions(base, "lf-versions-pdsh", "pdsh")
    yield (
        "lf-port",
        lambda: lf(
            base, "lf-port", Want("port_in_use"), held=29533, env={"MASTER_PORT": "29533"}, layout="train.log"
        ),
    )
    yield (
        "lf-api-port",
        lambda: lf(
            base,
            "lf-api-port",
            Want(USER, evidence="Some keys are not used"),
            n=0,
            command="api",
            held=8000,
            env={"API_PORT": "8000"},
            limit_s=60,
        ),
    )
    yield (
        "lf-bnb",
        lambda: lf(
            base,
            "lf-bnb",
            Want("missing_dependency", also=("bnb_no_gpu",)),
            n=0,
            quantization_bit=4,
            finetuning_type="lora",
        ),
    )
    yield (
        "lf-wandb",
        lambda: lf(base, "lf-wandb", Want("missing_dependency"), report_to="wandb", layout="srun"),
    )
    killed = Want("host_oom_killed")
    yield "lf-memory", lambda: lf(base, "lf-memory", killed, memory_mb=1100, layout="dmesg")
    yield "lf-memory-nohup", lambda: lf(base, "lf-memory-nohup", killed, n=0, memory_mb=420, layout="dmesg")
    yield (
        "lf-resume",
        lambda: lf(
            base,
            "lf-resume",
            Want(USER, also=("model_path_missing", "corrupt_checkpoint"), fix=()),
            resume_from_checkpoint="saves/checkpoint-500",
        ),
    )


# ms-swift


def swift(
    base: Path,
    name: str,
    want: Want,
    *,
    n: int = 2,
    layout: str = "train.log",
    during: Callable[[Stage], None] | None = None,
    limit_s: float = 100,
    env: Mapping[str, str] | None = None,
    held: int = 0,
    **options: object,
) -> Case:
    stage = Stage(name, base, "swift", limit_s=limit_s)
    lines = (
        {
            "messages": [
                {"role": "user", "content": r["instruction"]},
                {"role": "assistant", "content": r["output"]},
            ]
        }
        for r in ROWS
    )
    (stage.work / "chat.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    shutil.copytree(TINY, stage.work / "tiny", ignore=shutil.ignore_patterns("README.md"))
    given: dict[str, object] = {
        "model": "tiny",
        "model_type": "llama",
        "template": "dummy",
        "use_hf": "true",
        "dataset": "chat.jsonl",
        "tuner_type": "full",
        "torch_dtype": "float32",
        "max_steps": 20,
        "logging_steps": 5,
        "max_length": 128,
        "output_dir": str(stage.work / "output"),
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "use_cpu": "true",
        "ddp_timeout": 12,
    } | options
    argv = [x for k, v in given.items() for x in (f"--{k}", str(v))]
    held_by = [holder(held)] if held else []
    start = {"NPROC_PER_NODE": str(n)} if n > 1 else {}
    stage.play(
        *held_by,
        Part(("swift", "sft", *argv), env=start | dict(env or {}), after_s=2 if held else 0),
        during=during,
    )
    return stage.keep(want, laid(stage, layout))


def swift_full(base: Path, name: str) -> Case:
    with small_disk(base / "disk", "2m") as disk:
        return swift(base, name, Want("disk_full", 0), save_steps=10, output_dir=str(disk / "output"))


def swift_cases(base: Path) -> Iterator[tuple[str, object]]:
    step = "'loss':"
    yield "sw-ok", lambda: swift(base, "sw-ok", Want("healthy"), n=1)
    yield "sw-ok-two", lambda: swift(base, "sw-ok-two", Want("healthy"), layout="compose")
    yield "sw-type", lambda: swift(base, "sw-type", Want(USER, evidence="model_type"), model_type="llama3_2")
    yield "sw-argument", lambda: swift(base, "sw-argument", Want(USER), n=1, lora_ranks=8, layout="k8s")
    yield (
        "sw-dataset",
        lambda: swift(
            base,
            "sw-dataset",
            Want(USER, also=("hub_unreachable", "model_path_missing"), fix=()),
            dataset="train/chat_v2.jsonl",
            n=1,
        ),
    )
    yield "sw-full", lambda: swift_full(base, "sw-full")
    yield (
        "sw-kill",
        lambda: swift(
            base,
            "sw-kill",
            Want(DIED, 1, also=KILLED),
            during=signal_after(step, 1, signal.SIGKILL),
            max_steps=9000,
        ),
    )
    yield (
        "sw-term",
        lambda: swift(
            base,
            "sw-term",
            Want("preempted_sigterm"),
            during=terminate_after(step, b"torch.distributed.run"),
            max_steps=9000,
        ),
    )
    yield (
        "sw-nan",
        lambda: swift(
            base,
            "sw-nan",
            Want("nan_loss", also=("teardown_crash",)),
            learning_rate="1e30",
            max_grad_norm=0,
            lr_scheduler_type="constant",
            warmup_ratio=0,
        ),
    )
    yield (
        "sw-port",
        lambda: swift(
            base, "sw-port", Want("port_in_use"), held=29541, env={"MASTER_PORT": "29541"}, layout="srun"
        ),
    )
    yield (
        "sw-bnb",
        lambda: swift(
            base,
            "sw-bnb",
            Want("missing_dependency", also=("bnb_no_gpu",)),
            n=1,
            quant_method="bnb",
            quant_bits=4,
            tuner_type="lora",
        ),
    )
    yield (
        "sw-flash",
        lambda: swift(
            base,
            "sw-flash",
            Want("flash_attn_missing", also=("missing_dependency",)),
            attn_impl="flash_attention_2",
        ),
    )


# torchtune


def tune_config(stage: Stage, **keys: object) -> str:
    work = stage.work
    (work / "alpaca.json").write_text(json.dumps(ROWS))
    shutil.copy(PROGRAMS / "tune_tokenizer.py", work)
    given: dict[str, object] = {
        "output_dir": str(work / "out"),
        "tokenizer": {
            "_component_": "tune_tokenizer.TinyTokenizer",
            "tokenizer_json_path": str(TINY / "tokenizer.json"),
            "tokenizer_config_json_path": str(TINY / "tokenizer_config.json"),
            "generation_config_path": str(TINY / "generation_config.json"),
        },
        "dataset": {
            "_component_": "torchtune.datasets.alpaca_dataset",
            "source": "json",
            "data_files": str(work / "alpaca.json"),
            "packed": False,
        },
        "seed": 1,
        "shuffle": True,
        "model": {
            "_component_": "torchtune.models.llama3_2.llama3_2",
            "vocab_size": 2048, "num_layers": 5, "num_heads": 4, "num_kv_heads": 4,
            "embed_dim": 128, "max_seq_len": 512, "intermediate_dim": 384,
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(TINY),
            "checkpoint_files": ["model.safetensors"],
            "recipe_checkpoint": None,
            "output_dir": str(work / "out"),
            "model_type": "LLAMA3_2",
        },
        "resume_from_checkpoint": False,
        "batch_size": 2,
        "epochs": 1,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "max_steps_per_epoch": 8,
        "gradient_accumulation_steps": 1,
        "device": "cpu",
        "enable_activation_checkpointing": False,
        "enable_activation_offloading": False,
        "clip_grad_norm": None,
        "compile": False,
        "optimizer_in_bwd": False,
        "dtype": "fp32",
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": str(work / "out/logs")},
        "log_every_n_steps": 1,
        "log_peak_memory_stats": False,
    }  # fmt: skip
    file = work / "full.yaml"
    file.write_text(json.dumps({k: v for k, v in (given | keys).items() if v != "drop"}, indent=1))
    return file.name


def tune(
    base: Path,
    name: str,
    want: Want,
    *,
    n: int = 2,
    layout: str = "train.log",
    during: Callable[[Stage], None] | None = None,
    recipe: str = "",
    words: tuple[str, ...] = (),
    limit_s: float = 90,
    held: int = 0,
    **keys: object,
) -> Case:
    """The recipe of one device, or a copy of the distributed one, changed so that it runs on
    CPUs.
    """
    stage = Stage(name, base, limit_s=limit_s)
    file = tune_config(stage, **keys)
    if n > 1:
        from_tool = (
            next((folder("tools") / "lib").glob("python*"))
            / "site-packages/recipes/full_finetune_distributed.py"
        )
        text = from_tool.read_text()
        if recipe != "whole":
            start = text.index("        if self._is_rank_zero:\n            memory_stats =")
            text = text[:start] + text[text.index("        # synchronize before training begins", start) :]
            lacking = "torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda *a: None"
            text = text.replace("from tqdm import tqdm\n", f"from tqdm import tqdm\n\n{lacking}\n", 1)
        (stage.work / "full_finetune.py").write_text(text)
        port = ("--master_port", str(held)) if held else ()
        argv = (
            "tune",
            "run",
            "--nproc_per_node",
            str(n),
            *port,
            *words,
            "full_finetune.py",
            "--config",
            file,
        )
    else:
        argv = ("tune", "run", "full_finetune_single_device", "--config", file, *words)
    held_by = [holder(held)] if held else []
    stage.play(*held_by, Part(argv, after_s=2 if held else 0), during=during)
    return stage.keep(want, laid(stage, layout))


def tune_full(base: Path, name: str) -> Case:
    with small_disk(base / "disk", "1m") as disk:
        checkpointer = {
            "_component_": "torchtune.training.FullModelHFCheckpointer",
            "checkpoint_dir": str(TINY),
            "checkpoint_files": ["model.safetensors"],
            "recipe_checkpoint": None,
            "output_dir": str(disk / "out"),
            "model_type": "LLAMA3_2",
        }
        return tune(base, name, Want("disk_full", fix=None), n=1, checkpointer=checkpointer)


def tune_cases(base: Path) -> Iterator[tuple[str, object]]:
    lost = {
        "_component_": "torchtune.training.FullModelHFCheckpointer",
        "checkpoint_dir": "/mnt/models/Llama-3.2-1B-Instruct/",
        "checkpoint_files": ["model.safetensors"],
        "recipe_checkpoint": None,
        "output_dir": "/tmp/out",
        "model_type": "LLAMA3_2",
    }
    yield "tt-ok", lambda: tune(base, "tt-ok", Want("healthy"), n=1)
    yield "tt-ok-two", lambda: tune(base, "tt-ok-two", Want("healthy"), layout="k8s")
    yield "tt-cpu", lambda: tune(base, "tt-cpu", Want(USER, also=("version_mismatch",)), recipe="whole")
    yield "tt-key", lambda: tune(base, "tt-key", Want(USER), n=1, tokenizer="drop")
    yield (
        "tt-override",
        lambda: tune(base, "tt-override", Want(USER), n=1, words=("optimizer.lr", "3e-5"), layout="compose"),
    )
    yield (
        "tt-component",
        lambda: tune(
            base,
            "tt-component",
            Want(USER, also=("missing_dependency", "version_mismatch"), fix=()),
            n=1,
            loss={"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
        ),
    )
    yield (
        "tt-optimizer",
        lambda: tune(
            base,
            "tt-optimizer",
            Want("missing_dependency", evidence="bitsandbytes", also=("bnb_no_gpu",)),
            optimizer={"_component_": "bitsandbytes.optim.PagedAdamW8bit", "lr": 2e-5},
        ),
    )
    yield (
        "tt-path",
        lambda: tune(base, "tt-path", Want("model_path_missing", also=(USER,), fix=()), checkpointer=lost),
    )
    yield (
        "tt-kill",
        lambda: tune(
            base,
            "tt-kill",
            Want(DIED, 0, also=KILLED),
            during=signal_after("1|3|", 0, signal.SIGKILL),
            max_steps_per_epoch=None,
            epochs=200,
        ),
    )
    yield (
        "tt-stop",
        lambda: tune(
            base,
            "tt-stop",
            Want(DIED, 1, also=KILLED),
            during=signal_after("1|3|", 1, signal.SIGABRT),
            max_steps_per_epoch=None,
            epochs=200,
            layout="srun",
        ),
    )
    yield "tt-port", lambda: tune(base, "tt-port", Want("healthy"), held=29551)  # tune takes another port
    yield "tt-full", lambda: tune_full(base, "tt-full")
    yield (
        "tt-nan",
        lambda: tune(
            base, "tt-nan", Want("nan_loss"), n=1, optimizer={"_component_": "torch.optim.SGD", "lr": 1e30}
        ),
    )
    yield (
        "tt-term",
        lambda: tune(
            base,
            "tt-term",
            Want("preempted_sigterm"),
            during=terminate_after("1|3|", b"tune"),
            max_steps_per_epoch=None,
            epochs=300,
        ),
    )


# TRL's own command


def trl(
    base: Path,
    name: str,
    want: Want,
    *,
    n: int = 2,
    layout: str = "train.log",
    during: Callable[[Stage], None] | None = None,
    launch: tuple[str, ...] = (),
    column: str = "text",
    held: int = 0,
    limit_s: float = 90,
    env: Mapping[str, str] | None = None,
    **options: object,
) -> Case:
    stage = Stage(name, base, limit_s=limit_s)
    data = stage.work / "corpus"
    data.mkdir()
    (data / "train.jsonl").write_text(
        "".join(json.dumps({column: r["instruction"] + " " + r["output"]}) + "\n" for r in ROWS)
    )
    given: dict[str, object] = {
        "model_name_or_path": str(TINY),
        "dataset_name": str(data),
        "output_dir": str(stage.work / "sft-out"),
        "max_steps": 20,
        "logging_steps": 5,
        "max_length": 64,
        "per_device_train_batch_size": 2,
        "use_cpu": "true",
        "bf16": "false",
        "report_to": "none",
        "ddp_timeout": 12,
    } | options
    argv = [x for k, v in given.items() for x in (f"--{k}", str(v))]
    held_by = [holder(held)] if held else []
    start = ("trl", "sft")
    if n > 1:
        port = ("--master-port", str(held)) if held else ("--standalone",)
        start = ("torchrun", *port, "--nproc-per-node", str(n), *launch, "-m", "trl.scripts.sft")
    part = Part(
        (*start, *argv), env={"ACCELERATE_USE_CPU": "true"} | dict(env or {}), after_s=2 if held else 0
    )
    stage.play(*held_by, part, during=during)
    return stage.keep(want, laid(stage, layout))


def trl_full(base: Path, name: str) -> Case:
    with small_disk(base / "disk", "1m") as disk:
        return trl(
            base, name, Want("disk_full", 0), save_steps=10, output_dir=str(disk / "sft"), layout="pdsh"
        )


def trl_cases(base: Path) -> Iterator[tuple[str, object]]:
    step = "'loss':"
    yield "trl-ok", lambda: trl(base, "trl-ok", Want("healthy"), n=1)
    yield "trl-ok-two", lambda: trl(base, "trl-ok-two", Want("healthy"), layout="compose")
    yield "trl-argument", lambda: trl(base, "trl-argument", Want(USER), n=1, max_seq_length=64, layout="k8s")
    yield "trl-column", lambda: trl(base, "trl-column", Want(USER), column="question")
    yield "trl-full", lambda: trl_full(base, "trl-full")
    yield (
        "trl-nan",
        lambda: trl(base, "trl-nan", Want("nan_loss"), n=1, learning_rate="1e30", max_grad_norm=0),
    )
    yield (
        "trl-kill",
        lambda: trl(
            base,
            "trl-kill",
            Want(DIED, 0, also=KILLED),
            during=signal_after(step, 0, signal.SIGKILL),
            max_steps=9000,
            launch=("--tee", "3"),
        ),
    )
    yield (
        "trl-path",
        lambda: trl(
            base,
            "trl-path",
            Want("model_path_missing", also=("hub_unreachable",)),
            model_name_or_path="/mnt/models/Qwen3-4B",
        ),
    )
    yield (
        "trl-port",
        lambda: trl(base, "trl-port", Want("port_in_use"), held=29561),
    )
    yield (
        "trl-term",
        lambda: trl(
            base,
            "trl-term",
            Want("preempted_sigterm"),
            during=terminate_after(step, b"torchrun"),
            max_steps=9000,
            layout="compose",
        ),
    )
    yield (
        "trl-stop",
        lambda: trl(
            base,
            "trl-stop",
            SILENT,
            during=signal_after(step, 1, signal.SIGSTOP),
            max_steps=9000,
            limit_s=60,
        ),
    )
    yield (
        "trl-data",
        lambda: trl(
            base,
            "trl-data",
            Want(USER, also=("hub_unreachable", "model_path_missing"), fix=()),
            dataset_name="/mnt/data/sft-v3",
        ),
    )


def cases(base: Path) -> Iterator[tuple[str, object]]:
    """Names and how to make them."""
    yield from lf_cases(base)
    yield from swift_cases(base)
    yield from tune_cases(base)
    yield from trl_cases(base)
