"""Builds a run from its plan: model, data, optimizer, state; fresh or from a checkpoint."""

from pathlib import Path

import torch

from unisono.base.events import Reporter
from unisono.guard.facts import identity_of
from unisono.guard.rundir import RunDir
from unisono.guard.watch import Beats
from unisono.trainer.config.sections import DIFFUSION, own_objective
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.model.directory import locate_tokenizer
from unisono.trainer.model.forward import Forward, choose_forward
from unisono.trainer.model.load import SCORE, LoadedModel, load_for_training
from unisono.trainer.objectives import objective_of
from unisono.trainer.plan import RankPlace, RunPlan, Stream
from unisono.trainer.track import ServiceWriter, TensorboardWriter, Tracker, Trackers
from unisono.trainer.training import faults
from unisono.trainer.training.front_io import StopRequest, front_messages
from unisono.trainer.training.gradient_sync import gradient_sync_of
from unisono.trainer.training.join import check_device, join_ranks, quantized_digest
from unisono.trainer.training.optim import build_optimizers
from unisono.trainer.training.process_group import Alone, Group, world_mesh
from unisono.trainer.training.reference import set_reference
from unisono.trainer.training.run import GeneratorWatch, Run, TrainingData, TrainState, seed_torch
from unisono.trainer.training.saver import Saver, Staging
from unisono.trainer.training.saving import open_metrics, open_store, restore
from unisono.trainer.training.sharding import ShardedRoot, shard_model


def set_up(plan: RunPlan, place: RankPlace, report: Reporter, stop: StopRequest, beats: Beats) -> Run:
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
    if own := own_objective(plan.config.objective):
        report.phase("objective", f"executing {own[0]}")
        beats.enter("objective")
    objective = objective_of(plan.config, digest=plan.objective_digest)
    report.phase("load_model", f"loading {plan.config.model.path}")
    beats.enter("load_model")
    # Weights that will be sharded are first loaded into host memory: they may not fit on one
    # device.
    loaded = _load_model(plan, place, torch.device("cpu") if plan.strategy == "fsdp" else device)
    report.phase("load_data", "mapping the token table")
    beats.enter("load_data")
    data, eval_table = _open_data(plan, place)
    group: Group = Alone()
    if plan.world_size > 1:
        group = join_ranks(plan, place, report, beats, device=device, loaded=loaded, data=data)
    sharded = None
    if plan.strategy == "fsdp":
        sharded = shard_model(loaded, world_mesh(device, plan.world_size))
    forward = _choose_forward(plan, loaded, sharded)
    loaded.model.train()
    is_main = group.is_main
    pictures, sampler = None, None
    if plan.config.objective == DIFFUSION:
        from unisono.trainer.diffusion.drawing import (
            open_pictures,  # not at the top: training of text never loads it
        )

        pictures, sampler = open_pictures(plan, forward, device, draws=is_main)
    run = Run(
        plan=faults.plan_of_rank(plan, place.rank),
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
            text_lr=plan.config.diffusion.text_lr,
        ),
        gradient_sync=gradient_sync_of(plan, group, device, loaded, sharded, metrics=len(objective.metrics)),
        sharded=sharded,
        objective=objective,
        data=data,
        eval_table=eval_table,
        pictures=pictures,
        sampler=sampler,
        state=TrainState(),
        store=open_store(files) if group.is_main else None,
        metrics=None,
        tracker=_open_tracker(plan, files, report) if group.is_main else None,
        stop=stop,
        generator_watch=GeneratorWatch(torch_is_used=_uses_dropout(loaded)),
        saver=Saver(Staging(device, sharers=len(plan.on_node(place.node_rank)) if sharded else 1), beats),
        root_id=identity_of(files.root),
        front_messages=front_messages() if sharded is not None and group.is_main else None,
    )
    if run.objective.uses_reference:
        set_reference(run)  # with the starting weights
    if plan.resume is not None:
        report.phase("resume", f"reading checkpoint {plan.resume.step}")
        beats.enter("resume")
        restore(run, Path(plan.resume.path), trust=plan.resume.trust)
    if group.is_main:
        run.metrics = open_metrics(files, run.state, report)
    return run


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


def _load_model(plan: RunPlan, place: RankPlace, device: torch.device) -> LoadedModel:
    seed_torch(plan.config.seed, "weights")
    if plan.config.objective == DIFFUSION:
        from unisono.trainer.diffusion.pipeline import load_denoiser

        loaded = load_denoiser(
            plan.config, directory=Path(plan.model.directory), dtype=plan.dtype, device=device
        )
        faults.change_loaded(plan, place.rank, loaded)
        return loaded
    loaded = load_for_training(
        plan.config,
        directory=Path(plan.model.directory),
        tokenizer_directory=locate_tokenizer(plan.config),
        dtype=plan.dtype,
        device=device,
    )
    faults.change_loaded(plan, place.rank, loaded)
    loaded.quantized_digest = quantized_digest(loaded.model)
    return loaded


def _choose_forward(plan: RunPlan, loaded: LoadedModel, sharded: ShardedRoot | None) -> Forward:
    adapter = plan.config.adapter
    if plan.config.objective == DIFFUSION:
        from unisono.trainer.diffusion.pipeline import choose_picture_forward

        return choose_picture_forward(
            loaded,
            plan.config,
            directory=Path(plan.model.directory),
            dtype=plan.dtype,
            gradient_checkpointing=plan.gradient_checkpointing,
        )
    forward = choose_forward(
        loaded,
        dtype=plan.dtype,
        gradient_checkpointing=plan.gradient_checkpointing,
        quick_adapter=adapter is not None and adapter.is_plain,
        root=sharded.module if sharded else None,
    )
    if sharded is not None:
        sharded.reshard()
    elif not (plan.config.deterministic or plan.gradient_checkpointing or _uses_dropout(loaded)):
        length = plan.config.data.max_length
        forward.use_graphs(most_tokens=plan.micro_batch * length, longest=length)
    return forward


def _open_data(plan: RunPlan, place: RankPlace) -> tuple[TrainingData, TokenTable | None]:
    directory = Path(plan.data.cache_dir)
    table = faults.change_table(plan, place.rank, TokenTable.open(directory, "train"))
    groups = table.columns.get("group")
    rows = [table.rows_of(i)[0] for i in range(table.sequences)] if groups is not None else []
    of_sequences = groups[rows].tolist() if groups is not None else []
    stream = Stream(table.sequences, plan.config.seed, of_sequences, plan.global_batch)
    data = TrainingData(
        table, stream, plan.global_batch, plan.micro_batch, plan.total_sequences, place.rank, plan.world_size
    )
    return data, TokenTable.open(directory, "eval") if plan.data.eval else None


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


def _uses_dropout(loaded: LoadedModel) -> bool:
    # A model's `attention_dropout` is applied without a module of its own. The denoiser of an image
    # model has no config.
    modules = (m.p for m in loaded.model.modules() if isinstance(m, torch.nn.Dropout))
    settings = getattr(loaded.base, "config", None)
    return max(modules, default=0) > 0 or (getattr(settings, "attention_dropout", 0) or 0) > 0
