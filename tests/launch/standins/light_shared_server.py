"""The shared fork server with imports of tests in place of ours: python -m
tests.launch.standins.light_shared_server SOCKET --front-pid N
"""

import os
import runpy
import sys

from unisono.trainer.worker import fork_server, shared_fork_server

if __name__ == "__main__":
    fork_server._MODULES = ("numpy",)
    if shared_fork_server.main(sys.argv[1:]) is not None:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    os._exit(0)
