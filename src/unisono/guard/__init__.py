"""Compares nodes, watches ranks, finds causes of failures: in training and in any program."""
