"""Starts the fronts of a job on other machines by Ray and Slurm (`--launcher`)."""
