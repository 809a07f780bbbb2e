"""Makes the plan from the config and the facts.

Pure; every derived number is stored with its origin.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from unisono.base.errors import ConfigError
from unisono.base.text import Duration, Warmup, show_bytes
from unisono.guard.places.ranks import DeviceChoice, NodePlace, RankPlace
from unisono.trainer.config import optimizers, schedules
from unisono.trainer.config.data_sections import sources_of
from unisono.trainer.config.model_sections import needs_start
from unisono.trainer.config.optimizers import optimizer_named
from unisono.trainer.config.reward_models import RewardModel
from unisono.trainer.config.schedules import schedule_named
from unisono.trainer.config.schema import RunConfig, config_digest
from unisono.trainer.config.sections import GRPO, Section
from unisono.trainer.config.training_sections import BatchSection
from unisono.trainer.plan.extent import beyond_the_end, period_of, short_run, steps_of
from unisono.trainer.plan.families import family_for, family_of
from unisono.trainer.plan.memory import estimate_memory, mean_state_bytes
from unisono.trainer.plan.mesh import Mesh, meshes_of, needs_several_ranks
from unisono.trainer.plan.run_plan import (
    DataSummary,
    EnvironmentSetting,
    MemoryEstimate,
    ModelFacts,
    ResumePoint,
    RunPlan,
    expects_fast_layers,
    has_one_backward,
)
from unisono.trainer.plan.schedule import beyond_training, unusual_schedule

Dtype = Literal["float32", "bfloat16", "float16"]

# More tokens per forward do not increase throughput.
_ENOUGH_TOKENS = {"cpu": 8_192, "cuda": 65_536}
_SHARE_OF_MEMORY = 0.8
# Width of a text model. Measured with two threads in place of one (bench/results/threads.json): 1.2
# × the time at 128, the same at 192, less from 256 on.
_SMALL = 192
_LARGEST_BATCH = 1_000_000  # as in the schema
FUSED_TYPES = frozenset({"hrm_text"})
"""Model types whose files fuse several tensors of the model: transformers needs all of them
together to write one.
"""
_TIED_IN_GGUF = ("gemma", "gemma2")
"""Model types for which a GGUF has no head of its own."""


STORAGE_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "adl": "adlfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
    "webhdfs": "requests",
    "github": "requests",
    "gist": "requests",
    "jupyter": "requests",
    "git": "pygit2",
    "libarchive": "libarchive-c",
    "oss": "ossfs",
    "box": "boxfs",
    "dropbox": "dropboxdrivefs",
    "dvc": "dvc",
    "gdrive": "gdrive-fsspec",
    "lakefs": "lakefs-spec",
    "oci": "ocifs",
    "ocilake": "ocifs",
    "tos": "tosfs",
    "tosfs": "tosfs",
    "wandb": "wandbfs",
    "webdav": "webdav4",
}
"""The package with which fsspec opens URLs, by their scheme."""


@dataclass(frozen=True)
class NeededPackages:
    """Packages beside unisono's own dependencies, the key that needs them, and the words of it."""

    key: str
    words: str
    names: tuple[str, ...]


def needed_packages(config: RunConfig) -> list[NeededPackages]:
    """The packages that a config needs beside unisono's own dependencies."""
    needed = [NeededPackages("track", f"track: [{name}]", (name,)) for name in config.track]
    if quantize := config.model.quantize:
        words = f"model.quantize: {quantize}"
        needed.append(NeededPackages("model.quantize", words, ("bitsandbytes", "accelerate")))
    if package := optimizer_named(config.optim.kind).package:
        needed.append(NeededPackages("optim.kind", f"optim.kind: {config.optim.kind}", (package,)))
    if packages := family_for(config.objective).packages:
        needed.append(NeededPackages("objective", f"objective: {config.objective}", packages))
    urls = [(key, section.path) for key, section in sources_of(config.data)]
    for key, url in [*urls, ("checkpoint.storage", config.checkpoint.storage or "")]:
        scheme, is_url, _ = url.partition("://")
        if is_url and scheme.lower() in STORAGE_PACKAGES:
            needed.append(NeededPackages(key, f"{scheme}://", (STORAGE_PACKAGES[scheme.lower()],)))
    return needed


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan."""

    config: RunConfig
    run_id: str
    output_dir: str
    host: str
    device: DeviceChoice
    threads: int
    threads_origin: str
    model: ModelFacts
    data: DataSummary
    resume: ResumePoint | None
    resume_reason: str
    settings: dict[str, str] = field(default_factory=dict)
    ignored_variables: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    faults: Mapping[str, object] = field(default_factory=dict)
    code_digests: Mapping[str, str] = field(default_factory=dict)
    reward_models: Sequence[RewardModel] = ()
    nodes: list[NodePlace] = field(default_factory=list)
    """Empty: this node alone."""
    ranks: list[RankPlace] = field(default_factory=list)
    """Empty: one rank, on `device`."""
    store_host: str = "127.0.0.1"
    earlier_batch: tuple[int, tuple[int, int] | None] | None = None
    """`global_batch` and `batch_of_ranks` of the plan of a run that continues."""

    @property
    def world_size(self) -> int:
        """All ranks."""
        return max(1, len(self.ranks))

    @property
    def devices(self) -> list[DeviceChoice]:
        """The device of each rank."""
        return [place.device for place in self.ranks] or [self.device]


def resolve_plan(given: PlanInputs) -> RunPlan:
    """Makes the plan of a run.

    Raises:
        ConfigError: if the config is impossible on these devices with this data.
    """
    given, of_ranks = _with_global_batch(given)
    config, data = given.config, given.data
    origins = dict(given.origins) | {"threads": given.threads_origin}
    threads = _threads(given, origins)
    dtype = _dtype(config, given.devices, origins)
    _refuse_float16_products(config, given.devices)
    _refuse_absent_gpu(given.reward_models, given.devices)
    mesh, micro, checkpointing, memory = _fit(given, dtype, origins)
    per_epoch = data.train.sequences / config.rows_per_step
    total_steps, total_sequences = steps_of(config, data)
    periods = {
        "eval.every": (
            period_of(config.eval.every, config, data) if data.eval or config.diffusion.prompts else None
        ),
        "checkpoint.every": period_of(config.checkpoint.every, config, data),
    }
    eval_every, checkpoint_every = (every and min(every, total_steps) for every in periods.values())
    return RunPlan(
        run_id=given.run_id,
        config=config,
        config_digest=config_digest(config),
        output_dir=given.output_dir,
        world_size=given.world_size,
        strategy=mesh.strategy,
        nodes=given.nodes
        or [NodePlace(node_rank=0, host=given.host, address="127.0.0.1", nproc=1, nproc_origin="")],
        ranks=given.ranks
        or [RankPlace(rank=0, node_rank=0, local_rank=0, host=given.host, device=given.device)],
        store_host=given.store_host,
        device=given.device,
        host=given.host,
        threads=threads,
        dtype=dtype,
        model=given.model,
        data=data,
        global_batch=config.batch.global_,
        batch_of_ranks=of_ranks,
        micro_batch=micro,
        gradient_checkpointing=checkpointing,
        total_steps=total_steps,
        total_sequences=total_sequences,
        steps_per_epoch=per_epoch,
        warmup_steps=Warmup.parse(config.optim.warmup).steps(total_steps),
        eval_every=eval_every,
        checkpoint_every=checkpoint_every or total_steps,
        keep_every=period_of(config.checkpoint.keep_every, config, data),
        digest_every=period_of(config.watch.digest_every, config, data) if mesh.has_replicas else None,
        memory=memory,
        resume=given.resume,
        resume_reason=given.resume_reason,
        settings=[
            EnvironmentSetting(name=name, value=value, reason=config.reasons.get(name, ""))
            for name, value in sorted(given.settings.items())
        ],
        ignored_variables=given.ignored_variables,
        origins=origins,
        warnings=_few_steps(given, total_steps, of_ranks)
        + beyond_the_end(periods, given.origins, steps=total_steps)
        + beyond_training(config)
        + unusual_schedule(config)
        + _never_paged(config, given.device)
        + _without_effect(config, data, mesh, given.model)
        + _too_many_layers(config, given.model)
        + _parted_head(config, given.model)
        + _omitted(config, given.model)
        + _silent(given, mesh)
        + _gathered_whole(given, mesh)
        + _uneven(given.nodes)
        + _seldom_kept(config, data)
        + _reasons_for_nothing(config, given.settings),
        faults=dict(given.faults),
        code_digests=dict(given.code_digests),
    )


def _with_global_batch(given: PlanInputs) -> tuple[PlanInputs, tuple[int, int] | None]:
    """The inputs with `batch.global` in place of `batch.per_rank`, and what it was made from.

    Raises:
        ConfigError: if the product is beyond any batch.
    """
    config, data = given.config, given.data
    of_ranks = config.batch.of_ranks
    earlier, earlier_of_ranks = given.earlier_batch or (None, None)
    if of_ranks is None:
        return given, earlier_of_ranks
    per_rank, accumulate = of_ranks
    size = earlier or per_rank * accumulate * given.world_size
    if size > _LARGEST_BATCH:
        raise ConfigError.of(
            f"the global batch has {size:,} sequences: {per_rank:,} × {accumulate:,} × {given.world_size}"
            " ranks",
            where="batch.per_rank",
            why=f"the limit is {_LARGEST_BATCH:,}",
            fix="lower batch.per_rank or batch.accumulate",
        )
    batch = BatchSection.model_validate({"global": size, "micro": per_rank})
    if Duration.parse(config.duration).unit != "steps":
        data = data.model_copy(update={"total_steps": -(-data.total_steps // size)})
    return replace(given, config=config.model_copy(update={"batch": batch}), data=data), of_ranks


def _few_steps(given: PlanInputs, steps: int, of_ranks: tuple[int, int] | None) -> list[str]:
    """A line about a short run; a run that continues keeps its batch, and has said it."""
    if given.earlier_batch is not None or given.resume is not None:
        return []
    return short_run(given.config, given.data, steps=steps, ranks=given.world_size, of_ranks=of_ranks)


def _threads(given: PlanInputs, origins: dict[str, str]) -> int:
    """Threads of each rank: one for matrices so small that threads wait for each other longer than
    they compute, unless the number is declared.
    """
    on_cpu = all(device.kind == "cpu" for device in given.devices)
    is_small = family_of(given.model).decodes_tokens and given.model.hidden_size <= _SMALL
    if given.threads == 1 or not on_cpu or not is_small or "OMP_NUM_THREADS" in given.threads_origin:
        return given.threads
    origins["threads"] = f"a model of width {given.model.hidden_size} trains faster with one"
    return 1


def _dtype(config: RunConfig, devices: list[DeviceChoice], origins: dict[str, str]) -> Dtype:
    requested = config.model.dtype
    if requested != "auto":
        if requested == "float16" and any(device.kind == "cpu" for device in devices):
            raise ConfigError.of(
                "float16 does not train on a CPU",
                where="model.dtype",
                why="its sums overflow and there is no loss scaling",
                fix="set model.dtype to bfloat16, float32 or auto",
            )
        return requested
    without = next((device for device in devices if not device.bfloat16), None)
    odd = without or devices[0]
    origins["dtype"] = f"auto: {odd.name} {'has no' if without else 'has'} bfloat16 arithmetic"
    return "float32" if without else "bfloat16"


def _refuse_float16_products(config: RunConfig, devices: list[DeviceChoice]) -> None:
    if config.model.quantize_compute == "float16" and any(device.kind == "cpu" for device in devices):
        raise ConfigError.of(
            "products with quantized weights cannot be in float16 on a CPU",
            where="model.quantize_compute",
            why="their gradients overflow, and there is no loss scaling",
            fix="set model.quantize_compute to auto, bfloat16 or float32",
        )


def _refuse_absent_gpu(models: Sequence[RewardModel], devices: list[DeviceChoice]) -> None:
    for model in models:
        if model.device == "cuda" and any(device.kind != "cuda" for device in devices):
            raise ConfigError.of(
                f"the reward model {model.path} cannot compute on the GPU of its rank",
                where=f"{model.key.removesuffix('path')}device",
                why="the ranks compute on CPUs",
                fix="set it to cpu",
            )


@dataclass(frozen=True)
class _Fitting:
    """One combination of mesh and micro batch, and its memory."""

    mesh: Mesh
    micro: int
    checkpointing: bool
    memory: MemoryEstimate


def _fit(given: PlanInputs, dtype: str, origins: dict[str, str]) -> tuple[Mesh, int, bool, MemoryEstimate]:
    """The mesh, the micro batch, whether activations are recomputed, and the memory."""
    meshes = _meshes(given)
    room = int(min(device.memory_bytes for device in given.devices) * _SHARE_OF_MEMORY)
    for mesh in meshes:
        fitting = _micro_batch(given, mesh, dtype, room, origins)
        if fitting is not None:
            break
    else:
        fitting = _smallest(given, meshes[-1], dtype)
        origins["memory"] = (
            f"the estimate of {show_bytes(fitting.memory.total)} is more than {_SHARE_OF_MEMORY:.0%} of the"
            f" {show_bytes(int(room / _SHARE_OF_MEMORY))} that are free; the trial of the longest batch will"
            " show it"
        )
    if len(meshes) > 1:
        why = (
            "the model fits on one device"
            if fitting.mesh.has_replicas
            else "the model does not fit on one device"
        )
        origins["strategy"] = f"auto: {why}"
    return fitting.mesh, fitting.micro, fitting.checkpointing, fitting.memory


def _meshes(given: PlanInputs) -> list[Mesh]:
    """The meshes to try, in order."""
    meshes = meshes_of(given.config.parallel.strategy, given.world_size)
    if not meshes:
        raise ConfigError.of(
            f"parallel.strategy is single, and there are {given.world_size} ranks",
            where="parallel.strategy",
            why="a single rank has no peers",
            fix="pass --nproc 1, or set parallel.strategy to auto, ddp or fsdp",
        )
    # fsdp shards full matrices, which some optimizers need; so does peft's DoRA of quantized
    # weights.
    needs_full = bool(optimizer_named(given.config.optim.kind).needs_full)
    adapter = given.config.adapter
    quantized_dora = bool(given.model.quantized) and adapter is not None and adapter.kind == "dora"
    unsharded = [mesh for mesh in meshes if not mesh.shards_weights]
    if quantized_dora and not unsharded:
        raise ConfigError.of(
            "parallel.strategy is fsdp, adapter.kind dora, and the weights are quantized as"
            f" {given.model.quantized}",
            where="parallel.strategy",
            why="peft's DoRA computes norms of full matrices, and cannot dequantize sharded ones",
            fix="set adapter.kind to lora or rslora, or parallel.strategy to ddp",
        )
    other_adapter = adapter is not None and not adapter.is_of_pairs
    has_full = not family_of(given.model).can_shard or needs_full or quantized_dora or other_adapter
    return unsharded if has_full and unsharded else meshes


def _micro_batch(
    given: PlanInputs, mesh: Mesh, dtype: str, room: int, origins: dict[str, str]
) -> _Fitting | None:
    """The largest micro batch that fits; None if none fits."""
    config, longest = given.config, given.data.train.longest_sequence
    choices = _micro_choices(given)
    requested = config.memory.gradient_checkpointing
    for checkpointing in (False, True) if requested == "auto" else (bool(requested),):
        for micro in choices:
            estimate = _need(given, mesh, dtype, micro=micro, checkpointing=checkpointing)
            enough = micro * longest > _ENOUGH_TOKENS[given.device.kind] and micro > 1 and len(choices) > 1
            if estimate.total <= room and not enough:
                if config.batch.micro == "auto":
                    origins["micro_batch"] = family_of(given.model).fit(micro, longest)
                if requested == "auto":
                    needed = "needed to fit" if checkpointing else "not needed"
                    origins["gradient_checkpointing"] = f"auto: {needed}"
                return _Fitting(mesh, micro, checkpointing, estimate)
    return None


def _smallest(given: PlanInputs, mesh: Mesh, dtype: str) -> _Fitting:
    """The combination with the least memory."""
    checkpointing = given.config.memory.gradient_checkpointing is not False
    micro = _micro_choices(given)[-1]
    return _Fitting(
        mesh, micro, checkpointing, _need(given, mesh, dtype, micro=micro, checkpointing=checkpointing)
    )


def _micro_choices(given: PlanInputs) -> list[int]:
    """Divisors of the global batch, largest first; none much larger than the share of a rank."""
    batch = given.config.batch
    if batch.micro != "auto":
        return [batch.micro]
    share = -(-batch.global_ // given.world_size)
    divisors = [n for n in range(batch.global_, 0, -1) if batch.global_ % n == 0]
    enough = min(n for n in divisors if n >= share)
    return [n for n in divisors if n <= enough]


def _need(given: PlanInputs, mesh: Mesh, dtype: str, *, micro: int, checkpointing: bool) -> MemoryEstimate:
    config, train, pictures = given.config, given.data.train, given.data.pictures
    share = -(-config.batch.global_ // given.world_size)
    kind = given.device.kind
    return estimate_memory(
        given.model,
        dtype=dtype,
        adapter_rank=config.adapter.rank if config.adapter else None,
        micro_tokens=min(micro, share) * train.longest_sequence,
        longest_row=train.longest_row,
        gradient_checkpointing=checkpointing,
        shards=mesh.weight_shards,
        logits=config.uses_logits,
        on_gpu=kind == "cuda",
        fast_layers=expects_fast_layers(config, given.model, dtype=dtype, devices=given.devices),
        one_backward=has_one_backward(
            config, micro=micro, global_batch=config.batch.global_, world_size=given.world_size
        ),
        optimizer_bytes=mean_state_bytes(
            config.optim, given.model, adapter_rank=config.adapter.rank if config.adapter else None
        ),
        router_loss=config.optim.router_loss is not None,
        keeps_start=config.grpo.beta > 0 and needs_start(config.adapter),
        samples=config.objective == GRPO and config.rollout.engine == "own",
        reward_models=sum(model.memory_bytes for model in given.reward_models if model.device == kind),
        train_parts=config.train_parts,
        pixel_values=min(micro, share) * (pictures.most_values if pictures else 0),
        largest_picture=pictures.largest_values if pictures else 0,
    )


def _never_paged(config: RunConfig, device: DeviceChoice) -> list[str]:
    """A warning if the optimizer would keep its state in memory that a GPU pages, and there is no
    GPU.
    """
    kind = config.optim.kind
    if device.kind == "cuda" or kind not in ("adamw_paged", "adamw_8bit_paged"):
        return []
    return [f"optim.kind: {kind} is not paged on a CPU: its state stays in memory, as with {_UNPAGED[kind]}"]


_UNPAGED = {"adamw_paged": "adamw", "adamw_8bit_paged": "adamw_8bit"}


def _seldom_kept(config: RunConfig, data: DataSummary) -> list[str]:
    """A warning if few of the steps to keep forever have a checkpoint."""
    every = period_of(config.checkpoint.every, config, data)
    wanted = period_of(config.checkpoint.keep_every, config, data)
    if every is None or wanted is None or wanted % every == 0:
        return []
    return [
        f"checkpoint.keep_every is {wanted} steps and checkpoint.every {every}: only at every"
        f" {math.lcm(every, wanted)} steps can a checkpoint be kept forever"
    ]


def _reasons_for_nothing(config: RunConfig, settings: Mapping[str, str]) -> list[str]:
    """A warning for each variable with a reason that is not set: a misspelled name, or a removed
    setting.
    """
    return [
        f"reasons.{name} has no effect: {name} is not set on the head"
        for name in config.reasons
        if name not in settings
    ]


def _uneven(nodes: list[NodePlace]) -> list[str]:
    """A warning if nodes run different numbers of ranks, which is allowed if all declare it."""
    if len({node.nproc for node in nodes}) <= 1:
        return []
    counts = ", ".join(f"node {node.node_rank} ({node.host}): {node.nproc}" for node in nodes)
    return [f"ranks per node differ, as declared: {counts}"]


def _silent(given: PlanInputs, mesh: Mesh) -> list[str]:
    """A warning if answers are enabled and cannot be generated: see `RunPlan.answers`."""
    names = sorted({device.name for device in given.devices})
    requested = [key for key in ("exact_match", "metrics", "samples") if getattr(given.config.eval, key)]
    if not mesh.forwards_together or len(names) == 1 or given.data.eval is None:
        return []
    return [
        f"eval.{key} has no effect: with fsdp all ranks generate in step, and their devices differ:"
        f" {', '.join(names)}"
        for key in requested
    ]


def _gathered_whole(given: PlanInputs, mesh: Mesh) -> list[str]:
    """A warning if the result of sharded ranks cannot be gathered tensor by tensor."""
    model = given.model
    if not mesh.shards_weights or given.config.adapter is not None or model.model_type not in FUSED_TYPES:
        return []
    size = show_bytes(model.weight_bytes or 4 * model.parameters)
    return [
        f"rank 0 will hold the whole model ({size}) in host memory when the result is written: in the files"
        f" of {model.model_type} several tensors are one, so they are gathered together and not one by one"
    ]


def _without_effect(config: RunConfig, data: DataSummary, mesh: Mesh, model: ModelFacts) -> list[str]:
    """A warning for each setting without effect in this run."""
    warnings = []
    if mesh.world_size == 1 and needs_several_ranks(config.parallel.strategy):
        warnings.append(
            f"parallel.strategy: {config.parallel.strategy} has no effect: there is one rank; pass --nproc"
        )
    if data.eval is None and not config.diffusion.prompts:
        warnings += [
            f"eval.{key} has no effect: there are no evaluation rows; set data.eval"
            for key in _changed(config.eval)
        ]
    if config.deterministic and config.device == "cpu":
        warnings.append("deterministic has no effect: runs on CPU are always bit-exact")
    optimizer = optimizer_named(config.optim.kind)
    warnings += [
        f"optim.{key} has no effect: optim.kind is {config.optim.kind}"
        for key in optimizers.OWN_KEYS
        if key not in optimizer.keys and key in _changed(config.optim)
    ]
    warnings += _quantization_without_effect(config, model)
    if config.adapter is not None and config.adapter.kind == "oft" and "alpha" in _changed(config.adapter):
        warnings.append("adapter.alpha has no effect: adapter.kind is oft")
    if (
        config.adapter is not None
        and config.adapter.init != "pissa"
        and config.adapter.init_steps is not None
    ):
        warnings.append("adapter.init_steps has no effect: adapter.init is default")
    rope, positions = config.model.rope, model.positions
    if rope is not None and rope.factor == "auto" and 0 < config.data.max_length <= positions:
        warnings.append(
            f"model.rope has no effect: data.max_length is {config.data.max_length}, and the model has"
            f" {positions} positions"
        )
    schedule = schedule_named(config.optim.schedule)
    warnings += [
        f"optim.{key} has no effect: optim.schedule is {config.optim.schedule}"
        for key in schedules.OWN_KEYS
        if key not in schedule.keys and key in _changed(config.optim)
    ]
    return warnings


def _quantization_without_effect(config: RunConfig, model: ModelFacts) -> list[str]:
    """A warning for each setting of quantized weights that has no effect with this model."""
    warnings, changed = [], _changed(config.model)
    if not model.quantized and "quantize_compute" in changed:
        warnings.append("model.quantize_compute has no effect: the weights are not quantized")
    if config.model.quantize not in ("nf4", "fp4") and "quantize_double" in changed:
        what = model.quantized or "not quantized"
        warnings.append(f"model.quantize_double has no effect: the weights are {what}")
    return warnings


def _too_many_layers(config: RunConfig, model: ModelFacts) -> list[str]:
    """A note if `train_only.layers` asks for more layers than there are."""
    only = config.train_only
    if only is None or only.spread or abs(only.layers) <= model.layers:
        return []
    return [f"train_only.layers is {only.layers}: the model has {model.layers} layers, all are trained"]


def _omitted(config: RunConfig, model: ModelFacts) -> list[str]:
    """A warning for each kind of layer that words of `adapter.targets` omit, with the reason."""
    targets = config.adapter.targets if config.adapter else ""
    return [f"adapter.targets: {targets} omits {name}: {why}" for name, why in model.omitted.items()]


_HEAD = "lm_head"
_EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in", _HEAD)


def _parted_head(config: RunConfig, model: ModelFacts) -> list[str]:
    """A warning if the adapter changes embedding or head of a model in which they share one matrix:
    what that means for exports.
    """
    adapter = config.adapter
    if adapter is None or not model.ties_head or config.model.resize_vocabulary:
        return []
    keys = [
        f"adapter.modules_to_save: {name}"
        for name in adapter.modules_to_save
        if name.rpartition(".")[2] in _EMBEDDINGS
    ]
    patterns = adapter.targets if isinstance(adapter.targets, list) else []
    keys += [f"adapter.targets: {pattern}" for pattern in patterns if re.search(pattern, _HEAD)]
    if not keys:
        return []
    no_gguf = "; llama.cpp has no such Gemma, so it cannot be exported as GGUF"
    return [
        f"{keys[0]}: embedding and head share one matrix in this model, and are two after training. `unisono"
        " export` writes the adapter as it is, and `export --merge` a model with tie_word_embeddings:"
        f" false{no_gguf * (model.model_type in _TIED_IN_GGUF)}"
    ]


def _changed(section: Section) -> list[str]:
    """The keys that differ from their defaults; explicit defaults, as in config.yaml, do not
    count.
    """
    return sorted(
        name for name, field in type(section).model_fields.items() if getattr(section, name) != field.default
    )
