"""How many nodes a job has, which one this is, where the head is, and how many ranks run here.

Pure.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from unisono.base.errors import UsageError
from unisono.base.text import one_line

DEFAULT_PORT = 29577
HOST_PATTERN = re.compile(r"[A-Za-z0-9_.@:][A-Za-z0-9_.@:-]*")
"""Pattern of host names from a person or a peer; they never begin with `-`."""


def parse_head(text: str, source: str) -> tuple[str, int]:
    """Host and port of HOST, HOST:PORT, [IPv6]:PORT or a bare IPv6 address.

    Raises:
        UsageError: if it is none of these.
    """
    host, number = _split_head(text, source)
    return host, number or DEFAULT_PORT


def _split_head(text: str, source: str) -> tuple[str, int | None]:
    """The parts of a head's address; the port is None where none is given."""
    bracketed = re.fullmatch(r"\[([0-9A-Fa-f:.]+)\](?::(\d+))?", text)
    if bracketed:
        return bracketed[1], port(bracketed[2], source) if bracketed[2] else None
    host, colon, number = text.rpartition(":")
    if not colon or ":" in host:  # no port, or an IPv6 address without brackets
        return checked_host(text, source), None
    return checked_host(host, source), port(number, source)


def parse_hosts(text: str | None) -> tuple[str, ...]:
    """The hosts of `--hosts a,b,c`; none where it was not given.

    Raises:
        UsageError: if a place is empty.
    """
    words = () if text is None else tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise UsageError.of(
            f"--hosts {text!r} has an empty entry", where="command line", fix="e.g. --hosts a,b,c"
        )
    return words


def checked_host(text: str, source: str) -> str:
    """`text`, if it can be a host name or an address.

    Raises:
        UsageError: if it cannot; a name that begins with `-` would be an option to ssh.
    """
    host = text.strip()
    if HOST_PATTERN.fullmatch(host) and len(host) <= 253:
        return host
    raise UsageError.of(
        f"{source}: {one_line(text, limit=80)!r} is not a valid host name",
        where="environment" if source.isupper() else "command line",
        why="a host is letters, digits and . _ - : @, and does not begin with -",
        fix=f"{source} a-host.example or 10.0.0.1",
    )


def positive(text: str, source: str) -> int:
    """A whole number of at least 1.

    Raises:
        UsageError: if it is none.
    """
    number = whole(text, source)
    if number < 1:
        raise UsageError.of(
            f"{source} is {number}: it must be at least 1", where=source, fix=f"set {source} to 1 or more"
        )
    return number


def port(text: str, source: str) -> int:
    """A TCP port.

    Raises:
        UsageError: if it is none.
    """
    number = whole(text, source)
    if not 1 <= number <= 65_535:
        raise UsageError.of(
            f"{source}: {number} is not a port",
            where=source,
            fix=f"a port from 1024 to 65535; {DEFAULT_PORT} where none is given",
        )
    return number


def whole(text: str, source: str) -> int:
    """A whole number from 0.

    Raises:
        UsageError: if it is none.
    """
    stripped = text.strip()
    if stripped.isascii() and stripped.isdigit() and len(stripped) <= 9:
        return int(stripped)
    raise UsageError.of(
        f"{source}: {one_line(text, limit=80)!r} is not a whole number",
        where=source,
        fix=f"set {source} to a whole number, or omit it",
    )


_AUTOMATIC = ("auto", "gpu")  # torchrun's words for: as many as there are


@dataclass(frozen=True)
class TopologyRequest:
    """The command line's part, as it was typed.

    Attributes:
        nproc: `--nproc`.
        nodes: `--nodes`: a number, or MIN:MAX.
        node_rank: `--node-rank`.
        head: `--head`: HOST or HOST:PORT.
        devices: `--devices`, word by word.
        hosts: `--hosts`, host by host.
        command: the command line as it could be pasted, without these options.
    """

    nproc: int | None = None
    nodes: str | None = None
    node_rank: int | None = None
    head: str | None = None
    devices: tuple[str, ...] = ()
    hosts: tuple[str, ...] = ()
    command: str = "unisono train CONFIG"


@dataclass(frozen=True)
class TorchrunOptions:
    """Options of torchrun with the meaning of ours, as they were typed; None: absent.

    Attributes:
        nproc_per_node: a number, or `auto` or `gpu`: one rank per device, as without it.
        rdzv_endpoint: HOST or HOST:PORT.
    """

    nnodes: str | None = None
    nproc_per_node: str | None = None
    master_addr: str | None = None
    master_port: int | None = None
    rdzv_endpoint: str | None = None


Source = tuple[str, str | None]
"""An option or variable, and what it says; None: nothing."""


def with_torchrun_options(
    request: TopologyRequest, given: TorchrunOptions, variables: Mapping[str, str]
) -> tuple[TopologyRequest, tuple[str, ...]]:
    """The request with torchrun's options under our names, and lines to show.

    Args:
        variables: of a distributed job, as for `read_topology`.

    Raises:
        UsageError: if two of options and variables contradict each other, or torchrun's asks for
            what unisono does not do.
    """
    _refuse_other_meaning(given)
    nodes, nproc, head, notes = request.nodes, request.nproc, request.head, []
    if given.nnodes is not None:
        low, _, high = given.nnodes.partition(":")
        nnodes = str(positive(high or low, "--nnodes"))
        nodes = _agreed(("--nodes", request.nodes), ("--nnodes", nnodes), ("NNODES", variables.get("NNODES")))
    if given.nproc_per_node is not None:
        declared = variables.get("NPROC_PER_NODE", "")
        agreed = _agreed(
            ("--nproc", None if request.nproc is None else str(request.nproc)),
            ("--nproc-per-node", given.nproc_per_node),
            ("NPROC_PER_NODE", None if declared.lower() in ("", *_AUTOMATIC) else declared),
        )
        nproc = None if agreed in _AUTOMATIC else _ranks_of_a_node(agreed)
    address = {
        "--master-addr": given.master_addr,
        "--master-port": given.master_port,
        "--rdzv-endpoint": given.rdzv_endpoint,
    }
    typed = [f"{name} {value}" for name, value in address.items() if value is not None]
    if typed and not (request.hosts or (nodes or variables.get("NNODES", "1")) != "1"):
        notes.append(f"{' '.join(typed)}: not used, since the ranks of one node need no address")
    elif typed:
        head = _head_of_torchrun(request, given, variables)
    merged = replace(request, nodes=nodes, nproc=nproc, head=head)
    words = {
        "--nproc": (request.nproc, nproc),
        "--nodes": (request.nodes, nodes),
        "--head": (request.head, head),
    }
    read = [f"{name} {new}" for name, (old, new) in words.items() if new != old]
    if read:
        notes.append(f"torchrun's options are read as {' '.join(read)}")
    return merged, tuple(notes)


def _ranks_of_a_node(text: str) -> int:
    number = positive(text, "--nproc-per-node")
    if number > 1024:
        raise UsageError.of(
            f"--nproc-per-node {number} is more than 1024",
            where="command line",
            fix="set it to a whole number from 1 to 1024",
        )
    return number


def _refuse_other_meaning(given: TorchrunOptions) -> None:
    """Refuses nodes that come and go, and kinds of ranks that are set in the config."""
    low, colon, high = (given.nnodes or "").partition(":")
    if colon and low != high:
        raise UsageError.of(
            f"--nnodes {given.nnodes} is elastic: the number of nodes could change at any time",
            where="command line",
            why="unisono compares all nodes before a run starts, and must know how many they are",
            fix=(
                f"--nnodes {high}; with `train`, --nodes {given.nnodes} starts with what is there in time,"
                " and restarts without lost nodes"
            ),
        )
    if given.nproc_per_node in ("cpu", "xpu"):
        raise UsageError.of(
            f"--nproc-per-node {given.nproc_per_node} does not give a count of ranks",
            where="command line",
            why="unisono takes a number, or auto or gpu: one rank per device",
            fix="--nproc-per-node N; device=cpu trains on the CPU",
        )


def _head_of_torchrun(
    request: TopologyRequest, given: TorchrunOptions, variables: Mapping[str, str]
) -> str | None:
    """HOST:PORT of `--head`, `--rdzv-endpoint`, `--master-addr`, `--master-port` and their
    variables; None without a host.
    """
    ends = {"--head": request.head, "--rdzv-endpoint": given.rdzv_endpoint}
    pairs = {name: _split_head(text, name) for name, text in ends.items() if text is not None}
    hosts: list[Source] = [(name, host) for name, (host, _) in pairs.items()]
    ports: list[Source] = [(name, str(number)) for name, (_, number) in pairs.items() if number is not None]
    if given.master_addr is not None:
        hosts.append(("--master-addr", checked_host(given.master_addr.strip("[]"), "--master-addr")))
    if given.master_port is not None:
        ports.append(("--master-port", str(given.master_port)))
    host = _agreed(*hosts, ("MASTER_ADDR", variables.get("MASTER_ADDR") or None))
    number = _agreed(*ports, ("MASTER_PORT", variables.get("MASTER_PORT") or None)) or str(DEFAULT_PORT)
    if not host:
        return None
    return f"[{host}]:{number}" if ":" in host else f"{host}:{number}"


def _agreed(*sources: Source) -> str:
    """The value that all sources have; empty if none has one.

    Raises:
        UsageError: if two differ.
    """
    said = [(name, text) for name, text in sources if text is not None]
    for (name, text), (other, different) in pairwise(said):
        if text != different:
            raise UsageError.of(
                f"{name} {text} and {other} {different} contradict each other",
                where=(
                    "command line"
                    if other.startswith("-")
                    else f"environment: {other}={one_line(different, limit=80)}"
                ),
                why="both set the same value of the job",
                fix=(
                    "pass one of them, or the same value in"
                    f" both{'' if other.startswith('-') else f'; or unset {other}'}"
                ),
            )
    return said[0][1] if said else ""


@dataclass(frozen=True)
class Placed:
    """The place that a scheduler gave this front; options and variables of a launcher take
    precedence.

    Attributes:
        nodes: how many.
        node_rank: which of them this is.
        head_host: where node 0 is.
        origins: the names of what they were read from, as `Topology.origins` has them.
    """

    nodes: int
    node_rank: int
    head_host: str
    head_port: int
    origins: Mapping[str, str]


@dataclass(frozen=True)
class Accelerators:
    """The accelerators of this machine that ranks could use.

    Attributes:
        count: accelerators that may be used here: visible, and torch can use them; 0: ranks run on
            the CPU.
        note: why there are none, or what shows them: `CUDA_VISIBLE_DEVICES=0,1`.
    """

    count: int
    note: str = ""


@dataclass(frozen=True)
class Topology:
    """The shape of the job as this node knows it.

    Attributes:
        nodes: how many; with MIN:MAX the most.
        node_rank: which one this is.
        head_host: where node 0's front listens; empty for one node, and with `hosts` until it is
            found out.
        nproc_declared: by `--nproc` or NPROC_PER_NODE; otherwise inferred.
        nproc_origin: where the number came from, for people.
        hosts: the other nodes that this one starts over ssh, by node rank from 1.
        least_nodes: the number of nodes required to start and to continue; 0: all of them.
        origins: where each value came from, for the plan.
        used_variables: of the environment; they are not leftovers.
    """

    nodes: int
    node_rank: int
    head_host: str
    head_port: int
    nproc: int
    nproc_declared: bool
    nproc_origin: str
    hosts: tuple[str, ...] = ()
    least_nodes: int = 0
    origins: dict[str, str] = field(default_factory=dict)
    used_variables: tuple[str, ...] = ()

    @property
    def enough(self) -> int:
        """How many nodes the job can do with."""
        return self.least_nodes or self.nodes

    @property
    def is_head(self) -> bool:
        """Whether this is node 0."""
        return self.node_rank == 0


def read_topology(
    request: TopologyRequest,
    variables: Mapping[str, str],
    accelerators: Accelerators,
    *,
    is_local: Callable[[str], bool] = lambda _host: False,
    placed: Placed | None = None,
) -> Topology:
    """The shape of the job.

    Args:
        variables: of a distributed job, as `Environment.leftovers` has them.
        accelerators: `plan.placement.usable_accelerators` gives them.
        is_local: whether a host of `--hosts` is this machine.
        placed: by a scheduler that has started one front on each node; None: none has.

    Raises:
        UsageError: if something is missing, contradicts, or cannot be read; with the command line
            to type.
    """
    reader = _TopologyReader(request, variables, placed)
    hosts = _others(request, is_local)
    nodes = reader.nodes(len(hosts) + 1 if request.hosts else None)
    node_rank, host, port = reader.place(nodes, started_locally=bool(request.hosts))
    nproc, declared, origin = reader.nproc(accelerators)
    return Topology(
        nodes=nodes,
        node_rank=node_rank,
        head_host=host,
        head_port=port,
        nproc=nproc,
        nproc_declared=declared,
        nproc_origin=origin,
        hosts=hosts,
        least_nodes=reader.least,
        origins=reader.origins,
        used_variables=tuple(sorted(reader.used)),
    )


@dataclass
class _TopologyReader:
    """Reads one value after the other, and notes where each came from."""

    request: TopologyRequest
    variables: Mapping[str, str]
    placed: Placed | None = None
    origins: dict[str, str] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    least: int = 0

    def nodes(self, listed: int | None) -> int:
        """The number of nodes; `listed`: by --hosts."""
        if self.request.nodes is not None:
            return self._declared_nodes(self.request.nodes, "--nodes", listed)
        if listed is not None:
            self.origins["nodes"] = "--hosts"
            return listed
        if "NNODES" in self.variables:
            return self._declared_nodes(self.variables["NNODES"], "NNODES", listed)
        if self.placed is not None:
            self.origins["nodes"] = self.placed.origins["nodes"]
            return self.placed.nodes
        for option, value in (("--node-rank", self.request.node_rank), ("--head", self.request.head)):
            # Alone, node 0 would train by itself, and the others would wait for it.
            if value is not None:
                raise UsageError.of(
                    f"{option} {value} indicates several nodes, but not how many",
                    where="command line",
                    fix=f"add --nodes N: {self._example('N')}",
                )
        return 1

    def _declared_nodes(self, text: str, source: str, listed: int | None) -> int:
        self.least, nodes = _number_of_nodes(text, source)
        if listed not in (None, nodes):
            raise UsageError.of(
                f"--nodes {nodes} contradicts --hosts, which makes {listed} nodes with this one",
                where="command line",
                fix=f"omit --nodes, or pass --nodes MIN:{listed}",
            )
        if source == "NNODES":
            self.used.add(source)
        self.origins["nodes"] = source
        return nodes

    def place(self, nodes: int, *, started_locally: bool) -> tuple[int, str, int]:
        """Which node this is, and the head's host and port."""
        if started_locally:
            return self._first_of_hosts()
        if nodes == 1:
            if self.request.node_rank:
                raise UsageError.of(
                    f"--node-rank {self.request.node_rank} is outside of --nodes 1: node ranks start at 0",
                    where="command line",
                    fix="pass the number of nodes with --nodes, or --node-rank 0",
                )
            return 0, "", DEFAULT_PORT
        return self._node_rank(nodes), *self._head(nodes)

    def _first_of_hosts(self) -> tuple[int, str, int]:
        if self.request.node_rank:
            raise UsageError.of(
                f"--hosts starts the other nodes from node 0, but --node-rank is {self.request.node_rank}",
                where="command line",
                fix="omit --node-rank, and run the command on the first host",
            )
        if self.request.head is None:
            return 0, "", DEFAULT_PORT
        self.origins["head"] = "--head"
        return 0, *parse_head(self.request.head, "--head")

    def _node_rank(self, nodes: int) -> int:
        rank, source = self.request.node_rank, "--node-rank"
        if rank is None and "NODE_RANK" in self.variables and not self._nodes_placed:
            source = "NODE_RANK"
            rank = whole(self.variables[source], source)
            self.used.add(source)
        if rank is None and self.placed is not None:
            rank, source = self.placed.node_rank, self.placed.origins["node_rank"]
        if rank is None:
            raise UsageError.of(
                f"there are {nodes} nodes, and the rank of this node is unknown",
                where=self._nodes_where(nodes),
                fix=(
                    f"on this node: {self._example(str(nodes))}, with a different R from 0 to {nodes - 1} on"
                    " each node"
                ),
            )
        if not 0 <= rank < nodes:
            raise UsageError.of(
                f"node rank {rank} is outside of 0 to {nodes - 1}",
                where=f"{source}={rank}, {self._nodes_where(nodes)}",
                why=f"{nodes} nodes have the ranks 0 to {nodes - 1}",
                fix=f"on this node: {self._example(str(nodes))}",
            )
        self.origins["node_rank"] = source
        return rank

    def _head(self, nodes: int) -> tuple[str, int]:
        if self.request.head is not None:
            self.origins["head"] = "--head"
            return parse_head(self.request.head, "--head")
        if self.placed is not None and (self._nodes_placed or not self.variables.get("MASTER_ADDR")):
            self.origins["head"] = self.placed.origins["head"]
            return self.placed.head_host, self.placed.head_port
        if not self.variables.get("MASTER_ADDR"):
            raise UsageError.of(
                f"there are {nodes} nodes, and the address of the head (node 0) is unknown",
                where=self._nodes_where(nodes),
                fix=f"on every node, with the same head: {self._example(str(nodes))}",
            )
        self.used.add("MASTER_ADDR")
        self.origins["head"] = "MASTER_ADDR"
        host = checked_host(self.variables["MASTER_ADDR"], "MASTER_ADDR")
        if not self.variables.get("MASTER_PORT"):
            return host, DEFAULT_PORT
        self.used.add("MASTER_PORT")
        self.origins["head"] = "MASTER_ADDR, MASTER_PORT"
        return host, port(self.variables["MASTER_PORT"], "MASTER_PORT")

    def nproc(self, accelerators: Accelerators) -> tuple[int, bool, str]:
        """Ranks here, whether that was declared, and where it came from."""
        number, declared, origin = self._nproc_requested(accelerators)
        self.origins["nproc"] = origin
        named = len(self.request.devices)
        if named and number != named:
            raise UsageError.of(
                f"{origin} requests {_ranks(number)}, but --devices selects {named}",
                where="command line",
                why="every rank has its own device",
                fix=f"pass --nproc {named}, or name {number} with --devices",
            )
        if not named and 0 < accelerators.count < number:
            raise UsageError.of(
                f"{origin} requests {_ranks(number)}, but there {'is' if accelerators.count == 1 else 'are'} "
                f"{accelerators.count} accelerator{'' if accelerators.count == 1 else 's'} to use here",
                where=accelerators.note or "this machine",
                why="every rank has its own device",
                fix=f"pass --nproc {accelerators.count}, or device=cpu to train on the CPU",
            )
        return number, declared, origin

    def _nproc_requested(self, accelerators: Accelerators) -> tuple[int, bool, str]:
        if self.request.nproc is not None:
            return self.request.nproc, True, "--nproc"
        text = self.variables.get("NPROC_PER_NODE", "")
        if text and text.strip().lower() not in _AUTOMATIC:
            self.used.add("NPROC_PER_NODE")
            return positive(text, "NPROC_PER_NODE"), True, "NPROC_PER_NODE"
        if self.request.devices:
            return len(self.request.devices), False, f"--devices selects {len(self.request.devices)}"
        if accelerators.count:
            many = accelerators.count > 1
            return (
                accelerators.count,
                False,
                (f"{accelerators.count} visible {'accelerators' if many else 'accelerator'}"),
            )
        return 1, False, f"one for the CPU: {accelerators.note}" if accelerators.note else "one for the CPU"

    @property
    def _nodes_placed(self) -> bool:
        """Whether the scheduler has said how many nodes there are.

        NODE_RANK and MASTER_ADDR are then leftovers: a batch script that exports them gives all
        nodes its own.
        """
        return self.placed is not None and self.origins.get("nodes") == self.placed.origins["nodes"]

    def _nodes_where(self, nodes: int) -> str:
        return f"NNODES={nodes}" if self.origins.get("nodes") == "NNODES" else f"--nodes {nodes}"

    def _example(self, nodes: str) -> str:
        rank = "R" if self.request.node_rank is None else str(self.request.node_rank)
        head = self.request.head or f"HOST:{DEFAULT_PORT}"
        return f"{self.request.command} --nodes {nodes} --node-rank {rank} --head {head}"


def _others(request: TopologyRequest, is_local: Callable[[str], bool]) -> tuple[str, ...]:
    """The hosts that are not this machine, which stands first where it is listed at all."""
    hosts = tuple(checked_host(host, "--hosts") for host in request.hosts)
    twice = sorted({host for host in hosts if hosts.count(host) > 1})
    if twice:
        raise UsageError.of(
            f"--hosts names {', '.join(twice)} twice", where="command line", fix="name each host once"
        )
    if hosts and is_local(hosts[0]):
        return hosts[1:]
    own_host = next((host for host in hosts if is_local(host)), None)
    if own_host is not None:
        other_hosts = [host for host in hosts if host != own_host]
        raise UsageError.of(
            f"--hosts: {own_host} is this machine and is not the first",
            where="command line",
            why="this machine is node 0",
            fix=f"--hosts {','.join([own_host, *other_hosts])}",
        )
    return hosts


def _number_of_nodes(text: str, source: str) -> tuple[int, int]:
    """The fewest and the most; without a colon the fewest is 0: all are needed."""
    low, colon, high = text.partition(":")
    if not colon:
        return 0, positive(low, source)
    least, most = positive(low, source), positive(high, source)
    if least > most:
        raise UsageError.of(
            f"{source} {text}: the first number is larger than the second",
            where="command line" if source == "--nodes" else source,
            why="MIN:MAX are the minimum and the full number of nodes",
            fix=f"--nodes {most}:{least}",
        )
    return least if least < most else 0, most


def _ranks(number: int) -> str:
    return f"{number} rank{'' if number == 1 else 's'}"


def refuse_lone_node(nodes: str | None, topology: Topology) -> None:
    """Checks that a job of `--launcher nodes` has more nodes than this one, unless `--nodes 1` says
    that it has not.

    Raises:
        UsageError: if nothing says which they are.
    """
    if topology.nodes == 1 and nodes is None:
        raise UsageError.of(
            "--launcher nodes is for several nodes, but none are given",
            where="command line",
            fix=(
                "--hosts A,B from one of them, or on each --nodes N --node-rank R --head HOST; for this"
                " machine alone omit --launcher"
            ),
        )
