"""`--launcher ray`: the nodes of a job run in a Ray cluster. Ray starts the fronts and transfers files; unisono controls the run.

front (ray_job)         the user's command: config, lock, screen, signals                 never imports ray
└ driver                a separate process, since Ray may abort a connected process       ray_cluster, job_attempt, mirror
  └ node_actor          an actor on each node: starts and ends the node's front           standard library only
    └ process_guard     outlives the actor briefly, to clean up
      └ node_main       a front as everywhere, node 0 being the head                      launch.session.train
        └ ranks
"""
