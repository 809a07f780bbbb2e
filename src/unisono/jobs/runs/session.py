"""One training run: the request, this machine, and then this node's part, head or member; and its
rehearsal, the whole path before a long run.
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from unisono.base.errors import ConfigError, Disagreed, UnisonoError, UsageError, as_usage_error
from unisono.base.messages import Message, ResultMessage, Show, message_of, notify
from unisono.base.requirements import refuse_without_trainer
from unisono.base.text import show_bytes, show_seconds
from unisono.guard.facts import Environment, read_environment, read_machine, take_token
from unisono.guard.places.placement import lay_out
from unisono.guard.rendezvous import meeting_rules
from unisono.guard.rendezvous.remote_fronts import token_hint, token_of_step
from unisono.guard.rundir import RunDir
from unisono.guard.rundir.records import RunResult, read_metrics, shown_outcome
from unisono.guard.supervise.fork_server import ForkServer
from unisono.guard.supervise.interrupts import Interrupts, Stopped, exit_code_of
from unisono.guard.supervise.task_process import run_request
from unisono.jobs.remote_checkpoint.storage import storage_tried
from unisono.jobs.runs.head_run import HeadRun
from unisono.jobs.runs.planning import LocalNode, look_around, party_of, prepare, report_early_refusal
from unisono.jobs.runs.preparation import plan_start
from unisono.jobs.runs.run_records import Ending, is_about_nodes, result_without_run
from unisono.jobs.runs.start_decision import decide_start
from unisono.jobs.runs.train_request import (
    TrainRequest,
    load_requested,
    refuse_live_launcher,
    refuse_missing_packages,
    show_notes,
)
from unisono.trainer.config import LoadedConfig, RunConfig
from unisono.trainer.config.own_code import own_code_digests
from unisono.trainer.plan import RunPlan
from unisono.trainer.plan.families import family_of
from unisono.trainer.plan.task_requests import ExportRequest, RequestedModel


def train(request: TrainRequest, show: Show) -> RunResult:
    """Carries a start from its config to its end; gives its result.

    Raises:
        UnisonoError: if it is refused before anything was started.
    """
    began = time.monotonic()
    token = take_token()

    def announce(text: str) -> None:
        notify(show, text)

    fork_server = request.programs.fork_server or ForkServer(announce)
    fork_server.notify = announce
    with Interrupts() as interrupts, closing(fork_server):
        request = replace(request, programs=replace(request.programs, fork_server=fork_server))
        try:
            result = _start(request, show, interrupts, began, token)
        except Stopped as stopped:
            who = stopped.number.name + (f" to {stopped.where}" if stopped.where else "")
            notify(show, f"{who} before anything was started: nothing changed")
            ending = Ending(exit_code_of(stopped.number))
            result = result_without_run(ending, seconds=time.monotonic() - began)
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
    show(message_of(ResultMessage, result.to_json()))
    return result


def plan_only(request: TrainRequest, show: Show) -> RunPlan:
    """The plan of a start that is not made; nothing is left in the run's directory.

    Other nodes are taken to be like this one.

    Raises:
        UnisonoError: whatever the start itself would be refused for before its ranks.
    """
    loaded, local_node = _look(request, read_environment())
    show_notes(loaded, show)
    run = RunDir(Path(loaded.config.output_dir))
    with as_usage_error():
        decision = decide_start(
            run,
            loaded.config,
            resume=request.resume,
            fresh=request.fresh,
            allow=request.allowed,
            origins=loaded.origins,
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
    refuse_without_trainer("unisono train")
    with as_usage_error():
        loaded = load_requested(request)
        own_code_digests(loaded.config)
        refuse_live_launcher(environment, request)
        local_node = look_around(request, loaded, read_machine(request.probes.devices), environment)
        if (
            local_node.topology.is_head
        ):  # it alone keeps curves and copies; all others read data and model themselves
            refuse_missing_packages(loaded, request.probes.packages())
        return loaded, local_node


def _refuse_random_base(config: RunConfig) -> None:
    """Refuses an adapter on random weights, which nobody could use: only a plan may have it, for
    its estimate of memory.
    """
    if config.adapter is not None and config.model.weights == "random":
        raise ConfigError.of(
            "an adapter cannot be trained on random weights",
            where="adapter",
            why="its base model would be lost with the run",
            fix="set adapter: null, or pass --dry-run to see the plan only",
        )


def _start(
    request: TrainRequest, show: Show, interrupts: Interrupts, began: float, token: str | None
) -> RunResult:
    environment = read_environment()
    token = token or token_of_step(environment)
    try:
        loaded, local_node = _look(request, environment)
        _refuse_random_base(loaded.config)
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
        from unisono.jobs.runs.member_run import take_part

        return take_part(request, loaded, local_node, party, interrupts=interrupts)
    return HeadRun(request, show, interrupts, began, party).run(loaded, local_node)


def _disagreed(error: UnisonoError, show: Show, began: float) -> RunResult:
    """Says what nodes or ranks disagree about, in the same words on all of them, and gives the
    result.
    """
    assert error.verdict is not None
    if not (isinstance(error, Disagreed) and error.already_shown):
        meeting_rules.show_verdicts(show, error.verdict, [problem.what for problem in error.problems[1:]])
    ending = Ending(error.exit_code, verdict=error.verdict)
    return result_without_run(ending, seconds=time.monotonic() - began)


ROWS = 64
_STEPS, _MORE = 3, 1


@dataclass
class Rehearsal:
    """Result of a rehearsal.

    Attributes:
        exit_code: 0, or that of the stage that failed.
        stages: name and seconds of each stage that was passed.
        result: of the training that ended badly, or of the last.
        expected_s: estimated duration of the long run in seconds, if known.
    """

    exit_code: int = 0
    stages: list[tuple[str, float]] = field(default_factory=list)
    result: RunResult | None = None
    expected_s: float | None = None
    steps: int = 0
    checkpoint_bytes: int = 0

    def to_json(self) -> dict[str, object]:
        """For programs."""
        return {
            "schema": 1,
            "exit_code": self.exit_code,
            "outcome": self.result.outcome if self.result is not None else "failed",
            "stages": [{"stage": name, "seconds": seconds} for name, seconds in self.stages],
            "steps": self.steps,
            "expected_s": self.expected_s,
            "checkpoint_bytes": self.checkpoint_bytes,
            "verdict": self.result.verdict if self.result is not None else None,
        }


def rehearse(request: TrainRequest, show: Show, *, ignored_launcher: str | None = None) -> Rehearsal:
    """Goes through every stage with 64 rows and three steps, in a directory that is gone
    afterwards.

    The data of the long run are prepared whole: row 50,000 can be bad, too, and the long run finds
    them in the cache.

    Args:
        ignored_launcher: would place the long run on other nodes.

    Raises:
        UnisonoError: if a stage is refused before anything was started.
    """
    if request.nodes not in (None, "1") or request.hosts:
        raise UsageError.of(
            "a rehearsal runs on one node",
            where="--rehearse",
            why="it tries the path from data to export, and leaves nothing behind",
            fix="remove --nodes and --hosts; `unisono train --dry-run` shows the plan of all nodes",
        )
    if ignored_launcher is not None:
        notify(show, f"a rehearsal runs on this machine only: --launcher {ignored_launcher} is ignored")
    done = Rehearsal()

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        done.stages.append((name, time.monotonic() - began))
        if done.exit_code == 0:
            notify(show, f"{name}: done in {show_seconds(done.stages[-1][1])}")

    with tempfile.TemporaryDirectory(prefix="unisono-rehearsal-") as folder:
        run = RunDir(Path(folder) / "run")
        elsewhere = replace(
            request,
            overrides=(*request.overrides, f"output_dir={run.root}"),
            resume=False,
            fresh=False,
            rehearse=False,
        )
        with stage("all rows prepared, plan made"):
            long_run = plan_only(elsewhere, _only(show, "phase", "note"))
        for text in [*long_run.warnings, *long_run.data.warnings]:
            show({"kind": "warning", "time": time.time(), "code": "plan", "text": text})
        done.steps = long_run.total_steps
        family = family_of(long_run.model)
        with stage(family.rehearsed(ROWS if family.limits_rows else long_run.data.train.rows, _STEPS)):
            _train(done, elsewhere, show, steps=_STEPS, resume=False)
        if done.exit_code == 0:
            _measure(done, long_run, run)
            with stage(f"resumed from step {_STEPS}"):
                _train(done, elsewhere, show, steps=_STEPS + _MORE, resume=True)
        if done.exit_code == 0:
            with stage("exported"):
                _export(request, run, Path(folder) / "export", on_message=_only(show, "warning"))
    return done


def _train(done: Rehearsal, request: TrainRequest, show: Show, *, steps: int, resume: bool) -> None:
    short = (
        f"duration={steps} steps",
        f"eval.every={_STEPS} steps",
        f"checkpoint.every={_STEPS} steps",
        "track=[]",
        "checkpoint.storage=null",
    )
    short_request = replace(
        request,
        overrides=(*request.overrides, *short),
        limit_rows=ROWS,
        restarts=0,
        resume=resume,
        fresh=False,
    )
    done.result = train(short_request, _only(show, "phase", "warning", "verdict", "refused"))
    done.exit_code = done.result.exit_code


def _export(request: TrainRequest, run: RunDir, out: Path, *, on_message: Callable[[Message], None]) -> None:
    export = ExportRequest(model=RequestedModel(str(run.root)), out=str(out))
    run_request(export, on_message=on_message, programs=request.programs)


def _measure(done: Rehearsal, long_run: RunPlan, run: RunDir) -> None:
    """The expected duration of the full run: its tokens at the rate of the later steps, after
    warm-up.
    """
    lines = [line for line in read_metrics(run.metrics) if "tokens" in line and line.get("step_time_s")]
    later = lines[1:] or lines
    seconds = sum(line["step_time_s"] + (line.get("data_time_s") or 0.0) for line in later)
    first_tokens = lines[0]["tokens"] if len(lines) > len(later) else 0
    data = long_run.data.train
    if lines and seconds > 0 and later[-1]["tokens"] > first_tokens:
        rate = (later[-1]["tokens"] - first_tokens) / seconds
        done.expected_s = data.tokens / data.sequences * long_run.total_sequences / rate
    checkpoint = run.checkpoint(_STEPS)
    done.checkpoint_bytes = sum(file.stat().st_size for file in checkpoint.iterdir())


def _only(show: Show, *kinds: str) -> Show:
    def shown(message: Message) -> None:
        if message["kind"] in kinds:
            show(message)

    return shown


def summary(done: Rehearsal) -> list[str]:
    """For people: what is known now about the long run."""
    if done.exit_code:
        result = done.result
        ended = shown_outcome(result.outcome, result.verdict) if result is not None else "failed"
        return [f"the rehearsal ended with {ended} (exit code {done.exit_code})"]
    lines = [f"every stage passed in {show_seconds(sum(seconds for _, seconds in done.stages))}"]
    if done.expected_s is not None:
        lines.append(
            f"the long run: {done.steps:,} steps, about {show_seconds(done.expected_s)} of training at this rate, "
            f"without its evaluations; a checkpoint takes {show_bytes(done.checkpoint_bytes)}"
        )
    return lines
