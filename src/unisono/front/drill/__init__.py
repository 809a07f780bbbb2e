"""Drills: injects each fault into a tiny real run on this machine, and compares the verdict with
the expected one.
"""
