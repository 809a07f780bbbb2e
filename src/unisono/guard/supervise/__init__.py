"""Runs and monitors the processes of ranks and tasks, and makes the one decision on a death or a
stall; used by `train` and by `run`.
"""
