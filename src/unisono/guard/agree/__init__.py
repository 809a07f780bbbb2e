"""Compares whether all nodes and ranks have the same run: pure functions of their reports."""
