"""One training run: the request, this machine, and then this node's part, head or member."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from unisono.config import LoadedConfig
from unisono.errors import Disagreed, UnisonoError, as_usage_error
from unisono.events import Show, notify
from unisono.facts import Environment, read_environment, read_machine, take_token
from unisono.launch.head_preparation import plan_start
from unisono.launch.head_run import HeadRun
from unisono.launch.meeting_entry import is_about_nodes, party_of, report_early_refusal
from unisono.launch.outcome import NOTHING_DONE, Ending, result_of
from unisono.launch.planning import LocalNode, look_around, prepare
from unisono.launch.train_request import TrainRequest, load_requested, refuse_live_launcher, show_notes
from unisono.plan import RunPlan
from unisono.plan.placement import lay_out
from unisono.remote_checkpoint.storage_trial import storage_tried
from unisono.rendezvous import meeting_rules
from unisono.rendezvous.remote_fronts import token_hint, token_of_step
from unisono.rundir import RunDir
from unisono.rundir.start_decision import decide_start
from unisono.supervise.fork_server import ForkServer
from unisono.supervise.interrupts import Interrupts, Stopped, exit_code_of


def train(request: TrainRequest, show: Show) -> dict[str, Any]:
    """Carries a start from its config to its end; gives the object of result.json.

    Raises:
        UnisonoError: if it is refused before anything was started.
    """
    began = time.monotonic()
    token = take_token()
    with Interrupts() as interrupts, ForkServer(lambda text: notify(show, text)) as fork_server:
        request = replace(request, programs=replace(request.programs, fork_server=fork_server))
        try:
            result = _start(request, show, interrupts, began, token)
        except Stopped as stopped:
            who = stopped.number.name + (f" to {stopped.where}" if stopped.where else "")
            notify(show, f"{who} before anything was started: nothing changed")
            result = result_of(
                Ending(exit_code_of(stopped.number), NOTHING_DONE),
                run_id="",
                output_dir="",
                restarts=[],
                seconds=time.monotonic() - began,
            )
        except UnisonoError as error:
            if error.verdict is None or not is_about_nodes(error):
                raise
            if (
                error.verdict.cause == "token_rejected"
                and token is None
                and (hint := token_hint(read_environment()))
            ):
                notify(show, hint)
            result = _disagreed(error, show, began)
    show({"kind": "result", "time": time.time(), **result})
    return result


def plan_only(request: TrainRequest, show: Show) -> RunPlan:
    """The plan of a start that is not made; nothing is left in the run's directory. Other nodes are taken to be like this one.

    Raises:
        UnisonoError: whatever the start itself would be refused for before its ranks.
    """
    loaded, local_node = _look(request, read_environment())
    show_notes(loaded, show)
    run = RunDir(Path(loaded.config.output_dir))
    with as_usage_error():
        decision = decide_start(
            run, loaded.config, resume=request.resume, fresh=request.fresh, allow=request.allowed
        )
    with storage_tried(
        loaded.config,
        run,
        decision.run_id,
        programs=request.programs,
        leftovers=local_node.leftovers,
        show=show,
    ):
        prepared = prepare(request, loaded, local_node.environment, ledger=False, show=show)
    layout = lay_out([local_node.offer_as(node_rank) for node_rank in range(local_node.topology.nodes)])
    return plan_start(
        request, loaded, local_node, run=run, decision=decision, prepared=prepared, show=show, layout=layout
    )


def _look(request: TrainRequest, environment: Environment) -> tuple[LoadedConfig, LocalNode]:
    """The config, and what is here for it."""
    with as_usage_error():
        loaded = load_requested(request)
        refuse_live_launcher(environment, request)
        return loaded, look_around(request, loaded, read_machine(request.probes.devices), environment)


def _start(
    request: TrainRequest, show: Show, interrupts: Interrupts, began: float, token: str | None
) -> dict[str, Any]:
    environment = read_environment()
    token = token or token_of_step(environment)
    try:
        loaded, local_node = _look(request, environment)
    except UnisonoError as error:
        report_early_refusal(request, environment, error, token=token, show=show)
        raise
    if local_node.topology.is_head:
        show_notes(loaded, show)
    party = None
    if local_node.topology.nodes > 1:
        if request.programs.fork_server is not None:
            request.programs.fork_server.waits = (
                False  # meanwhile this front would not answer the other nodes
            )
        party = party_of(request, local_node.topology, host=local_node.machine.host, token=token, show=show)
    if party is not None and not local_node.topology.is_head:
        from unisono.launch.member_run import take_part

        return take_part(request, loaded, local_node, party, interrupts=interrupts)
    return HeadRun(request, show, interrupts, began, party).run(loaded, local_node)


def _disagreed(error: UnisonoError, show: Show, began: float) -> dict[str, Any]:
    """Says what nodes or ranks disagree about, in the same words on all of them, and gives the result."""
    assert error.verdict is not None
    if not (isinstance(error, Disagreed) and error.already_shown):
        meeting_rules.show_verdicts(show, error.verdict, [problem.what for problem in error.problems[1:]])
    return result_of(
        Ending(error.exit_code, NOTHING_DONE, error.verdict),
        run_id="",
        output_dir="",
        restarts=[],
        seconds=time.monotonic() - began,
    )
