"""What a rank brings to the table when its data and model are ready, before its first collective."""

import os

import torch

from unisono.agree.reports import RankReport
from unisono.model.load import LoadedModel
from unisono.plan import RankPlace, RunPlan
from unisono.train.batches import TrainingData
from unisono.train.digests import by_layer, digest_of, outline, rows_digest, tokenizer_digest, values_by_name
from unisono.train.group import backend_of

_STEPS = 100  # whose order is compared
_SHOWN = 8


def report_rank(
    plan: RunPlan,
    place: RankPlace,
    *,
    device: torch.device,
    loaded: LoadedModel,
    data: TrainingData,
    store_port: int | None,
) -> RankReport:
    """Looks at what this rank has in fact, not at what the plan says of it."""
    table = data.table
    steps = [data.step(step).sequences for step in range(1, min(plan.total_steps, _STEPS) + 1)]
    frozen = {n: p for n, p in loaded.model.named_parameters() if not p.requires_grad}
    frozen_values = values_by_name(frozen)
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
        parameters_digest=outline(loaded.trainable),
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
    """The UUID of the accelerator that is bound, as the driver writes it; None on CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else None
