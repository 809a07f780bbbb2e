"""`unisono doctor --launcher`: the look made on nodes that Slurm or Ray gives for it; node 0's table comes back here."""
