"""Runs over processes and nodes: launchers, attempts, restarts, remote checkpoints."""
