"""`unisono train --launcher ray`, in the front of the user's command: config, lock, the driver's
process, and the outcome.
"""

import contextlib
import secrets
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from unisono.base.causes import Verdict, find_cause
from unisono.base.errors import Disagreed, RankDied, UsageError
from unisono.base.messages import ResultMessage, Show, VerdictMessage, message_of, notify
from unisono.guard.facts import Environment, no_gpus, read_environment, read_machine
from unisono.guard.places.topology import Accelerators, Topology, TopologyRequest, read_topology
from unisono.guard.rendezvous.meeting_rules import show_verdicts
from unisono.guard.rendezvous.remote_fronts import forwarded_variables
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import Restart, RunResult, read_result, set_verdict, write_result
from unisono.guard.supervise.child_process import Programs
from unisono.guard.supervise.codec import encode
from unisono.guard.supervise.interrupts import Interrupts, Stopped, exit_code_of
from unisono.guard.supervise.task_process import TaskProcess, refusal, run_request
from unisono.jobs.launchers.launcher import NodeOutput, NodesCommand
from unisono.jobs.launchers.ray_node_fronts import RayHead, ray_head_lost
from unisono.jobs.launchers.ray_requests import InspectionRequest, JobOutcome, RayJobRequest
from unisono.jobs.runs.preparation import Claim, claim
from unisono.jobs.runs.run_records import Ending, read_progress, result_of, result_without_run
from unisono.jobs.runs.train_request import TrainRequest, config_yaml, load_requested, show_notes
from unisono.trainer.config import LoadedConfig

DRIVER = Programs(task=(sys.executable, "-m", "unisono.jobs.launchers.ray_driver"))
_POLL_S = 0.1
_HEAD_EXIT_S = 3.0
"""The cluster's head may end slightly later than the processes connected to it."""


def train(request: TrainRequest, show: Show, *, ray_address: str | None) -> RunResult:
    """The result, after running a job on a Ray cluster to its end.

    Args:
        ray_address: as typed.

    Raises:
        UnisonoError: if it is refused before anything starts.
    """
    began = time.monotonic()
    environment = read_environment()
    loaded = load_requested(request)
    show_notes(loaded, show)
    body = _driver_request(request, loaded, environment, ray_address)
    with Interrupts() as interrupts:
        try:
            result = _Session(request, loaded, show, interrupts, body, began).run()
        except Stopped as stopped:
            notify(show, f"{stopped.number.name} before anything was started: nothing changed")
            ending = Ending(exit_code_of(stopped.number))
            result = result_without_run(ending, seconds=time.monotonic() - began)
        except Disagreed as error:
            if error.verdict is None:
                raise
            show_verdicts(show, error.verdict, [problem.what for problem in error.problems[1:]])
            ending = Ending(error.exit_code, verdict=error.verdict)
            result = result_without_run(ending, seconds=time.monotonic() - began)
    show(message_of(ResultMessage, result.to_json()))
    return result


@dataclass
class _Session:
    request: TrainRequest
    loaded: LoadedConfig
    show: Show
    interrupts: Interrupts
    body: RayJobRequest
    began: float
    ray_head: RayHead | None = None
    step: int = 0
    restarts: list[Restart] = field(default_factory=list)
    """The driver's restarts; with these fields the outcome is known even if the driver dies."""

    @property
    def run_dir(self) -> RunDir:
        return RunDir(Path(self.loaded.config.output_dir))

    def run(self) -> RunResult:
        """The job's result.

        The run's directory stays claimed until the nodes turn out to share it.
        """
        config, request = self.loaded.config, self.request
        with contextlib.ExitStack() as stack:
            claimed = stack.enter_context(
                claim(
                    config,
                    host=read_machine(no_gpus).host,
                    resume=request.resume,
                    fresh=request.fresh,
                    notify=lambda text: notify(self.show, text),
                    allow=request.allowed,
                    origins=self.loaded.origins,
                )
            )
            try:
                with TaskProcess("driver", encode(self.body), has_input=True, programs=DRIVER) as driver:
                    last = self._follow(driver, stack, claimed)
            except RankDied as error:
                last = self._without_driver(error)
            finally:
                claimed.worth_keeping = _has_something(self.run_dir)
            return self._ended(last)

    def _follow(self, driver: TaskProcess, stack: contextlib.ExitStack, claimed: Claim) -> JobOutcome:
        """The driver's result. Its other messages are shown; signals are passed to it."""
        sent = 0
        while True:
            for message in driver.new_messages():
                match message["kind"]:
                    case "placed":
                        hosts = ", ".join(
                            f"node {rank} on {host}" for rank, host in enumerate(message["hosts"])
                        )
                        notify(self.show, f"placed by Ray: {hosts}")
                        self.interrupts.collect()
                        claimed.trained = True  # from now on the files here come from the head
                        if message["shared"]:  # the head's front claims the directory itself
                            claimed.worth_keeping = _has_something(
                                self.run_dir
                            )  # files of an earlier attempt
                            stack.close()
                        driver.send({"kind": "go"})
                    case "connected":
                        self.ray_head = RayHead(str(message["address"]), str(message["host"]))
                    case "restarting":
                        self.restarts.append(Restart.model_validate(message["restart"]))
                    case "result":
                        return cast("JobOutcome", message)
                    case _:
                        self.step = int(message["step"]) if message["kind"] == "step" else self.step
                        self.show(message)
            received = (self.interrupts.first is not None) + self.interrupts.twice
            while sent < received and self.interrupts.first is not None:
                driver.send({"kind": "signal", "name": self.interrupts.first.name})
                sent += 1
            time.sleep(_POLL_S)

    def _without_driver(self, error: RankDied) -> JobOutcome:
        """The result in place of a driver that exited without one: Ray ends it at once if the
        cluster's head is gone.

        Raises:
            RankDied: if the head still answers.
        """
        head = self.ray_head
        if head is not None:
            head.probe_for(_HEAD_EXIT_S)
        if head is None or not head.why:
            raise _driver_died(error, self.body.address) from error
        verdict = ray_head_lost(head, message=error.problems[0].why, after_s=round(head.silent_s, 3))
        self.show(message_of(VerdictMessage, verdict.to_json()))
        return {
            "last": None,
            "lost": verdict.to_json(),
            "step": self.step,
            "restarts": [one.model_dump() for one in self.restarts],
        }

    def _ended(self, outcome: JobOutcome) -> RunResult:
        """The result of the job, from the driver's result.

        Raises:
            UnisonoError: if the head's front refused.
        """
        last, lost = outcome["last"], outcome["lost"]
        restarts = [Restart.model_validate(one) for one in outcome["restarts"]]
        if last is None:
            return self._lost(Verdict.from_json(lost or {}), int(outcome["step"]), restarts)
        if last["kind"] == "start_refused":
            raise refusal(last)
        result = RunResult.from_json(last)
        if restarts:
            result = result.model_copy(update={"restarts": [*restarts, *result.restarts]})
            write_result(self.run_dir, result)
        return result

    def _lost(self, verdict: Verdict, step: int, restarts: Sequence[Restart]) -> RunResult:
        """The result if the head's node is lost and no restart is left.

        Its saved files are here.
        """
        known = find_cause(verdict.cause)
        progress = read_progress(self.run_dir)
        progress = replace(progress, step=max(step, progress.step))
        ending = Ending(known.exit_code if known else 4, progress, verdict)
        if self.interrupts.first is not None:
            ending = replace(ending, exit_code=exit_code_of(self.interrupts.first))
        result = result_of(
            ending,
            run_id="",
            output_dir=str(self.run_dir.root),
            restarts=restarts,
            seconds=time.monotonic() - self.began,
        )
        set_verdict(self.run_dir, verdict)
        before = read_result(self.run_dir)
        if before is None or not before.is_completed:
            write_result(self.run_dir, result)
        return result


def ray_topology(request: TrainRequest, environment: Environment) -> Topology:
    """The nodes and ranks to request from Ray.

    Raises:
        UsageError: if an option does not work with Ray.
    """
    if request.devices is not None:
        raise UsageError.of(
            "--devices does not work with --launcher ray: Ray assigns the devices of each node",
            where="command line",
            fix="remove it; --nproc N requests N accelerators on each node",
        )
    variables = {name: value for name, value in environment.leftovers.items() if name == "NPROC_PER_NODE"}
    has_others = request.nodes not in (None, "1")
    return read_topology(
        TopologyRequest(
            nproc=request.nproc,
            nodes=request.nodes,
            command=request.command,
            node_rank=0 if has_others else None,
            head="ray" if has_others else None,
        ),
        variables,
        Accelerators(0),
    )


def run_by_actors(command: NodesCommand, *, ray_address: str | None) -> NodeOutput:
    """Runs a command on the nodes of a Ray cluster.

    Args:
        ray_address: as typed.

    Raises:
        UsageError: if an option does not apply to Ray, or there is no such cluster.
        UnfitError: if it cannot provide the nodes, or one is lost.
    """
    environment, request, given = read_environment(), command.request, command.config_path is not None
    shape = ray_topology(request, environment)
    by = f"unisono {command.name}, by --launcher ray"
    inspection = InspectionRequest(
        job=secrets.token_hex(8),
        address=_cluster_address(ray_address, environment),
        config=config_yaml(command.loaded.config, command=by) if given else None,
        device=command.loaded.config.device,
        # Null stands for each node's config, which contains the overrides.
        words=["--json", command.name, *([None] if given else []), *command.options],
        nodes=shape.nodes,
        least=shape.enough,
        nproc=shape.nproc,
        join_timeout_s=request.join_timeout_s,
        variables=forwarded_variables(environment.variables),
    )
    looked = run_request(inspection, on_message=command.show, programs=DRIVER)
    hosts = ", ".join(looked["hosts"])
    return NodeOutput(
        lines=looked["lines"],
        code=looked["code"],
        host=f"Ray's {hosts}",
        where=f"{looked['hosts'][0]}, exit code {looked['code']}",
        tail=looked["said"],
        fix="`ray status` shows the state of that node; or run there: unisono doctor",
    )


def _cluster_address(ray_address: str | None, environment: Environment) -> str:
    """The address of the cluster; `auto`: the cluster of this machine."""
    return ray_address or environment.ray_address or "auto"


def _driver_request(
    request: TrainRequest, loaded: LoadedConfig, environment: Environment, ray_address: str | None
) -> RayJobRequest:
    """The request for the driver's process.

    Raises:
        UsageError: if an option does not work with Ray.
    """
    shape = ray_topology(request, environment)
    options = {
        "resume": request.resume,
        "allow": list(request.allow),
        "trust": request.trust,
        "trust_code": request.trust_code,
        "nproc": shape.nproc,
        "rehearse": request.rehearse,
        "join_timeout_s": request.join_timeout_s,
        "debug_comm": request.debug_comm,
        "limit_rows": request.limit_rows,
        "origins": dict(loaded.origins),
    }
    return RayJobRequest(
        job=secrets.token_hex(8),
        address=_cluster_address(ray_address, environment),
        config=loaded.config,
        options=options,
        nodes=shape.nodes,
        least=shape.enough,
        nproc=shape.nproc,
        join_timeout_s=request.join_timeout_s,
        variables=forwarded_variables(environment.variables),
    )


def _driver_died(error: RankDied, address: str) -> RankDied:
    """The error for a dead driver: Ray calls abort() if the cluster's head or the local raylet is
    gone; others may signal it.
    """
    problem = error.problems[0]
    return RankDied.of(
        problem.what.replace("the task driver", "the process that is connected to Ray"),
        where=f"Ray cluster {address}",
        why=problem.why,
        fix=(
            "`ray status` shows whether the cluster is still up; the same command resumes from the latest"
            " checkpoint here"
        ),
    )


def _has_something(run: RunDir) -> bool:
    """Whether a run's files are here, besides those of this front."""
    return any(path.exists() for path in (run.plan, run.result, run.verdict, run.agreement, run.metrics))
