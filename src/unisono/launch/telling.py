"""Tells the head of this node's ranks: how they are, twice a second, and what was gathered of those that it asks for."""

import time
from collections.abc import Callable

from unisono.events import Message
from unisono.launch.job import RanksHere
from unisono.launch.signs import Signs

_EVERY_S = 0.5
_LINKS_FOR_S = 15.0  # while something is suspected the head asks again and again


class Telling:
    """What a node other than the head's says of its ranks. Nothing here waits."""

    def __init__(self, local: RanksHere, node_rank: int, send: Callable[[Message], None]) -> None:
        """Nothing has been told yet.

        Args:
            local: this node's ranks.
            node_rank: of this node.
            send: to the head.
        """
        self._local = local
        self._send = send
        self._signs = Signs(local, node_rank)
        self._next = 0.0
        self._links_until = 0.0

    def look(self, message: Message) -> None:
        """The head suspects something; other nodes' ranks that it may name are left out."""
        self._links_until = time.monotonic() + _LINKS_FOR_S
        self._signs.look([int(rank) for rank in message["ranks"]])

    def tell(self) -> None:
        """Called as often as one likes. Says nothing once all ranks are gone: the head may have begun the next start then."""
        if self._local.all_ended:
            return
        now = time.monotonic()
        if now >= self._next:
            self.tell_views()
        for look in self._signs.looks():
            raw = {str(look.rank): self._signs.raw(look.rank).to_json()}
            self._send({"kind": "looked", "looks": [look.to_json()], "raw": raw})

    def tell_views(self) -> None:
        """At once: of a rank that has ended it is the last sign of life, and goes before the word of its end."""
        now = time.monotonic()
        self._next = now + _EVERY_S
        links = self._signs.links() if now < self._links_until else []
        views = [view.to_json() for view in self._signs.views(now)]
        self._send({"kind": "beats", "views": views, "links": links})

    def close(self) -> None:
        """Ends what was started for looks."""
        self._signs.close()
