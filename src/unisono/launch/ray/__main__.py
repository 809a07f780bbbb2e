"""`python -m unisono.launch.ray driver REQUEST.json`: see driver.py."""

import json
import sys

from unisono.child import parse_child_arguments, run_child
from unisono.launch.ray.driver import drive

if __name__ == "__main__":
    arguments = parse_child_arguments(sys.argv[1:], named=True)
    body = json.loads(arguments.file.read_text(encoding="utf-8"))
    sys.exit(run_child(lambda reporter: drive(reporter, body), arguments))
