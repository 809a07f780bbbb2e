"""What is known of the launchers of a guarded program, without I/O: the job that a command line
describes (launcher, numbers of nodes and ranks, node rank, address); and the facts that launchers
and ranks send, collected until all have sent theirs, then compared.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Literal

from unisono.base.causes import Verdict, find_cause
from unisono.guard.agree.agreement import Agreement
from unisono.guard.agree.compare import compare_launchers, compare_rank_facts
from unisono.guard.agree.reports import NodeReport, name_node
from unisono.guard.integrations.border import LAUNCHER, Answer
from unisono.guard.places.ranks import NodePlace, RankPlace
from unisono.guard.supervise.node_messages import FactsAnswered, FactsReported

Kind = Literal["torchrun", "accelerate", "llamafactory", "deepspeed", "python", "other"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and its origin.

    Attributes:
        origin: an option or variable, e.g. "--nnodes", "NNODES".
    """

    text: str
    origin: str


@dataclass(frozen=True)
class Command:
    """The parts of a command line that describe the job.

    Attributes:
        options: of the launcher, by the longest name, e.g. `nproc_per_node`.
        script: the Python file or module that it runs; empty if unknown.
        script_at: its index in `words`.
    """

    words: tuple[str, ...]
    kind: Kind
    options: Mapping[str, Setting] = field(default_factory=dict)
    script: str = ""
    script_at: int = 0

    def option(self, *names: str) -> Setting | None:
        """The first of these options that is set."""
        return next((self.options[name] for name in names if name in self.options), None)

    @property
    def arguments(self) -> tuple[str, ...]:
        """The script's own arguments."""
        return self.words[self.script_at + 1 :] if self.script else ()


_TORCHRUN_FLAGS = frozenset(
    {"standalone", "m", "module", "no_python", "run_path", "virtual_local_rank", "h", "help"}
)
# fmt: off
_ACCELERATE_FLAGS = frozenset(
    {
        "quiet", "q", "cpu", "multi_gpu", "tpu", "enable_cpu_affinity", "dynamo_use_fullgraph", "dynamo_use_dynamic",
        "dynamo_use_regional_compilation", "use_deepspeed", "use_fsdp", "use_parallelism_config",
        "use_megatron_lm", "same_network",
        "m", "module", "no_python", "tpu_cluster", "tpu_use_sudo", "downcast_bf16",
        "fp8_use_autocast_during_eval", "debug", "h", "help",
        "use_xpu", "ipex", "use_mps_device",
    }
)
_DEEPSPEED_FLAGS = frozenset(
    {
        "no_python", "no_local_rank", "no_ssh", "no_ssh_check", "force_multi", "module", "m", "h", "help",
        "elastic_training",
        "enable_each_rank_log", "save_pid", "bind_cores_to_rank",
    }
)
# fmt: on
_FLAGS: dict[Kind, frozenset[str]] = {
    "torchrun": _TORCHRUN_FLAGS,
    "accelerate": _ACCELERATE_FLAGS,
    "deepspeed": _DEEPSPEED_FLAGS,
}
_MODULES: dict[str, Kind] = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
    "llamafactory.cli": "llamafactory",
}
_PROGRAMS: dict[str, Kind] = {
    "torchrun": "torchrun",
    "deepspeed": "deepspeed",
    "ds": "deepspeed",
    "llamafactory-cli": "llamafactory",
    "lmf": "llamafactory",
}
_PYTHON_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")


def read_command(words: Sequence[str]) -> Command:
    """Parses a command line. Never fails: an unknown program has kind `other`.

    Args:
        words: at least one.
    """
    name = PurePath(words[0]).name
    if name in _PROGRAMS:
        return _of_launcher(words, 1, _PROGRAMS[name])
    if name == "accelerate":
        is_launch = tuple(words[1:2]) == ("launch",)
        return _of_launcher(words, 2, "accelerate") if is_launch else Command(tuple(words), "other")
    if name.startswith(("python", "pypy")):
        return _of_python(words)
    return Command(tuple(words), "other")


def _of_python(words: Sequence[str]) -> Command:
    """`python [options] script`, or `-m module`, which may be a launcher."""
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "-":
        word = words[at]
        if word == "-c":
            break
        if word == "-m" or (
            word.startswith("-") and not word.startswith("--") and word.endswith("m") and len(word) <= 4
        ):
            module = words[at + 1] if at + 1 < len(words) else ""
            kind = _MODULES.get(module)
            if kind is not None:
                return _of_launcher(words, at + 2, kind)
            return Command(tuple(words), "python", script=module, script_at=at + 1)
        at += 2 if word in _PYTHON_WITH_VALUE else 1
    if at < len(words) and words[at] not in ("-c", "-"):
        return Command(tuple(words), "python", script=words[at], script_at=at)
    return Command(tuple(words), "python")


def _of_launcher(words: Sequence[str], begin: int, kind: Kind) -> Command:
    if kind == "llamafactory":  # its job is in the environment; its arguments are about training
        return Command(tuple(words), kind, script="llamafactory", script_at=begin - 1)
    options: dict[str, Setting] = {}
    at = begin
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        name, _, given = words[at].partition("=")
        key = _key(name)
        if "=" not in words[at] and key not in _FLAGS[kind]:
            at += 1
            given = words[at] if at < len(words) else ""
        options[key] = Setting(given, name)
        at += 1
    at += words[at : at + 1] in (["--"], ("--",))
    script = words[at] if at < len(words) else ""
    return Command(tuple(words), kind, options, script, at)


def _key(name: str) -> str:
    """The option's key: `--nproc-per-node` and `--nproc_per_node` are the same."""
    return name.lstrip("-").replace("-", "_")


# --- the job by the options of each launcher


@dataclass(frozen=True)
class LauncherSettings:
    """The job by arguments and, where an argument is missing, environment; None: not set.

    Attributes:
        nodes: number of nodes.
        restarts: how often the launcher restarts the ranks by itself.
    """

    nodes: Setting | None = None
    node_rank: Setting | None = None
    nproc: Setting | None = None
    host: Setting | None = None
    port: Setting | None = None
    backend: Setting | None = None
    restarts: Setting | None = None


def read_job(command: Command, variables: Mapping[str, str]) -> LauncherSettings:
    """The job that a command describes."""
    reader = _READERS.get(command.kind)
    job = reader(command) if reader else LauncherSettings()
    torch = command.kind in ("torchrun", "python", "other", "llamafactory")
    pet = dict(_from(variables, "PET_" if torch else ""))
    plain = dict(_from(variables, ""))

    def first(given: Setting | None, *names: str) -> Setting | None:
        return (
            given
            or next((pet[n] for n in names if torch and n in pet), None)
            or next((plain[n] for n in names if n in plain), None)
        )

    endpoint = pet.get("RDZV_ENDPOINT") if torch else None
    host, port = _split(endpoint)
    backend = job.backend or (pet.get("RDZV_BACKEND") if torch else None)
    return LauncherSettings(
        nodes=first(job.nodes, "NNODES"),
        node_rank=first(job.node_rank, "NODE_RANK"),
        nproc=first(job.nproc, "NPROC_PER_NODE"),
        host=job.host or host or first(None, "MASTER_ADDR"),
        port=job.port or port or first(None, "MASTER_PORT"),
        backend=None if backend is not None and backend.text in ("", "unisono") else backend,
        restarts=first(job.restarts, "MAX_RESTARTS"),
    )


def _from(variables: Mapping[str, str], prefix: str) -> Iterator[tuple[str, Setting]]:
    """Variables with a value, by their names without the prefix."""
    for name, value in variables.items():
        if name.startswith(prefix) and value.strip():
            yield name.removeprefix(prefix), Setting(value.strip(), name)


def _split(endpoint: Setting | None) -> tuple[Setting | None, Setting | None]:
    """Host and port of HOST:PORT, of HOST, and of [ADDRESS]:PORT."""
    if endpoint is None or not endpoint.text:
        return None, None
    text = endpoint.text
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit():
        host, port = text, ""
    host = host.strip("[]")
    return Setting(host, endpoint.origin) if host else None, Setting(port, endpoint.origin) if port else None


def _torchrun(command: Command) -> LauncherSettings:
    host, port = _split(command.option("rdzv_endpoint"))
    if "standalone" in command.options:
        return LauncherSettings(
            nodes=Setting("1", "--standalone"),
            nproc=command.option("nproc_per_node"),
            restarts=command.option("max_restarts"),
        )
    return LauncherSettings(
        nodes=command.option("nnodes"),
        node_rank=command.option("node_rank"),
        nproc=command.option("nproc_per_node"),
        host=host or command.option("master_addr"),
        port=port or command.option("master_port"),
        backend=command.option("rdzv_backend"),
        restarts=command.option("max_restarts"),
    )


def _accelerate(command: Command) -> LauncherSettings:
    nodes, together = command.option("num_machines"), command.option("num_processes")
    nproc = together
    if (
        together is not None
        and nodes is not None
        and together.text.isdigit()
        and nodes.text.isdigit()
        and int(nodes.text)
    ):
        nproc = Setting(str(int(together.text) // int(nodes.text)), f"{together.origin} / {nodes.origin}")
    return LauncherSettings(
        nodes=nodes,
        node_rank=command.option("machine_rank"),
        nproc=nproc,
        host=command.option("main_process_ip"),
        port=command.option("main_process_port"),
        backend=command.option("rdzv_backend"),
        restarts=command.option("max_restarts"),
    )


def _deepspeed(command: Command) -> LauncherSettings:
    return LauncherSettings(
        nodes=command.option("num_nodes"),
        node_rank=command.option("node_rank"),
        nproc=command.option("num_gpus", "num_accelerators"),
        host=command.option("master_addr"),
        port=command.option("master_port"),
    )


_READERS: dict[Kind, Callable[[Command], LauncherSettings]] = {
    "torchrun": _torchrun,
    "accelerate": _accelerate,
    "deepspeed": _deepspeed,
}

NODE_OPTIONS = frozenset(
    {
        "node_rank",
        "machine_rank",
        "local_addr",
        "log_dir",
        "rdzv_conf",
        "nproc_per_node",
        "num_processes",
        "num_gpus",
    }
)
"""Options of launchers that may differ between nodes; numbers of ranks are compared separately."""


def comparable(command: Command) -> list[str]:
    """The arguments that must be equal on every node: without node-specific options and the
    program's directory.
    """
    words = [PurePath(command.words[0]).name]
    end = command.script_at if command.script else len(command.words)
    at = 1
    while at < end:
        word = command.words[at]
        if _key(word.partition("=")[0]) in NODE_OPTIONS and word.startswith("-"):
            at += 1 if "=" in word else 2
            continue
        words.append(word)
        at += 1
    return [
        *words,
        *([PurePath(command.script).name] if command.script and command.kind != "llamafactory" else []),
        *command.arguments,
    ]


_FIRST_LINE_S, _NEXT_LINES_S = 5.0, 10.0

_Group = dict[int, tuple[int, FactsReported, float]]
"""By node of a launcher, or by rank: its node, its facts, and the time of arrival."""


@dataclass(frozen=True)
class Compared:
    """The result of a complete comparison.

    Attributes:
        answers: pairs of a node and the message for it.
        complete_at: when the last facts arrived, in monotonic seconds.
    """

    name: str
    agreement: Agreement
    answers: Sequence[tuple[int, FactsAnswered]]
    complete_at: float


@dataclass(frozen=True)
class Waiting:
    """An incomplete comparison.

    Attributes:
        since_s: seconds since the first facts arrived.
        missing: the missing nodes or ranks, for messages.
        is_due: whether it is time for a message.
    """

    name: str
    since_s: float
    missing: str
    hosts: tuple[str, ...]
    is_due: bool

    @property
    def line(self) -> str:
        """The message during the wait."""
        who = (
            "the program's launchers wait"
            if self.name == LAUNCHER
            else f"ranks wait, to compare {self.name},"
        )
        return f"{who} for {self.missing} ({self.since_s:.0f} s)"

    @property
    def verdict(self) -> Verdict:
        """The verdict after the wait has timed out."""
        entry = find_cause("node_missing")
        return Verdict(
            cause="node_missing",
            when="before",
            hosts=self.hosts,
            fix=entry.remedy if entry else (),
            summary=(
                f"{self.missing} has not started its launcher within {self.since_s:.0f} s, and the other"
                " nodes wait for it"
            ),
            named_after_s=round(self.since_s, 3),
        )


@dataclass
class LauncherFacts:
    """All incomplete comparisons.

    Attributes:
        reports: of all nodes; empty for one node.
        uneven: whether nodes may have unequal numbers of ranks.
        store_host: the address of node 0.
    """

    nodes: Sequence[NodePlace]
    reports: Sequence[NodeReport]
    uneven: bool
    store_host: str
    _groups: dict[str, _Group] = field(default_factory=dict)
    _shown_at: dict[str, float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._groups)

    def take(self, node_rank: int, news: FactsReported, *, now: float) -> Compared | None:
        """Takes the facts of a launcher or rank; gives the result of the comparison if they were
        the last.
        """
        name = news.reported.name
        who = node_rank if name == LAUNCHER else news.reported.rank
        group = self._groups.setdefault(name, {})
        group[who] = (node_rank, news, now)
        if len(group) < (len(self.nodes) if name == LAUNCHER else news.reported.world_size):
            return None
        del self._groups[name]
        agreement = self._compare(name, group)
        return Compared(
            name,
            agreement,
            list(self._answers(name, group, agreement)),
            max(at for _, _, at in group.values()),
        )

    def waiting(self, places: Mapping[int, RankPlace], *, now: float) -> list[Waiting]:
        """The incomplete comparisons, for ranks at these places."""
        late = []
        for name, group in self._groups.items():
            since_s = now - min(at for _, _, at in group.values())
            is_due = since_s >= _FIRST_LINE_S and now - self._shown_at.get(name, 0.0) >= _NEXT_LINES_S
            if is_due:
                self._shown_at[name] = now
            absent = [node for node in self.nodes if node.node_rank not in group]
            if name == LAUNCHER:
                missing = ", ".join(name_node(node.node_rank, node.host) for node in absent)
            else:
                ranks = [place.label for rank, place in sorted(places.items()) if rank not in group]
                missing = "; ".join(ranks[:4]) or "others"
            hosts = tuple(node.host for node in absent) if name == LAUNCHER else ()
            late.append(Waiting(name, since_s, missing, hosts, is_due))
        return late

    def _compare(self, name: str, group: _Group) -> Agreement:
        if name == LAUNCHER:
            nproc = {node: news.reported.facts.get("nproc") for node, (_, news, _) in group.items()}
            started = {node: count for node, count in nproc.items() if isinstance(count, int) and count}
            return (
                compare_launchers(self.reports, started, uneven=self.uneven) if self.reports else Agreement()
            )
        hosts = {node.node_rank: node.host for node in self.nodes}
        facts = {rank: (node, hosts[node], news.reported.facts) for rank, (node, news, _) in group.items()}
        return compare_rank_facts(name, facts)

    def _answers(self, name: str, group: _Group, agreement: Agreement) -> Iterator[tuple[int, FactsAnswered]]:
        text = agreement.fatal[0].summary if agreement.fatal else ""
        facts = self._store(group) if name == LAUNCHER else {}
        for node, news, _ in group.values():
            answer = Answer(agreement.agreed, text, 3, {**facts, "node_rank": node} if facts else {})
            yield node, FactsAnswered(news.key, answer)

    def _store(self, group: _Group) -> dict[str, object]:
        """The address of torch's store.

        Node 0's launcher has already bound its port, so no other program can take it.
        """
        port = group[0][1].reported.details.get("store_port")
        host = f"[{self.store_host}]" if ":" in self.store_host else self.store_host
        return {"nodes": len(self.nodes), "store": f"{host}:{port}"}
