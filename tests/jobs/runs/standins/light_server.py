"""The fork server with imports of tests in place of ours: python -m
tests.jobs.runs.standins.light_server FRONT_PID
"""

import os
import sys

from unisono.trainer.worker import fork_server

if __name__ == "__main__":
    fork_server._MODULES = ("numpy", *filter(None, os.environ.get("LIGHT_SERVER_IMPORTS", "").split()))
    fork_server.main(sys.argv[1:])
    os._exit(0)
