"""`--launcher nodes`: the user, a scheduler or SSH starts the same command on each node."""

from unisono.jobs.launchers.launcher import Launcher


class NodesLauncher(Launcher):
    """Runs this node's part of a job of several nodes."""

    name = "nodes"
    expects_nodes = True
