"""Checks before a start whether training will work on this machine and between nodes, and prints
the fix for each problem.
"""
