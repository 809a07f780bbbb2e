"""`--launcher ray`: the nodes of a job are places in a Ray cluster. Ray starts our fronts and carries files; the run is ours alone.

front (session)     what was typed: config, lock, screen, signals                     never imports ray
└ driver            a process of its own, since Ray may abort whoever is connected     cluster, job, mirror
  └ keeper          an actor on each node: starts and ends what runs there             standard library alone
    └ warden        outlives the actor for a moment, to leave nothing behind
      └ node        the same front as everywhere, node 0 being the head                session.train
        └ ranks
"""
