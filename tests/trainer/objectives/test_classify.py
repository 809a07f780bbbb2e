"""Runs with `objective: classify`: the losses of plain transformers, and what is written.

Run: pytest tests/trainer/objectives/test_classify.py
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from tests.trainer.objectives.labelled import LABELS, labelled_rows, write_rows
from unisono.base.errors import DataError, ModelError
from unisono.trainer.plan import SequenceStream

Train = Callable[..., Any]
STEPS, BATCH = 5, 8
_OPTIM = {
    "lr": 1e-3,
    "betas": [0.9, 0.99],
    "eps": 1e-4,  # the usual one amplifies rounding where a gradient is nearly 0
    "schedule": "constant",
    "warmup": "0%",
    "weight_decay": 0.0,
    "max_grad_norm": 1e9,
}


@dataclass(frozen=True)
class Case:
    """Rows, settings, and the loss of torch for the same."""

    multi_label: bool = False
    weights: dict[str, float] | str | None = None


CASES = {
    "one label": Case(),
    "weights": Case(weights={"garden": 3.0, "street": 0.5}),
    "balanced": Case(weights="balanced"),
    "labels": Case(multi_label=True),
    "weights of labels": Case(multi_label=True, weights={"garden": 3.0}),
}


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of rows with one label."""
    return write_rows(tmp_path / "rows.jsonl", labelled_rows(40))


@pytest.fixture
def run(rows: Path, tmp_path: Path) -> dict[str, Any]:
    """The config of a run on them."""
    unseen = write_rows(tmp_path / "unseen.jsonl", labelled_rows(20, seed=1))
    return {
        "objective": "classify",
        "data": {"train": str(rows), "eval": str(unseen), "max_length": 64},
        "checkpoint": {"every": "3 steps"},
    }


def _start(model_dir: Path, folder: Path, *, adapter: bool, multi_label: bool) -> tuple[Path, Path | None]:
    """A classifier with a head of its own, and an adapter on it whose B is not zero."""
    torch.manual_seed(0)
    kind = "multi_label_classification" if multi_label else "single_label_classification"
    names = dict(enumerate(LABELS))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        model_dir, id2label=names, label2id={name: i for i, name in names.items()}, problem_type=kind
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    model.config.pad_token_id = tokenizer.pad_token_id
    directory = folder / "classifier"
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    if not adapter:
        return directory, None
    lora = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="SEQ_CLS", modules_to_save=["score"]
    )
    adapted = peft.get_peft_model(model, lora)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.02)
    adapted.save_pretrained(folder / "adapter")
    return directory, folder / "adapter"


def _loss(model: Any, tokenizer: Any, rows: list[dict[str, Any]], case: Case, all_rows: list[Any]) -> Any:
    """The loss of transformers, or with weights that of torch's own losses."""
    batch = tokenizer([row["text"] for row in rows], padding=True, padding_side="right", return_tensors="pt")
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    if case.multi_label:
        wanted = torch.tensor([[float(name in row["labels"]) for name in LABELS] for row in rows])
    else:
        wanted = torch.tensor([LABELS.index(row["label"]) for row in rows])
    if case.weights is None:
        return model(**inputs, labels=wanted).loss
    if case.weights == "balanced":
        counts = [sum(row["label"] == name for row in all_rows) for name in LABELS]
        weights = torch.tensor([len(all_rows) / (len(LABELS) * count) for count in counts])
    else:
        assert isinstance(case.weights, dict)
        weights = torch.tensor([case.weights.get(name, 1.0) for name in LABELS])
    criterion = (
        torch.nn.BCEWithLogitsLoss(pos_weight=weights)
        if case.multi_label
        else torch.nn.CrossEntropyLoss(weight=weights)
    )
    return criterion(model(**inputs).logits, wanted)


@pytest.mark.parametrize("adapter", ["full", "lora"])
@pytest.mark.parametrize("name", CASES)
def test_the_losses_of_five_steps_are_those_of_transformers(
    train_here: Train, model_dir: Path, tmp_path: Path, name: str, adapter: str
) -> None:
    case = CASES[name]
    all_rows = labelled_rows(24, several=case.multi_label)
    file = write_rows(tmp_path / "rows.jsonl", all_rows)
    directory, start = _start(model_dir, tmp_path, adapter=adapter == "lora", multi_label=case.multi_label)
    mine = train_here(
        objective="classify",
        model={"path": str(directory), "dtype": "float32"},
        adapter={"rank": 4, "alpha": 8, "from": str(start)} if start else None,
        data={"train": str(file), "packing": False},
        classify={"class_weights": case.weights},
        optim=_OPTIM,
        duration=f"{STEPS} steps",
        batch={"global": BATCH, "micro": 2},
    )
    model: Any = transformers.AutoModelForSequenceClassification.from_pretrained(directory)
    if start is not None:
        model = peft.PeftModel.from_pretrained(model, start, is_trainable=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.0)
    stream = SequenceStream(len(all_rows), seed=0)
    theirs = []
    model.train()
    for step in range(1, STEPS + 1):
        chosen = stream.step(step, global_batch=BATCH, total_sequences=10**6)
        loss = _loss(model, tokenizer, [all_rows[i] for i in chosen], case, all_rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        theirs.append(loss.item())
    assert abs(theirs[-1] - theirs[0]) > 1e-3 * theirs[0], "the updates show"
    assert mine.losses == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize("weights", [None, "balanced"])
def test_neither_packing_nor_the_micro_batch_changes_losses_and_metrics(
    train_here: Train, run: dict[str, Any], weights: str | None
) -> None:
    run["classify"] = {"class_weights": weights}
    alone = {**run, "data": {**run["data"], "packing": False}}
    whole = train_here(**alone, batch={"global": 40}, duration="3 steps")
    small = train_here(**alone, batch={"global": 40, "micro": 5}, duration="3 steps")
    packed = train_here(**run, batch={"global": 8}, duration="1 steps").plan.data.train.sequences
    assert packed <= 20
    together = train_here(**run, batch={"global": packed}, duration="3 steps")
    for lines in zip(*(one.metrics for one in (whole, small, together)), strict=True):
        names = {"loss", "accuracy", "f1", "eval_loss", "eval_accuracy", "eval_f1"} & lines[0].keys()
        assert len(names) == 3
        for line in lines[1:]:
            for name in names:
                assert line[name] == pytest.approx(lines[0][name], rel=1e-5, abs=1e-6), name


@pytest.mark.parametrize("adapter", [{"rank": 4, "alpha": 8, "dropout": 0.1}, None], ids=["lora", "full"])
def test_a_resumed_run_is_the_straight_one(
    train_here: Train, run: dict[str, Any], adapter: dict[str, Any] | None
) -> None:
    run["classify"] = {"class_weights": "balanced"}
    straight = train_here(**run, adapter=adapter)
    checkpoint = straight.directory / "checkpoints" / "step-00000003"
    resumed = train_here(**run, adapter=adapter, resume=(3, checkpoint))
    assert resumed.losses == straight.losses[3:]
    wanted = straight.weights()
    assert all(torch.equal(value, wanted[name]) for name, value in resumed.weights().items())


@pytest.mark.parametrize("column", ["label", "labels"])
def test_accuracy_and_f1_are_those_of_the_written_model(
    train_here: Train, run: dict[str, Any], tmp_path: Path, column: str
) -> None:
    several = column == "labels"
    rows = labelled_rows(40, several=several)
    unseen = labelled_rows(20, several=several, seed=1)
    run["data"] = {
        "train": str(write_rows(tmp_path / "t.jsonl", rows)),
        "eval": str(write_rows(tmp_path / "e.jsonl", unseen)),
    }
    done = train_here(**run, adapter=None, optim={"lr": 5e-3}, duration="12 steps")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(done.directory / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(done.directory / "model")
    assert list(model.config.label2id) == LABELS
    with torch.no_grad():
        values = torch.cat([model(**tokenizer(row["text"], return_tensors="pt")).logits for row in unseen])
    right = [set(row["labels"] if several else [row["label"]]) for row in unseen]
    if several:
        given = [
            {name for name, is_given in zip(LABELS, line, strict=True) if is_given} for line in (values > 0)
        ]
    else:
        given = [{LABELS[i]} for i in values.argmax(1).tolist()]
    pairs, figures = list(zip(right, given, strict=True)), done.result["eval"]
    assert figures["accuracy"] == pytest.approx(sum(one == other for one, other in pairs) / len(pairs))
    scores = []
    for name in LABELS:
        hits = sum(name in one and name in other for one, other in pairs)
        misses = sum((name in one) != (name in other) for one, other in pairs)
        scores.append(2 * hits / (2 * hits + misses))
    assert figures["f1"] == pytest.approx(sum(scores) / len(scores))
    assert 0 < figures["f1"] < 1, "some are right and some are wrong"


def test_a_classifier_is_trained_further_with_its_head(train_here: Train, run: dict[str, Any]) -> None:
    first = train_here(**run, adapter=None)
    model = {"path": str(first.directory / "model"), "dtype": "float32"}
    second = train_here(**run, model=model)
    assert second.result["eval"]["loss_before"] == pytest.approx(first.result["eval"]["loss"], rel=1e-5)
    adapter = {"rank": 4, "alpha": 8, "from": str(second.directory)}
    third = train_here(**run, model=model, adapter=adapter)
    assert third.result["eval"]["loss_before"] == pytest.approx(second.result["eval"]["loss"], rel=1e-5)
    with pytest.raises(ModelError, match="has other labels than the rows"):
        train_here(**run, model=model, classify={"labels": [*LABELS, "moon"]})


def test_labels_are_those_of_the_config_or_of_the_rows_sorted(
    train_here: Train, run: dict[str, Any], tmp_path: Path
) -> None:
    turned = list(reversed(LABELS))
    own = train_here(**run, classify={"labels": turned}, duration="1 steps")
    assert own.plan.data.labels.names == turned
    numbers = [{"text": row["text"], "label": i % 12} for i, row in enumerate(labelled_rows(36))]
    file = write_rows(tmp_path / "numbers.jsonl", numbers)
    run["data"] = {"train": str(file)}
    counted = train_here(**run, duration="1 steps")
    assert counted.plan.data.labels.names == [str(number) for number in range(12)]
    assert counted.plan.data.labels.rows == [3] * 12


def test_rows_that_cannot_be_classified_are_named_with_their_lines(
    train_here: Train, run: dict[str, Any], tmp_path: Path
) -> None:
    def refused(bad: dict[str, Any], split: str, why: str, **classify: Any) -> None:
        rows = labelled_rows(20)
        rows.insert(4, bad)
        file = write_rows(tmp_path / "some.jsonl", rows)
        data = {**run["data"], split: str(file)}
        with pytest.raises(DataError) as error:
            train_here(**{**run, "data": data, "classify": classify})
        (problem,) = error.value.problems
        assert why in problem.why
        assert problem.where.endswith("some.jsonl:5")

    text = "a rose"
    refused({"text": text, "label": "gardn"}, "eval", "'gardn' is not a label of the training: garden")
    refused(
        {"text": text, "label": "moon"}, "train", "'moon' is not a label of the training: ", labels=LABELS
    )
    refused({"text": text, "labels": ["garden"]}, "train", "it has a list of labels")
    refused({"text": text, "label": ""}, "train", "label is empty")
    refused({"text": text, "label": 0.5}, "train", "label has a number")
    refused({"text": text}, "train", "there is no column 'label'")
    refused({"text": "", "label": "garden"}, "train", "the text is empty")
    one = [{"text": row["text"], "label": "garden"} for row in labelled_rows(8)]
    alone = {**run, "data": {"train": str(write_rows(tmp_path / "one.jsonl", one))}}
    with pytest.raises(DataError, match="all rows have the label garden"):
        train_here(**alone)
    with pytest.raises(DataError, match="moon has a weight, and is not among the labels"):
        train_here(**run, classify={"class_weights": {"moon": 2}})


def test_a_long_row_is_cut_only_if_the_config_says_so(
    train_here: Train, run: dict[str, Any], tmp_path: Path
) -> None:
    long = {"text": " ".join(["rose"] * 200), "label": "garden"}
    file = write_rows(tmp_path / "long.jsonl", [*labelled_rows(20), long])
    run["data"] = {"train": str(file), "max_length": 32}
    with pytest.raises(DataError, match="a row is too long"):
        train_here(**run)
    for how, rows in (("cut", 21), ("drop", 20)):
        done = train_here(**{**run, "data": {**run["data"], "too_long": how}}, duration="1 steps")
        assert sum(done.plan.data.labels.rows) == rows
        ledger = json.loads((done.directory / "data.json").read_text())
        assert [(note["line"], note["what"]) for note in ledger["rows"]] == [
            (21, "cut" if how == "cut" else "dropped")
        ]


def test_conversations_are_classified_as_their_template_renders_them(
    train_here: Train, run: dict[str, Any], model_dir: Path, tmp_path: Path
) -> None:
    turns = [{"role": "user", "content": "dig"}, {"role": "assistant", "content": "the rose"}]
    rows = [{"messages": turns, "label": label} for label in islice(LABELS, 2)] * 4
    run["data"] = {"train": str(write_rows(tmp_path / "talks.jsonl", rows)), "packing": False}
    done = train_here(**run, duration="1 steps")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    wanted = tokenizer.apply_chat_template(turns, return_dict=False)
    assert done.plan.data.train.longest_row == len(wanted)
    assert done.plan.data.train.tokens == len(rows) * len(wanted)
