"""The places that Ray has given, once each keeper has said where it is. In the driver's process."""

from typing import Any

from unisono.errors import UnfitError
from unisono.launch.ray.cluster import RayNode, Wanted, living_nodes
from unisono.launch.ray.fronts import KeeperLost, Place


def wanted_of(nproc: int, device: str, nodes: list[RayNode]) -> Wanted:
    """What each node is asked for: one accelerator a rank, where the config does not say otherwise and the cluster has any."""
    has_any = any(node.total.get("GPU", 0) for node in nodes)
    return Wanted(nproc, nproc if device == "cuda" or (device == "auto" and has_any) else 0)


def met(actors: list[Any], *, cluster: str) -> list[Place]:
    """The places, by node rank.

    Args:
        actors: the keepers' handles.
        cluster: its address, for people.

    Raises:
        UnfitError: if a keeper does not answer.
    """
    nodes = {node.id: node for node in living_nodes()}
    places = [Place(rank, actor) for rank, actor in enumerate(actors)]
    for place in places:
        try:
            place.facts = place.call("facts")
        except KeeperLost as error:
            raise UnfitError.of(
                f"Ray could not start anything for node {place.node_rank}", where=place.address or cluster, why=error.why,
                fix="look at `ray status`, and at the raylet's log on that node",
            ) from error  # fmt: skip
        node = nodes.get(str(place.facts["ray_node"]))
        place.address = node.address if node is not None else ""
    places.sort(key=lambda place: (place.host, place.address))  # Ray deals bundles out as it likes
    for node_rank, place in enumerate(places):
        place.node_rank = node_rank
    return places


def head_of(places: list[Place]) -> str:
    """HOST:PORT of node 0, on a port that is free there.

    Raises:
        KeeperLost: if it does not answer.
    """
    head = places[0]
    host = f"[{head.address}]" if ":" in head.address else head.address
    return f"{host}:{head.call('free_port', head.address)}"
