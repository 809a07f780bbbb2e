"""Nodes agree, ranks are watched, failures get their cause: in training and in any program."""
