"""Whichever way a run is opened, it says the same; and what cannot be asked is refused.

Run: pytest tests/front/talk/test_answers_of_runs.py
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from unisono.base.errors import UnisonoError
from unisono.trainer.plan.task_requests import (
    ConversationRequest,
    EvaluateRequest,
    GeneratedText,
    GenerateRequest,
    RequestedModel,
)
from unisono.trainer.task import evaluate, generation
from unisono.trainer.task.inference import open_for_inference

Train = Callable[..., Any]
PROMPT = "what day is it"


def asked(target: object, *, step: int | None = None, **more: Any) -> GenerateRequest:
    return GenerateRequest(
        model=RequestedModel(str(target), step), **{"prompt": PROMPT, "max_tokens": 12, **more}
    )


def answer(target: object, listening: Any, **more: Any) -> GeneratedText:
    return generation.run_generate(asked(target, **more), listening)["answers"][0]


@pytest.mark.parametrize(
    "adapter", [{"rank": 4, "alpha": 8}, {"kind": "dora", "rank": 2}, None], ids=["lora", "dora", "full"]
)
def test_result_last_checkpoint_and_transformers_give_the_same_answer(
    train_here: Train, listening: Any, adapter: dict[str, Any] | None
) -> None:
    run = train_here(adapter=adapter)
    final = answer(run.directory, listening)["answer"]
    assert answer(run.directory, listening, step=4)["answer"] == final
    directory = run.directory / ("adapter" if adapter else "model")
    assert answer(directory, listening)["answer"] == final
    auto = peft.AutoPeftModelForCausalLM if adapter else transformers.AutoModelForCausalLM
    model = auto.from_pretrained(directory).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )["input_ids"]
    with torch.no_grad():
        printed = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False
        )
    assert tokenizer.decode(printed[0, ids.shape[1] :], skip_special_tokens=True) == final


def test_earlier_steps_answer_otherwise(train_here: Train, listening: Any) -> None:
    run = train_here(adapter=None)
    step_2 = open_for_inference(str(run.directory), step=2, report=listening).forward.loaded.base
    step_4 = open_for_inference(str(run.directory), step=4, report=listening).forward.loaded.base
    assert not torch.equal(step_2.lm_head.weight, step_4.lm_head.weight)


def test_a_single_answer_is_streamed_and_the_pieces_are_the_answer(model_dir: Path, listening: Any) -> None:
    found = answer(model_dir, listening)
    assert "".join(message["text"] for message in listening.of_kind("token")) == found["answer"]
    assert found["ended"] == "length"


def test_an_answer_ends_before_its_stop_text(model_dir: Path, listening: Any) -> None:
    whole = answer(model_dir, listening)["answer"]
    stop = whole[3:5]
    found = answer(model_dir, listening, stop=[stop])
    assert found["answer"] == whole[: whole.index(stop)]
    assert found["ended"] == "stop"


def test_a_file_gives_the_answers_that_its_prompts_get_alone(
    model_dir: Path, tmp_path: Path, listening: Any
) -> None:
    file = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [
        {"prompt": "what day is it"},
        {"messages": [{"role": "user", "content": "call me"}]},
        {"text": "the quick brown fox jumps over the lazy dog"},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = generation.run_generate(asked(model_dir, prompt=None, file=str(file)), listening)
    together = [found["answer"] for found in result["answers"]]
    alone = [
        answer(model_dir, listening, prompt=text)["answer"]
        for text in ("what day is it", "call me", rows[2]["text"])
    ]
    assert together == alone
    assert [found["where"] for found in result["answers"]] == [f"{file}:{line}" for line in (1, 2, 3)]


def test_raw_text_is_continued_without_the_template(model_dir: Path, listening: Any) -> None:
    assert answer(model_dir, listening, raw=True)["answer"] != answer(model_dir, listening)["answer"]


def test_a_model_without_a_template_continues_and_reports_it(model_dir: Path, listening: Any) -> None:
    (model_dir / "chat_template.jinja").unlink()
    raw = answer(model_dir, listening, raw=True)["answer"]
    assert answer(model_dir, listening)["answer"] == raw
    assert any(message["code"] == "no_template" for message in listening.of_kind("warning"))


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": 3}\n{"question": "a"}\n', "no prompt"),
        ("p.jsonl", '{"prompt": "a"\n', "JSON"),
        ("p.jsonl", '{"prompt": " "}\n', "empty"),
        ("p.jsonl", '{"messages": [{"role": "assistant", "content": "a"}]}\n', "ends with an answer"),
        ("p.jsonl", '{"messages": ["a"]}\n', "is not a list of"),
        ("p.txt", "\n\n", "no prompt"),
        ("p.xyz", "a\n", "unsupported file type"),
    ],
)
def test_a_file_of_bad_prompts_is_refused_with_file_and_line(
    model_dir: Path, tmp_path: Path, listening: Any, name: str, text: str, problem: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    with pytest.raises(UnisonoError, match=problem) as found:
        generation.run_generate(asked(model_dir, prompt=None, file=str(file)), listening)
    assert found.value.exit_code == 2
    assert all(str(file) in shown.where and shown.fix for shown in found.value.problems)


def test_a_prompt_that_is_empty_too_long_or_leaves_no_room_is_refused(
    model_dir: Path, listening: Any
) -> None:
    for more, problem in (
        ({"prompt": "  "}, "empty"),
        ({"prompt": "a " * 400}, "too long"),
        ({"prompt": "a", "max_tokens": 255}, "no room"),
        ({"prompt": None, "file": "nothing.txt"}, "no file"),
        ({"raw": True, "system": "be brief"}, "template"),
    ):
        with pytest.raises(UnisonoError, match=problem) as found:
            answer(model_dir, listening, **more)
        assert found.value.exit_code == 2


def test_an_answer_whose_length_is_not_requested_fits_the_model(model_dir: Path, listening: Any) -> None:
    found = answer(model_dir, listening, prompt="a " * 100, max_tokens=None)
    assert 0 < found["tokens"] < 256


def test_eval_measures_what_training_measured(
    train_here: Train, rows_file: Path, tmp_path: Path, listening: Any
) -> None:
    run = train_here(
        data={"train": str(rows_file), "eval": str(rows_file), "max_length": 64},
        eval={"every": None, "exact_match": True},
    )
    model = RequestedModel(str(run.directory))
    request = EvaluateRequest(model=model, data=str(rows_file), cache_dir=tmp_path / "cache")
    result = evaluate.run(request, listening)
    figures: dict[str, Any] = result["figures"]
    assert figures["loss"] == pytest.approx(
        run.result["eval"]["loss"], rel=1e-5
    )  # packed there, row by row here
    assert figures["exact_match"] == run.result["eval"]["exact_match"]
    assert (figures["rows"], figures["questions"], result["ledger"]["used"]) == (24, 24, 24)
    assert 0 <= figures["rouge_l"] <= 1
    assert len(result["rows"]) == 24
    assert result["rows"][0]["row"] == f"{rows_file}:1"


def test_eval_of_a_limit_measures_the_first_rows(
    model_dir: Path, rows_file: Path, tmp_path: Path, listening: Any
) -> None:
    few = tmp_path / "few.jsonl"
    few.write_text("".join(line + "\n" for line in rows_file.read_text().splitlines()[:5]))
    request = EvaluateRequest(
        model=RequestedModel(str(model_dir)), data=str(few), cache_dir=tmp_path / "cache"
    )
    whole = evaluate.run(request, listening)["figures"]
    limited = evaluate.run(replace(request, data=str(rows_file), limit=5), listening)["figures"]
    assert limited == pytest.approx(whole)


def test_eval_of_plain_text_has_a_loss_and_no_answers(
    model_dir: Path, tmp_path: Path, listening: Any
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("the quick brown fox\nwhat day is it today\n")
    request = EvaluateRequest(
        model=RequestedModel(str(model_dir)), data=str(file), cache_dir=tmp_path / "cache"
    )
    figures = evaluate.run(request, listening)["figures"]
    assert figures["loss"] is not None
    assert figures["loss"] > 0
    assert (figures["questions"], figures["exact_match"]) == (0, None)


def test_a_conversation_remembers_its_turns_and_forgets_them_when_cleared(
    model_dir: Path, listening: Any
) -> None:
    opened = open_for_inference(str(model_dir), report=listening)
    template, note = opened.chat_template()
    assert note == ""
    settings = ConversationRequest(model=RequestedModel(str(model_dir)), system=None, max_tokens=12)
    talk = generation.ModelChat(opened, template, settings, listening, generation._Interrupt())
    talk.answer("what day is it")
    talk.answer("call me")
    first, second = (message["text"] for message in listening.of_kind("answer"))
    turns = [
        {"role": "user", "content": "what day is it"}, {"role": "assistant", "content": first}, {"role": "user", "content": "call me"},
    ]  # fmt: skip
    file = model_dir / "turns.jsonl"
    file.write_text(json.dumps({"messages": turns}))
    assert answer(model_dir, listening, prompt=None, file=str(file))["answer"] == second
    talk.clear()
    talk.answer("call me")
    assert listening.of_kind("answer")[-1]["text"] == answer(model_dir, listening, prompt="call me")["answer"]


def test_turn_that_outgrows_the_model_is_reported_and_the_next_is_answered(
    model_dir: Path, listening: Any
) -> None:
    opened = open_for_inference(str(model_dir), report=listening)
    settings = ConversationRequest(model=RequestedModel(str(model_dir)), system=None, max_tokens=12)
    template = opened.chat_template()[0]
    talk = generation.ModelChat(opened, template, settings, listening, generation._Interrupt())
    talk.answer("a " * 400)
    assert "longer than the 256 tokens" in listening.of_kind("refused_turn")[0]["text"]
    talk.answer("call me")
    assert len(listening.of_kind("answer")) == 1
