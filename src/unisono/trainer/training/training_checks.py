"""Checks of training: the largest batch fits into memory, loss and gradient are finite, replicas
stay equal.
"""

import math
import platform
import re
import resource
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import xxhash

from unisono.base.causes import Evidence, Verdict, find_cause
from unisono.base.errors import RankDied
from unisono.base.text import show_bytes, shown_places
from unisono.trainer.batches.source import Counts, Micro, StepBatches
from unisono.trainer.config.optimizers import optimizer_named
from unisono.trainer.model.load import odd_parameters
from unisono.trainer.objectives.objective import Objective
from unisono.trainer.objectives.user_objective import MODEL, OBJECTIVE, OwnObjective
from unisono.trainer.plan import estimate_memory, mean_state_bytes
from unisono.trainer.plan.families import family_of
from unisono.trainer.plan.run_plan import has_one_backward
from unisono.trainer.plan.schedule import lower_rates
from unisono.trainer.training.evaluation import evaluating, evaluation_part, first_sum
from unisono.trainer.training.optim import state_before_a_step
from unisono.trainer.training.process_group import Alone
from unisono.trainer.training.router_step import RouterStep
from unisono.trainer.training.run import Run

MAX_SKIPPED = 3
SKIP_WINDOW = 20
_EVENTS = "events/rank-00000.jsonl"  # has the whole list of a warning's rows


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step.

    `loss` or `grad_norm` may be NaN or infinite; then no update was made.
    """

    loss: float
    grad_norm: float
    lr: float
    data_time_s: float
    step_time_s: float
    cpu_time_s: float
    """CPU seconds of the whole process; other load on the machine does not change them much."""
    comm_time_s: float
    """Seconds spent waiting for the other ranks' gradients."""
    odd_ranks: list[int]
    """Ranks whose own part of the loss is NaN or infinite."""
    origin_of_nan: int
    """MODEL or OBJECTIVE for an objective of the user's own; 0: nobody knows."""
    metrics: dict[str, float]
    """Those of the objective and of routers."""
    routers: list[float]
    """The sums of `RouterStep` over all ranks; empty without experts."""

    @property
    def is_sound(self) -> bool:
        """Whether loss and gradient were finite, so that the update was made."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def note_skipped_step(run: Run, batches: StepBatches, outcome: StepOutcome) -> None:
    """Reports a step that was skipped because of a NaN or infinite loss or gradient, with the rows
    of its batch.
    """
    run.state.skipped = [step for step in run.state.skipped if step > batches.step - SKIP_WINDOW] + [
        batches.step
    ]
    what = "gradient" if math.isfinite(outcome.loss) else "loss"
    rows = run.source.row_ids(batches.sequences)
    if origin := _of_objective(run, outcome, what=what):
        text = f"step {batches.step} was skipped: {origin}"
        run.report.send(
            {
                "kind": "warning",
                "code": "nan_step",
                "step": batches.step,
                "rows": rows,
                "fix": _objective_fix(run.objective)[0],
                "text": text,
            }
        )
        return
    if _is_model(run, outcome.odd_ranks):
        run.report.send(
            {
                "kind": "warning",
                "code": "nan_step",
                "step": batches.step,
                "rows": [],
                "fix": _model_fix(run),
                "text": (
                    f"step {batches.step} was skipped: NaN or infinite {what} before any update; the loaded model"
                    " is the cause, not a row"
                ),
            }
        )
        return
    run.report.send(
        {
            "kind": "warning",
            "code": "nan_step",
            "step": batches.step,
            "rows": rows,
            "fix": f"set a smaller optim.lr, or look at these rows; all are in {_EVENTS} of the run",
            "text": (
                f"step {batches.step} was skipped: NaN or infinite {what}{_on_ranks(run, outcome)}; its rows:"
                f" {shown_places(rows)}"
            ),
        }
    )


def _on_ranks(run: Run, outcome: StepOutcome) -> str:
    """The ranks with a NaN or infinite loss, if there are several ranks and the loss shows it."""
    if run.group.world_size == 1 or not outcome.odd_ranks:
        return ""
    return " on " + ", ".join(run.plan.ranks[rank].label for rank in outcome.odd_ranks)


def made_no_update(run: Run) -> bool:
    """Whether all steps so far were skipped.

    There are at most MAX_SKIPPED of them then, so none has left the window.
    """
    return run.state.step > 0 and len(run.state.skipped) == run.state.step


def too_many_skipped(run: Run, batches: StepBatches, outcome: StepOutcome) -> Verdict | None:
    """The verdict that ends the run after too many skipped steps, or None while it may continue."""
    is_last = run.state.step == run.plan.total_steps
    if len(run.state.skipped) < MAX_SKIPPED and not (is_last and made_no_update(run)):
        return None
    origin = _of_objective(run, outcome)
    if not origin and _is_model(run, outcome.odd_ranks):
        return model_verdict(run)
    where = run.where
    # A gradient can overflow although every loss is finite; no rank is blamed then.
    culprits = outcome.odd_ranks if run.group.world_size > 1 else [0]
    if origin and len(outcome.odd_ranks) in (0, run.group.world_size):
        culprits = []
    steps = ", ".join(map(str, run.state.skipped))
    among = (
        f"{len(run.state.skipped)} of the last {SKIP_WINDOW} steps"
        if run.state.step > MAX_SKIPPED
        else "every step"
    )
    return Verdict(
        cause="nan_loss",
        when="during",
        ranks=tuple(culprits),
        hosts=tuple(dict.fromkeys(run.plan.ranks[rank].host for rank in culprits)),
        phase="train",
        step=batches.step,
        summary=(
            f"NaN or infinite loss or gradient in {among} ({steps}){_on_ranks(run, outcome)}"
            if not origin
            else f"{origin}, in {among} ({steps})"
        ),
        evidence=(
            Evidence(
                where=where,
                text=(
                    f"steps {steps} were skipped; the weights come from before step {run.state.skipped[0]}"
                    " and the finite steps since"
                ),
            ),
            Evidence(
                where=where,
                text=f"rows of step {batches.step}: {shown_places(run.source.row_ids(batches.sequences))}",
            ),
        ),
        fix=(
            _objective_fix(run.objective)
            if origin
            else (
                f"restart with a smaller learning rate, e.g. {lower_rates(run.plan.config)}",
                family_of(run.plan.model).rows_advice,
                "if model.dtype is float16, use bfloat16 or float32",
            )
        ),
    )


def lasting_trouble(run: Run, batches: StepBatches, outcome: StepOutcome) -> Verdict | None:
    """Warns of signs of trouble that the objective sees in the figures of several steps; a verdict
    if the run must end.
    """
    signs = run.objective.signs({"step": batches.step, **outcome.metrics, **batches.figures})
    for sign in run.sign_counts.lasting(signs):
        entry = find_cause(sign.cause)
        assert entry is not None
        text = f"{sign.text}, in {sign.steps} steps in a row" if sign.steps > 1 else sign.text
        if sign.ends_run:
            return Verdict(
                cause=sign.cause,
                when="during",
                summary=text,
                phase="train",
                step=batches.step,
                evidence=(Evidence(where=run.where, text=f"{sign.text} in step {batches.step}"),),
                fix=entry.remedy,
            )
        if run.group.is_main:
            run.report.warning(sign.cause, text, fix=entry.remedy[0])
    return None


def _objective_fix(objective: Objective) -> tuple[str, str]:
    where = objective.where if isinstance(objective, OwnObjective) else ""
    return (
        (
            f"fix the loss in {where}: e.g. a division by 0, or log, sqrt or a power of 0, whose gradient is"
            " infinite"
        ),
        (
            "torch.autograd.set_detect_anomaly(True) in that file makes the rank's log show the line; with"
            " objective: sft model and data are tried without it"
        ),
    )


def _of_objective(run: Run, outcome: StepOutcome, *, what: str = "loss or gradient") -> str:
    """That NaN came from an objective of the user's own, certainly or likely; empty for ours, and
    if the model's outputs had it.
    """
    own = run.objective
    if not isinstance(own, OwnObjective) or outcome.origin_of_nan == MODEL:
        return ""
    on = _on_ranks(run, outcome)
    if outcome.origin_of_nan == OBJECTIVE:
        return (
            f"the objective {own.where} gives a NaN or infinite {what}{on}, and all outputs of the model are"
            " finite"
        )
    return f"NaN or infinite {what}{on}, whose likely origin is the objective {own.where}"


def _is_model(run: Run, odd_ranks: list[int]) -> bool:
    """Whether the loaded model itself gives NaN: no update was made yet, and all ranks, which hold
    the same weights, have NaN.

    The learning rate has had no effect then, and different rows would give NaN, too. If only some
    ranks have NaN, their rows or devices are the cause.
    """
    return made_no_update(run) and len(odd_ranks) in (0, run.group.world_size)


def model_verdict(run: Run) -> Verdict:
    """The verdict on a run whose steps gave NaN or infinity before any update was made."""
    steps = ", ".join(map(str, run.state.skipped))
    model = run.plan.config.model.path
    own = f" with the objective {run.objective.where}" if isinstance(run.objective, OwnObjective) else ""
    odd = odd_parameters(run.forward.loaded.model)
    if odd:
        reason = f"{odd[0]} has NaN or infinite values" + (
            f", and so have {len(odd) - 1} more tensors" if len(odd) > 1 else ""
        )
    else:
        reason = f"all weights are finite, so values overflow in the computation with {run.plan.dtype}"
        if run.plan.config.model.trust_remote_code:
            reason += ", or the model's own Python code makes them NaN"
    return Verdict(
        cause="nan_loss",
        when="during",
        ranks=(),
        hosts=(),
        phase="train",
        step=run.state.step,
        summary=(
            f"the model {model}{own} gives a NaN or infinite loss or gradient before any update (steps"
            f" {steps}): nothing was trained"
        ),
        evidence=(
            Evidence(where=run.where, text=reason),
            Evidence(
                where=run.where,
                text=(
                    "no update was made, so neither the learning rate nor a row is the cause; all ranks have"
                    " the same weights"
                ),
            ),
        ),
        fix=(_model_fix(run), *_objective_fix(run.objective)) if own else (_model_fix(run),),
    )


def _model_fix(run: Run) -> str:
    model = run.plan.config.model
    fix = f"use different weights than {model.path}"
    if model.trust_remote_code:
        fix = f"fix the model's own Python code, or {fix}"
    if run.plan.dtype == "float32":
        return f"{fix}, or download them again"
    return f"set model.dtype to float32 (now {run.plan.dtype}); if that does not help, {fix}"


# ---- Memory

_QUICK_S = 1.0


@dataclass(frozen=True)
class MemoryTrial:
    """The result of trying the longest batch.

    Attributes:
        peak_bytes: peak memory.
        step_time_s: time of a step on this rank, estimated from the tokens of this batch and of an
            average step.
    """

    peak_bytes: int
    step_time_s: float


def try_longest_batch(run: Run) -> MemoryTrial:
    """Runs forward and backward on the largest micro batch, and one evaluation batch, so that
    memory runs out now and not hours later.

    All ranks must call it: each tries its own batch; with sharded weights the forwards are
    collective.

    Raises:
        RankDied: if memory runs out, with a verdict that has the batch's shape and two settings to
            change.
    """
    run.report.phase("rehearse", "trying the longest batch")
    run.beats.enter("rehearse")
    sides, first_sides = run.objective.sides, run.objective.first_sides
    family = family_of(run.plan.model)
    padded = family.decodes_tokens and bool(run.forward.padded)
    group = run.source.longest(sides, padded=padded)
    micro = group.load(sides)
    shape = family.micro_shape(len(group.sequences), micro.tokens, max(micro.rows.lengths))
    try:
        if not run.gradient_sync.needs_equal_rounds:
            run.gradient_sync.begin()  # gradients must be in their buffers, as in training
        held = _as_much_as_the_optimizer_will_hold(run)
        if first_sides:
            first_sum(run, [(run.source.longest(first_sides, padded=padded).load(first_sides), True)])
        seconds = _time_of(run, micro)
        if seconds < _QUICK_S and not run.gradient_sync.needs_equal_rounds:
            # The first pass includes warmup, the second lacks the gradient sum and the update of a
            # step: take the mean.
            run.gradient_sync.begin()
            seconds = (seconds + _time_of(run, micro)) / 2
        run.optimizers.zero_grad()
        del held
        if run.evaluation is not None and not run.source.measures:
            first = next(run.evaluation.rounds())
            with torch.no_grad(), evaluating(run):
                evaluation_part(run, first, counts=run.evaluation.rows.counts(first))
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(run, error, shape=shape, phase="rehearse") from error
    data = run.plan.data.train
    tokens = data.tokens / max(1, data.sequences) * run.plan.global_batch / run.group.world_size
    return MemoryTrial(peak_bytes(run.device), seconds * tokens / max(1, micro.tokens))


def _time_of(run: Run, micro: Micro) -> float:
    """Seconds for a forward and a backward."""
    began = time.perf_counter()
    if len(micro.rows.labels) or run.gradient_sync.needs_equal_rounds:
        counts = Counts(micro.units, max(1, len(micro.rows.labels)), micro.tokens)
        routers = RouterStep(run, tokens=micro.tokens, group=Alone())
        loss = run.objective.loss(run.forward, micro, counts=counts).loss
        routers.added_to(loss, is_counted=True).backward()
    if run.device.type == "cuda":
        torch.cuda.synchronize(run.device)
    return time.perf_counter() - began


def _as_much_as_the_optimizer_will_hold(run: Run) -> list[torch.Tensor]:
    """The optimizer's state of every trained parameter: the first step allocates it, so later
    forwards have less memory.
    """
    if any(part.state for part in run.optimizers.parts.values()):
        return []
    section, trained = run.plan.config.optim, run.forward.loaded.trainable.values()
    return [moment.add_(1) for parameter in trained for moment in state_before_a_step(section, parameter)]


_OUT_OF_MEMORY = re.compile(r"can't allocate memory|CUDA error: out of memory|STATUS_ALLOC_FAILED")
"""Messages of torch on a CPU, of the CUDA driver, which needs memory e.g. for a kernel's stack, and
of cuBLAS and cuDNN.
"""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether torch reports that memory ran out, on GPU or CPU."""
    return isinstance(error, torch.OutOfMemoryError) or bool(_OUT_OF_MEMORY.search(str(error)))


def out_of_memory(run: Run, error: BaseException, *, shape: str, phase: str) -> RankDied:
    """The error for the user: the batch's shape, and two settings with the memory that each
    saves.
    """
    cause = "cuda_oom" if run.device.type == "cuda" else "host_oom_killed"
    why = str(error) + _why_more(run)
    summary = f"memory ran out on {run.plan.device.name} with a batch of {shape}"
    verdict = Verdict(
        cause=cause,
        when="during",
        summary=summary,
        ranks=(run.group.rank,),
        hosts=(run.plan.host,),
        phase=phase,
        step=run.state.step,
        evidence=(Evidence(where=run.where, text=why),),
        fix=tuple(_savings(run)),
    )
    return RankDied.of(
        summary,
        where=f"{run.where}, {phase}",
        why=why,
        fix="; ".join(_savings(run)),
        verdict=verdict,
    )


def _why_more(run: Run) -> str:
    """That the fast layers, with which the plan has estimated the memory, are not used, and why;
    empty otherwise.
    """
    if run.forward.fast_layers or not run.plan.expects_fast_layers:
        return ""
    why = run.forward.why.removeprefix("the fast layers are not used: ") or "none of them fits the model"
    return f"; the memory was estimated for the fast layers, which are not used here: {why}"


def _savings(run: Run) -> list[str]:
    """Two settings that save memory, each with the estimated amount."""
    plan, config, pictures = run.plan, run.plan.config, run.plan.data.pictures
    optimizer = optimizer_named(config.optim.kind)
    rank = config.adapter.rank if config.adapter else None
    state_bytes = mean_state_bytes(config.optim, plan.model, adapter_rank=rank)

    def total(micro: int, *, checkpointing: bool, optimizer_bytes: float = state_bytes) -> int:
        return estimate_memory(
            plan.model,
            dtype=plan.dtype,
            adapter_rank=rank,
            micro_tokens=micro * plan.data.train.longest_sequence,
            longest_row=plan.data.train.longest_row,
            gradient_checkpointing=checkpointing,
            shards=plan.mesh.weight_shards,
            logits=config.uses_logits,
            on_gpu=run.device.type == "cuda",
            fast_layers=run.device.type == "cuda" and run.forward.fast_layers > 0,
            one_backward=has_one_backward(
                config, micro=micro, global_batch=plan.global_batch, world_size=run.group.world_size
            ),
            optimizer_bytes=optimizer_bytes,
            router_loss=config.optim.router_loss is not None,
            train_parts=config.train_parts,
            pixel_values=micro * (pictures.most_values if pictures else 0),
            largest_picture=pictures.largest_values if pictures else 0,
        ).total

    now = total(plan.micro_batch, checkpointing=plan.gradient_checkpointing)
    advice = []
    if plan.micro_batch > 1:
        smaller = max(n for n in range(1, plan.micro_batch) if plan.global_batch % n == 0)
        saved = now - total(smaller, checkpointing=plan.gradient_checkpointing)
        if saved > 0:  # with several micro batches in a step, gradients of full fine-tuning are in float32
            advice.append(f"batch.micro={smaller} saves about {show_bytes(saved)}, with the same result")
    if not plan.gradient_checkpointing:
        saved = now - total(plan.micro_batch, checkpointing=True)
        advice.append(
            f"memory.gradient_checkpointing=true saves about {show_bytes(saved)}, and takes about a third"
            " longer"
        )
    saved = now - total(
        plan.micro_batch,
        checkpointing=plan.gradient_checkpointing,
        optimizer_bytes=optimizer.state_bytes("bfloat16"),
    )
    # Later the checkpoints have the state in this dtype, and would not be resumed.
    if len(advice) < 2 and config.adapter is None and saved > 0 and run.state.step == 0:
        advice.append(f"optim.state_dtype=bfloat16 saves about {show_bytes(saved)} of the optimizer's state")
    if len(advice) < 2:
        advice.append(family_of(plan.model).shorter_rows(config.data.max_length))
    if len(advice) < 2 and config.adapter is None:
        advice.append(
            "adapter={kind: lora} trains few parameters, without gradients and optimizer state for the rest"
        )
    return advice[:2]


def peak_bytes(device: torch.device) -> int:
    """Peak memory so far: of the GPU if there is one, else of the process."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# ---- Equality of replicas

_CHUNK = 1 << 20  # words at a time on a device: 16 MiB of temporary memory for any model size


def report_weights_digest(run: Run) -> None:
    """Reports a digest of all trained weights to the front every `digest_every` steps and after the
    last one, so that it can compare replicas.

    Ranks of a ddp run start with the same bits, get the same sums, and make the same updates. A
    digest needs no collective, so it cannot hang.
    """
    every, step = run.plan.digest_every, run.state.step
    if every is None or (step % every != 0 and step != run.plan.total_steps):
        return
    digest = weights_digest(run.forward.loaded.trainable.values())
    run.report.send({"kind": "digest", "step": step, "digest": digest, "arithmetic": arithmetic(run.device)})


def weights_digest(tensors: Iterable[torch.Tensor]) -> str:
    """The digest of the bytes of float32 tensors, in order.

    On a CPU xxh3; on a device of two sums, so that only these are copied.
    """
    tensors = [tensor.detach() for tensor in tensors]
    if all(tensor.device.type == "cpu" for tensor in tensors):
        digest = xxhash.xxh3_128()
        for tensor in tensors:
            digest.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()
    sums = torch.stack([_checksums(tensor) for tensor in tensors]).cpu()  # the only wait for the device
    return xxhash.xxh3_128(sums.numpy()).hexdigest()


def _checksums(tensor: torch.Tensor) -> torch.Tensor:
    """(2,) int64: Σ w, and Σ w·place, modulo 2⁶⁴, over the 4-byte words w; computed on the tensor's
    device.
    """
    words = tensor.contiguous().view(-1).view(torch.int32)
    place = torch.arange(1, _CHUNK + 1, device=words.device)  # int64
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for number, chunk in enumerate(words.split(_CHUNK)):
        plain = chunk.sum(dtype=torch.int64)
        total[0] += plain
        total[1] += (chunk * place[: len(chunk)]).sum() + plain * (number * _CHUNK)
    return total


def arithmetic(device: torch.device) -> str:
    """The hardware property that determines how sums are rounded: the device's name, or the
    instruction set that torch uses on this CPU.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU with {torch.backends.cpu.get_cpu_capability()}"
