"""This node's part of a job, and the plan: data, model facts, layout, resume point; and how a plan
from the head is checked by another node.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import Disagreed, UnfitError, UnisonoError, UsageError
from unisono.base.messages import Show
from unisono.base.text import Duration, validation_words
from unisono.guard.agree.reports import NodeReport
from unisono.guard.agree.training import PreparedFacts
from unisono.guard.facts import Environment, Machine, no_gpus, read_machine
from unisono.guard.facts.environment import read_nccl_files
from unisono.guard.places.placement import (
    Layout,
    NodeOffer,
    choose_devices,
    device_words,
    threads_of,
    usable_accelerators,
)
from unisono.guard.places.ranks import DeviceChoice
from unisono.guard.places.topology import Accelerators, Topology, read_topology, refuse_lone_node
from unisono.guard.rendezvous.head_address import is_this_machine, report_refusal
from unisono.guard.rendezvous.party import Party, make_token, read_token, watch_lifeline
from unisono.guard.rendezvous.remote_fronts import find_head, placed_by_slurm
from unisono.guard.supervise.child_process import Programs, misleading_variables
from unisono.guard.supervise.task_process import run_request
from unisono.jobs.runs.train_request import TrainRequest
from unisono.trainer.config import LoadedConfig, RunConfig
from unisono.trainer.config.own_code import own_code_digests, own_code_of, put_path
from unisono.trainer.config.reward_models import reward_models_of
from unisono.trainer.config.schema import deciding_keys
from unisono.trainer.config.sections import path_keys
from unisono.trainer.plan import DataSummary, ModelFacts, PlanInputs, ResumePoint, RunPlan, resolve_plan
from unisono.trainer.plan.task_requests import PrepareRequest

_BY_HAND = re.compile(r"^(NCCL|GLOO|TP|TORCH|PYTORCH|CUDA|CUBLAS|CUDNN)_")


@dataclass(frozen=True)
class LocalNode:
    """This machine, its environment, and the part of the job that runs on it."""

    machine: Machine
    environment: Environment
    topology: Topology
    devices: list[DeviceChoice]
    """The devices of this node's ranks, by local rank."""
    device_origin: str

    @property
    def threads(self) -> tuple[int, str]:
        """The threads of each rank of this node, and where the number comes from."""
        return threads_of(
            cores=self.machine.cores, nproc=len(self.devices), declared=self.environment.omp_num_threads
        )

    @property
    def offer(self) -> NodeOffer:
        """This node's contribution to a plan of this node alone."""
        return self.offer_as(self.topology.node_rank)

    def offer_as(self, node_rank: int) -> NodeOffer:
        """The contribution of a node like this one."""
        threads, origin = self.threads
        return NodeOffer(
            node_rank,
            self.machine.host,
            "127.0.0.1",
            self.devices,
            self.topology.nproc_origin,
            threads,
            origin,
        )

    @property
    def leftovers(self) -> dict[str, str]:
        """Variables of other launchers that were not used for anything."""
        used = self.topology.used_variables
        return {k: v for k, v in self.environment.leftovers.items() if k not in used}


def look_around(
    request: TrainRequest, loaded: LoadedConfig, machine: Machine, environment: Environment
) -> LocalNode:
    """Reads the shape of the job, and chooses the devices of this node's ranks.

    Raises:
        UsageError: if the options contradict each other or the machine.
    """
    torch_version = request.probes.packages().get("torch", "")
    requested, visible = loaded.config.device, environment.visible_devices
    usable = usable_accelerators(machine, requested=requested, visible=visible, torch_version=torch_version)
    topology = read_topology(
        request.topology,
        environment.leftovers,
        usable,
        is_local=lambda host: is_this_machine(host, request.probes.network),
        placed=placed_by_slurm(environment.slurm_step, request.probes.network),
    )
    if request.expects_nodes:
        refuse_lone_node(request.nodes, topology)
    topology = find_head(topology, request.probes.network)
    devices, origin = choose_devices(
        machine,
        requested=requested,
        named=device_words(request.devices),
        visible=visible,
        nproc=topology.nproc,
        torch_version=torch_version,
    )
    return LocalNode(machine, environment, topology, devices, origin)


@dataclass(frozen=True)
class PreparedInputs:
    """What the task `prepare` found of data and model."""

    data: DataSummary
    model: ModelFacts


def prepare(
    request: TrainRequest, loaded: LoadedConfig, environment: Environment, *, ledger: bool, show: Show
) -> PreparedInputs:
    """Has this machine's data and model looked through.

    Args:
        loaded: the config, its paths absolute.
        ledger: whether data.json is written into the run's directory.

    Raises:
        UnisonoError: if data or model are refused.
    """
    config = loaded.config
    task = PrepareRequest(
        config, environment.cache_dir, config.output_dir if ledger else None, request.limit_rows
    )
    return run_prepare(task, show=show, programs=request.programs)


def run_prepare(task: PrepareRequest, *, show: Show, programs: Programs | None) -> PreparedInputs:
    """Runs the task `prepare`.

    Raises:
        UnisonoError: if data or model are refused.
    """
    prepared = run_request(task, on_message=show, programs=programs)
    return PreparedInputs(
        DataSummary.model_validate(prepared["data"]), ModelFacts.model_validate(prepared["model"])
    )


def make_plan(
    request: TrainRequest,
    loaded: LoadedConfig,
    local_node: LocalNode,
    *,
    layout: Layout,
    prepared: PreparedInputs,
    run_id: str,
    resume: ResumePoint | None,
    resume_reason: str,
    earlier_batch: tuple[int, tuple[int, int] | None] | None = None,
) -> RunPlan:
    """Decides everything.

    Args:
        loaded: the config, its paths absolute.
        layout: which rank runs where.
        prepared: what `prepare` gave.
        run_id: the same over all starts of a run.
        resume: the checkpoint to resume from, or None.
        earlier_batch: as in the StartDecision.

    Raises:
        UnisonoError: if the request does not fit the devices or the data.
    """
    return resolve_plan(
        PlanInputs(
            config=loaded.config,
            run_id=run_id,
            output_dir=loaded.config.output_dir,
            host=local_node.machine.host,
            device=layout.ranks[0].device,
            nodes=layout.nodes,
            ranks=layout.ranks,
            store_host=layout.store_host,
            threads=layout.threads,
            threads_origin=layout.threads_origin,
            model=prepared.model,
            data=prepared.data,
            resume=resume,
            resume_reason=resume_reason,
            earlier_batch=earlier_batch,
            settings=_set_by_hand(local_node.environment, loaded.config.reasons),
            ignored_variables=misleading_variables(local_node.leftovers, world_size=layout.world_size),
            origins=_origins(loaded, local_node, layout),
            faults=request.faults,
            code_digests=own_code_digests(loaded.config),
            reward_models=list(reward_models_of(loaded.config.rewards)),
        )
    )


def _origins(loaded: LoadedConfig, local_node: LocalNode, layout: Layout) -> dict[str, str]:
    decided = {"device": f"{layout.ranks[0].device.name}: {local_node.device_origin}"}
    return {**loaded.origins, **local_node.topology.origins, **decided}


def _set_by_hand(environment: Environment, reasons: Mapping[str, str]) -> dict[str, str]:
    """Settings of NCCL, gloo, torch and CUDA that are in effect here, and others for which the
    config gives a reason.
    """
    variables = environment.variables
    known = {**read_nccl_files(named=variables.get("NCCL_CONF_FILE")), **variables}
    return {name: value for name, value in known.items() if _BY_HAND.match(name) or name in reasons}


def offer_of(report: NodeReport) -> NodeOffer:
    """The contribution of a node, from its report."""
    return NodeOffer(
        node_rank=report.node_rank,
        host=report.host,
        address=report.address,
        devices=report.places,
        nproc_origin=report.nproc_origin,
        threads=report.threads,
        threads_origin=report.threads_origin,
        shares_output=report.output.shared is not False,
    )


# ---- a plan from the head, checked against what this node would have planned


def accept_plan(
    value: Any,
    *,
    config: RunConfig,
    node_rank: int,
    host: str,
    devices: list[DeviceChoice],
    prepared: PreparedInputs,
) -> RunPlan:
    """The plan as this node carries it out: decided by the head, with the config and the paths of
    this node.

    Args:
        config: this node's config, its paths absolute.
        node_rank: which node this is.
        devices: of its ranks, as it has reported them.

    Raises:
        Disagreed: plan_mismatch, if the plan means another run than this node does, or gives it
            other work than it offered.
    """
    where = f"node {node_rank} ({host})"
    try:
        plan = RunPlan.model_validate(value)
    except ValidationError as error:
        raise _mismatch(where, host, "the head's plan cannot be read", validation_words(error)) from error
    if config.batch.of_ranks is not None and config.batch.of_ranks == plan.batch_of_ranks:
        config = config.model_copy(update={"batch": plan.config.batch})  # the head knows the number of ranks
    for problem in _problems(plan, config=config, node_rank=node_rank, devices=devices, prepared=prepared):
        raise _mismatch(where, host, *problem)
    data, model = prepared.data, prepared.model
    return plan.model_copy(
        update={
            "config": config,
            "output_dir": config.output_dir,
            "data": plan.data.model_copy(update={"cache_dir": data.cache_dir}),
            "model": plan.model.model_copy(update={"directory": model.directory}),
        }
    )


def _problems(
    plan: RunPlan, *, config: RunConfig, node_rank: int, devices: list[DeviceChoice], prepared: PreparedInputs
) -> list[tuple[str, str]]:
    """The problems of a plan, each with its evidence."""
    problems = []
    planned, own_config = _without_paths(plan.config), _without_paths(config)
    if planned != own_config:
        odd = [key for key in sorted({*planned, *own_config}) if planned.get(key) != own_config.get(key)]
        problems.append(
            ("the head's plan has a different config than this node", f"they differ in {', '.join(odd)}")
        )
    if plan.config.model.trust_remote_code and not config.model.trust_remote_code:
        problems.append(
            (
                "the head's plan would run code from the model's repository",
                "model.trust_remote_code is off here",
            )
        )
    places = plan.on_node(node_rank)
    if [place.device.uuid for place in places] != [device.uuid for device in devices]:
        problems.append(
            ("the head's plan gives this node different devices than it offered", f"{len(places)} ranks")
        )
    if [place.rank for place in plan.ranks] != list(range(plan.world_size)):
        problems.append(("the head's plan does not number its ranks from 0", f"world_size {plan.world_size}"))
    for part in ("data", "model"):
        planned_digest, own_digest = getattr(plan, part).digest, getattr(prepared, part).digest
        if planned_digest != own_digest:
            problems.append(
                (
                    f"the head's plan has a different {part}",
                    f"digest {planned_digest} there, {own_digest} here",
                )
            )
    return problems


def _without_paths(config: RunConfig) -> dict[str, object]:
    body = deciding_keys(config)
    for code in own_code_of(config):
        put_path(body, code, code.path.name)
    for dotted in path_keys(RunConfig):
        section, _, key = dotted.rpartition(".")
        if body.get(section) is not None:
            body[section].pop(key, None)
    return body


def _mismatch(where: str, host: str, what: str, why: str) -> Disagreed:
    known = find_cause("plan_mismatch")
    verdict = Verdict(
        cause="plan_mismatch",
        when="before",
        summary=f"{where}: {what}",
        hosts=(host,),
        phase="agree.plan",
        evidence=(Evidence(where=where, text=why),),
        fix=known.remedy if known else (),
    )
    return Disagreed.of(verdict.summary, where=where, why=why, fix="; ".join(verdict.fix), verdict=verdict)


def with_step_difference(plan: RunPlan, loaded: LoadedConfig) -> RunPlan:
    """The plan with a warning if LLaMA-Factory makes another number of steps from the same file;
    its packed sequences are others.
    """
    duration = Duration.parse(plan.config.duration)
    if loaded.translation is None or duration.unit != "epochs" or plan.config.data.packing:
        return plan
    note = loaded.translation.fewer_steps(
        duration.amount, sequences=plan.data.train.sequences, global_batch=plan.global_batch
    )
    return plan.model_copy(update={"warnings": [*plan.warnings, note]}) if note else plan


def party_of(request: TrainRequest, topology: Topology, *, host: str, token: str | None, show: Show) -> Party:
    """This node, as it comes to the meeting; where it was started by --hosts, it ends with who
    started it.

    Args:
        token: UNISONO_TOKEN, or None.

    Raises:
        UsageError: if there is no token, or it is not private.
    """
    if topology.hosts and request.token_file is None and token is None:
        secret = make_token()
    else:
        token_read = read_token(request.token_file, token, nodes=topology.nodes)
        assert token_read is not None, "several nodes have a token"
        secret = token_read
    if secret.from_stdin:
        watch_lifeline()
    return Party(
        topology=topology,
        token=secret.secret,
        host=host,
        show=show,
        join_timeout_s=request.join_timeout_s,
        programs=request.programs,
        network=request.probes.network,
        command=request.command,
    )


def report_early_refusal(
    request: TrainRequest, environment: Environment, error: UnisonoError, *, token: str | None, show: Show
) -> None:
    """Reports to the other nodes that this one does not start, even if its config could not be
    read.
    """
    without_ranks = replace(
        request.topology, nproc=1, devices=()
    )  # the number of its ranks does not matter now
    try:
        placed = placed_by_slurm(environment.slurm_step, request.probes.network)
        topology = read_topology(without_ranks, environment.leftovers, Accelerators(0), placed=placed)
        if topology.nodes == 1 or topology.hosts:
            return
        party = party_of(request, topology, host=read_machine(no_gpus).host, token=token, show=show)
    # the address of the head is unknown, too: this node shows its own error, and the others report
    # it missing
    except UnisonoError:
        return
    report_refusal(party, error)


def prepared_facts(prepared: PreparedInputs) -> PreparedFacts:
    """The part of them that nodes compare."""
    return _prepared_facts(prepared.data, prepared.model)


def refusal_alone(verdict: Verdict, *, again: bool = False) -> UnisonoError:
    """The error if the only node of a job is refused: there is no node to disagree with, so its
    exit code is 6 or 2, never 3.

    Args:
        again: before a restart: the request was valid at the first start, so the machine has
            changed.
    """
    known = find_cause(verdict.cause)
    is_unfit = again or (known is not None and known.exit_code == UnfitError.exit_code)
    return (UnfitError if is_unfit else UsageError).of(
        verdict.summary, where=verdict.phase or "", fix="; ".join(verdict.fix), verdict=verdict
    )


def _prepared_facts(data: DataSummary, model: ModelFacts) -> PreparedFacts:
    return PreparedFacts(
        data_digest=data.digest,
        rows=data.train.rows,
        sequences=data.train.sequences,
        tokens=data.train.tokens,
        loss_tokens=data.train.loss_tokens,
        eval_rows=data.eval.rows if data.eval else 0,
        total_steps=data.total_steps,
        formats=tuple(data.formats),
        template=data.template,
        ledger=data.ledger,
        model_type=model.model_type,
        parameters=model.parameters,
        model_digest=model.digest,
    )
