"""Slurm: where srun has put a front, and `--launcher slurm`, which writes, submits and follows a batch job."""
