"""Runs over processes and nodes: launchers, attempts, restarts, checkpoints that move between nodes."""
