"""Reads the logs of a failed run, of any tool, and finds the cause: sources, events, facts, rules,
one verdict.
"""
