"""Preference rows with pictures: the losses are those of plain transformers and TRL's formula, also
on two ranks; both answers share the pictures of their prompt.

Run: pytest tests/trainer/vision/test_preferences.py
"""

import json
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from tests.trainer.ranks.conftest import Done
from tests.trainer.vision.conftest import Gallery
from tests.trainer.vision.test_parity import LAYERS, Collator
from tests.trainer.vision.trl_pairs import train_in_trl
from tests.vision_models import COLORS, FAMILIES, SHAPES, processor_of
from unisono.base.errors import DataError
from unisono.base.events import Reporter
from unisono.trainer.batches.seeds import seed_torch
from unisono.trainer.data.pictures.processor import PictureProcessor
from unisono.trainer.data.token_table import TokenTable, read_picture_numbers
from unisono.trainer.families import training_of
from unisono.trainer.model.frozen_vision import FrozenVision
from unisono.trainer.objectives.preference import kto_losses, orpo_losses, simpo_losses
from unisono.trainer.plan import RunPlan, SequenceStream
from unisono.trainer.plan.task_requests import EvaluateRequest, RequestedModel
from unisono.trainer.task import evaluate

pytestmark = pytest.mark.processes  # pictures are decoded in them

Row = dict[str, Any]
BETA = 0.3


@pytest.fixture(scope="module")
def pairs(picture_rows: Path) -> Path:
    """Pairs with a picture, with two of them in two turns, and of text alone."""
    rows: list[Row] = []
    for i in range(16):
        name = f"pictures/{i}.png"
        right, wrong = (
            f"a {COLORS[i % 4]} {SHAPES[i // 4 % 2]}",
            f"a {COLORS[(i + 1) % 4]} {SHAPES[i % 2]} I think",
        )
        prompt = [{"role": "user", "content": "<image>what is this?"}]
        images = [name]
        if i % 4 == 3:
            prompt, images = [{"role": "user", "content": "what is red?"}], []
        elif i % 4 == 2:
            prompt += [
                {"role": "assistant", "content": "a picture"},
                {"role": "user", "content": "and <image> this?"},
            ]
            images = [name, f"pictures/{i - 1}.png"]
        sides = {
            side: [{"role": "assistant", "content": text}]
            for side, text in (("chosen", right), ("rejected", wrong))
        }
        rows.append({"prompt": prompt, **sides, **({"images": images} if images else {})})
    file = picture_rows.parent / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def plan_of(gallery: Gallery, family: str, rows: Path, **more: Any) -> RunPlan:
    """The plan of a run on pairs."""
    data = {"train": str(rows), "packing": False, **more.pop("data", {})}
    sections = {"objective": "dpo", "preference": {"beta": BETA}, **more}
    return gallery.plan(family, data=data, **sections)


def _side(row: Row, side: str) -> Row:
    return {"messages": [*row["prompt"], *row[side]], "images": row.get("images", [])}


class _ByHand:
    """The log-probabilities of last answers, of plain transformers."""

    def __init__(self, model: Any, directory: Path, folder: Path) -> None:
        self.directory, self._model = directory, model
        self._collate = Collator(processor_of(directory), folder, last_only=True)

    def sums(self, rows: list[Row]) -> torch.Tensor:
        """(R,): of each row alone."""
        return torch.stack([self.tokens(row).sum() for row in rows])

    def means(self, rows: list[Row]) -> torch.Tensor:
        """(R,): likewise, of a token."""
        return torch.stack([self.tokens(row).mean() for row in rows])

    def ratios(self, rows: list[Row]) -> torch.Tensor:
        """(R,): the sums less those of the model without its adapter."""
        with torch.no_grad(), self._model.disable_adapter():
            reference = self.sums(rows)
        return self.sums(rows) - reference

    def tokens(self, row: Row, *, image_id: int | None = None) -> torch.Tensor:
        """(N,): of each token of the last answer; with `image_id` of every other token of the row up
        to its end.
        """
        batch = self._collate([row])
        labels, ids = batch.pop("labels")[0, 1:], batch["input_ids"][0, 1:]
        counts = labels != -100
        log_probs = self._model(**batch).logits[0, :-1].float().log_softmax(-1)
        if image_id is not None:
            counts = (ids != image_id) & (torch.arange(len(ids)) <= counts.nonzero().max())
        return log_probs[counts].gather(1, ids[counts][:, None])[:, 0]


def _sides(rows: list[Row]) -> tuple[list[Row], list[Row]]:
    chosen, rejected = ([_side(row, side) for row in rows] for side in ("chosen", "rejected"))
    return chosen, rejected


def _dpo(hand: _ByHand, rows: list[Row]) -> torch.Tensor:
    chosen, rejected = map(hand.ratios, _sides(rows))
    return -torch.nn.functional.logsigmoid(BETA * (chosen - rejected)).mean()


def _simpo(hand: _ByHand, rows: list[Row]) -> torch.Tensor:
    chosen, rejected = map(hand.means, _sides(rows))
    return simpo_losses(chosen, rejected, beta=BETA, gamma=0.5).mean()


def _orpo(hand: _ByHand, rows: list[Row]) -> torch.Tensor:
    chosen, rejected = map(hand.means, _sides(rows))
    image_id = processor_of(Path(hand.directory)).tokenizer.convert_tokens_to_ids("<image>")
    predicted = [hand.tokens(side, image_id=image_id) for side in _sides(rows)[0]]
    return orpo_losses(chosen, rejected, beta=BETA).mean() - torch.cat(predicted).mean()


def _kto(hand: _ByHand, rows: list[Row]) -> torch.Tensor:
    """Of rated answers, which have the answer of the row before, too."""
    with torch.no_grad():
        kl = hand.ratios([_side(row, "other") for row in rows]).mean().clamp(min=0)
    ratios = hand.ratios([_side(row, "completion") for row in rows])
    good = torch.tensor([row["label"] for row in rows])
    return kto_losses(ratios, good, beta=BETA, kl=float(kl)).mean()


LOSSES = {"dpo": _dpo, "simpo": _simpo, "orpo": _orpo, "kto": _kto}


def by_hand(plan: RunPlan, rows: list[Row], folder: Path) -> list[float]:
    """The losses of plain transformers and peft, and the formula of the objective."""
    directory = Path(plan.model.directory)
    base = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    targets = rf".*(language_model|text_model).*\.({LAYERS})"
    adapter = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets)
    model = peft.get_peft_model(base, adapter).train()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    seed_torch(plan.config.seed, "weights")
    begun = training_of(plan).load(plan, torch.device("cpu")).trainable
    assert begun.keys() == trained.keys()
    with torch.no_grad():
        for name, value in begun.items():
            trained[name].copy_(value)
    optimizer = torch.optim.AdamW(trained.values(), lr=plan.config.optim.lr, weight_decay=0.0)
    hand = _ByHand(model, directory, folder)
    table = TokenTable.open(Path(plan.data.cache_dir), "train")
    stream, losses = SequenceStream(table.sequences, plan.config.seed), []
    for step in range(1, plan.total_steps + 1):
        sequences = stream.step(step, global_batch=4, total_sequences=plan.total_sequences)
        chosen = [rows[int(table.columns["number"][i]) - 1] for s in sequences for i in table.rows_of(s)]
        loss = LOSSES[plan.config.objective](hand, chosen)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(trained.values(), plan.config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_transformers_and_the_formula_by_hand(
    gallery: Gallery, pairs: Path, family: str
) -> None:
    plan = plan_of(gallery, family, pairs)

    losses = gallery.alone(plan).losses

    assert plan.data.ledger["pictures"] == 16  # of both answers together
    assert losses == pytest.approx(by_hand(plan, _read(pairs), pairs.parent), abs=1e-5)


def _read(file: Path) -> list[Row]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("objective", ["simpo", "orpo"])
def test_losses_of_other_objectives_of_pairs_are_those_by_hand(
    gallery: Gallery, pairs: Path, objective: str
) -> None:
    plan = plan_of(gallery, "llava", pairs, objective=objective)

    losses = gallery.alone(plan).losses

    assert losses == pytest.approx(by_hand(plan, _read(pairs), pairs.parent), abs=1e-5)


def test_losses_of_rated_answers_are_those_by_hand(gallery: Gallery, pairs: Path) -> None:
    rows = [
        {key: row[key] for key in ("prompt", "images") if key in row}
        | {"completion": row["rejected" if i % 3 else "chosen"], "label": not i % 3}
        for i, row in enumerate(_read(pairs))
    ]
    file = pairs.parent / "rated.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    plan = plan_of(gallery, "llava", file, objective="kto")

    losses = gallery.alone(plan).losses

    others = [row | {"other": rows[i - 1]["completion"]} for i, row in enumerate(rows)]
    assert losses == pytest.approx(by_hand(plan, others, file.parent), abs=1e-5)


def test_losses_are_those_of_trl(gallery: Gallery, pairs: Path, tmp_path: Path) -> None:
    optim = {
        "lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-4, "schedule": "constant", "warmup": "0%", "weight_decay": 0.0,
    }  # fmt: skip
    plan = plan_of(gallery, "llava", pairs, adapter=None, optim=optim, batch={"global": 4, "micro": 4})
    rows = _read(pairs)
    stream = SequenceStream(len(rows), plan.config.seed)
    order = [
        i
        for step in range(1, plan.total_steps + 1)
        for i in stream.step(step, global_batch=4, total_sequences=plan.total_sequences)
    ]

    losses = gallery.alone(plan).losses

    given = [
        rows[i] | {"images": [str(pairs.parent / name) for name in rows[i].get("images", [])]} for i in order
    ]
    assert losses == pytest.approx(
        train_in_trl(Path(plan.model.directory), given, tmp_path, steps=5, batch=4, beta=BETA), abs=1e-5
    )


def _references(done: Done) -> list[list[float]]:
    return [row.tolist() for row in load_file(done.directory / "reference.safetensors")["train"]]


def _sums_of(directory: Path, plan: RunPlan, pairs: Path) -> list[list[float]]:
    """Those of both answers of each row of the table, of a model of transformers."""
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    rows = _read(pairs)
    numbers = TokenTable.open(Path(plan.data.cache_dir), "train").columns["number"]
    hand = _ByHand(model, directory, pairs.parent)
    with torch.no_grad():
        sides = [hand.sums(of_side) for of_side in _sides([rows[number - 1] for number in numbers])]
    return [list(pair) for pair in zip(*(one.tolist() for one in sides), strict=True)]


@pytest.mark.parametrize("parts", [["language"], ["language", "projector", "vision"]], ids="+".join)
def test_the_reference_sees_the_pictures(gallery: Gallery, pairs: Path, parts: list[str]) -> None:
    plan = plan_of(gallery, "qwen3_vl", pairs, train_parts=parts)

    done = gallery.alone(plan)

    for own, wanted in zip(_references(done), _sums_of(gallery.model("qwen3_vl"), plan, pairs), strict=True):
        assert own == pytest.approx(wanted, abs=1e-4)  # sums of about 60
    assert done.losses[-1] < done.losses[0]


def test_a_reference_that_is_named_sees_with_its_own_vision_part(
    gallery: Gallery, pairs: Path, tmp_path: Path
) -> None:
    other = AutoModelForImageTextToText.from_pretrained(gallery.model("llava"), dtype=torch.float32)
    torch.manual_seed(5)
    for parameter in other.model.vision_tower.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    other.save_pretrained(tmp_path / "other")
    processor_of(gallery.model("llava")).save_pretrained(tmp_path / "other")
    named = {"beta": BETA, "reference": str(tmp_path / "other")}
    plan = plan_of(gallery, "llava", pairs, preference=named)

    done = gallery.alone(plan)

    wanted = _sums_of(tmp_path / "other", plan, pairs)
    for own, one in zip(_references(done), wanted, strict=True):
        assert own == pytest.approx(one, abs=1e-4)
    auto = _sums_of(gallery.model("llava"), plan, pairs)
    assert max(abs(one[0] - two[0]) for one, two in zip(auto, wanted, strict=True)) > 0.01


def test_both_answers_share_the_pictures_and_their_features(
    gallery: Gallery, pairs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(gallery, "gemma3", pairs)
    computed, times = FrozenVision._computed, []

    def counted(vision: FrozenVision, tensors: Any) -> Any:
        times.append(1)
        return computed(vision, tensors)

    monkeypatch.setattr(FrozenVision, "_computed", counted)

    gallery.alone(plan)

    table = Path(plan.data.cache_dir)
    numbers = read_picture_numbers(table)
    assert numbers[::2] == numbers[1::2]  # chosen and rejected
    assert plan.data.pictures is not None
    assert plan.data.pictures.number == 12
    assert len(times) == 12 + 1  # and for the test of `FrozenVision.of`
    named = json.loads((table / "pictures.json").read_text())["pictures"]
    assert len({picture["digest"] for picture in named}) == len(named)


def test_eval_of_a_run_gives_what_the_run_measured(gallery: Gallery, pairs: Path, tmp_path: Path) -> None:
    done = gallery.alone(plan_of(gallery, "llava", pairs, data={"eval": str(pairs)}))
    model = RequestedModel(str(done.directory), None)
    request = EvaluateRequest(model=model, data=str(pairs), cache_dir=tmp_path / "cache")

    figures = evaluate.run(request, Reporter(None, fallback=sys.stderr))["figures"]

    for name in ("loss", "reward_margin", "logps_chosen"):
        assert figures[name] == pytest.approx(done.result["eval"][name], rel=2e-5, abs=2e-5), name
    assert done.result["eval"]["reward_margin"] > 0.1


def _tokens(gallery: Gallery, file: Path, **data: Any) -> list[tuple[list[int], list[bool], list[int]]]:
    """Of both sides of the first row: tokens, which of them count, and numbers of pictures."""
    plan = plan_of(gallery, "qwen2_5_vl", file, data=data, batch={"global": 1, "micro": 1})
    table, numbers = (
        TokenTable.open(Path(plan.data.cache_dir), "train"),
        read_picture_numbers(Path(plan.data.cache_dir)),
    )
    return [(*(part.tolist() for part in table.row(0, side)), numbers[side]) for side in (0, 1)]


_QUESTION = "<image>what is this?"
_OF_ROWS: dict[str, Row] = {
    "llamafactory-sharegpt": {
        "conversations": [{"from": "human", "value": _QUESTION}],
        "chosen": {"from": "gpt", "value": "a red square"},
        "rejected": {"from": "gpt", "value": "a dog"},
    },
    "llamafactory-alpaca": {"instruction": _QUESTION, "chosen": "a red square", "rejected": "a dog"},
    "trl-columns": {
        "prompt": [{"role": "user", "content": "what is this?"}],
        "chosen": [{"role": "assistant", "content": "a red square"}],
        "rejected": [{"role": "assistant", "content": "a dog"}],
    },
    "trl-parts": {
        "prompt": [{"role": "user", "content": [{"type": "image", "text": None}, {"type": "text", "text": "what is this?"}]}],
        "chosen": [{"role": "assistant", "content": [{"type": "text", "text": "a red square"}]}],
        "rejected": [{"role": "assistant", "content": [{"type": "text", "text": "a dog"}]}],
    },
    "whole-conversations": {
        side: [{"role": "user", "content": _QUESTION}, {"role": "assistant", "content": answer}]
        for side, answer in (("chosen", "a red square"), ("rejected", "a dog"))
    },
}  # fmt: skip


@pytest.mark.parametrize("name", _OF_ROWS)
def test_pairs_of_other_programs_give_the_same_tokens_and_pictures(
    gallery: Gallery, picture_rows: Path, tmp_path: Path, name: str
) -> None:
    wanted = {"prompt": _QUESTION, "chosen": "a red square", "rejected": "a dog"}
    images = {"images": [str(picture_rows.parent / "pictures/0.png")]}
    files = [tmp_path / "wanted.jsonl", tmp_path / "rows.jsonl"]
    for file, row in zip(files, (wanted, _OF_ROWS[name]), strict=True):
        file.write_text(json.dumps(row | images) + "\n")

    first, second = (_tokens(gallery, file) for file in files)

    assert first == second
    assert first[0][2] == [0]


def test_a_template_of_llama_factory_shares_the_pictures_too(
    gallery: Gallery, picture_rows: Path, tmp_path: Path
) -> None:
    rows = [_OF_ROWS["llamafactory-sharegpt"] | {"images": [str(picture_rows.parent / "pictures/0.png")]}]
    rows.append(rows[0] | {"images": []} | {"conversations": [{"from": "human", "value": "what is red?"}]})
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    data = {"template": "lf:qwen2_vl"}

    chosen, rejected = _tokens(gallery, tmp_path / "rows.jsonl", **data)

    processor = PictureProcessor(gallery.model("qwen2_5_vl"))
    for ids, counts, numbers in (chosen, rejected):
        assert numbers == [0]
        text = processor.processor.tokenizer.decode(ids)
        assert f"<|vision_start|>{processor.expansion((96, 64))}<|vision_end|>what is this?" in text
        assert not any(i in processor.image_ids and c for i, c in zip(ids, counts, strict=True))
    plan = plan_of(gallery, "qwen2_5_vl", tmp_path / "rows.jsonl", data=data, batch={"global": 2, "micro": 2})
    losses = gallery.alone(plan).losses
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("row", "data", "why"),
    [
        (
            {side: [{"role": "user", "content": _QUESTION * count}, {"role": "assistant", "content": side}] for side, count in (("chosen", 1), ("rejected", 2))}
            | {"images": ["pictures/0.png", "pictures/1.png"]},
            {},
            "chosen and rejected have different pictures",
        ),
        (
            {"prompt": "what is this?", "chosen": "a <image>", "rejected": "a dog", "images": ["pictures/0.png"]},
            {},
            "chosen and rejected have different pictures",
        ),
        (
            {"prompt": "what?", "chosen": "<image>", "rejected": "<image> a dog", "images": ["pictures/0.png"]},
            {},
            "a picture is in an answer",
        ),
        (
            {"prompt": _QUESTION, "chosen": "a red square " * 9, "rejected": "a dog", "images": ["pictures/0.png"]},
            {"max_length": 40, "too_long": "keep-answer"},
            "a picture is never cut",
        ),
        (
            {"prompt": _QUESTION, "chosen": "a dog", "rejected": "a red square " * 9, "images": ["pictures/0.png"]},
            {"max_length": 20, "too_long": "cut"},
            "a picture is never cut",
        ),
        (
            {"prompt": _QUESTION, "chosen": "a dog", "rejected": "a cat", "images": ["pictures/none.png"]},
            {},
            "there is no such file",
        ),
    ],
    ids=["different", "in-one-answer", "in-answers", "keep-answer", "cut", "missing"],
)  # fmt: skip
def test_bad_pairs_are_named(
    gallery: Gallery, picture_rows: Path, row: Row, data: dict[str, Any], why: str
) -> None:
    file = picture_rows.parent / "bad.jsonl"
    file.write_text(json.dumps(row) + "\n")

    with pytest.raises(DataError) as caught:
        plan_of(gallery, "llava", file, data=data)

    assert why in caught.value.problems[0].why


@pytest.mark.ranks
@pytest.mark.parametrize(("family", "way"), [("llava", "ddp"), ("qwen3_vl", "fsdp")])
def test_two_ranks_give_the_losses_of_one(gallery: Gallery, pairs: Path, family: str, way: str) -> None:
    kinds: tuple[dict[str, Any], ...] = (
        {"data": {"packing": True}},
        {"batch": {"global": 2, "micro": 1}},
        {"train_parts": ["language", "projector", "vision"], "batch": {"global": 4, "micro": 1}},
    )
    alone = [gallery.alone(plan_of(gallery, family, pairs, **more)) for more in kinds]

    together = gallery.together(
        [plan_of(gallery, family, pairs, world=2, strategy=way, **more) for more in kinds]
    )

    for one, two in zip(alone, together, strict=True):
        assert two.losses == pytest.approx(one.losses, abs=1e-6)
