"""Cases from loops of one's own under accelerate, Lightning, DeepSpeed and Ray, on one node or
several.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING

from tests.guard.diagnosis.making.record import PROGRAMS, Want
from tests.guard.diagnosis.making.runs_tools import (
    DIED,
    KILLED,
    SILENT,
    STALLED,
    USER,
    holder,
    laid,
    small_disk,
    terminate_after,
)
from tests.guard.diagnosis.making.spaces import NET
from tests.guard.diagnosis.making.stage import Part, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

Case = dict[str, object]
PORT = "29571"


def hosted(want: Want, stage: Stage) -> Want:
    """The node of this number by its name."""
    if not want.host:
        return want
    return Want(want.cause, want.rank, stage.hosts[int(want.host)], want.evidence, want.also, want.fix)


def play(
    base: Path,
    name: str,
    want: Want,
    parts: Callable[[Stage], list[Part]],
    *,
    size: int = 1,
    layout: str = "train.log",
    during: Callable[[Stage], None] | None = None,
    loopback: tuple[int, ...] = (),
    bridge: str = "",
    limit_s: float = 60,
    only_file: int | None = None,
    cut: int = 0,
    hold: int = 0,
) -> Case:
    """Play the parts and keep what they said; `only_file`: only this node's log is there; `cut`:
    without so many lines at the end.
    """
    stage = Stage(name, base, size=size, loopback=loopback, bridge=bridge, limit_s=limit_s)
    made = parts(stage)
    if hold:
        made = [holder(hold, 25), *(Part(p.argv, p.node, p.env, p.after_s + 2) for p in made)]
    stage.play(*made, during=during)
    if layout == "log-dir":
        files = {f"{rank}-stderr.log": text for rank, text in stage.rank_files().items()}
    elif layout == "tee":
        files = {"train.log": stage.one()}
    else:
        files = laid(stage, layout)
    if only_file is not None:
        files = dict([list(files.items())[only_file]])
    if cut:
        files = {n: "\n".join(t.split("\n")[:-cut]) + "\n" for n, t in files.items()}
    return stage.keep(hosted(want, stage), files)


# accelerate


def acc(n: int, *more: str, nodes: int = 1, head: str = "", **env: str) -> Callable[[Stage], list[Part]]:
    """`accelerate launch`, once a node."""

    def parts(stage: Stage) -> list[Part]:
        base = ("accelerate", "launch", "--cpu", "--mixed_precision", "no", "--dynamo_backend", "no")
        out = []
        for i in range(nodes):
            where: tuple[str, ...] = ("--num_machines", str(nodes), "--num_processes", str(n))
            if nodes > 1:
                where += (
                    "--machine_rank",
                    str(i),
                    "--main_process_ip",
                    head or f"{NET}.1",
                    "--main_process_port",
                    PORT,
                )
            argv = (*base, *where, *more, str(PROGRAMS / "acc_fit.py"))
            own = {k: v for k, v in env.items() if "@" not in k}
            own |= {k.split("@")[0]: v for k, v in env.items() if k.endswith(f"@{i}")}
            out.append(Part(argv, i, {"OUT": str(stage.work / "runs")} | own))
        return out

    return parts


def by_hand(
    program: str, world: int, nodes: int = 1, head: str = "", **env: str
) -> Callable[[Stage], list[Part]]:
    """A process a rank, as srun or a shell loop starts them."""

    def parts(stage: Stage) -> list[Part]:
        each = world // nodes
        return [
            Part(
                ("python", str(PROGRAMS / program)),
                rank // each,
                {
                    "RANK": str(rank), "LOCAL_RANK": str(rank % each), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(each),
                    "MASTER_ADDR": (stage.hosts[0] if head == "name" else head) or f"{NET}.1", "MASTER_PORT": PORT,
                    "OUT": str(stage.work / "runs"), "ACCELERATE_USE_CPU": "true",
                } | env,
            )
            for rank in range(world)
        ]  # fmt: skip

    return parts


def full(
    base: Path, name: str, program: str, size: str, layout: str = "train.log", want: Want | None = None
) -> Case:
    with small_disk(base / "disk", size) as disk:
        out = str(disk / "runs")
        if program == "acc_fit.py":
            parts = acc(2, OUT=out)
        elif program == "pl_fit.py":
            parts = pl(OUT=out)
        else:
            parts = ray_fit(OUT=out)
        return play(base, name, want or Want("disk_full", 0), parts, layout=layout)


def acc_cases(base: Path) -> Iterator[tuple[str, object]]:
    p = play
    ok = Want("healthy")
    yield "acc-ok", lambda: p(base, "acc-ok", ok, acc(2))
    yield "acc-ok-nodes", lambda: p(base, "acc-ok-nodes", ok, acc(2, nodes=2), size=2, layout="nodes")
    yield "acc-ok-workers", lambda: p(base, "acc-ok-workers", ok, acc(1, WORKERS="2"), layout="k8s")
    yield (
        "acc-ok-srun",
        lambda: p(base, "acc-ok-srun", ok, by_hand("acc_fit.py", 2, 2), size=2, layout="srun"),
    )
    yield (
        "acc-kill-srun",
        lambda: p(
            base,
            "acc-kill-srun",
            Want(DIED, 1, also=KILLED),
            by_hand("acc_fit.py", 3, FAULT="kill"),
            layout="srun",
        ),
    )
    yield (
        "acc-kill-names",
        lambda: p(
            base,
            "acc-kill-names",
            Want(DIED, 1, "1", also=KILLED),
            by_hand("acc_fit.py", 2, 2, FAULT="kill"),
            size=2,
            layout="names",
        ),
    )
    yield (
        "acc-kill-other",
        lambda: p(
            base,
            "acc-kill-other",
            Want("healthy"),
            acc(2, nodes=2, FAULT="kill"),
            size=2,
            layout="nodes",
            only_file=0,
        ),
    )
    yield (
        "acc-kill-tee",
        lambda: p(
            base,
            "acc-kill-tee",
            Want(DIED, also=KILLED),
            acc(2, "--tee", "3", FAULT="kill", BAD="0"),
            layout="k8s",
        ),
    )
    yield (
        "acc-slow-ranks",
        lambda: p(
            base,
            "acc-slow-ranks",
            Want("healthy"),
            by_hand("acc_fit.py", 3, FAULT="slow", BAD="2"),
            layout="ranks",
            limit_s=32,
        ),
    )
    yield (
        "acc-slow-nodes",
        lambda: p(
            base,
            "acc-slow-nodes",
            Want("rank_stalled", 1, also=STALLED),
            acc(2, nodes=2, FAULT="slow"),
            size=2,
            layout="nodes",
            limit_s=40,
        ),
    )
    yield (
        "acc-slow-worker",
        lambda: p(
            base,
            "acc-slow-worker",
            Want("rank_stalled", 1, also=STALLED),
            by_hand("acc_fit.py", 2, FAULT="slow", WORKERS="2"),
            layout="srun",
            limit_s=32,
        ),
    )
    odd = Want("unequal_steps", 1, also=("split_mismatch",))
    yield (
        "acc-split-ranks",
        lambda: p(base, "acc-split-ranks", odd, by_hand("acc_fit.py", 3, FAULT="split"), layout="ranks"),
    )
    yield "acc-split", lambda: p(base, "acc-split", Want("healthy"), acc(3, FAULT="split"), layout="compose")
    yield (
        "acc-twice",
        lambda: p(base, "acc-twice", Want("process_group_destroyed_twice"), acc(2, FAULT="twice")),
    )
    yield "acc-full", lambda: full(base, "acc-full", "acc_fit.py", "16k", want=Want("disk_full"))
    yield "acc-nan", lambda: p(base, "acc-nan", Want("nan_loss"), acc(2, FAULT="nan"))
    yield (
        "acc-memory",
        lambda: p(
            base,
            "acc-memory",
            Want("host_oom_killed", 1, also=(USER,)),
            limited(by_hand("acc_fit.py", 2, FAULT="memory"), "9000000000"),
            layout="ranks",
        ),
    )
    yield (
        "acc-memory-srun",
        lambda: p(
            base,
            "acc-memory-srun",
            Want("host_oom_killed", 1, also=(USER,)),
            limited(by_hand("acc_fit.py", 3, FAULT="memory"), "9000000000"),
            layout="srun",
        ),
    )
    lacking = Want("missing_dependency", 1, evidence="sentencepiece_fast")
    yield (
        "acc-package-ranks",
        lambda: p(
            base,
            "acc-package-ranks",
            lacking,
            by_hand("acc_fit.py", 2, FAULT="package"),
            layout="ranks",
            limit_s=30,
        ),
    )
    yield (
        "acc-package-names",
        lambda: p(
            base,
            "acc-package-names",
            Want("missing_dependency", 1, "1"),
            by_hand("acc_fit.py", 2, 2, FAULT="package"),
            size=2,
            layout="names",
            limit_s=30,
        ),
    )
    yield (
        "acc-package-dir",
        lambda: p(
            base,
            "acc-package-dir",
            lacking,
            torchrun("acc_fit.py", 2, FAULT="package"),
            layout="log-dir",
            limit_s=40,
        ),
    )
    yield (
        "acc-row",
        lambda: p(base, "acc-row", Want(USER, 1), by_hand("acc_fit.py", 2, FAULT="row", WORKERS="2")),
    )
    yield (
        "acc-row-cut",
        lambda: p(base, "acc-row-cut", Want(USER, 1), by_hand("acc_fit.py", 2, FAULT="row"), cut=12),
    )
    yield (
        "acc-loopback",
        lambda: p(
            base,
            "acc-loopback",
            Want("hostname_loopback"),
            by_hand("acc_fit.py", 2, 2, head="name"),
            size=2,
            loopback=(0, 1),
            layout="nodes",
        ),
    )
    yield (
        "acc-loopback-one",
        lambda: p(
            base,
            "acc-loopback-one",
            Want("healthy"),
            by_hand("acc_fit.py", 2, 2),
            size=2,
            loopback=(1,),
            layout="pdsh",
        ),
    )
    yield (
        "acc-iface",
        lambda: p(
            base, "acc-iface", Want("nccl_socket_iface", also=("address_unreachable",)),
            by_hand("acc_fit.py", 2, 2, GLOO_SOCKET_IFNAME="virbr0"), size=2, bridge="virbr0", layout="names", limit_s=40,
        ),
    )  # fmt: skip
    yield (
        "acc-iface-one",
        lambda: p(
            base, "acc-iface-one", Want("healthy"),
            acc(2, nodes=2, **{"GLOO_SOCKET_IFNAME@1": "docker0"}), size=2, bridge="docker0", layout="nodes", limit_s=40,
        ),
    )  # fmt: skip
    yield (
        "acc-missing",
        lambda: p(
            base,
            "acc-missing",
            Want("rdzv_timeout", also=("node_missing",)),
            first(by_hand("acc_fit.py", 2, 2)),
            size=2,
            layout="nodes",
        ),
    )
    yield (
        "acc-worker-alone",
        lambda: p(
            base,
            "acc-worker-alone",
            Want("rdzv_timeout", also=("head_unreachable", "address_unreachable", "node_missing")),
            second(by_hand("acc_fit.py", 2, 2)),
            size=2,
            layout="names",
            limit_s=70,
        ),
    )
    yield (
        "acc-config",
        lambda: p(base, "acc-config", Want(USER, fix=()), acc(2, "--config_file", "cluster.yaml")),
    )
    yield (
        "acc-argument",
        lambda: p(base, "acc-argument", Want(USER, fix=()), acc(2, "--num_proceses", "4"), layout="k8s"),
    )
    yield (
        "acc-port",
        lambda: p(base, "acc-port", Want("healthy"), acc(2, "--main_process_port", "29581"), hold=29581),
    )
    yield (
        "acc-dns",
        lambda: p(
            base,
            "acc-dns",
            Want("dns_failure"),
            second(by_hand("acc_fit.py", 2, 2, head="trainer-0.trainer.ml.svc")),
            size=2,
            layout="nodes",
            limit_s=40,
        ),
    )


def torchrun(program: str, n: int, **env: str) -> Callable[[Stage], list[Part]]:
    def parts(stage: Stage) -> list[Part]:
        argv = (
            "torchrun",
            "--standalone",
            "--nproc-per-node",
            str(n),
            "--log-dir",
            str(stage.work / "logs"),
            "--redirects",
            "3",
        )
        return [Part((*argv, str(PROGRAMS / program)), env={"OUT": str(stage.work / "runs")} | env)]

    return parts


def limited(parts: Callable[[Stage], list[Part]], size: str) -> Callable[[Stage], list[Part]]:
    """With a limit of address space, as `ulimit -v` gives."""
    return lambda stage: [Part(("prlimit", f"--as={size}", *p.argv), p.node, p.env) for p in parts(stage)]


def first(parts: Callable[[Stage], list[Part]]) -> Callable[[Stage], list[Part]]:
    """Without the other nodes."""
    return lambda stage: parts(stage)[:1]


def second(parts: Callable[[Stage], list[Part]]) -> Callable[[Stage], list[Part]]:
    """Without the first node."""
    return lambda stage: parts(stage)[1:2]


# Lightning


def pl(nodes: int = 1, devices: tuple[int, ...] = (2,), **env: str) -> Callable[[Stage], list[Part]]:
    """Lightning starts the processes of a node itself; several nodes are told by the
    environment.
    """

    def parts(stage: Stage) -> list[Part]:
        out = []
        for i in range(nodes):
            own: dict[str, str] = {
                "OUT": str(stage.work / "runs"),
                "NODES": str(nodes),
                "DEVICES": str(devices[i % len(devices)]),
            }
            if nodes > 1:
                own |= {"MASTER_ADDR": f"{NET}.1", "MASTER_PORT": PORT, "NODE_RANK": str(i)}
            out.append(Part(("python", str(PROGRAMS / "pl_fit.py")), i, own | env))
        return out

    return parts


def pl_cases(base: Path) -> Iterator[tuple[str, object]]:
    p = play
    ok = Want("healthy")
    yield "pl-ok", lambda: p(base, "pl-ok", ok, pl())
    yield "pl-ok-one", lambda: p(base, "pl-ok-one", ok, pl(devices=(1,)), layout="k8s")
    yield "pl-ok-nodes", lambda: p(base, "pl-ok-nodes", ok, pl(2, (1,)), size=2, layout="nodes")
    yield "pl-ok-srun", lambda: p(base, "pl-ok-srun", ok, pl(2, (2,)), size=2, layout="srun")
    yield "pl-kill", lambda: p(base, "pl-kill", Want(DIED, 1, also=KILLED), pl(FAULT="kill"))
    yield (
        "pl-kill-nodes",
        lambda: p(
            base,
            "pl-kill-nodes",
            Want(DIED, 1, "1", also=KILLED),
            pl(2, (1,), FAULT="kill"),
            size=2,
            layout="nodes",
        ),
    )
    yield (
        "pl-slow",
        lambda: p(
            base,
            "pl-slow",
            Want("rank_stalled", 1, also=STALLED),
            pl(2, (1,), FAULT="slow"),
            size=2,
            layout="nodes",
            limit_s=35,
        ),
    )
    yield (
        "pl-slow-srun",
        lambda: p(
            base,
            "pl-slow-srun",
            Want("rank_stalled", 0, also=STALLED),
            pl(2, (1,), FAULT="slow", BAD="0"),
            size=2,
            layout="srun",
            limit_s=35,
        ),
    )
    yield (
        "pl-split",
        lambda: p(base, "pl-split", Want("unequal_steps", 1, also=("split_mismatch",)), pl(FAULT="split")),
    )
    yield "pl-twice", lambda: p(base, "pl-twice", Want("process_group_destroyed_twice"), pl(FAULT="twice"))
    yield "pl-full", lambda: full(base, "pl-full", "pl_fit.py", "16k", "compose")
    yield "pl-nan", lambda: p(base, "pl-nan", Want("nan_loss"), pl(FAULT="nan"))
    yield (
        "pl-nproc",
        lambda: p(
            base,
            "pl-nproc",
            Want("nproc_mismatch", also=("world_mismatch",)),
            pl(2, (2, 1)),
            size=2,
            layout="nodes",
            limit_s=36,
        ),
    )
    yield (
        "pl-nproc-pdsh",
        lambda: p(
            base,
            "pl-nproc-pdsh",
            Want("nproc_mismatch", also=("world_mismatch",)),
            pl(2, (1, 2)),
            size=2,
            layout="pdsh",
            limit_s=36,
        ),
    )
    yield (
        "pl-missing",
        lambda: p(
            base, "pl-missing", Want("rdzv_timeout", also=("node_missing",)), first(pl(2, (1,))), size=2
        ),
    )
    yield (
        "pl-port",
        lambda: p(base, "pl-port", Want("port_in_use"), first(pl(2, (1,))), size=2, hold=int(PORT)),
    )
    yield (
        "pl-row",
        lambda: p(
            base,
            "pl-row",
            Want(USER, 1, evidence="unexpected end of file"),
            pl(FAULT="row"),
            layout="compose",
        ),
    )
    yield "pl-argument", lambda: p(base, "pl-argument", Want(USER, evidence="gpus"), pl(FAULT="argument"))
    yield (
        "pl-memory",
        lambda: p(
            base,
            "pl-memory",
            Want("host_oom_killed", 1),
            limited(pl(FAULT="memory"), "9000000000"),
            layout="k8s",
        ),
    )
    yield (
        "pl-term",
        lambda: p(
            base,
            "pl-term",
            SILENT,
            pl(devices=(1,), FAULT="slow", BAD="0"),
            during=terminate_after("Epoch 0", b"pl_fit.py"),
            limit_s=40,
        ),
    )


# DeepSpeed


def ds(
    n: int = 2, config: Mapping[str, object] | None = None, words: tuple[str, ...] = (), **env: str
) -> Callable[[Stage], list[Part]]:
    def parts(stage: Stage) -> list[Part]:
        given: dict[str, object] = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 1,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
            "steps_per_print": 5,
        } | dict(config or {})
        file = stage.work / "ds_config.json"
        file.write_text(json.dumps(given, indent=1))
        argv = (
            "deepspeed",
            "--num_gpus",
            str(n),
            "--master_port",
            PORT,
            *words,
            str(PROGRAMS / "ds_fit.py"),
            "--deepspeed_config",
            str(file),
        )
        return [Part(argv, env={"OUT": str(stage.work / "runs")} | env)]

    return parts


def ds_nodes(slots: tuple[tuple[int, int], ...], **env: str) -> Callable[[Stage], list[Part]]:
    """The launcher of each node, started there with the hostfile of that node."""

    def parts(stage: Stage) -> list[Part]:
        ds()(stage)
        out = []
        for i, seen in enumerate(slots):
            hosts = stage.work / f"hostfile{i}"
            hosts.write_text("".join(f"{h} slots={n}\n" for h, n in zip(stage.hosts, seen, strict=True)))
            argv = (
                "deepspeed", "--hostfile", str(hosts), "--no_ssh", "--node_rank", str(i), "--master_addr", f"{NET}.1",
                "--master_port", PORT, str(PROGRAMS / "ds_fit.py"), "--deepspeed_config", str(stage.work / "ds_config.json"),
            )  # fmt: skip
            out.append(Part(argv, i, {"OUT": str(stage.work / "runs")} | env))
        return out

    return parts


def ds_cases(base: Path) -> Iterator[tuple[str, object]]:
    p = play
    yield "ds-ok", lambda: p(base, "ds-ok", Want("healthy"), ds())
    yield (
        "ds-ok-nodes",
        lambda: p(base, "ds-ok-nodes", Want("healthy"), ds_nodes(((1, 1), (1, 1))), size=2, layout="nodes"),
    )
    yield "ds-kill", lambda: p(base, "ds-kill", Want(DIED, 1, also=KILLED), ds(FAULT="kill"), layout="k8s")
    yield "ds-batch", lambda: p(base, "ds-batch", Want(USER, fix=()), ds(config={"train_batch_size": 7}))
    yield (
        "ds-type",
        lambda: p(
            base,
            "ds-type",
            Want(USER, fix=()),
            ds(config={"zero_optimization": {"stage": "three"}}),
            layout="compose",
        ),
    )
    yield "ds-path", lambda: p(base, "ds-path", Want(USER, also=("model_path_missing",), fix=()), ds_lost)
    yield (
        "ds-slow",
        lambda: p(
            base,
            "ds-slow",
            SILENT,
            ds_nodes(((1, 1), (1, 1)), FAULT="slow"),
            size=2,
            layout="nodes",
            limit_s=35,
        ),
    )
    yield "ds-twice", lambda: p(base, "ds-twice", Want("process_group_destroyed_twice"), ds(FAULT="twice"))
    yield (
        "ds-nproc",
        lambda: p(
            base,
            "ds-nproc",
            Want("nproc_mismatch", also=("world_mismatch",)),
            ds_nodes(((2, 2), (2, 1))),
            size=2,
            layout="nodes",
            limit_s=40,
        ),
    )
    yield (
        "ds-nproc-srun",
        lambda: p(
            base,
            "ds-nproc-srun",
            Want("nproc_mismatch", also=("world_mismatch",)),
            ds_nodes(((1, 1), (1, 2))),
            size=2,
            layout="srun",
            limit_s=40,
        ),
    )
    yield "ds-row", lambda: p(base, "ds-row", Want(USER, 1, evidence="JSONDecodeError"), ds(FAULT="row"))
    yield "ds-nan", lambda: p(base, "ds-nan", Want("nan_loss"), ds(FAULT="nan"))
    yield "ds-port", lambda: p(base, "ds-port", Want("port_in_use"), ds(), hold=int(PORT), layout="pdsh")
    yield (
        "ds-term",
        lambda: p(
            base,
            "ds-term",
            SILENT,
            ds(FAULT="slow", BAD="0", LIMIT="60"),
            during=terminate_after("step 4", b"launcher.launch"),
            limit_s=40,
        ),
    )


def ds_lost(stage: Stage) -> list[Part]:
    """The config is not where the command says."""
    (part,) = ds()(stage)
    return [Part((*part.argv[:-1], "configs/ds_zero2.json"), part.node, part.env)]


# Ray


def ray_fit(**env: str) -> Callable[[Stage], list[Part]]:
    def parts(stage: Stage) -> list[Part]:
        base = {"OUT": str(stage.work / "results"), "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "15"}
        return [Part(("python", str(PROGRAMS / "ray_loop.py")), env=base | env)]

    return parts


def shell(*lines: str, **env: str) -> Callable[[Stage], list[Part]]:
    """Commands as a person types them."""

    def parts(stage: Stage) -> list[Part]:
        text = " ; ".join(lines).format(code=PROGRAMS, work=stage.work)
        return [Part(("sh", "-c", text), env={"OUT": str(stage.work / "results")} | env)]

    return parts


def ray_cases(base: Path) -> Iterator[tuple[str, object]]:
    p = play
    yield "ray-ok", lambda: p(base, "ray-ok", Want("healthy"), ray_fit(), limit_s=80)
    yield "ray-ok-tune", lambda: p(base, "ray-ok-tune", Want("healthy"), ray_fit(FAULT="tune"), limit_s=80)
    yield (
        "ray-ok-again",
        lambda: p(base, "ray-ok-again", Want("healthy", also=()), ray_again, layout="k8s", limit_s=80),
    )
    yield (
        "ray-kill",
        lambda: p(
            base,
            "ray-kill",
            Want("ray_worker_died", 1, also=("rank_died_first", "host_oom_killed", "rank_killed")),
            ray_fit(FAULT="kill"),
            limit_s=80,
        ),
    )
    yield (
        "ray-row",
        lambda: p(
            base,
            "ray-row",
            Want(USER, 1, evidence="KeyError"),
            ray_fit(FAULT="row"),
            layout="compose",
            limit_s=80,
        ),
    )
    yield (
        "ray-package",
        lambda: p(
            base,
            "ray-package",
            Want("missing_dependency", 1, evidence="megatron_fused_ops"),
            ray_fit(FAULT="package"),
            limit_s=80,
        ),
    )
    yield (
        "ray-twice",
        lambda: p(base, "ray-twice", Want("healthy"), ray_fit(FAULT="twice"), limit_s=80),
    )
    yield "ray-full", lambda: full(base, "ray-full", "ray_loop.py", "6m", want=Want("disk_full"))
    yield (
        "ray-tune-row",
        lambda: p(
            base,
            "ray-tune-row",
            Want(USER, evidence="not supported by this schedule"),
            ray_fit(FAULT="tune_row"),
            limit_s=80,
        ),
    )
    yield (
        "ray-cpus",
        lambda: p(
            base,
            "ray-cpus",
            Want("ray_resources_unsatisfiable"),
            ray_fit(EACH="6"),
            layout="pdsh",
            limit_s=50,
        ),
    )
    yield (
        "ray-port",
        lambda: p(
            base,
            "ray-port",
            Want("undetermined", also=("port_in_use", "head_unreachable", "rdzv_timeout")),
            shell("ray start --head --port 6399 --num-cpus 2 --disable-usage-stats"),
            hold=6399,
            limit_s=40,
        ),
    )
    gone = Want(
        "head_unreachable",
        also=("rdzv_timeout", "address_unreachable", "node_missing", "undetermined"),
        fix=(),
    )
    yield (
        "ray-gone",
        lambda: p(base, "ray-gone", gone, shell("ray start --address 10.77.3.9:6379"), limit_s=70),
    )
    yield (
        "ray-memory",
        lambda: p(
            base,
            "ray-memory",
            Want("ray_worker_died", 1, also=("host_oom_killed", "rank_died_first")),
            ray_memory,
            limit_s=60,
        ),
    )


def ray_again(stage: Stage) -> list[Part]:
    """A worker that dies once, and a run that goes on."""
    (part,) = ray_fit(FAULT="once", AGAIN="1", MARK=str(stage.work / "died"))(stage)
    return [part]


def ray_memory(stage: Stage) -> list[Part]:
    """Ray's own memory monitor ends a worker."""
    (part,) = ray_fit(FAULT="memory", RAY_memory_usage_threshold="0.5", RAY_memory_monitor_refresh_ms="100")(
        stage
    )
    return [part]


def cases(base: Path) -> Iterator[tuple[str, object]]:
    """Names and how to make them, in turn of the tools."""
    turns = itertools.zip_longest(ray_cases(base), ds_cases(base), pl_cases(base), acc_cases(base))
    yield from (case for turn in turns for case in turn if case)
