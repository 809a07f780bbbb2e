"""Nodes agree, ranks are watched, failures get their cause: for our training and for any program."""
