"""torch.distributed under guard: a device before the group, a heartbeat at each collective, stores that restarts do not share, no port in a world of one."""

import atexit
import functools
import inspect
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any

from unisono.gloo import let_gloo_finish
from unisono.integrations.border import Registration, own_registration
from unisono.integrations.inside.guarded_process import GuardedProcess, this_process
from unisono.watch.beat import KINDS

# fmt: off
_NAMES = {
    "all_reduce": ("all_reduce", "all_reduce_coalesced"),
    "broadcast": ("broadcast", "broadcast_object_list"),
    "barrier": ("barrier", "monitored_barrier"),
    "all_gather": (
        "all_gather", "all_gather_single", "all_gather_into_tensor", "_all_gather_base", "all_gather_coalesced", "all_gather_object",
    ),
    "reduce_scatter": ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor", "_reduce_scatter_base"),
    "reduce": ("reduce",),
    "gather": ("gather", "gather_object"),
    "scatter": ("scatter", "scatter_object_list"),
    "all_to_all": ("all_to_all", "all_to_all_single"),
    "send": ("send", "send_object_list"),
    "recv": ("recv", "recv_object_list"),
    "other": ("new_group", "split_group"),
}
# fmt: on
"""Functions of torch.distributed.distributed_c10d by what they are; those that a torch does not have are left out."""
_PLAIN = ("Tensor", "Parameter")  # of others, as tensors that are only traced, the size may be no number


def wrap_collectives(module: ModuleType, here: GuardedProcess) -> list[str]:
    """Replaces the collectives in torch.distributed.distributed_c10d; gives the names of those that were found.

    Args:
        module: torch's.
        here: this process.
    """
    found = []
    for kind, names in _NAMES.items():
        for name in names:
            function = getattr(module, name, None)
            if function is not None:
                setattr(module, name, beating(function, KINDS.index(kind), here))
                found.append(name)
    return found


def beating(function: Callable[..., Any], kind: int, here: GuardedProcess) -> Callable[..., Any]:
    """The function with a sign of life at both its ends, where the main thread calls it, and not from within another one.

    One that fails leaves the record as it is: it is where the rank ends, and its last sign of life says which it was.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if here.inside or not here.is_main_thread():
            return function(*args, **kwargs)
        here.inside = True
        beats = here.beats
        try:
            first = args[0] if args else None
            elements = first.numel() if type(first).__name__ in _PLAIN else 0  # type: ignore[union-attr]
            if here.step_starts.collective(kind, elements):
                beats.take_batch()
            before = beats.wait_in(kind, elements)
            found = function(*args, **kwargs)
            beats.come_back(before)
            return found
        finally:
            here.inside = False

    return call


_SETTERS = {"torch.cuda": "set_device", "torch.accelerator": "set_device_index"}


class _Chosen:
    """Whether the program has chosen a device by itself."""

    by_program = False


def hook_devices(module: ModuleType) -> None:
    """Changes torch.cuda or torch.accelerator: a device that the program chooses is its own choice."""
    if this_process() is not None:
        name = _SETTERS[module.__name__]
        setattr(module, name, _choosing(getattr(module, name)))


def _choosing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        _Chosen.by_program = True

    return choose


def bind_device(at: GuardedProcess, environment: Mapping[str, str]) -> int | None:
    """Binds the device of LOCAL_RANK, and says so; gives the index of the one that is bound, None without a GPU or if it is not to be known."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_available():
        return None
    local_rank = environment.get("LOCAL_RANK", "")
    if not _Chosen.by_program:
        index = device_for(local_rank, cuda.device_count())
        if index is None:
            return None
        cuda.set_device(index)
        _Chosen.by_program = False
        at.note(
            f"bound device cuda:{index} before the process group was made: the program had not chosen one"
        )
    return int(cuda.current_device())


def device_for(local_rank: str, count: int) -> int | None:
    """Which device belongs to a rank of this node; None where that cannot be said.

    Args:
        local_rank: LOCAL_RANK, as it is set or empty.
        count: devices that the rank sees; where it sees one, that is its own.
    """
    if count == 1:
        return 0
    return int(local_rank) if local_rank.isdigit() and int(local_rank) < count else None


def device_uuid() -> str:
    """The current device's, as the driver writes it; empty without a GPU."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return ""
    uuid = str(getattr(cuda.get_device_properties(cuda.current_device()), "uuid", ""))
    return f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid


_KEPT = ("_bootstrap_store_info", "_shared_tcp_store_server")
"""What DynamicRendezvousHandler keeps of the first start; a test notices if it goes."""


def hook_rendezvous(module: ModuleType) -> None:
    """Changes torch.distributed.elastic.rendezvous.dynamic_rendezvous: each start has a store of its own, as torch means it to be."""
    handler = module.DynamicRendezvousHandler
    handler.next_rendezvous = _forgetting(handler.next_rendezvous)


def _forgetting(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def next_rendezvous(self: Any) -> Any:
        before = {name: getattr(self, name) for name in _KEPT if hasattr(self, name)}
        for name in before:
            setattr(self, name, None)
        try:
            return original(self)
        finally:
            before.clear()  # not earlier: ranks on other nodes may be at the old store until all have met

    return next_rendezvous


def with_own_names(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """torch's `rendezvous`, whose store has names of its own for each start of the launcher."""

    @functools.wraps(original)
    def rendezvous(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world_size in original(*args, **kwargs):
            start = _start_in(store, os.environ, module)  # noqa: TID251 - of somebody else's program
            yield module.PrefixStore(f"unisono/start-{start}", store) if start else store, rank, world_size

    return rendezvous


def _start_in(store: Any, environment: Mapping[str, str], module: ModuleType) -> int:
    """Which start this is, from 0, where ranks share the store with those of earlier ones; else 0.

    Of several nodes only those count alike that meet statically. Then the launchers' own words are in the same store.
    """
    text = environment.get("TORCHELASTIC_RESTART_COUNT", "")
    if not text.isdigit() or environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return 0
    if environment.get("GROUP_WORLD_SIZE") != "1":
        launchers = module.PrefixStore(environment.get("TORCHELASTIC_RUN_ID", ""), store)
        if not launchers.check([f"torchelastic/assigned_ranks/{environment.get('GROUP_RANK', '')}"]):
            return 0
    return int(text)


_SEES = ("beats", "collectives", "stacks")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "lo"


def hook_process_groups(module: ModuleType) -> None:
    """Changes torch.distributed.distributed_c10d, before anybody has taken a function out of it."""
    at = this_process()
    if at is None:
        return
    wrap_collectives(module, at)
    module.rendezvous = with_own_names(module.rendezvous, module)  # type: ignore[attr-defined]
    module.init_process_group = _opening(module.init_process_group, module, at)  # type: ignore[attr-defined]
    module.destroy_process_group = _closing(module.destroy_process_group, module, at)  # type: ignore[attr-defined]
    atexit.register(let_gloo_finish)  # of a program that never destroys its group


def _opening(original: Callable[..., None], module: ModuleType, at: GuardedProcess) -> Callable[..., None]:
    """init_process_group, with what it lacks."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # torch says it best
            return original(*args, **kwargs)
        if module.is_initialized():
            return original(*args, **kwargs)
        environment = os.environ  # noqa: TID251 - torch reads the same, of somebody else's program
        at.become(_joining_rank(given, environment))
        bound = bind_device(at, environment)
        at.phase("join")
        if _world_size(given, environment) == 1 and given.get("store") is None:
            with _alone(at, given) as without_port:
                original(**without_port)
        else:
            if bound is not None and given.get("device_id") is None and _is_nccl(given.get("backend")):
                given = {**given, "device_id": sys.modules["torch"].device("cuda", bound)}
                at.note(f"init_process_group was given device_id cuda:{bound}")
            original(**given)
        at.become(_as_it_is(module, at))
        at.phase("program")
        return None

    return init_process_group


def _closing(original: Callable[..., None], module: ModuleType, at: GuardedProcess) -> Callable[..., None]:
    """destroy_process_group, which may be called again."""

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if _is_gone(group, module):
            at.note(
                "destroy_process_group was called again; nothing was done: there is no such group any more"
            )
            return
        at.phase("close")
        let_gloo_finish()
        original(group)
        if not module.is_initialized() and at.registration is not None:
            at.become(replace(at.registration, grouped=False))
        at.phase("program")

    return destroy_process_group


def _is_gone(group: Any, module: ModuleType) -> bool:
    """Whether a group has been destroyed, or there has been none. A group that this rank is not in is torch's to judge."""
    if group is None:
        return not module.is_initialized()
    members = module._world.pg_map  # noqa: SLF001 - where torch itself looks; a test notices if it goes
    return group != module.GroupMember.NON_GROUP_MEMBER and members.get(group) is None


def _world_size(given: Mapping[str, Any], environment: Mapping[str, str]) -> int | None:
    """How many ranks the group will have; None where that is not known before."""
    size = given.get("world_size", -1)
    if size != -1:
        return int(size)
    if (given.get("init_method") or "env://") != "env://" or given.get("backend") == "fake":
        return None
    text = environment.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else None


def _joining_rank(given: Mapping[str, Any], environment: Mapping[str, str]) -> Registration | None:
    """Who joins, as far as is known before: so a rank that waits for the others is seen already."""
    known = {"RANK": given.get("rank", -1), "WORLD_SIZE": given.get("world_size", -1)}
    said = {name: str(value) for name, value in known.items() if value != -1}
    return own_registration({**environment, **said})


def _as_it_is(module: ModuleType, at: GuardedProcess) -> Registration | None:
    """Who this rank is, by torch's own word."""
    rank, world_size = module.get_rank(), module.get_world_size()
    known = at.registration or own_registration({"RANK": str(rank), "WORLD_SIZE": str(world_size)})
    if known is None:
        return None
    return replace(known, rank=rank, world_size=world_size, grouped=True, sees=_SEES, uuid=device_uuid())


def _is_nccl(backend: Any) -> bool:
    """Whether GPUs speak to each other by NCCL alone. With no backend named, a device_id would take gloo away from tensors on the CPU."""
    return str(backend or "").lower() in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl")


@contextmanager
def _alone(at: GuardedProcess, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What init_process_group is given in a world of one: a store in memory in place of one that listens at a port.

    gloo is kept on the loopback meanwhile, and variables that name no interface of this machine are dropped: they are leftovers of another
    start, and NCCL would fail over them.
    """
    environment = os.environ  # noqa: TID251 - of this process alone, and as it was afterwards
    names = {name for _, name in socket.if_nameindex()}
    dropped = []
    for name in _INTERFACES:
        named = [part.lstrip("=").partition(":")[0] for part in environment.get(name, "").split(",") if part]
        if named and not named[0].startswith("^") and not any(i.startswith(n) for n in named for i in names):
            dropped.append(f"{name}={environment.pop(name)}")
    before = environment.get(_INTERFACES[0])
    if _LOOPBACK in names:
        environment[_INTERFACES[0]] = _LOOPBACK
    without = {name: value for name, value in given.items() if name != "init_method"}
    try:
        yield {**without, "store": sys.modules["torch.distributed"].HashStore(), "rank": 0, "world_size": 1}
    finally:
        environment.pop(_INTERFACES[0], None)
        if before is not None:
            environment[_INTERFACES[0]] = before
    text = "a world of one rank: its store is kept in memory, and no port was opened for it"
    at.note(f"{text}; without effect was {', '.join(dropped)}: no such interface" if dropped else text)
