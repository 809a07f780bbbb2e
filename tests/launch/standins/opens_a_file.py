"""A module that leaves a file open as it is imported."""

import tempfile

HELD = tempfile.TemporaryFile()  # noqa: SIM115 - it stays open
