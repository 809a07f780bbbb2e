"""The Ray cluster: connecting to it, what its nodes have, and the places of a job on them. Only the driver's process calls this."""

import contextlib
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from unisono.cluster.ray import node_actor
from unisono.cluster.ray.cluster_health import RayHead
from unisono.cluster.ray.node_fronts import ActorLost, JobNode
from unisono.errors import UnfitError, UsageError
from unisono.text import one_line, show_bytes

MEMORY_OF_A_RANK_BYTES = 1_000_000_000
RESERVE_BYTES = 500_000_000
"""Beside the ranks, on each node: for the front, the actor, and Ray's own processes."""

_REACH_S = 3.0
_NOTE_EVERY_S = 10.0
_END_S = 5.0
_SPREAD = "STRICT_SPREAD"


@dataclass(frozen=True)
class ResourceRequest:
    """What is asked for on each node.

    Attributes:
        nproc: ranks.
        gpus: accelerators; one a rank, or none.
    """

    nproc: int
    gpus: int

    @property
    def bundle(self) -> dict[str, float]:
        """As Ray has it."""
        memory = self.nproc * MEMORY_OF_A_RANK_BYTES + RESERVE_BYTES
        found: dict[str, float] = {"CPU": self.nproc, "memory": memory}
        return found | ({"GPU": self.gpus} if self.gpus else {})

    def __str__(self) -> str:
        return (
            f"on each {show_resources(self.bundle)} (1 CPU{', 1 GPU' if self.gpus else ''} and "
            f"{show_bytes(MEMORY_OF_A_RANK_BYTES)} a rank, {show_bytes(RESERVE_BYTES)} in reserve)"
        )


@dataclass(frozen=True)
class RayNode:
    """A living node of the cluster.

    Attributes:
        id: Ray's.
        host: its name.
        address: Ray's for it.
        total: its resources.
        free: of them, now.
    """

    id: str
    host: str
    address: str
    total: dict[str, float]
    free: dict[str, float]

    def could_have(self, bundle: Mapping[str, float]) -> bool:
        """Whether it is large enough, if nothing else ran there."""
        return all(self.total.get(name, 0.0) >= amount for name, amount in bundle.items())

    def has_free(self, bundle: Mapping[str, float]) -> bool:
        """Whether there is room on it now."""
        return all(self.free.get(name, 0.0) >= amount for name, amount in bundle.items())

    def describe(self, bundle: Mapping[str, float]) -> str:
        """`ada (10.0.0.1): 2 of 4 CPU free, …`, of what is asked for."""
        parts = [_free_of(name, self.free.get(name, 0.0), self.total.get(name, 0.0)) for name in bundle]
        return f"{self.host} ({self.address}): {', '.join(parts)}"


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """This process is a driver of the cluster while it is entered.

    Args:
        address: HOST:PORT, or `auto`: the one that runs on this machine.

    Raises:
        UsageError: if Ray is not installed, the address is none, or nobody answers there.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError.of(
            "--launcher ray needs Ray, and it is not installed here",
            where="this machine",
            why=str(error),
            fix="pip install 'ray[default]', in the version of the cluster",
        ) from error
    _refuse_address(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="unisono")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise _not_connected(address, str(error)) from error
    _leave_signals_to_the_front()
    try:
        yield
    finally:
        _bounded(ray.shutdown)


def _leave_signals_to_the_front() -> None:
    """Terminals and `ray job stop` signal all processes of a command, and Ray has its drivers end by SIGTERM; what is to be saved comes through this one."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _bounded(work: Callable[[], object]) -> None:
    """Asks Ray for an end, for a few seconds: where its head is gone it would wait for that, and what it is asked for ends with the cluster."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_END_S)


def find_ray_head() -> RayHead:
    """Where Ray's own head is; needs a connection."""
    import ray

    address = str(ray.get_runtime_context().gcs_address)
    host = address.rpartition(":")[0].strip("[]")
    return RayHead(address, next((node.host for node in living_nodes() if node.address == host), ""))


def living_nodes() -> list[RayNode]:
    """The nodes of the cluster, by host."""
    import ray
    from ray._private.state import (
        available_resources_per_node,
    )  # 2.60: no public way to what is free on each node

    free = available_resources_per_node()
    found = [
        RayNode(
            str(node["NodeID"]),
            str(node["NodeManagerHostname"]),
            str(node["NodeManagerAddress"]),
            dict(node["Resources"]),
            dict(free.get(node["NodeID"], {})),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: (node.host, node.address))


def refuse_too_small(nodes: Sequence[RayNode], wanted: ResourceRequest, least: int) -> None:
    """Whether the cluster could carry the job at all, if nothing else ran on it.

    Raises:
        UnfitError: with what was asked for, and what there is, node by node.
    """
    fit = [node for node in nodes if node.could_have(wanted.bundle)]
    if len(fit) < least:
        raise no_room(
            nodes, wanted, least, why=f"{len(fit)} of {len(nodes)} nodes of the cluster are large enough"
        )


def no_room(nodes: Sequence[RayNode], wanted: ResourceRequest, least: int, *, why: str) -> UnfitError:
    """What is said of a cluster that does not give the places."""
    there = "; ".join(node.describe(wanted.bundle) for node in nodes) or "no living node"
    return UnfitError.of(
        f"the Ray cluster has no place for {least} node{'' if least == 1 else 's'}: {why}",
        where=f"asked for: {wanted}",
        why=f"there is: {there}",
        fix="ask for fewer with --nodes or --nproc, wait for what else runs there (`ray status`), or add nodes",
    )


@contextlib.contextmanager
def reserved(
    wanted: ResourceRequest,
    *,
    nodes: int,
    least: int,
    timeout_s: float,
    note: Callable[[str], None],
    stopped: Callable[[], bool],
) -> Iterator[list[Any]]:
    """One actor on each of so many nodes, in one placement group; both are gone when it is left.

    Args:
        wanted: on each node.
        nodes: how many at the most.
        least: so many will do where there is no room for more now.
        timeout_s: how long to wait for room that others have.
        note: is told how the waiting goes.
        stopped: whether nobody wants it any more.

    Raises:
        UnfitError: if there is not enough, or it is stopped.
    """
    import ray
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(node_actor)
    began = time.monotonic()
    patience = _Waiting(began, began + timeout_s, note, stopped)
    group, count = _reserve(wanted, nodes=nodes, least=least, patience=patience)
    actors: list[Any] = []
    try:
        for index in range(count):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
            options = {
                "num_cpus": wanted.nproc,
                "num_gpus": wanted.gpus,
                "max_restarts": 0,
                "max_concurrency": 8,
            }
            actors.append(
                ray.remote(node_actor.NodeActor).options(scheduling_strategy=strategy, **options).remote()
            )
        yield actors
    finally:
        for actor in actors:
            _bounded(partial(ray.kill, actor))
        _bounded(partial(remove_placement_group, group))


def _reserve(wanted: ResourceRequest, *, nodes: int, least: int, patience: "_Waiting") -> tuple[Any, int]:
    """A placement group that is there, and the number of its places.

    Raises:
        UnfitError: if the time is over, the cluster is too small, or it is stopped.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    name = f"unisono-{secrets.token_hex(4)}"
    while True:
        here = living_nodes()
        refuse_too_small(here, wanted, least)
        fit = [node for node in here if node.could_have(wanted.bundle)]
        roomy = [node for node in fit if node.has_free(wanted.bundle)]
        count = min(nodes, len(fit), max(least, len(roomy)))
        group = placement_group([wanted.bundle] * count, strategy=_SPREAD, name=name)
        try:
            if _wait_for_group(group, wanted, count, patience):
                return group, count
        except BaseException:  # not there, and not wanted any more; raised again
            remove_placement_group(group)
            raise
        remove_placement_group(group)  # Ray takes a quarter of a minute to see that a node is gone


@dataclass
class _Waiting:
    began: float
    until: float
    note: Callable[[str], None]
    stopped: Callable[[], bool]


def _wait_for_group(group: Any, wanted: ResourceRequest, count: int, patience: _Waiting) -> bool:
    """Waits until the places are there; False where the cluster has become too small for so many.

    Raises:
        UnfitError: if the time is over, or it is stopped.
    """
    told = time.monotonic() - _NOTE_EVERY_S + 2.0
    while not group.wait(0.5):
        nodes, now = living_nodes(), time.monotonic()
        if sum(node.could_have(wanted.bundle) for node in nodes) < count:
            return False
        if patience.stopped():
            raise no_room(nodes, wanted, count, why="it was asked to stop while it waited")
        if now > patience.until:
            raise no_room(
                nodes, wanted, count, why=f"no room came within {patience.until - patience.began:.0f} s"
            )
        if now - told > _NOTE_EVERY_S:
            told = now
            patience.note(
                f"waiting for room on {count} nodes of the Ray cluster ({now - patience.began:.0f} s): "
                + "; ".join(node.describe(wanted.bundle) for node in nodes)
            )
    return True


def show_resources(bundle: Mapping[str, float]) -> str:
    """`2 CPU, 1 GPU, 2.5 GiB`."""
    return ", ".join(_amount(name, amount) for name, amount in bundle.items())


def _amount(name: str, amount: float) -> str:
    return f"{show_bytes(int(amount))} memory" if name == "memory" else f"{amount:g} {name}"


def _free_of(name: str, free: float, total: float) -> str:
    if name == "memory":
        return f"{show_bytes(int(free))} of {show_bytes(int(total))} memory free"
    return f"{free:g} of {total:g} {name} free"


def _refuse_address(address: str) -> None:
    """Ray itself tries for twenty seconds and more to reach what is not there."""
    if address.startswith("ray://"):
        raise UsageError.of(
            "--launcher ray does not work through Ray Client",
            where=f"--ray-address {address}",
            why="files would have to go through its proxy",
            fix="run it on a node of the cluster, or by `ray job submit`",
        )
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise UsageError.of(
            f"{address} is no address of a Ray cluster",
            where="--ray-address",
            fix="as in --ray-address 10.0.0.1:6379",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise UsageError.of(
            f"no Ray cluster answers at {address}",
            where="--ray-address, RAY_ADDRESS",
            why=str(error),
            fix="start one there (`ray start --head`), or give the address that it printed",
        ) from error


def _not_connected(address: str, text: str) -> UsageError:
    if "Version mismatch" in text:
        return UsageError.of(
            "this is another version of Ray or Python than the cluster's",
            where=address,
            why=one_line(text, limit=500),
            fix="install the cluster's version of ray here, under the cluster's version of python",
        )
    return UsageError.of(
        "there is no Ray cluster here"
        if address == "auto"
        else f"the Ray cluster at {address} does not take this driver",
        where="--ray-address, RAY_ADDRESS",
        why=one_line(text, limit=500),
        fix="start one (`ray start --head`), or name it: --ray-address HOST:6379; the command runs on one of its nodes",
    )


def resources_for(nproc: int, device: str, nodes: list[RayNode]) -> ResourceRequest:
    """What each node is asked for: one accelerator a rank, where the config does not say otherwise and the cluster has any."""
    has_any = any(node.total.get("GPU", 0) for node in nodes)
    return ResourceRequest(nproc, nproc if device == "cuda" or (device == "auto" and has_any) else 0)


def identify_nodes(actors: list[Any], *, cluster: str) -> list[JobNode]:
    """The places, by node rank.

    Args:
        actors: the keepers' handles.
        cluster: its address, for people.

    Raises:
        UnfitError: if a keeper does not answer.
    """
    nodes = {node.id: node for node in living_nodes()}
    places = [JobNode(rank, actor) for rank, actor in enumerate(actors)]
    for place in places:
        try:
            place.facts = place.call("facts")
        except ActorLost as error:
            raise UnfitError.of(
                f"Ray could not start anything for node {place.node_rank}",
                where=place.address or cluster,
                why=error.why,
                fix="look at `ray status`, and at the raylet's log on that node",
            ) from error
        node = nodes.get(str(place.facts["ray_node"]))
        place.address = node.address if node is not None else ""
    places.sort(key=lambda place: (place.host, place.address))  # Ray deals bundles out as it likes
    for node_rank, place in enumerate(places):
        place.node_rank = node_rank
    return places


def head_endpoint(places: list[JobNode]) -> str:
    """HOST:PORT of node 0, on a port that is free there.

    Raises:
        KeeperLost: if it does not answer.
    """
    head = places[0]
    host = f"[{head.address}]" if ":" in head.address else head.address
    return f"{host}:{head.call('free_port', head.address)}"
