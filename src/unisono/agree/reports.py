"""What each node and each rank reports for the comparison. Plain values; secrets never enter a report."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from unisono.plan import DeviceChoice


class ReportPart(BaseModel):
    """A frozen value. Reports cross machines, so an unknown field is refused like any other disagreement."""

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
    """An accelerator as the driver sees it; `index` is the physical one."""

    index: int
    uuid: str
    name: str
    memory_bytes: int
    memory_free_bytes: int
    bus_id: str = ""
    numa_node: int | None = None


class FileDigest(ReportPart):
    """A file that the run reads. `label` names it without its path: `train[0]: rows.jsonl`."""

    label: str
    bytes: int
    digest: str


class OutputFacts(ReportPart):
    """The output_dir as a node finds it."""

    path: str
    writable: bool | None
    """None: could not be tried."""
    trouble: str = ""
    """Why it cannot be written, or tried."""
    shared: bool | None
    """Whether the head's nonce was seen in it; None: could not be looked for."""
    free_bytes: int | None
    file_system: str = ""


class Limits(ReportPart):
    """What the system lets a process have. None: could not be read, or (for limits) unlimited."""

    cores: int
    memory_bytes: int
    shm_bytes: int | None
    shm_free_bytes: int | None
    open_files: int | None
    locked_memory_bytes: int | None
    stack_bytes: int | None
    processes: int | None


class NodeReport(ReportPart):
    """What one node's front knows before anything imports torch."""

    node_rank: int
    host: str
    address: str
    """On which it reached the head, and is reached."""
    pid: int
    nodes: int
    """How many it believes there are."""
    nproc: int
    """Ranks that it would start (nproc_per_node)."""
    nproc_declared: bool
    """By --nproc or NPROC_PER_NODE; otherwise inferred."""
    nproc_origin: str
    """Where the number came from, for people: `--nproc`, `NPROC_PER_NODE`, `8 visible accelerators`."""
    device_kind: Literal["cpu", "cuda"]
    chosen: list[Device]
    """Those its ranks would use, by local rank; empty on CPU."""
    places: list[DeviceChoice] = []
    """What each of its ranks would run on, by local rank: the plan takes it as it is."""
    threads: int = 1
    """That each of its ranks may have."""
    threads_origin: str = ""
    visible: list[Device]
    physical: list[Device]
    visible_variable: str | None
    """CUDA_VISIBLE_DEVICES, or None where it is not set."""
    device_note: str = ""
    """Why there are none, or could not be seen."""
    variables: dict[str, str]
    """Of the environment: those that must be equal, valid or known (causes.variables), as they are set."""
    nccl_files: dict[str, str] = {}
    """What /etc/nccl.conf and ~/.nccl.conf set."""
    versions: dict[str, str]
    """Of what numbers and wire formats depend on: python, torch, cuda, nccl, driver, transformers, peft, unisono, …"""
    environment_digest: str
    packages: dict[str, str]
    """All installed distributions."""
    code: dict[str, str]
    """Digest of each source file of unisono, by module path, and of code that the run loads (trust_remote_code)."""
    config: dict[str, Any]
    """The resolved config without paths, flat: `optim.lr` → 0.0002."""
    data_files: list[FileDigest]
    tokenizer_files: list[FileDigest]
    model_files: list[FileDigest]
    """config.json, weights, generation_config.json."""
    files_note: str = ""
    """Why files could not be digested; then they are UNKNOWN, never equal."""
    output: OutputFacts
    limits: Limits
    interfaces: list[Interface]
    host_addresses: list[str]
    """What its own host name resolves to; empty: nothing."""
    head_addresses: list[str]
    """What the head's name resolves to here."""
    clock_offset_s: float | None
    """Wall clock minus the head's; None: not measured."""
    probe_ports: list[int] = []
    """Ports on `address` at which it answers the dial matrix; chosen by binding."""
    reserved: dict[str, int] = {}
    """What the plan leaves to the system on this node: memory_bytes, disk_bytes, shm_bytes, cores."""


def settings_of(report: NodeReport) -> dict[str, str]:
    """What NCCL, torch and the rest will read: the files of NCCL, and the environment, which beats them."""
    return {**report.nccl_files, **report.variables}


class DialReport(ReportPart):
    """What one node saw when it dialled another."""

    source: int
    """node_rank of the one that dialled."""
    target: int
    address: str
    port: int
    outcome: Literal["ok", "refused", "timed_out", "unreachable", "stranger", "stalled"]
    """stranger: something answered that is not ours; stalled: small sizes passed, a larger one did not come back."""
    largest_bytes: int
    """The largest message that came back whole."""
    tried_bytes: list[int]
    rtt_s: float | None
    note: str = ""


class RankReport(ReportPart):
    """What one rank knows when data and model are ready, before its first collective."""

    rank: int
    local_rank: int
    node_rank: int
    world_size: int
    host: str
    pid: int
    device_kind: Literal["cpu", "cuda"]
    device_uuid: str | None
    """Of the device that is bound in fact."""
    rows: int | None = None
    """Of the table, before packing."""
    sequences: int
    """Of one epoch."""
    rows_digest: str
    """Of the row ids in the order of the table."""
    order_digest: str
    """Of the sequence indices of the first steps, before they are dealt over the ranks."""
    first_difference: list[str] = []
    """Row ids of the first sequences in that order: shown where orders differ."""
    total_steps: int
    tokens: int
    """Of one epoch."""
    loss_tokens: int
    parameters_digest: str
    """Of names, shapes and dtypes of what is trained, in order."""
    trainable_parameters: int
    trained_values_digest: str
    """Of the initial values of what is trained."""
    frozen_values_digest: str
    odd_tensors: dict[str, str] = {}
    """Digest by tensor for a bounded number of frozen tensors, so that a difference can be named."""
    tokenizer_digest: str
    """Of what a fixed text becomes, and of the vocabulary."""
    dtype: str
    strategy: str
    seed: int
    threads: int
    resume_step: int
    torch_version: str
    collective_backend: str
    """gloo or nccl."""
    store_port: int | None = None
    """Rank 0: where torch's store waits."""


Status = Literal["pass", "warn", "fail", "unknown"]


class Check(ReportPart):
    """One thing that was looked at, for agreement.json and the screen."""

    id: str
    """`nproc`, `config`, `env`, `versions`, `network.dial`, …"""
    status: Status
    text: str
    """What was found, one line."""
    where: str = ""
    fix: str = ""
