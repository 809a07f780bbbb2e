"""The Ray cluster: the connection to it, its nodes' resources, and the reservation of nodes for a
job.

Only the driver calls this.
"""

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

from unisono.base.errors import UnfitError, UsageError
from unisono.base.text import one_line, show_bytes
from unisono.jobs.launchers import ray_node_actor
from unisono.jobs.launchers.ray_node_fronts import ActorLost, JobNode, RayHead

MEMORY_OF_A_RANK_BYTES = 1_000_000_000
RESERVE_BYTES = 500_000_000
"""Memory beside the ranks on each node: for the front, the actor, and Ray's own processes."""

_REACH_S = 3.0
_NOTE_EVERY_S = 10.0
_END_S = 5.0
_SPREAD = "STRICT_SPREAD"


@dataclass(frozen=True)
class ResourceRequest:
    """The resources requested on each node.

    Attributes:
        gpus: accelerators; one for each rank, or none.
    """

    nproc: int
    gpus: int

    @property
    def bundle(self) -> dict[str, float]:
        """The request as a bundle of Ray."""
        memory = self.nproc * MEMORY_OF_A_RANK_BYTES + RESERVE_BYTES
        resources: dict[str, float] = {"CPU": self.nproc, "memory": memory}
        return resources | ({"GPU": self.gpus} if self.gpus else {})

    def __str__(self) -> str:
        return (
            f"on each {show_resources(self.bundle)} (1 CPU{', 1 GPU' if self.gpus else ''} and "
            f"{show_bytes(MEMORY_OF_A_RANK_BYTES)} per rank, {show_bytes(RESERVE_BYTES)} in reserve)"
        )


@dataclass(frozen=True)
class RayNode:
    """A live node of the cluster."""

    id: str
    host: str
    address: str
    total: dict[str, float]
    free: dict[str, float]

    def could_have(self, bundle: Mapping[str, float]) -> bool:
        """Whether it is large enough when idle."""
        return all(self.total.get(name, 0.0) >= amount for name, amount in bundle.items())

    def has_free(self, bundle: Mapping[str, float]) -> bool:
        """Whether it has enough free resources now."""
        return all(self.free.get(name, 0.0) >= amount for name, amount in bundle.items())

    def describe(self, bundle: Mapping[str, float]) -> str:
        """`ada (10.0.0.1): 2 of 4 CPU free, …`, for the requested resources."""
        parts = [_free_of(name, self.free.get(name, 0.0), self.total.get(name, 0.0)) for name in bundle]
        return f"{self.host} ({self.address}): {', '.join(parts)}"


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connects this process to the cluster as a driver, inside the context.

    Args:
        address: HOST:PORT, or `auto`: the cluster of this machine.

    Raises:
        UsageError: if Ray is not installed, the address is not valid, or no cluster answers there.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError.of(
            "--launcher ray needs Ray, which is not installed here",
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
    """Ignores signals here: terminals and `ray job stop` signal all processes of a command, and
    Ray's drivers exit on SIGTERM, but files are saved through this one.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _bounded(work: Callable[[], object]) -> None:
    """Runs a clean-up call for a few seconds at most: without its head Ray would wait, and what the
    call ends also ends with the cluster.
    """
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_END_S)


def find_ray_head() -> RayHead:
    """Ray's head node; needs a connection."""
    import ray

    address = str(ray.get_runtime_context().gcs_address)
    host = address.rpartition(":")[0].strip("[]")
    return RayHead(address, next((node.host for node in living_nodes() if node.address == host), ""))


def living_nodes() -> list[RayNode]:
    """The live nodes of the cluster, sorted by host."""
    import ray

    # 2.60: no public function gives the free resources of each node.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    alive = [
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
    return sorted(alive, key=lambda node: (node.host, node.address))


def refuse_too_small(nodes: Sequence[RayNode], request: ResourceRequest, least: int) -> None:
    """Checks that the cluster could run the job when idle.

    Raises:
        UnfitError: with the requested resources and those of each node.
    """
    fit = [node for node in nodes if node.could_have(request.bundle)]
    if len(fit) < least:
        raise no_capacity(
            nodes, request, least, why=f"{len(fit)} of {len(nodes)} nodes of the cluster are large enough"
        )


def no_capacity(nodes: Sequence[RayNode], request: ResourceRequest, least: int, *, why: str) -> UnfitError:
    """The error for a cluster that cannot provide the nodes."""
    available = "; ".join(node.describe(request.bundle) for node in nodes) or "no live node"
    return UnfitError.of(
        f"the Ray cluster has no room for {least} node{'' if least == 1 else 's'}: {why}",
        where=f"requested: {request}",
        why=f"available: {available}",
        fix="lower --nodes or --nproc, wait for other jobs there (`ray status`), or add nodes",
    )


@contextlib.contextmanager
def reserved(
    request: ResourceRequest,
    *,
    nodes: int,
    least: int,
    timeout_s: float,
    note: Callable[[str], None],
    stopped: Callable[[], bool],
) -> Iterator[list[Any]]:
    """One actor on each reserved node, in one placement group; both are removed on exit.

    Args:
        request: resources on each node.
        nodes: the largest number of nodes.
        least: the smallest sufficient number, used if there is no room for more now.
        timeout_s: how long to wait for resources in use by others.
        stopped: whether a stop was requested.

    Raises:
        UnfitError: if the resources are missing, or a stop was requested.
    """
    import ray
    from ray.util.placement_group import remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    ray.cloudpickle.register_pickle_by_value(ray_node_actor)
    began = time.monotonic()
    patience = _Patience(began, began + timeout_s, note, stopped)
    group, count = _reserve(request, nodes=nodes, least=least, patience=patience)
    actors: list[Any] = []
    try:
        for index in range(count):
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=index
            )
            options = {
                "num_cpus": request.nproc,
                "num_gpus": request.gpus,
                "max_restarts": 0,
                "max_concurrency": 8,
            }
            actors.append(
                ray.remote(ray_node_actor.NodeActor).options(scheduling_strategy=strategy, **options).remote()
            )
        yield actors
    finally:
        for actor in actors:
            _bounded(partial(ray.kill, actor))
        _bounded(partial(remove_placement_group, group))


def _reserve(request: ResourceRequest, *, nodes: int, least: int, patience: "_Patience") -> tuple[Any, int]:
    """A ready placement group, and the number of its nodes.

    Raises:
        UnfitError: on timeout, if the cluster is too small, or if a stop was requested.
    """
    from ray.util.placement_group import placement_group, remove_placement_group

    name = f"unisono-{secrets.token_hex(4)}"
    while True:
        living = living_nodes()
        refuse_too_small(living, request, least)
        fit = [node for node in living if node.could_have(request.bundle)]
        with_space = [node for node in fit if node.has_free(request.bundle)]
        count = min(nodes, len(fit), max(least, len(with_space)))
        group = placement_group([request.bundle] * count, strategy=_SPREAD, name=name)
        try:
            if _wait_for_group(group, request, count, patience):
                return group, count
        except BaseException:  # not ready and no longer needed; raised again
            remove_placement_group(group)
            raise
        remove_placement_group(group)  # Ray takes about 15 s to detect a lost node


@dataclass
class _Patience:
    began: float
    until: float
    note: Callable[[str], None]
    stopped: Callable[[], bool]


def _wait_for_group(group: Any, request: ResourceRequest, count: int, patience: _Patience) -> bool:
    """Waits until the placement group is ready; False if the cluster has become too small for it.

    Raises:
        UnfitError: on timeout, or if a stop was requested.
    """
    noted = time.monotonic() - _NOTE_EVERY_S + 2.0
    while not group.wait(0.5):
        nodes, now = living_nodes(), time.monotonic()
        if sum(node.could_have(request.bundle) for node in nodes) < count:
            return False
        if patience.stopped():
            raise no_capacity(nodes, request, count, why="it was stopped while it waited")
        if now > patience.until:
            raise no_capacity(
                nodes,
                request,
                count,
                why=f"no room became free within {patience.until - patience.began:.0f} s",
            )
        if now - noted > _NOTE_EVERY_S:
            noted = now
            patience.note(
                f"waiting for room on {count} nodes of the Ray cluster ({now - patience.began:.0f} s): "
                + "; ".join(node.describe(request.bundle) for node in nodes)
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
    """Checks the address first: Ray itself retries for 20 s or more."""
    if address.startswith("ray://"):
        raise UsageError.of(
            "--launcher ray does not work through Ray Client",
            where=f"--ray-address {address}",
            why="files would have to pass through its proxy",
            fix="run the command on a node of the cluster, or with `ray job submit`",
        )
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isdigit():
        raise UsageError.of(
            f"{address} is not a valid address of a Ray cluster",
            where="--ray-address",
            fix="e.g. --ray-address 10.0.0.1:6379",
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
    except OSError as error:
        raise UsageError.of(
            f"no Ray cluster answers at {address}",
            where="--ray-address, RAY_ADDRESS",
            why=str(error),
            fix="start one there (`ray start --head`), or use the address that it printed",
        ) from error


def _not_connected(address: str, text: str) -> UsageError:
    if "Version mismatch" in text:
        return UsageError.of(
            "the version of Ray or Python differs from the cluster's",
            where=address,
            why=one_line(text, limit=500),
            fix="install the cluster's version of Ray here, under the cluster's version of Python",
        )
    return UsageError.of(
        "there is no Ray cluster here"
        if address == "auto"
        else f"the Ray cluster at {address} rejects this driver",
        where="--ray-address, RAY_ADDRESS",
        why=one_line(text, limit=500),
        fix="start one (`ray start --head`), or set --ray-address HOST:6379; run the command on one of its nodes",
    )


def resources_for(nproc: int, device: str, nodes: list[RayNode]) -> ResourceRequest:
    """The resources for each node: one accelerator for each rank, if the config allows it and the
    cluster has any.
    """
    has_any = any(node.total.get("GPU", 0) for node in nodes)
    return ResourceRequest(nproc, nproc if device == "cuda" or (device == "auto" and has_any) else 0)


def identify_nodes(actors: list[Any], *, cluster: str) -> list[JobNode]:
    """The nodes of the job, by node rank.

    Args:
        cluster: its address, for messages.

    Raises:
        UnfitError: if an actor does not answer.
    """
    ray_nodes = {ray_node.id: ray_node for ray_node in living_nodes()}
    nodes = [JobNode(rank, actor) for rank, actor in enumerate(actors)]
    for node in nodes:
        try:
            node.facts = node.call("facts")
        except ActorLost as error:
            raise UnfitError.of(
                f"Ray could not start an actor for node {node.node_rank}",
                where=node.address or cluster,
                why=error.why,
                fix="see `ray status`, and the raylet's log on that node",
            ) from error
        ray_node = ray_nodes.get(str(node.facts["ray_node"]))
        node.address = ray_node.address if ray_node is not None else ""
    nodes.sort(key=lambda node: (node.host, node.address))  # Ray assigns bundles in any order
    for node_rank, node in enumerate(nodes):
        node.node_rank = node_rank
    return nodes


def head_endpoint(nodes: list[JobNode]) -> str:
    """HOST:PORT for the head on node 0, with a free port there.

    Raises:
        ActorLost: if node 0 does not answer.
    """
    head = nodes[0]
    host = f"[{head.address}]" if ":" in head.address else head.address
    return f"{host}:{head.call('free_port', head.address)}"
