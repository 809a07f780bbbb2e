"""`python -m unisono.cluster.ray driver|look REQUEST.json`: the process that is connected to Ray; see driver.py."""

import json
import sys

from unisono.child import parse_child_arguments, run_child
from unisono.cluster.ray.driver import drive, inspect_nodes

if __name__ == "__main__":
    arguments = parse_child_arguments(sys.argv[1:], named=True)
    body = json.loads(arguments.file.read_text(encoding="utf-8"))
    work = {"driver": drive, "look": inspect_nodes}[arguments.name]
    sys.exit(run_child(lambda reporter: work(reporter, body), arguments))
