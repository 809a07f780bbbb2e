"""The log-probabilities that a reference model gives to the answers: computed once, stored with the
run, and verified before use.

They are computed before the first step, when the model still has its starting weights, so no second
copy of the weights stays in memory. The ranks share the work, and every rank gets all values: two
numbers for each unit. Which rows are computed together depends on the rows alone, so that the
values are the same for any number of ranks.
"""

import contextlib
import hashlib
import json
import time
from collections.abc import Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from unisono.base.causes import Evidence, Verdict
from unisono.base.errors import Disagreed, Problem
from unisono.base.files import whole_file
from unisono.base.text import one_line
from unisono.guard.agree.agreement import odd_first, odd_out, partition
from unisono.guard.agree.reports import Member
from unisono.trainer.batches.table import Tables
from unisono.trainer.data import grouped
from unisono.trainer.data.pictures.processor import processor_digests
from unisono.trainer.data.token_table import Split
from unisono.trainer.families import training_of
from unisono.trainer.model.directory import locate_model, picture_processor
from unisono.trainer.model.forward import Forward, choose_forward
from unisono.trainer.model.load import DTYPES, LoadedModel, load_base
from unisono.trainer.model.quantization import count_parameters, quantized_load, scales_of
from unisono.trainer.plan import RunPlan
from unisono.trainer.training.evaluation import evaluating
from unisono.trainer.training.join import digest_of, values_by_name
from unisono.trainer.training.process_group import device_mesh
from unisono.trainer.training.rank0_work import on_rank0
from unisono.trainer.training.run import Run
from unisono.trainer.training.sharding import ShardedRoot, shard_model

_TOKENS = 8_192  # in a forward
_TOKENS_WITH_LOGITS = 1_024  # in one of a model whose head gives the logits of all tokens at once
_SIDES = (0, 1)

Values = dict[Split, torch.Tensor]


def set_reference(run: Run, tables: Tables) -> None:
    """Sets the reference values of the rows: from the run's store if it is intact, else computed
    and stored.

    All ranks must call it, before weights are restored.

    Raises:
        Disagreed: if the ranks have loaded different reference models.
        ModelError: if the reference model is refused.
    """
    run.beats.enter("reference")
    path, key = run.files.reference, reference_key(run)
    outcome = on_rank0(run, partial(_read, path, key, tables), what="reading the reference values", path=path)
    stored, why = outcome if outcome is not None else (None, "")
    if run.group.any(stored is not None):
        _set(tables, _shared(run, tables, stored))
        run.report.send({"kind": "reference", "computed": 0, "reused": _number(tables)})
        return
    if why:
        run.report.warning(
            "reference_damaged", f"{path}: {why}; the values of the reference are computed again"
        )
    began, cpu_began = time.perf_counter(), time.process_time()
    with _reference_forward(run) as (forward, restore):
        values = _compute(run, forward, tables)
        restore()
    if run.group.is_main:
        with whole_file(path) as temporary:
            temporary.write_bytes(_encode(values, key))
    _set(tables, values)
    run.report.send(
        {
            "kind": "reference",
            "computed": _number(tables),
            "reused": 0,
            "seconds": time.perf_counter() - began,
            "cpu_time_s": time.process_time() - cpu_began,
        }
    )


def _set(tables: Tables, values: Values) -> None:
    for split, rows in tables.items():
        rows.reference = values[split]


def _number(tables: Tables) -> int:
    """Units of all splits."""
    return sum(rows.table.rows for rows in tables.values())


def reference_key(run: Run) -> str:
    """The digest of what determines the values: the contents of all model files and of the rows,
    and how and by what the model is computed.

    The model's digest covers adapters and the reference that the config names, so that a run can be
    moved with them.
    """
    plan, adapter = run.plan, run.plan.config.adapter
    parts = {
        "model": plan.model.digest,
        "settings": plan.config.model.model_dump(
            mode="json", exclude={"path", "tokenizer", "trust_remote_code"}
        ),
        "start": (
            adapter.model_dump(mode="json", exclude={"from_", "merge"})
            if adapter is not None and adapter.init == "pissa"
            else None
        ),
        "seed": plan.config.seed if plan.config.model.weights == "random" else None,
        "rows": plan.data.rows_digest,
        "dtype": plan.dtype,
        "reference": plan.config.preference.reference == "auto",
        "packages": {name: version(name) for name in ("torch", "transformers")},
        "code": _code_of_model(run) if plan.config.model.trust_remote_code else None,
        **_processor_of(plan),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def _processor_of(plan: RunPlan) -> dict[str, object]:
    """What makes the pixels of pictures, if rows have some."""
    directory = picture_processor(Path(plan.model.directory)) if plan.model.reads_pictures else None
    if directory is None:
        return {}
    return {"processor": processor_digests(directory), "processor_package": version("pillow")}


def _code_of_model(run: Run) -> dict[str, str]:
    """The digest of each file of code in the model's directory: `model.digest` is that of weights
    and config.json.
    """
    files = sorted(Path(run.plan.model.directory).glob("*.py"))
    return {file.name: xxhash.xxh3_128_hexdigest(file.read_bytes()) for file in files}


# ---- the store: RUN/reference.safetensors


def _encode(values: Values, key: str) -> bytes:
    tensors = {split: value.cpu().contiguous() for split, value in values.items()}
    return save(tensors, metadata={"schema": "1", "key": key, "digest": _digest(tensors)})


def _digest(tensors: Values) -> str:
    total = xxhash.xxh3_128()
    for split in sorted(tensors):
        total.update(split.encode() + tensors[split].numpy().tobytes())
    return total.hexdigest()


def _read(path: Path, key: str, tables: Tables) -> tuple[Values | None, str]:
    """The stored values; or None, and what is wrong with a file that is there."""
    if not path.is_file():
        return None, ""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            values: Values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        return None, f"the file is damaged ({one_line(str(error), limit=100)})"
    if metadata.get("digest") != _digest(values):
        return None, "its contents do not match their digest"
    if metadata.get("key") != key:
        return None, "it belongs to other weights, rows or settings"
    shapes = {split: (rows.table.rows, len(_SIDES)) for split, rows in tables.items()}
    if {split: tuple(value.shape) for split, value in values.items()} != shapes:
        return None, "it has a different number of rows"
    return values, ""


def _shared(run: Run, tables: Tables, stored: Values | None) -> Values:
    """The values of rank 0 on every rank."""
    by_split: Values = {}
    for split, rows in tables.items():
        values = torch.zeros(rows.table.rows, len(_SIDES), device=run.device)
        if stored is not None:
            values.copy_(stored[split])
        run.group.broadcast(values)
        by_split[split] = values.cpu()
    return by_split


# ---- computing


def _compute(run: Run, forward: Forward, tables: Tables) -> Values:
    """The sums of the log-probabilities of both answers of every unit. All ranks must call it."""
    by_split: Values = {}
    total, done = _number(tables), 0
    with torch.no_grad():
        for split, part in tables.items():
            table = part.table
            values = torch.zeros(table.rows, len(_SIDES), device=run.device)
            most = _TOKENS if forward.head == "chunked" else _TOKENS_WITH_LOGITS
            groups = list(grouped(enumerate(table.row_lengths().tolist()), most=most))
            for first in range(0, len(groups), run.group.world_size):
                for hook in run.hooks:
                    hook.work_begins("reference", run.state.step, lambda: None)
                turn = groups[first : first + run.group.world_size]
                own = turn[run.group.rank] if run.group.rank < len(turn) else []
                if own or run.gradient_sync.needs_equal_rounds:
                    rows = part.load_units(own or [0], _SIDES).rows
                    sums = rows.sums(forward.log_probs(rows)).view(-1, len(_SIDES))
                    if own:
                        values[own] = sums
                done += sum(map(len, turn))
                run.beats.enter("reference", done=done, total=total)
                run.report.phase(
                    "reference", "computing the reference's log-probabilities", done=done, total=total
                )
            run.group.sum(values)
            by_split[split] = values.cpu()
    return by_split


@contextlib.contextmanager
def _reference_forward(run: Run) -> Iterator[Any]:
    """The reference in evaluation mode: a model of its own, the model without its adapter, or the
    model as it starts.
    """
    named, adapter = run.plan.config.preference.reference, run.plan.config.adapter
    if named != "auto":
        forward, sharded = _load(run, named)
        forward.loaded.model.eval()
        yield forward, lambda: sharded.reshard() if sharded is not None else None
        return
    # The components that PiSSA moves into the adapter are missing from the base.
    switches_off = adapter is not None and adapter.init != "pissa"
    with evaluating(run), run.forward.without_adapter() if switches_off else contextlib.nullcontext():
        yield run.forward, lambda: None
        if run.sharded is not None:
            # First: peft switches the adapter on again by `requires_grad` of the parameters that it
            # finds, which must be the shards.
            run.sharded.reshard()


def _load(run: Run, named: str) -> tuple[Forward, ShardedRoot | None]:
    """The reference model of a directory or hub id, with its weights as those of the run's own
    model are.
    """
    plan, model = run.plan, run.plan.config.model
    run.report.phase("reference", f"loading the reference {named}")
    directory = locate_model(named, key="preference.reference")
    dtype = DTYPES[plan.dtype] if plan.config.adapter is not None else torch.float32
    host = torch.device("cpu") if run.sharded is not None else run.device
    base = load_base(
        directory,
        dtype=dtype,
        trust_remote_code=model.trust_remote_code,
        quantized=quantized_load(None, directory, dtype=plan.dtype, device=host),
        keeps_parts=plan.model.reads_pictures,
    )
    base.config.use_cache = False
    base.requires_grad_(False)
    base.to(host)
    loaded = LoadedModel(base, base, run.tokenizer, {}, count_parameters(base))
    for hook in run.hooks:
        hook.reference_loaded(loaded)
    _compare(run, named, digest_of(values_by_name(dict(base.named_parameters()) | scales_of(base)).items()))
    sharded = shard_model(loaded, device_mesh(plan.mesh, run.device)) if run.sharded is not None else None
    root = sharded.module if sharded is not None else None
    forward = choose_forward(
        loaded,
        dtype=plan.dtype,
        quick_adapter=False,
        gradient_checkpointing=False,
        root=root,
        pictures=training_of(plan).probe(plan, run.device),
    )
    return forward, sharded


def _compare(run: Run, named: str, digest: str) -> None:
    """Compares the reference models that the ranks have loaded. All ranks must call it.

    Raises:
        Disagreed: with the ranks that differ from the others; on a tie nobody is named as the
            culprit.
    """
    if run.group.world_size == 1:
        return
    digests = torch.zeros(run.group.world_size, dtype=torch.int64, device=run.device)
    digests[run.group.rank] = int(digest[:15], 16)
    run.group.sum(digests)
    places = run.plan.ranks
    values = digests.tolist()
    groups = partition(
        (Member(place.node_rank, place.rank, place.host), value)
        for place, value in zip(places, values, strict=True)
    )
    if len(groups) == 1:
        return
    odd = odd_out(groups)
    shown = "; ".join(
        f"{', '.join(places[who.rank].label for who in group.members)}: digest {group.value:015x}"
        for group in odd_first(groups, odd)
    )
    hosts = tuple(dict.fromkeys(who.host for who in odd))
    what = f"the reference model {named} has different weights: {shown}"
    fix = (
        f"on {', '.join(hosts) or 'the node that differs'}: copy the weights from a correct node; compare"
        " with `sha256sum *.safetensors`"
    )
    evidence = tuple(
        Evidence(where=place.label, text=f"digest {value:015x}")
        for place, value in zip(places, values, strict=True)
    )
    verdict = Verdict(
        cause="weights_mismatch",
        when="before",
        summary=what,
        ranks=tuple(who.rank for who in odd),
        hosts=hosts,
        phase="reference",
        evidence=evidence,
        fix=(fix,),
    )
    raise Disagreed(
        Problem(what, "preference.reference", "ranks would compare with different models", fix),
        verdict=verdict,
    )
