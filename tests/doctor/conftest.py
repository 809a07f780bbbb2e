"""Several nodes on this machine, as tests/nodes have them."""

from tests.nodes.conftest import job_of, networks, pair, trio

__all__ = ["job_of", "networks", "pair", "trio"]
