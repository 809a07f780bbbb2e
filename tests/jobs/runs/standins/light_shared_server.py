"""The shared fork server with imports of tests in place of ours: python -m
tests.jobs.runs.standins.light_shared_server SOCKET --front-pid N
"""

import os
import sys

from tests import shared_fork_server
from unisono.trainer.worker import fork_server

if __name__ == "__main__":
    fork_server._MODULES = ("numpy",)
    shared_fork_server.main(sys.argv[1:])
    os._exit(0)
