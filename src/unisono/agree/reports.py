"""What each node and each rank reports for the comparison. Plain values; secrets never enter a report."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from unisono.plan import DeviceChoice


class ReportPart(BaseModel):
    """A frozen value. Reports are sent between machines, so an unknown field is rejected like any other difference."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def to_json(self) -> dict[str, Any]:
        """A JSON object."""
        return self.model_dump(mode="json")


class Interface(ReportPart):
    """A network interface."""

    name: str
    addresses: list[str]
    mtu: int | None
    up: bool
    loopback: bool
    speed_mbit: int | None = None
    kind: Literal["ethernet", "infiniband", "loopback", "virtual", "unknown"] = "unknown"


class Device(ReportPart):
    """An accelerator as the driver lists it; `index` is the physical index."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    memory_free_bytes: int
    bus_id: str = ""
    numa_node: int | None = None


class FileDigest(ReportPart):
    """A file that the run reads. `label` identifies it without its path: `train[0]: rows.jsonl`."""

    label: str
    bytes: int
    digest: str


class OutputFacts(ReportPart):
    """The output_dir as seen by a node."""

    path: str
    writable: bool | None
    """None: not tested."""
    trouble: str = ""
    """Why it is not writable, or could not be tested."""
    shared: bool | None
    """Whether the head's nonce was found in it; None: not checked."""
    free_bytes: int | None
    file_system: str = ""


class Limits(ReportPart):
    """Resource limits of a process. None: could not be read, or (for limits) unlimited."""

    cores: int
    memory_bytes: int
    shm_bytes: int | None
    shm_free_bytes: int | None
    open_files: int | None
    locked_memory_bytes: int | None
    stack_bytes: int | None
    processes: int | None


class NodeReport(ReportPart):
    """Facts that one node's front collects before anything imports torch."""

    node_rank: int
    host: str
    address: str
    """The address from which it reached the head, and at which others reach it."""
    pid: int
    nodes: int
    """Number of nodes that it was started with."""
    nproc: int
    """Ranks that it would start (nproc_per_node)."""
    nproc_declared: bool
    """Whether it was set by --nproc or NPROC_PER_NODE; otherwise it was inferred."""
    nproc_origin: str
    """Origin of the number, for people: `--nproc`, `NPROC_PER_NODE`, `8 visible accelerators`."""
    device_kind: Literal["cpu", "cuda"]
    chosen: list[Device]
    """Devices that its ranks would use, by local rank; empty on CPU."""
    places: list[DeviceChoice] = []
    """Device of each of its ranks, by local rank: the plan uses it unchanged."""
    threads: int = 1
    """Threads that each of its ranks may use."""
    threads_origin: str = ""
    visible: list[Device]
    physical: list[Device]
    visible_variable: str | None
    """CUDA_VISIBLE_DEVICES, or None where it is not set."""
    device_note: str = ""
    """Why there are none, or why they could not be listed."""
    variables: dict[str, str]
    """Environment variables that must be equal, valid or known (causes.variables), with their values."""
    nccl_files: dict[str, str] = {}
    """Variables set in /etc/nccl.conf and ~/.nccl.conf."""
    versions: dict[str, str]
    """Versions that results and wire formats depend on: python, torch, cuda, nccl, driver, transformers, peft, unisono, …"""
    environment_digest: str
    packages: dict[str, str]
    """All installed distributions."""
    code: dict[str, str]
    """Digest of each source file of unisono, by module path, and of remote code that the run loads (trust_remote_code)."""
    config: dict[str, Any]
    """The resolved config without paths, flat: `optim.lr` → 0.0002."""
    data_files: list[FileDigest]
    tokenizer_files: list[FileDigest]
    model_files: list[FileDigest]
    """config.json, weights, generation_config.json."""
    files_note: str = ""
    """Why files could not be hashed; such files are unknown, never equal."""
    output: OutputFacts
    limits: Limits
    interfaces: list[Interface]
    host_addresses: list[str]
    """Addresses that its own host name resolves to; empty: none."""
    head_addresses: list[str]
    """Addresses that the head's name resolves to on this node."""
    clock_offset_s: float | None
    """Wall clock minus the head's; None: not measured."""
    probe_ports: list[int] = []
    """Ports on `address` that accept connections of the dial matrix; chosen by binding."""
    reserved: dict[str, int] = {}
    """Resources that the plan reserves for the system on this node: memory_bytes, disk_bytes, shm_bytes, cores."""


def settings_of(report: NodeReport) -> dict[str, str]:
    """The settings that NCCL, torch and other libraries read: NCCL's files, overridden by the environment."""
    return {**report.nccl_files, **report.variables}


class DialReport(ReportPart):
    """Result of one connection attempt from one node to another."""

    source: int
    """node_rank of the node that connected."""
    target: int
    address: str
    port: int
    outcome: Literal["ok", "refused", "timed_out", "unreachable", "stranger", "stalled"]
    """stranger: a different program answered; stalled: small messages passed, a larger one did not return."""
    largest_bytes: int
    """Size of the largest message that returned complete."""
    tried_bytes: list[int]
    rtt_s: float | None
    note: str = ""


class RankReport(ReportPart):
    """Facts of one rank when data and model are ready, before its first collective."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    host: str
    pid: int
    device_kind: Literal["cpu", "cuda"]
    device_uuid: str | None
    """UUID of the device that is bound."""
    rows: int | None = None
    """Number of rows, before packing."""
    sequences: int
    """Of one epoch."""
    rows_digest: str
    """Digest of the row ids in table order."""
    order_digest: str
    """Digest of the sequence indices of the first steps, before they are distributed over the ranks."""
    first_difference: list[str] = []
    """Row ids of the first sequences in that order, shown if orders differ."""
    total_steps: int
    tokens: int
    """Of one epoch."""
    loss_tokens: int
    parameters_digest: str
    """Digest of names, shapes and dtypes of the trained parameters, in order."""
    trainable_parameters: int
    trained_values_digest: str
    """Digest of the initial values of the trained parameters."""
    frozen_values_digest: str
    odd_tensors: dict[str, str] = {}
    """Digest of each of a bounded number of frozen tensors, so that a difference can be located."""
    tokenizer_digest: str
    """Digest of the tokens of a fixed text, and of the vocabulary."""
    dtype: str
    strategy: str
    seed: int
    threads: int
    resume_step: int
    torch_version: str
    collective_backend: str
    """gloo or nccl."""
    store_port: int | None = None
    """Rank 0: port of torch's store."""


Status = Literal["pass", "warn", "fail", "unknown"]


class Check(ReportPart):
    """Result of one check, for agreement.json and the screen."""

    id: str
    """`nproc`, `config`, `env`, `versions`, `network.dial`, …"""
    status: Status
    text: str
    """The result, one line."""
    where: str = ""
    fix: str = ""
