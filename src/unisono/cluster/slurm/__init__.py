"""Slurm: `--launcher slurm` writes, submits and follows a batch job; `doctor` takes a step of srun."""
