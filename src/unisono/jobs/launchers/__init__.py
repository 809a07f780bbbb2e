"""Starts the fronts of a job on other machines with Ray and Slurm (`--launcher`).

`--launcher slurm` writes, submits and follows a batch job; `doctor` runs as an srun step. With
`--launcher ray` the nodes of a job run in a Ray cluster: Ray starts the fronts and transfers files;
unisono controls the run.

front (ray_job)         the user's command: config, lock, screen, signals; never imports ray
└ ray_driver            a separate process, since Ray may abort a connected process;
                        uses ray_cluster, ray_job_attempt, ray_mirror
  └ ray_node_actor      on each node: starts and ends its front; standard library only
    └ its process guard outlives the actor briefly, to clean up
      └ ray_node_main   a front as everywhere (runs.session.train), node 0 being the head
        └ ranks
"""
