"""Starts the fronts of a job on other machines with Ray and Slurm (`--launcher`)."""
