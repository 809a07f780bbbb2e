"""`unisono doctor --launcher ray`: the look on the nodes that a Ray cluster would give a run."""

import secrets

from unisono.cluster.ray.ray_job import DRIVER, cluster_address, ray_topology
from unisono.doctor.asked import DoctorRequest
from unisono.doctor.examining import Examination
from unisono.doctor.launched.answer import examination_of, read_answer, without_answer
from unisono.doctor.looking import read_config
from unisono.facts import read_environment
from unisono.launch.train_request import config_yaml
from unisono.rendezvous.ssh import forwarded_variables
from unisono.supervise.child_process import option_words
from unisono.supervise.task_process import run_task


def examine_on_ray(request: DoctorRequest) -> Examination:
    """Has the nodes look, and gives what they have found together.

    Raises:
        ConfigError: with every problem of the config, before the cluster is asked for anything.
        UsageError: if an option does not go with Ray, or there is no such cluster.
        UnfitError: if it cannot give the nodes, one is lost, or the look ended without an answer.
    """
    environment, loaded = read_environment(), read_config(request)
    shape = ray_topology(request.training, environment)
    given = request.config_path is not None
    body = {
        "job": secrets.token_hex(8), "address": cluster_address(request.training, environment),
        "config": config_yaml(loaded.config, command="unisono doctor, by --launcher ray") if given else None,
        "device": loaded.config.device, "words": _words(request), "nodes": shape.nodes, "least": shape.enough, "nproc": shape.nproc,
        "join_timeout_s": request.join_timeout_s, "variables": forwarded_variables(environment.variables),
    }  # fmt: skip
    told = run_task("look", body, on_message=request.show, programs=DRIVER)
    answer = next((found for line in reversed(told["lines"]) if (found := read_answer(line))), None)
    hosts = ", ".join(told["hosts"])
    if answer is None:
        raise without_answer(
            where=f"{told['hosts'][0]}, exit code {told['code']}",
            said=told["said"],
            fix="`ray status` says what became of that node; or look there by hand: unisono doctor",
        )
    return examination_of(answer, code=int(told["code"]), host=f"Ray's {hosts}")


def _words(request: DoctorRequest) -> list[str | None]:
    """Of each node's `unisono`, null where its config stands; that has the overrides in it."""
    words, options = request.look(None, resolved=True)
    config = [None] if request.config_path is not None else []
    return ["--json", *words, *config, *option_words(options)]
