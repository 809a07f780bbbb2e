"""torch.distributed under guard: a device before the group, a heartbeat at each collective, stores
that restarts do not share, no port in a world of one.
"""

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

from unisono.base.torch_internals import let_gloo_finish
from unisono.guard.integrations.border import Registration, own_registration
from unisono.guard.integrations.inside.guarded_process import GuardedProcess, this_process
from unisono.guard.watch import KINDS

_NAMES = {
    "all_reduce": ("all_reduce", "all_reduce_coalesced"),
    "broadcast": ("broadcast", "broadcast_object_list"),
    "barrier": ("barrier", "monitored_barrier"),
    "all_gather": (
        "all_gather",
        "all_gather_single",
        "all_gather_into_tensor",
        "_all_gather_base",
        "all_gather_coalesced",
        "all_gather_object",
    ),
    "reduce_scatter": (
        "reduce_scatter",
        "reduce_scatter_single",
        "reduce_scatter_tensor",
        "_reduce_scatter_base",
    ),
    "reduce": ("reduce",),
    "gather": ("gather", "gather_object"),
    "scatter": ("scatter", "scatter_object_list"),
    "all_to_all": ("all_to_all", "all_to_all_single"),
    "send": ("send", "send_object_list"),
    "recv": ("recv", "recv_object_list"),
    "other": ("new_group", "split_group"),
}
"""Functions of torch.distributed.distributed_c10d by kind; those that a version of torch lacks are
skipped.
"""
_PLAIN = ("Tensor", "Parameter")  # the size of others, e.g. traced tensors, may not be a number


def wrap_collectives(module: ModuleType, process: GuardedProcess) -> list[str]:
    """Wraps the collectives in torch.distributed.distributed_c10d; returns the names of those that
    exist.
    """
    wrapped = []
    for kind, names in _NAMES.items():
        for name in names:
            function = getattr(module, name, None)
            if function is not None:
                setattr(module, name, beating(function, KINDS.index(kind), process))
                wrapped.append(name)
    return wrapped


def beating(function: Callable[..., Any], kind: int, process: GuardedProcess) -> Callable[..., Any]:
    """The function with a heartbeat before and after it, if the main thread calls it, and not
    inside another collective.

    A failing one leaves the record unchanged: a rank usually exits there, and its last heartbeat
    shows which one it was.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if process.inside or not process.is_main_thread():
            return function(*args, **kwargs)
        process.inside = True
        beats = process.beats
        try:
            first = args[0] if args else None
            elements = first.numel() if type(first).__name__ in _PLAIN else 0  # type: ignore[union-attr]
            if process.step_starts.collective(kind, elements):
                beats.take_batch()
            before = beats.wait_in(kind, elements)
            result = function(*args, **kwargs)
            beats.come_back(before)
            return result
        finally:
            process.inside = False

    return call


_SETTERS = {"torch.cuda": "set_device", "torch.accelerator": "set_device_index"}


class _Chosen:
    """Whether the program has selected a device itself."""

    by_program = False


def hook_devices(module: ModuleType) -> None:
    """Hooks torch.cuda or torch.accelerator, to detect that the program selects a device."""
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
    """Binds the device of LOCAL_RANK and reports it; returns the index of the bound device, None
    without a GPU or if it is unknown.
    """
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
    """The device index of a rank on this node; None if unknown.

    Args:
        local_rank: LOCAL_RANK, as it is set or empty.
        count: number of devices visible to the rank; a single one is its own.
    """
    if count == 1:
        return 0
    return int(local_rank) if local_rank.isdigit() and int(local_rank) < count else None


def device_uuid() -> str:
    """UUID of the current device, as the driver writes it; empty without a GPU."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not cuda.is_available() or not cuda.is_initialized():
        return ""
    uuid = str(getattr(cuda.get_device_properties(cuda.current_device()), "uuid", ""))
    return f"GPU-{uuid}" if uuid and not uuid.startswith("GPU-") else uuid


_KEPT = ("_bootstrap_store_info", "_shared_tcp_store_server")
"""What DynamicRendezvousHandler (torch 2.13) keeps of the first start; a test fails if it goes."""


def hook_rendezvous(module: ModuleType) -> None:
    """Hooks torch.distributed.elastic.rendezvous.dynamic_rendezvous, so that each start has its own
    store.
    """
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
            # This comes last: ranks on other nodes may use the old store until the rendezvous is
            # complete.
            before.clear()

    return next_rendezvous


def with_own_names(original: Callable[..., Any], module: ModuleType) -> Callable[..., Any]:
    """torch's `rendezvous` with a prefix of the store for each start of the launcher."""

    @functools.wraps(original)
    def rendezvous(*args: Any, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
        for store, rank, world_size in original(*args, **kwargs):
            start = _start_in(store, os.environ, module)  # noqa: TID251 - of a foreign program
            yield module.PrefixStore(f"unisono/start-{start}", store) if start else store, rank, world_size

    return rendezvous


def _start_in(store: Any, environment: Mapping[str, str], module: ModuleType) -> int:
    """The number of this start, from 0, if ranks share the store with earlier ones; else 0.

    On several nodes the number is equal only with a static rendezvous. Then the launchers' own keys
    are in the same store.
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
    """Hooks torch.distributed.distributed_c10d, before any function is imported from it."""
    at = this_process()
    if at is None:
        return
    wrap_collectives(module, at)
    module.rendezvous = with_own_names(module.rendezvous, module)  # type: ignore[attr-defined]
    module.init_process_group = _opening(module.init_process_group, module, at)  # type: ignore[attr-defined]
    module.destroy_process_group = _closing(module.destroy_process_group, module, at)  # type: ignore[attr-defined]
    atexit.register(let_gloo_finish)  # for a program that never destroys its group


def _opening(original: Callable[..., None], module: ModuleType, at: GuardedProcess) -> Callable[..., None]:
    """init_process_group with a bound device, and without a port in a world of one."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError:  # torch reports the error
            return original(*args, **kwargs)
        if module.is_initialized():
            return original(*args, **kwargs)
        environment = os.environ  # noqa: TID251 - torch reads the same, of a foreign program
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
    """destroy_process_group, which may be called twice."""

    @functools.wraps(original)
    def destroy_process_group(group: Any = None) -> None:
        if _is_gone(group, module):
            at.note("destroy_process_group was called again; nothing was done: the group no longer exists")
            return
        at.phase("close")
        let_gloo_finish()
        original(group)
        if not module.is_initialized() and at.registration is not None:
            at.become(replace(at.registration, grouped=False))
        at.phase("program")

    return destroy_process_group


def _is_gone(group: Any, module: ModuleType) -> bool:
    """Whether a group was destroyed, or never created. torch handles groups without this rank."""
    if group is None:
        return not module.is_initialized()
    try:
        return group != module.GroupMember.NON_GROUP_MEMBER and not module.get_backend(group)
    except (ValueError, AssertionError):  # earlier torch asserts it
        return True


def _world_size(given: Mapping[str, Any], environment: Mapping[str, str]) -> int | None:
    """Number of ranks of the new group; None if unknown before."""
    size = given.get("world_size", -1)
    if size != -1:
        return int(size)
    if (given.get("init_method") or "env://") != "env://" or given.get("backend") == "fake":
        return None
    text = environment.get("WORLD_SIZE", "")
    return int(text) if text.isdigit() else None


def _joining_rank(given: Mapping[str, Any], environment: Mapping[str, str]) -> Registration | None:
    """The registration known before joining, so that a rank that waits for the others is already
    visible.
    """
    numbers = {"RANK": given.get("rank", -1), "WORLD_SIZE": given.get("world_size", -1)}
    settings = {name: str(value) for name, value in numbers.items() if value != -1}
    return own_registration({**environment, **settings})


def _as_it_is(module: ModuleType, at: GuardedProcess) -> Registration | None:
    """The registration of this rank, from torch."""
    rank, world_size = module.get_rank(), module.get_world_size()
    registration = at.registration or own_registration({"RANK": str(rank), "WORLD_SIZE": str(world_size)})
    if registration is None:
        return None
    return replace(
        registration, rank=rank, world_size=world_size, grouped=True, sees=_SEES, uuid=device_uuid()
    )


def _is_nccl(backend: Any) -> bool:
    """Whether GPUs use NCCL alone.

    Without a backend, a device_id would disable gloo for CPU tensors.
    """
    return str(backend or "").lower() in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl")


@contextmanager
def _alone(at: GuardedProcess, given: Mapping[str, Any]) -> Iterator[dict[str, object]]:
    """Arguments of init_process_group in a world of one: a store in memory instead of one that
    listens on a port.

    gloo uses the loopback interface meanwhile, and variables that name no interface of this machine
    are removed: they are leftovers of a different start, and NCCL would fail with them.
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
