"""Slurm: `--launcher slurm` writes, submits and follows a batch job; `doctor` runs as an srun step."""
