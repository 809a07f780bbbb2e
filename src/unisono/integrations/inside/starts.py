"""Ranks that torchrun starts anew find nothing in torch's store that others have left there, who are gone.

torchrun keeps one store for all starts (pytorch/pytorch#135712, up to 2.13 at least), and ranks put their addresses into it under the same
names each time. A rank that comes before another one reads where that one's forerunner was, and connects to nobody.
"""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

_KEPT = ("_bootstrap_store_info", "_shared_tcp_store_server")
"""What DynamicRendezvousHandler keeps of the first start; a test notices if it goes."""


def hook(module: ModuleType) -> None:
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
