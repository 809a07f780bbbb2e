"""torch.distributed under guard: a device before the group, no port in a world of one, collectives that beat, an end that may come twice."""

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
from unisono.integrations.inside.collectives import wrap_collectives
from unisono.integrations.inside.devices import bind_device, uuid_of
from unisono.integrations.inside.here import Here, here
from unisono.integrations.inside.starts import with_own_names

_SEES = ("beats", "collectives", "stacks")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_LOOPBACK = "lo"


def hook(module: ModuleType) -> None:
    """Changes torch.distributed.distributed_c10d, before anybody has taken a function out of it."""
    at = here()
    if at is None:
        return
    wrap_collectives(module, at)
    module.rendezvous = with_own_names(module.rendezvous, module)  # type: ignore[attr-defined]
    module.init_process_group = _opening(module.init_process_group, module, at)  # type: ignore[attr-defined]
    module.destroy_process_group = _closing(module.destroy_process_group, module, at)  # type: ignore[attr-defined]
    atexit.register(let_gloo_finish)  # of a program that never destroys its group


def _opening(original: Callable[..., None], module: ModuleType, at: Here) -> Callable[..., None]:
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
        at.become(_who(given, environment))
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


def _closing(original: Callable[..., None], module: ModuleType, at: Here) -> Callable[..., None]:
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


def _who(given: Mapping[str, Any], environment: Mapping[str, str]) -> Registration | None:
    """Who joins, as far as is known before: so a rank that waits for the others is seen already."""
    known = {"RANK": given.get("rank", -1), "WORLD_SIZE": given.get("world_size", -1)}
    said = {name: str(value) for name, value in known.items() if value != -1}
    return own_registration({**environment, **said})


def _as_it_is(module: ModuleType, at: Here) -> Registration | None:
    """Who this rank is, by torch's own word."""
    rank, world_size = module.get_rank(), module.get_world_size()
    known = at.registration or own_registration({"RANK": str(rank), "WORLD_SIZE": str(world_size)})
    if known is None:
        return None
    return replace(known, rank=rank, world_size=world_size, grouped=True, sees=_SEES, uuid=uuid_of())


def _is_nccl(backend: Any) -> bool:
    """Whether GPUs speak to each other by NCCL alone. With no backend named, a device_id would take gloo away from tensors on the CPU."""
    return str(backend or "").lower() in ("nccl", "cuda:nccl", "cpu:gloo,cuda:nccl")


@contextmanager
def _alone(at: Here, given: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
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
