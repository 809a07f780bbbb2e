"""A front that prints what it is, and what it was given: python -m
tests.jobs.runs.standins.front_facts [EXIT-CODE]
"""

import json
import os
import socket
import sys

from tests.jobs.runs.standins.reported_facts import facts

if __name__ == "__main__":
    found = facts() | {"given": sys.stdin.read(), "path": sys.path, "host": socket.gethostname()}
    print(json.dumps({"parent": os.getppid(), "facts": found}))
    print("to stderr", end="", file=sys.stderr)
    sys.exit(int(sys.argv[1]) if sys.argv[1:] else 0)
