"""`python -m unisono.launch.ray look REQUEST.json`: the driver of a look (`unisono doctor`) on nodes that Ray gives for it.

Like the driver of a run it is a process of its own. It asks for places as a run would, starts `unisono doctor` on each, and hands on
what node 0 says; nothing of it stays there.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unisono.checkpoint.manifest import user_key
from unisono.control.tokens import new_token
from unisono.errors import UnfitError
from unisono.events import Reporter
from unisono.facts import read_environment
from unisono.launch.ray.alike import refuse_unlike
from unisono.launch.ray.cluster import connected, living_nodes, placed
from unisono.launch.ray.driver import watch_for_token
from unisono.launch.ray.fronts import Fronts, KeeperLost, Place, name_lost_place
from unisono.launch.ray.places import head_of, met, wanted_of

_POLL_S = 0.3


@dataclass(frozen=True)
class LookAsked:
    """What the front asks for.

    Attributes:
        job: a name that no other has, for folders on the nodes.
        address: of the cluster.
        config: its text; None: there is none.
        device: as the config has it.
        words: of `unisono doctor`, without its place; null where the config stands.
        nodes: at the most.
        least: as few will do.
        nproc: ranks on each.
        join_timeout_s: how long to wait for room.
        variables: of the environment, for all nodes.
    """

    job: str
    address: str
    config: str | None
    device: str
    words: list[str | None]
    nodes: int
    least: int
    nproc: int
    join_timeout_s: float
    variables: dict[str, str]


def look(reporter: Reporter, body: dict[str, Any]) -> dict[str, Any]:
    """Has the nodes look; gives `lines` (what node 0 printed), `code` (its exit code), `said` (the last on its stderr) and `hosts`.

    Raises:
        UnisonoError: if the cluster cannot give the nodes, they are unlike this machine, or one is lost.
    """
    asked = LookAsked(**body)
    connecting = threading.Event()
    threading.Thread(target=watch_for_token, args=(reporter, connecting), daemon=True).start()

    def note(text: str) -> None:
        reporter.send("note", text=text)

    with connected(asked.address):
        connecting.set()
        wanted = wanted_of(asked.nproc, asked.device, living_nodes())
        with placed(
            wanted, nodes=asked.nodes, least=asked.least, timeout_s=asked.join_timeout_s, note=note, stopped=lambda: False
        ) as actors:  # fmt: skip
            places = met(actors, cluster=asked.address)
            refuse_unlike(places)
            note(f"placed by Ray: {', '.join(place.label for place in places)}")
            with _left_clean(places):
                try:
                    _start(asked, places)
                    return _heard(places)
                except KeeperLost as error:
                    place = error.place or places[0]
                    place.lost = place.lost or error.why
                    raise _lost(place) from error


def _start(asked: LookAsked, places: list[Place]) -> None:
    token = new_token().encode()
    key = user_key(read_environment().settings_dir).hex()
    head = head_of(places)
    for place in places:
        place.folder = str(place.call("make_place", asked.job))
        several = ["--nodes", str(len(places)), "--node-rank", str(place.node_rank), "--head", head]
        words = [*asked.words, "--token-file", "-", *(several if len(places) > 1 else [])]
        place.call("start", asked.config or "", {"look": words}, token, key, asked.variables)


def _heard(places: list[Place]) -> dict[str, Any]:
    """Hears node 0 to its end. The others end with it."""
    lines: list[str] = []
    fronts = Fronts(places, None, lines.append)
    head = places[0]
    while not head.ended:
        fronts.listen(_POLL_S)
        lost = next((place for place in places if place.lost), None)
        if lost is not None:
            raise _lost(lost)
    fronts.wait_gone()
    return {"lines": lines, "code": head.code, "said": head.tail, "hosts": [place.host for place in places]}


@contextlib.contextmanager
def _left_clean(places: list[Place]) -> Iterator[None]:
    try:
        yield
    finally:
        for place in places:
            with contextlib.suppress(
                KeeperLost
            ):  # its folder goes with its warden, or when the next job comes there
                place.call("leave")


def _lost(place: Place) -> UnfitError:
    verdict = name_lost_place(place)
    return UnfitError.of(verdict.summary, where=place.address, why=place.lost, fix=verdict.fix[0])
