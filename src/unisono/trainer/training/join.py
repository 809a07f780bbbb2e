"""How a rank finds its place in the plan, reports what it holds, and joins the other ranks."""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from unisono.base.causes import Evidence, Verdict
from unisono.base.errors import Disagreed, Problem
from unisono.base.events import Reporter
from unisono.guard.agree.reports import RankReport
from unisono.guard.facts import Environment
from unisono.guard.places.ranks import RankPlace
from unisono.guard.watch import Beats
from unisono.trainer.batches.table import TableSource
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.data.tokenizer import PROBE
from unisono.trainer.model.load import LoadedModel
from unisono.trainer.model.quantization import packed_weights, scales_of
from unisono.trainer.plan import RunPlan
from unisono.trainer.training.front_io import front_messages
from unisono.trainer.training.process_group import Group, Listener, Ranks, backend_of


def find_place(plan: RunPlan, environment: Environment) -> RankPlace:
    """The rank of the plan that this process is, by its environment variables.

    A plan of one rank reads none.

    Raises:
        Disagreed: if the plan has no such rank, or a variable contradicts the plan.
    """
    if plan.world_size == 1:
        return plan.ranks[0]
    rank = environment.rank
    if rank is None or rank >= plan.world_size:
        found_rank = "is not set" if rank is None else f"is {rank}"
        raise _plan_mismatch(
            None,
            f"RANK {found_rank}, but the plan has ranks 0 to {plan.world_size - 1}",
            "start ranks with `unisono train`",
        )
    place = plan.ranks[rank]
    for name, actual, planned in (
        ("WORLD_SIZE", environment.world_size, plan.world_size),
        ("LOCAL_RANK", environment.local_rank, place.local_rank),
    ):
        if actual != planned:
            value = "is not set" if actual is None else f"is {actual}"
            raise _plan_mismatch(
                place,
                f"{name} {value} for rank {rank}, but the plan has {planned}",
                "start ranks with `unisono train`",
            )
    return place


def check_device(place: RankPlace, device: torch.device) -> None:
    """Compares the bound device with the plan.

    Raises:
        Disagreed: if they differ.
    """
    planned, bound = place.device.uuid, bound_uuid(device)
    if bound is not None and planned is not None and planned.startswith("GPU-") and planned != bound:
        raise _plan_mismatch(
            place,
            f"rank {place.rank} has bound {bound}, but the plan assigns {planned} to it",
            "unset CUDA_VISIBLE_DEVICES where the rank starts, or select devices with --devices",
        )


def join_ranks(
    plan: RunPlan,
    place: RankPlace,
    report: Reporter,
    beats: Beats,
    *,
    device: torch.device,
    loaded: LoadedModel,
    data: TableSource,
) -> Group:
    """Reports what this rank holds, waits until the front confirms that all ranks agree, and joins
    the others.

    All ranks must call it.

    The process exits here if the front is gone, or ends the run because ranks differ.

    Raises:
        Disagreed: if the number of ranks that have joined is not that of the plan.
    """
    report.phase("agree.ranks", "comparing the ranks")
    listener = Listener(plan.store_host) if place.rank == 0 else None
    own = make_rank_report(
        plan, place, device=device, loaded=loaded, data=data, store_port=listener.port if listener else None
    )
    report.send({"kind": "rank_report", "report": own.to_json()})
    beats.enter("agree.ranks")
    host, port = _wait_for_go()
    report.phase("join", "joining the other ranks")
    beats.enter("join")
    group = Ranks(
        f"{plan.run_id}/{plan.epoch}",
        rank=place.rank,
        world_size=plan.world_size,
        device=device,
        store=(host, port),
        listener=listener,
        beats=beats,
    )
    check_world(plan, place, group)
    return group


def check_world(plan: RunPlan, place: RankPlace, group: Ranks) -> None:
    """Compares the number of ranks that have joined with the plan: the group's own size, and a
    count.

    All ranks must call it.

    Raises:
        Disagreed: if they differ. A world of a different size would train, but on different
            batches.
    """
    count = torch.ones((), dtype=torch.int64, device=group.device)
    group.sum(count)
    for what, size in (("the group has", group.joined), ("a count gives", int(count))):
        if size != plan.world_size:
            raise _world_mismatch(place, f"{what} {size} ranks, but the plan has {plan.world_size}")


def _world_mismatch(place: RankPlace, what: str) -> Disagreed:
    fix = "restart all nodes with the same --nodes and --nproc as in the plan"
    summary = f"{place.label}: {what}"
    verdict = Verdict(
        cause="world_mismatch",
        when="before",
        summary=summary,
        phase="join",
        evidence=(Evidence(where=place.label, text=what),),
        fix=(fix,),
    )
    return Disagreed(
        Problem(summary, place.label, "a world of a different size trains on different batches", fix),
        verdict=verdict,
    )


def _wait_for_go() -> tuple[str, int]:
    """Host and port of rank 0's store, from the line on stdin with which the front lets the rank
    continue.
    """
    message = front_messages().wait_for("go")
    if message is None:
        # The ranks differ, and the front has reported how; or there is no front, and only the log
        # is left.
        sys.stderr.write("the front closed stdin without letting this rank continue: it exits\n")
        sys.exit(Disagreed.exit_code)
    try:
        host, port = message["store"]
        return str(host), int(port)
    except (ValueError, KeyError, TypeError) as error:
        raise AssertionError(f"invalid message of the front: {message!r}") from error


def _plan_mismatch(place: RankPlace | None, what: str, fix: str) -> Disagreed:
    verdict = Verdict(
        cause="plan_mismatch",
        when="before",
        summary=what,
        ranks=(place.rank,) if place else (),
        hosts=(place.host,) if place else (),
        phase="agree.ranks",
        evidence=(Evidence(where=place.label, text=what),) if place else (),
        fix=(fix,),
    )
    return Disagreed(
        Problem(
            what, place.label if place else "", "a rank follows the plan exactly, or does not start", fix
        ),
        verdict=verdict,
    )


# ---- The report of a rank

_STEPS = 100  # the order of rows is compared for so many steps
_SHOWN = 8


def make_rank_report(
    plan: RunPlan,
    place: RankPlace,
    *,
    device: torch.device,
    loaded: LoadedModel,
    data: TableSource,
    store_port: int | None,
) -> RankReport:
    """The report of what this rank actually holds, independent of the plan."""
    table = data.rows.table
    steps = [data.sequences(step) for step in range(1, min(plan.total_steps, _STEPS) + 1)]
    frozen = {n: p for n, p in loaded.model.named_parameters() if not p.requires_grad}
    frozen_values = values_by_name(frozen | scales_of(loaded.model))
    return RankReport(
        rank=place.rank,
        local_rank=place.local_rank,
        node_rank=place.node_rank,
        world_size=plan.world_size,
        host=place.host,
        pid=os.getpid(),
        device_kind="cuda" if device.type == "cuda" else "cpu",
        device_uuid=bound_uuid(device),
        rows=table.rows,
        sequences=table.sequences,
        rows_digest=rows_digest(table),
        order_digest=digest_of(steps),
        first_difference=data.row_ids([sequence for step in steps for sequence in step][:_SHOWN]),
        total_steps=plan.total_steps,
        tokens=int(table.sequence_tokens().sum()),
        loss_tokens=int(table.sequence_loss_tokens().sum()),
        parameters_digest=shapes_digest(loaded.trainable),
        trainable_parameters=loaded.trainable_parameters,
        trained_values_digest=digest_of(values_by_name(loaded.trainable).items()),
        frozen_values_digest=digest_of(frozen_values.items()),
        odd_tensors=by_layer(frozen_values),
        tokenizer_digest=tokenizer_digest(loaded.tokenizer),
        dtype=plan.dtype,
        strategy=plan.strategy,
        seed=plan.config.seed,
        threads=torch.get_num_threads(),
        resume_step=plan.resume.step if plan.resume else 0,
        torch_version=torch.__version__,
        collective_backend=backend_of(device),
        store_port=store_port,
    )


def bound_uuid(device: torch.device) -> str | None:
    """The UUID of the bound accelerator, as the driver writes it; None on CPU, and of a MIG slice,
    which has another one than its device.
    """
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    return None if " MIG " in properties.name else f"GPU-{properties.uuid}"


# ---- Digests of what it holds

_WIDTH = 1024  # words in a block; a word's weight is that of its place in the block times that of the block
_BLOCKS = 4096  # blocks at a time: 32 MiB
_MOST_NAMES = 256
_NUMBERED = re.compile(r"^(.*?\.\d+)\.")


def checksum(tensor: torch.Tensor) -> int:
    """A checksum that changes with any flipped bit and any two swapped words; the same on every
    device.

    Σ of the tensor's 8-byte words, each times an odd number that depends on its place, modulo 2⁶⁴.
    Computed on the tensor's device.
    """
    data = tensor.detach().contiguous().view(-1).view(torch.uint8)
    data = torch.nn.functional.pad(data, (0, -len(data) % 8))
    words = data.view(torch.int64)
    place = torch.arange(_WIDTH, device=words.device) * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    step = _WIDTH * _BLOCKS
    for number, first in enumerate(range(0, len(words), step)):
        part = words[first : first + step]
        part = torch.nn.functional.pad(part, (0, -len(part) % _WIDTH)).view(-1, _WIDTH)
        block = torch.arange(len(part), device=words.device) + number * _BLOCKS
        total += ((part * place).sum(1) * (block * 4 + 1)).sum()
    return int(total) & ((1 << 64) - 1)


def values_by_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The checksum of each tensor."""
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def digest_of(parts: Iterable[Any]) -> str:
    """The digest of plain values, in order."""
    return hashlib.sha256(json.dumps(list(parts)).encode()).hexdigest()[:32]


def quantized_digest(model: torch.nn.Module) -> str:
    """The digest of the quantized weights and their scales; empty if no weight is quantized."""
    packed = packed_weights(model)
    return digest_of(values_by_name(packed | scales_of(model)).items()) if packed else ""


def shapes_digest(tensors: Mapping[str, torch.Tensor]) -> str:
    """The digest of names, shapes and dtypes, in order."""
    return digest_of([name, list(t.shape), str(t.dtype)] for name, t in tensors.items())


def by_layer(values: dict[str, int]) -> dict[str, str]:
    """A bounded number of digests: one per tensor, or one per layer if there are many tensors."""
    if len(values) <= _MOST_NAMES:
        return {name: f"{value:016x}" for name, value in values.items()}
    layers: dict[str, list[Any]] = {}
    for name, value in values.items():
        match = _NUMBERED.match(name)
        layers.setdefault(match[1] if match else name, []).append([name, value])
    return {layer: digest_of(members)[:16] for layer, members in list(layers.items())[:_MOST_NAMES]}


def rows_digest(table: TokenTable) -> str:
    """The digest of each row's origin and length, in the order of the table, and of the rows of
    each sequence.
    """
    digest = hashlib.sha256(json.dumps(table.files).encode())
    for name in ("file", "number", "length", "loss"):
        digest.update(table.columns[name].tobytes())
    digest.update(table.sequence_rows.tobytes())
    digest.update(table.sequence_ends.tobytes())
    return digest.hexdigest()[:32]


def tokenizer_digest(tokenizer: Any) -> str:
    """The digest of the vocabulary, the chat template, and the tokens of a fixed text; of None
    that of nothing.
    """
    if tokenizer is None:
        return digest_of([])
    ids = tokenizer(PROBE)["input_ids"]
    return digest_of([ids, sorted(tokenizer.get_vocab().items()), tokenizer.chat_template])
