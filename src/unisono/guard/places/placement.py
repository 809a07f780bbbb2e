"""The devices of a node's ranks, and which rank runs on which node.

Pure: machine and environment are handed in.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from unisono.base.errors import UsageError
from unisono.guard.facts import Machine
from unisono.guard.facts.machine import Gpu
from unisono.guard.places.ranks import DeviceChoice, NodePlace, RankPlace
from unisono.guard.places.topology import Accelerators

_BFLOAT16_SINCE = (8, 0)  # Ampere


def usable_accelerators(
    machine: Machine, *, requested: str, visible: str | None, torch_version: str = ""
) -> Accelerators:
    """How many accelerators ranks could use here, by the config's `device`; what `read_topology`
    infers from.
    """
    if requested == "cpu":
        return Accelerators(0, "device: cpu")
    gpus = visible_gpus(machine.gpus, visible)
    why_cpu = _why_none(machine, gpus, visible, torch_version)
    if why_cpu:
        return Accelerators(0, why_cpu)
    return Accelerators(len(gpus), f"CUDA_VISIBLE_DEVICES={visible}" if visible is not None else "")


def choose_devices(
    machine: Machine,
    *,
    requested: str,
    named: tuple[str, ...],
    visible: str | None,
    nproc: int,
    torch_version: str = "",
) -> tuple[list[DeviceChoice], str]:
    """The devices of this node's ranks, by local rank, and where the choice came from.

    Args:
        requested: the config's `device`: auto, cpu or cuda.
        named: `--devices`: physical indices or UUIDs; none: the first that are visible.
        visible: CUDA_VISIBLE_DEVICES, or None where it is not set.
        nproc: ranks on this node; on a CPU they share its memory.
        torch_version: of the installed torch; `+cpu` in it means that it cannot use an accelerator.

    Raises:
        UsageError: if there is no such device, it may not be used, or there are too few.
    """
    if requested == "cpu":
        if named:
            raise UsageError.of(
                f"--devices {','.join(named)} selects an accelerator, but the config has `device: cpu`",
                where="command line",
                fix="omit --devices, or pass device=cuda",
            )
        return [_cpu(machine, nproc)] * nproc, "device: cpu"
    gpus = visible_gpus(machine.gpus, visible)
    why_cpu = _why_none(machine, gpus, visible, torch_version)
    if not named and requested == "auto" and why_cpu:
        return [_cpu(machine, nproc)] * nproc, f"auto: {why_cpu}"
    if why_cpu:
        raise UsageError.of(
            "there is no CUDA device for this run",
            where="--devices" if named else "device",
            why=why_cpu,
            fix="set `device: cpu`, or fix what the line above reports",
        )
    if named:
        chosen = [_named(gpus, machine.gpus, word, visible) for word in named]
        _refuse_repeated(named, chosen)
        return [_cuda(gpu, machine) for gpu in chosen], "--devices"
    _refuse_too_few(nproc, gpus, visible)
    return [_cuda(gpu, machine) for gpu in gpus[:nproc]], f"{requested}: {_first_of(nproc, gpus)}"


def device_words(text: str | None) -> tuple[str, ...]:
    """`--devices`, word by word.

    Raises:
        UsageError: if there is nothing between two commas.
    """
    if text is None:
        return ()
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise UsageError.of(
            f"--devices {text!r} has an empty entry",
            where="command line",
            fix="e.g. --devices 0,1 (index or UUID)",
        )
    return words


def _first_of(nproc: int, gpus: list[Gpu]) -> str:
    if len(gpus) == nproc:
        return "the visible one" if nproc == 1 else f"the {nproc} visible ones"
    first = "the first" if nproc == 1 else f"the first {nproc}"
    return f"{first} of {len(gpus)} visible; --devices picks {'another' if nproc == 1 else 'others'}"


def _refuse_too_few(nproc: int, gpus: list[Gpu], visible: str | None) -> None:
    if nproc > len(gpus):
        raise UsageError.of(
            f"{nproc} ranks need {nproc} accelerators, and {len(gpus)} can be used here",
            where="this machine" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}",
            why="every rank has its own device",
            fix=f"pass --nproc {len(gpus)}, or device=cpu",
        )


def _refuse_repeated(words: tuple[str, ...], chosen: list[Gpu]) -> None:
    seen: dict[str, str] = {}
    for word, gpu in zip(words, chosen, strict=True):
        if gpu.uuid in seen:
            raise UsageError.of(
                f"--devices names one device twice: {seen[gpu.uuid]} and {word} are {gpu.index} ({gpu.uuid})",
                where="command line",
                why="two ranks on one device fail or wait for each other",
                fix="name each device once",
            )
        seen[gpu.uuid] = word


def visible_gpus(gpus: list[Gpu], visible: str | None) -> list[Gpu]:
    """The machine's GPUs that CUDA_VISIBLE_DEVICES selects, in its order."""
    if visible is None:
        return gpus
    chosen = []
    for word in (part.strip() for part in visible.split(",")):
        gpu = _match(gpus, word)
        if gpu is None:  # as in CUDA: an entry that is not a device ends the list
            break
        chosen.append(gpu)
    return chosen


def _match(gpus: list[Gpu], word: str) -> Gpu | None:
    if word.isascii() and word.isdigit():
        return next((gpu for gpu in gpus if gpu.index == int(word)), None)
    near = [gpu for gpu in gpus if word and gpu.uuid.lower().startswith(word.lower())]
    return near[0] if len(near) == 1 else None


def _why_none(machine: Machine, gpus: list[Gpu], visible: str | None, torch_version: str) -> str:
    """Why no accelerator can be used; empty where one can."""
    if not machine.gpus:
        return machine.gpu_note or "no accelerator was found"
    if not gpus:
        return f"CUDA_VISIBLE_DEVICES={visible} hides all {len(machine.gpus)} devices of this machine"
    if "+cpu" in torch_version:
        return f"torch {torch_version} is built without CUDA"
    return ""


def _named(gpus: list[Gpu], everything: list[Gpu], word: str, visible: str | None) -> Gpu:
    gpu = _match(gpus, word)
    if gpu is not None:
        return gpu
    choices = ", ".join(f"{gpu.index} ({gpu.uuid})" for gpu in gpus)
    hidden = _match(everything, word) is not None
    raise UsageError.of(
        f"there is no device {word} for this run",
        where="command line, --devices",
        why=f"CUDA_VISIBLE_DEVICES={visible} hides it" if hidden else "",
        fix=f"one of {choices}",
    )


def _cpu(machine: Machine, nproc: int) -> DeviceChoice:
    return DeviceChoice(
        kind="cpu",
        name=machine.cpu_name,
        memory_bytes=machine.memory_available_bytes // nproc,
        bfloat16=machine.cpu_bfloat16,
    )


def _cuda(gpu: Gpu, machine: Machine) -> DeviceChoice:
    return DeviceChoice(
        kind="cuda",
        index=gpu.index,
        uuid=gpu.uuid,
        name=gpu.name,
        memory_bytes=gpu.memory_free_bytes,
        bfloat16=gpu.capability >= _BFLOAT16_SINCE,
        compiles=machine.compiles,
    )


@dataclass(frozen=True)
class NodeOffer:
    """The contribution of one node to the plan.

    Attributes:
        address: where the others reach it.
        devices: one for each rank, by local rank.
        nproc_origin: where their number came from.
        threads: that each rank may have, and `threads_origin` where that came from.
        shares_output: whether its output_dir is the head's.
    """

    node_rank: int
    host: str
    address: str
    devices: Sequence[DeviceChoice]
    nproc_origin: str
    threads: int
    threads_origin: str
    shares_output: bool = True


@dataclass(frozen=True)
class Layout:
    """Nodes and ranks of a job, as the plan has them."""

    nodes: list[NodePlace]
    ranks: list[RankPlace]
    store_host: str
    threads: int
    threads_origin: str
    origins: dict[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        """All ranks."""
        return len(self.ranks)


def lay_out(offers: Sequence[NodeOffer]) -> Layout:
    """Ranks node after node, in the order of node ranks; threads as the poorest node has them, the
    same on all.

    Replicas round alike only where they add in the same order, and that depends on the number of
    threads.
    """
    ordered = sorted(offers, key=lambda offer: offer.node_rank)
    nodes = [
        NodePlace(
            node_rank=offer.node_rank,
            host=offer.host,
            address=offer.address,
            nproc=len(offer.devices),
            nproc_origin=offer.nproc_origin,
            shares_output=offer.shares_output,
        )
        for offer in ordered
    ]
    pairs = [(offer, local_rank) for offer in ordered for local_rank in range(len(offer.devices))]
    ranks = [
        RankPlace(
            rank=rank,
            node_rank=offer.node_rank,
            local_rank=local_rank,
            host=offer.host,
            device=offer.devices[local_rank],
        )
        for rank, (offer, local_rank) in enumerate(pairs)
    ]
    poorest = min(ordered, key=lambda offer: offer.threads)
    origin = poorest.threads_origin
    if len({offer.threads for offer in ordered}) > 1:
        origin = f"{origin} of node {poorest.node_rank} ({poorest.host}), which has the fewest"
    return Layout(nodes, ranks, ordered[0].address, poorest.threads, origin)


def threads_of(*, cores: int, nproc: int, declared: int | None) -> tuple[int, str]:
    """Threads of each rank of a node, and where that comes from; part of what makes a run
    repeatable.
    """
    if declared:
        return declared, "OMP_NUM_THREADS"
    if nproc == 1:
        return cores, "the cores that this process may use"
    return max(1, cores // nproc), f"{cores} cores for {nproc} ranks"
