"""Checkpoints beyond the process that wrote them: copies in storage, shards of other nodes, rescue
from memory, re-reading.
"""
