"""`unisono train --launcher ray`, in the front that was typed: config, lock, the driver's process, and how it ended."""

import contextlib
import secrets
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from unisono.causes import Verdict, find_cause
from unisono.cluster.ray.cluster_health import RayHead, ray_head_lost
from unisono.config import LoadedConfig
from unisono.errors import Disagreed, RankDied, UsageError
from unisono.events import Message, Show, say
from unisono.facts import Environment, read_environment, read_machine
from unisono.facts.machine import Gpu
from unisono.launch.outcome import NOTHING_DONE, Ending, result_of
from unisono.launch.run_claim import Claim, claim
from unisono.launch.run_records import read_progress
from unisono.launch.train_request import TrainRequest, load_asked
from unisono.plan.topology import Accelerators, Topology, TopologyRequest, read_topology
from unisono.rendezvous.meeting_end import show_verdicts
from unisono.rendezvous.ssh import forwarded_variables
from unisono.rundir import RunDir
from unisono.rundir.records import RunResult, read_result, set_verdict, write_result
from unisono.supervise.child_process import Programs
from unisono.supervise.interrupts import Interrupts, Stopped, exit_code_of
from unisono.supervise.task_process import TaskProcess, refusal

DRIVER = Programs(task=(sys.executable, "-m", "unisono.cluster.ray"))
_POLL_S = 0.1
_HEAD_GOES_S = 3.0
"""A cluster's head does not end in one moment with what is connected to it."""


def train(request: TrainRequest, show: Show) -> dict[str, Any]:
    """Carries a start on a Ray cluster from its config to its end; gives the object of result.json.

    Raises:
        UnisonoError: if it is refused before anything was started.
    """
    began = time.monotonic()
    environment = read_environment()
    loaded = load_asked(request)
    body = _driver_request(request, loaded, environment)
    with Interrupts() as interrupts:
        try:
            result = _Session(request, loaded, show, interrupts, body, began).run()
        except Stopped as stopped:
            say(show, f"{stopped.number.name} before anything was started: nothing changed")
            result = _without_run(Ending(exit_code_of(stopped.number), NOTHING_DONE), began)
        except Disagreed as error:
            if error.verdict is None:
                raise
            show_verdicts(show, error.verdict, [problem.what for problem in error.problems[1:]])
            result = _without_run(Ending(error.exit_code, NOTHING_DONE, error.verdict), began)
    show({"kind": "result", "time": time.time(), **result})
    return result


@dataclass
class _Session:
    request: TrainRequest
    loaded: LoadedConfig
    show: Show
    interrupts: Interrupts
    body: dict[str, Any]
    began: float
    ray_head: RayHead | None = None
    step: int = 0
    restarts: list[dict[str, Any]] = field(default_factory=list)
    """Of the driver's; with it and what is above, a driver that dies can be done without."""

    @property
    def run_dir(self) -> RunDir:
        return RunDir(Path(self.loaded.config.output_dir))

    def run(self) -> dict[str, Any]:
        """With the run's directory claimed, until it is known that the nodes have it themselves."""
        config, request = self.loaded.config, self.request
        with contextlib.ExitStack() as stack:
            claimed = stack.enter_context(
                claim(
                    config,
                    host=read_machine(_no_devices).host,
                    resume=request.resume,
                    fresh=request.fresh,
                    say=lambda text: say(self.show, text),
                    allow=request.allowed,
                )
            )
            try:
                with TaskProcess("driver", self.body, talks=True, programs=DRIVER) as driver:
                    last = self._hear(driver, stack, claimed)
            except RankDied as error:
                last = self._without_driver(error)
            finally:
                claimed.worth_keeping = _has_something(self.run_dir)
            return self._ended(last)

    def _hear(self, driver: TaskProcess, stack: contextlib.ExitStack, claimed: Claim) -> Message:
        """Shows what the driver says until its last word; signals go to it."""
        passed = 0
        while True:
            for message in driver.news():
                match message["kind"]:
                    case "placed":
                        hosts = ", ".join(
                            f"node {rank} on {host}" for rank, host in enumerate(message["hosts"])
                        )
                        say(self.show, f"placed by Ray: {hosts}")
                        self.interrupts.collect()
                        claimed.trained = True  # what is here from now on is what the head has
                        if message["shared"]:  # its front takes the directory itself
                            claimed.worth_keeping = _has_something(
                                self.run_dir
                            )  # what an earlier start brought
                            stack.close()
                        driver.send({"kind": "go"})
                    case "connected":
                        self.ray_head = RayHead(str(message["address"]), str(message["host"]))
                    case "restarting":
                        self.restarts.append(message["restart"])
                    case "result":
                        return message
                    case _:
                        self.step = int(message["step"]) if message["kind"] == "step" else self.step
                        self.show(message)
            wished = (self.interrupts.first is not None) + self.interrupts.twice
            while passed < wished and self.interrupts.first is not None:
                driver.send({"kind": "signal", "name": self.interrupts.first.name})
                passed += 1
            time.sleep(_POLL_S)

    def _without_driver(self, error: RankDied) -> Message:
        """The last word in place of a driver's that has ended without one: Ray ends it at once where the cluster's head is gone.

        Raises:
            RankDied: if it is not.
        """
        head = self.ray_head
        if head is not None:
            head.look_for(_HEAD_GOES_S)
        if head is None or not head.why:
            raise _driver_died(error, str(self.body["address"])) from error
        verdict = ray_head_lost(head, words=error.problems[0].why, after_s=round(head.silent_s, 3))
        self.show({"kind": "verdict", "time": time.time(), **verdict.to_json()})
        return {
            "kind": "result",
            "last": None,
            "lost": verdict.to_json(),
            "step": self.step,
            "restarts": self.restarts,
        }

    def _ended(self, told: Message) -> dict[str, Any]:
        """What became of it, from the driver's last word.

        Raises:
            UnisonoError: if the head's front refused.
        """
        last, lost, restarts = told["last"], told["lost"], list(told["restarts"])
        if last is None:
            return self._lost(Verdict.from_json(lost), int(told["step"]), restarts)
        if last["kind"] == "start_refused":
            raise refusal(last)
        result = {name: value for name, value in last.items() if name not in ("kind", "time")}
        if restarts:
            result["restarts"] = [*restarts, *result["restarts"]]
            write_result(self.run_dir, RunResult.from_json(result))
        return result

    def _lost(self, verdict: Verdict, step: int, restarts: list[dict[str, Any]]) -> dict[str, Any]:
        """The head's node is gone, and no other start is allowed. What it had saved is here."""
        known = find_cause(verdict.cause)
        fields = read_progress(self.run_dir)
        fields["step"] = max(step, fields["step"])
        ending = Ending(known.exit_code if known else 4, fields, verdict)
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
            write_result(self.run_dir, RunResult.from_json(result))
        return result


def ray_topology(request: TrainRequest, environment: Environment) -> Topology:
    """How many nodes and ranks Ray is asked for.

    Raises:
        UsageError: if an option does not go with Ray.
    """
    if request.devices is not None:
        raise UsageError.of(
            "--devices does not go with --launcher ray: Ray gives each node its devices",
            where="command line",
            fix="leave it out; --nproc N asks for N accelerators a node",
        )
    variables = {name: value for name, value in environment.leftovers.items() if name == "NPROC_PER_NODE"}
    several = request.nodes not in (None, "1")
    return read_topology(
        TopologyRequest(
            nproc=request.nproc,
            nodes=request.nodes,
            command=request.command,
            node_rank=0 if several else None,
            head="ray" if several else None,
        ),
        variables,
        Accelerators(0),
    )


def cluster_address(request: TrainRequest, environment: Environment) -> str:
    """Of the cluster; `auto`: the one that runs here."""
    return request.ray_address or environment.ray_address or "auto"


def _driver_request(request: TrainRequest, loaded: LoadedConfig, environment: Environment) -> dict[str, Any]:
    """What the driver's process gets.

    Raises:
        UsageError: if an option does not go with Ray.
    """
    shape = ray_topology(request, environment)
    options = {
        "resume": request.resume,
        "allow": list(request.allow),
        "trust": request.trust,
        "nproc": shape.nproc,
        "rehearse": request.rehearse,
        "join_timeout_s": request.join_timeout_s,
        "debug_comm": request.debug_comm,
        "limit_rows": request.limit_rows,
        "origins": dict(loaded.origins),
    }
    return {
        "job": secrets.token_hex(8),
        "address": cluster_address(request, environment),
        "config": loaded.config.model_dump(mode="json", by_alias=True),
        "options": options,
        "nodes": shape.nodes,
        "least": shape.enough,
        "nproc": shape.nproc,
        "join_timeout_s": request.join_timeout_s,
        "variables": forwarded_variables(environment.variables),
    }


def _driver_died(error: RankDied, address: str) -> RankDied:
    """Ray ends a driver by abort() where the cluster's head, or the raylet beside it, is gone; others end it by a signal."""
    told = error.problems[0]
    return RankDied.of(
        told.what.replace("the task driver", "the process that is connected to Ray"),
        where=f"Ray cluster {address}",
        why=told.why,
        fix="`ray status` says whether the cluster is still there; the same command goes on from the newest checkpoint that is here",
    )


def _has_something(run: RunDir) -> bool:
    """Whether anything of a run is here, beside what this front holds itself."""
    return any(path.exists() for path in (run.plan, run.result, run.verdict, run.agreement, run.metrics))


def _without_run(ending: Ending, began: float) -> dict[str, Any]:
    return result_of(ending, run_id="", output_dir="", restarts=[], seconds=time.monotonic() - began)


def _no_devices() -> tuple[list[Gpu], str]:
    """A probe that asks no driver: only the host's name is wanted."""
    return [], ""
