"""Steps of peft alone on the rows of a run: what losses of ours are compared with."""

from pathlib import Path
from typing import Any

import peft
import torch

from unisono.trainer.batches.seeds import seed_torch
from unisono.trainer.batches.table import TableRows
from unisono.trainer.data.token_table import TokenTable
from unisono.trainer.model.forward import Rows
from unisono.trainer.model.load import LoadedModel, load_for_training
from unisono.trainer.plan import SequenceStream


def loaded_again(run: Any) -> LoadedModel:
    """The model of a run as it was before step 1."""
    seed_torch(run.plan.config.seed, "weights")
    directory = Path(run.plan.model.directory)
    return load_for_training(
        run.plan.config,
        directory=directory,
        tokenizer_directory=directory,
        dtype=run.plan.dtype,
        device=torch.device("cpu"),
    )


def losses_by_hand(
    run: Any, model: Any, *, targets: str | list[str], parameters: list[str] | None = None
) -> list[float]:
    """The losses of peft on a model: its own layers, each row alone, torch's cross entropy and
    AdamW.

    Args:
        run: with the rows and the adapter's settings.
        model: of transformers.
        targets: names of linear layers.
        parameters: names of experts.
    """
    adapter = run.plan.config.adapter
    wanted = peft.LoraConfig(
        r=adapter.rank, lora_alpha=adapter.alpha, target_modules=targets, target_parameters=parameters, task_type="CAUSAL_LM",
        use_dora=adapter.kind == "dora", use_rslora=adapter.kind == "rslora",
    )  # fmt: skip
    model = peft.get_peft_model(model, wanted).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for name, begun in loaded_again(run).trainable.items():
            trained[name].copy_(begun)
    optimizer = torch.optim.AdamW(trained.values(), lr=run.plan.config.optim.lr, weight_decay=0.0)
    table = TokenTable.open(Path(run.plan.data.cache_dir), "train")
    stream, losses = SequenceStream(table.sequences, run.plan.config.seed), []
    for step in range(1, run.plan.total_steps + 1):
        sequences = stream.step(step, global_batch=4, total_sequences=run.plan.total_sequences)
        rows = TableRows(table, torch.device("cpu")).load(sequences).rows
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=run.plan.dtype == "bfloat16"):
            loss = sum_of_rows(model, rows) / len(rows.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def sum_of_rows(model: Any, rows: Rows) -> torch.Tensor:
    """The sum of the cross entropy at the loss tokens, with each row alone."""
    logits = torch.cat([model(input_ids=ids[None]).logits[0] for ids in rows.input_ids.split(rows.lengths)])
    return torch.nn.functional.cross_entropy(logits[rows.label_index].float(), rows.labels, reduction="sum")
