"""A module that warns as it is imported."""

import sys

sys.stderr.write("an old name is used\n")
