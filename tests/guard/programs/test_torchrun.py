"""What the rendezvous back-end takes from torchrun in names that are not public.

Run: pytest tests/guard/programs/test_torchrun.py
"""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

from unisono.guard.integrations.torchrun_handler import launcher_node_rank, launcher_nproc, launcher_restarts

# torchrun itself, with a back-end that says what ours would find from where it is called.
_PROBE = """
import sys
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.run import main
from unisono.guard.integrations.torchrun_handler import launcher_node_rank, launcher_nproc, launcher_restarts

def create(parameters):
    print("found", launcher_nproc(), launcher_node_rank(), launcher_restarts(), parameters.max_nodes, parameters.config.get("rank"), flush=True)
    sys.exit(0)

rendezvous_handler_registry.register("probe", create)
main(sys.argv[1:])
"""


def test_the_number_of_ranks_and_of_the_node_is_found_in_this_torch() -> None:
    """If torch renames what leads to a handler, this says so: see
    unisono.guard.integrations.torchrun_handler.
    """
    words = [
        "--nnodes",
        "3",
        "--node-rank",
        "2",
        "--nproc-per-node",
        "5",
        "--max-restarts",
        "4",
        "--rdzv-backend",
        "probe",
        "--rdzv-endpoint",
        "h:1",
        "x.py",
    ]
    environment = {**os.environ, "PET_RDZV_CONF": "rank=2"}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        env=environment,
    )
    assert "found 5 2 4 3 2" in done.stdout, done.stderr


def test_torchrun_finds_the_back_end_without_loading_torch() -> None:
    (found,) = [one for one in entry_points(group="torchrun.handlers") if one.name == "unisono"]
    body = f"import sys; from {found.module} import {found.attr}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", body], check=True, timeout=240, cwd=Path(__file__).parent)


def test_outside_of_torchrun_nothing_is_found() -> None:
    assert launcher_nproc() is None
    assert launcher_node_rank() is None
    assert launcher_restarts() is None
