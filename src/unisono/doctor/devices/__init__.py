"""Accelerators and processors: which there are, how they are joined, whether they are well, and whether the choice is a good one."""
