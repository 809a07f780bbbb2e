"""Several nodes on this machine, as tests/jobs/nodes have them."""

from tests.jobs.nodes.conftest import job_of, networks, pair, trio

__all__ = ["job_of", "networks", "pair", "trio"]
