"""The same training here and in TRL's trainers: the same rows, weights and optimizer, float32, one
rank, all of a batch in one micro batch.

TRL gets the rows in the order of unisono's stream. The mismatched answer of KTO is that of the row
before in the file here, and in the batch there: both are equal if all rows of the file are one
batch, which TRL gets in the order of the file.

An answer ends with its stop token here. TRL's ends with what the template writes after it, e.g.
Qwen's newline, which the model never writes: of templates that write something, TRL gets the
rendered text up to the stop token. A reward model scores whole rows in both.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from tests import front_server
from tests.trainer.objectives.families import POSITIONS, Family
from unisono.guard.supervise.child_process import child_environment
from unisono.trainer.plan import SequenceStream

Train = Callable[..., Any]
Row = dict[str, Any]
STEPS = 5
_OPTIM = {
    "lr": 1e-3,
    "betas": [0.9, 0.99],
    "eps": 1e-4,
    "schedule": "constant",
    "warmup": "0%",
    "weight_decay": 0.0,
}
_OF_TRL = {
    "learning_rate": 1e-3,
    "adam_beta1": 0.9,
    "adam_beta2": 0.99,
    "adam_epsilon": 1e-4,  # the usual one amplifies rounding where a gradient is nearly 0
    "weight_decay": 0.0,
    "max_grad_norm": 1.0,
}


@dataclass(frozen=True)
class Case:
    """An objective with its settings here and in TRL."""

    objective: str
    preference: dict[str, Any] = field(default_factory=dict)
    of_trl: dict[str, Any] = field(default_factory=dict)
    batch: int = 8
    optim: dict[str, Any] = field(default_factory=dict)


SIGMOID = Case("dpo", {"beta": 0.3}, {"beta": 0.3})
KTO = Case(
    "kto",
    {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7},
    {"beta": 0.3, "desirable_weight": 1.2, "undesirable_weight": 0.7},
    batch=24,
)
ORPO = Case("orpo", {"beta": 0.2}, {"beta": 0.2})
SIMPO = Case(
    "simpo",
    {"beta": 2.0, "gamma": 0.7},
    {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 0.7},
)


@dataclass(frozen=True)
class Start:
    """What a case begins with.

    Attributes:
        model: a language model, or a reward model.
        family: of its template; None: one that writes nothing after the stop token.
    """

    model: Path
    family: Family | None = None


@dataclass
class Both:
    """The same training here and in TRL."""

    losses: list[float]
    steps: list[dict[str, Any]]
    trl_losses: list[float]
    trl_steps: list[dict[str, Any]]


def message(role: str, text: str) -> dict[str, str]:
    """A message."""
    return {"role": role, "content": text}


def pairs_of(file: Path) -> list[Row]:
    """The pairs of a file, as conversations."""
    return [
        {
            "prompt": [message("user", row["prompt"])],
            **{side: [message("assistant", row[side])] for side in ("chosen", "rejected")},
        }
        for row in map(json.loads, file.read_text().splitlines())
    ]


def train_both(
    folder: Path, train: Train, cases: list[tuple[Case, Start]], pairs: list[Row], *, steps: int = STEPS
) -> list[Both]:
    """Each case here, one after the other, and all of them in one process of TRL."""
    specs, runs = [], []
    for number, (case, start) in enumerate(cases):
        rows = _rows_for(case, pairs)
        file = folder / f"rows-{number}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        runs.append(
            train(
                objective=case.objective, model={"path": str(start.model), "dtype": "float32"}, adapter=None, optim=_OPTIM | case.optim,
                data={"train": str(file), "format": "messages" if case.objective == "sft" else "auto", "max_length": POSITIONS, "packing": False},
                duration=f"{steps} steps", batch={"global": case.batch, "micro": case.batch}, **({"preference": case.preference} if case.preference else {}),
            )
        )  # fmt: skip
        order = [
            i
            for step in range(1, steps + 1)
            for i in SequenceStream(len(rows), seed=0).step(
                step, global_batch=case.batch, total_sequences=10**6
            )
        ]
        ordered = rows if case.objective == "kto" else [_without_messages(rows[i]) for i in order]
        given = _for_trl(ordered, case, start)
        specs.append(
            {
                "trainer": case.objective, "model": str(start.model), "steps": steps, "batch": case.batch, "max_length": POSITIONS,
                "eos": start.family.stop if start.family is not None and given is not ordered else None, "rows": given, "settings": _OF_TRL | case.of_trl,
            }
        )  # fmt: skip
    found = run_trl(folder, specs)
    return [
        Both(run.losses, [line for line in run.metrics if "loss" in line], trl["losses"], trl["metrics"])
        for run, trl in zip(runs, found, strict=True)
    ]


def run_trl(folder: Path, specs: list[dict[str, Any]], *, module: str = "trl_losses") -> list[dict[str, Any]]:
    """What a module of this folder, in a process of its own, finds for some specs."""
    (folder / "specs.json").write_text(json.dumps(specs))
    files = [str(folder / "specs.json"), str(folder / "results.json")]
    command = [sys.executable, "-m", f"tests.trainer.objectives.{module}", *files]
    with front_server.start_rank(
        command, env=child_environment(threads=1), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 0, printed[-4000:]
    found: list[dict[str, Any]] = json.loads((folder / "results.json").read_text())
    return found


def _rows_for(case: Case, pairs: list[Row]) -> list[Row]:
    if case.objective == "pretrain":
        return [{"text": row["chosen"][0]["content"]} for row in pairs]
    return {"kto": _rated(pairs)[: case.batch], "sft": _answers(pairs)}.get(case.objective, pairs)


def _rated(pairs: list[Row]) -> list[Row]:
    return [
        {"prompt": row["prompt"], "completion": row["chosen" if i % 3 else "rejected"], "label": bool(i % 3)}
        for i, row in enumerate(pairs)
    ]


def _answers(pairs: list[Row]) -> list[Row]:
    """`messages` are for unisono, the rest for TRL."""
    return [
        {"messages": row["prompt"] + row["chosen"], "prompt": row["prompt"], "completion": row["chosen"]}
        for row in pairs
    ]


def _without_messages(row: Row) -> Row:
    return {key: value for key, value in row.items() if key != "messages"}


def _for_trl(rows: list[Row], case: Case, start: Start) -> list[Row]:
    if start.family is None or not start.family.tail or case.objective == "reward":
        return rows
    tokenizer = AutoTokenizer.from_pretrained(start.model)
    return [_through_stop(row, tokenizer, start.family) for row in rows]


def _through_stop(row: Row, tokenizer: Any, family: Family) -> Row:
    """The row as text, up to the stop token of its answers."""
    prompt = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False)
    found = dict(row, prompt=prompt)
    for side in row.keys() & {"chosen", "rejected", "completion"}:
        text = tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False)
        assert text.startswith(prompt)
        assert text.endswith(family.stop + family.tail)
        found[side] = text.removesuffix(family.tail)[len(prompt) :]
    return found
