"""Where ranks run: the nodes of a job, the devices of a node, and who runs on which."""
