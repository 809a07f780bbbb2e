"""Builds a run from its plan: model, data, optimizer, state; fresh or from a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import torch

from unisono.base.events import Reporter
from unisono.guard.places.ranks import RankPlace
from unisono.guard.rundir import RunDir
from unisono.guard.watch import Beats
from unisono.trainer.batches.seeds import seed_torch
from unisono.trainer.batches.table import EvaluationRows, TableRows, Tables, TableSource
from unisono.trainer.config.own_code import own_classes_of
from unisono.trainer.families import training_of
from unisono.trainer.model.directory import SCORE
from unisono.trainer.model.load import LoadedModel, uses_dropout
from unisono.trainer.objectives import objective_of
from unisono.trainer.plan import RunPlan
from unisono.trainer.track import ServiceWriter, TensorboardWriter, Tracker, Trackers
from unisono.trainer.training.answer_metrics import AnswerMetrics
from unisono.trainer.training.directory_check import DirectoryCheck
from unisono.trainer.training.front_io import StopRequest, front_messages
from unisono.trainer.training.gradient_sync import gradient_sync_of
from unisono.trainer.training.hooks import RunHook
from unisono.trainer.training.join import check_device, join_ranks, quantized_digest
from unisono.trainer.training.optim import build_optimizers, load_own_optimizer, rates_of
from unisono.trainer.training.process_group import Alone, Group, device_mesh
from unisono.trainer.training.reference import set_reference
from unisono.trainer.training.router_step import sums_of_routers
from unisono.trainer.training.run import GeneratorWatch, Run, TrainState
from unisono.trainer.training.run_rank import RunRank
from unisono.trainer.training.saver import Saver, Staging
from unisono.trainer.training.saving import open_metrics, open_store, restore
from unisono.trainer.training.sharding import shard_model


def set_up(
    plan: RunPlan,
    place: RankPlace,
    report: Reporter,
    stop: StopRequest,
    beats: Beats,
    hooks: Sequence[RunHook] = (),
) -> Run:
    """Loads everything, and joins the other ranks if there are any.

    The returned run is ready to train.

    Raises:
        ConfigError: if an own objective is refused.
        Disagreed: if this rank does not match the plan.
        ModelError: if the model or its tokenizer is refused.
        IntegrityError: if the checkpoint to resume from does not belong to this run.
    """
    files = RunDir(Path(plan.output_dir))
    device = _bind_device(plan)
    check_device(place, device)
    torch.set_num_threads(plan.threads)
    for own in own_classes_of(plan.config):
        report.phase("objective", f"executing {own.path}")
        beats.enter("objective")
    objective = objective_of(plan.config, digest=plan.code_digests.get("objective", ""))
    objective.check(plan, rank=place.rank)
    optimizer = load_own_optimizer(plan.config, digest=plan.code_digests.get("optim.kind", ""))
    report.phase("load_model", f"loading {plan.config.model.path}")
    beats.enter("load_model")
    # Weights that will be sharded are first loaded into host memory: they may not fit on one
    # device.
    loaded = _load_model(plan, torch.device("cpu") if plan.mesh.shards_weights else device, hooks)
    report.phase("load_data", "mapping the token table")
    beats.enter("load_data")
    tables = _open_tables(plan, device, hooks)
    data = TableSource.of(plan, place, tables["train"])
    group: Group = Alone()
    if plan.world_size > 1:
        group = join_ranks(plan, place, report, beats, device=device, loaded=loaded, data=data)
        for hook in hooks:
            group = hook.ranks_joined(group, beats)
    sharded = shard_model(loaded, device_mesh(plan.mesh, device)) if plan.mesh.shards_weights else None
    family = training_of(plan)
    forward = family.choose_forward(plan, loaded, sharded.module if sharded else None)
    loaded.model.train()
    is_main = group.is_main
    contents, sampler = family.open_contents(plan, forward, device, draws=is_main)
    if sharded is not None:
        sharded.reshard()
    for rows in tables.values():
        rows.add_contents(contents, seed=plan.config.seed, global_batch=plan.global_batch)
    rank = RunRank(group, plan, device, files.root, report, beats, loaded, stop)
    metrics = 2 * len(objective.metrics) + sums_of_routers(forward.routers)
    agreed = plan
    for hook in hooks:
        agreed = hook.plan_agreed(agreed)
    run = Run(
        plan=agreed,
        place=place,
        group=group,
        files=files,
        report=report,
        beats=beats,
        device=device,
        forward=forward,
        optimizers=build_optimizers(
            plan.config.optim,
            loaded.trainable,
            not_matrices=_tables(loaded),
            rates=rates_of(plan.config, loaded),
            own=optimizer,
        ),
        gradient_sync=gradient_sync_of(plan, group, device, loaded, sharded, metrics=metrics),
        sharded=sharded,
        objective=objective,
        source=objective.source(data, forward, rank),
        evaluation=EvaluationRows(tables["eval"], plan.micro_batch, data.dp_rank, data.dp_size)
        if "eval" in tables
        else None,
        answer_metrics=_answer_metrics(rank),
        sampler=sampler,
        state=TrainState(),
        store=open_store(files) if group.is_main else None,
        metrics=None,
        tracker=_open_tracker(plan, files, report) if group.is_main else None,
        stop=stop,
        generator_watch=GeneratorWatch(torch_is_used=uses_dropout(loaded)),
        saver=Saver(Staging(device, sharers=len(plan.on_node(place.node_rank)) if sharded else 1), beats),
        directory_check=DirectoryCheck(files) if is_main or plan.has_own_output(place.node_rank) else None,
        hooks=hooks,
        front_messages=front_messages() if sharded is not None and group.is_main else None,
    )
    if run.objective.uses_reference:
        set_reference(run, tables)  # with the starting weights
    if plan.resume is not None:
        report.phase("resume", f"reading checkpoint {plan.resume.step}")
        beats.enter("resume")
        restore(run, Path(plan.resume.path), trust=plan.resume.trust)
    if group.is_main:
        run.metrics = open_metrics(files, run.state, report)
    return run


def _answer_metrics(rank: RunRank) -> AnswerMetrics | None:
    """Metrics of answers, whose functions are loaded; None if there are none.

    Raises:
        ConfigError: if a function cannot be loaded.
    """
    if rank.plan.data.eval is None or not rank.plan.config.eval.metrics or not rank.plan.answers:
        return None
    metrics = AnswerMetrics(rank)
    metrics.start()
    return metrics


def _bind_device(plan: RunPlan) -> torch.device:
    """Binds the planned device before anything else touches CUDA."""
    if plan.device.kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0)  # the front makes only the planned device visible
    torch.cuda.set_device(device)
    if plan.config.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # nothing reads what it has not written
    return device


def _load_model(plan: RunPlan, device: torch.device, hooks: Sequence[RunHook]) -> LoadedModel:
    seed_torch(plan.config.seed, "weights")
    loaded = training_of(plan).load(plan, device)
    for hook in hooks:
        hook.model_loaded(loaded)
    loaded.quantized_digest = quantized_digest(loaded.model)
    return loaded


def _open_tables(plan: RunPlan, device: torch.device, hooks: Sequence[RunHook]) -> Tables:
    directory = Path(plan.data.cache_dir)
    train = TableRows.open(directory, "train", device)
    for hook in hooks:
        train.table = hook.table_opened(train.table)
    tables: Tables = {"train": train}
    if plan.data.eval:
        tables["eval"] = TableRows.open(directory, "eval", device)
    return tables


def _open_tracker(plan: RunPlan, files: RunDir, report: Reporter) -> Trackers | None:
    trackers: list[Tracker] = []
    for name in plan.config.track:
        if name == "tensorboard":
            purge_step = plan.resume.step + 1 if plan.resume else None
            trackers.append(TensorboardWriter(files.tensorboard, report, purge_step=purge_step))
        else:
            directory, title = files.root / name, files.root.name
            trackers.append(ServiceWriter(name, directory, report, name=title, run_id=plan.run_id))
    return Trackers(trackers) if trackers else None


def _tables(loaded: LoadedModel) -> set[int]:
    """Ids of the parameters of embedding and head, which Muon is not for."""
    base = loaded.base
    modules = [base.get_input_embeddings(), base.get_output_embeddings(), getattr(base, SCORE, None)]
    return {id(parameter) for module in modules if module is not None for parameter in module.parameters()}
