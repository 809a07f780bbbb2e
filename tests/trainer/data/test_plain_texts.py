"""With `data.plain_texts`, texts are tokenized as in TRL 1.16, and messages are rendered.

Run: pytest tests/trainer/data/test_plain_texts.py
"""

from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from unisono.base.errors import DataError
from unisono.trainer.config.data_sections import SourceSection
from unisono.trainer.config.schema import RunConfig
from unisono.trainer.data import Completion, Conversation, Message, OpenPrompt, Preference, RowError
from unisono.trainer.data.encode import Encoder
from unisono.trainer.data.formats import FormatName
from unisono.trainer.data.preference_rows import shared_prompt
from unisono.trainer.data.token_table import Encoded, EncodedUnit
from unisono.trainer.data.tokenizer import load_tokenizer

TokenizerDir = Callable[..., Path]
Row = dict[str, Any]
SOURCE = SourceSection(path="rows.jsonl")
TURNS: list[Message] = [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "because"}]
_texts = st.text(st.sampled_from("dentist at Tuesday\n"), min_size=1, max_size=20).filter(str.strip)


def encoder_of(tokenizer_dir: TokenizerDir, template: str | None = "chatml_tools", **options: Any) -> Encoder:
    folder = tokenizer_dir(template)
    tokenizer = load_tokenizer(folder, trust_remote_code=False)
    return Encoder(tokenizer, directory=folder, plain_texts=True, **options)


def encoded(encoder: Encoder, name: FormatName, row: Row) -> list[Encoded]:
    """The row, or the two sides of a pair."""
    one = encoder.read_row(name, row, SOURCE)
    if isinstance(one, Preference):
        (unit,) = encoder.encode_pairs([one])
    elif isinstance(one, OpenPrompt):
        (unit,) = encoder.encode_prompts([one])
    else:
        (side,) = encoder.encode([one])
        assert isinstance(side, Encoded)
        return [side]
    assert isinstance(unit, EncodedUnit)
    return list(unit.sides)


def of_trl(tokenizer: Any, prompt: str, *answers: str) -> list[tuple[list[int], list[int]]]:
    """The tokens of prompt and answer, and the trained ones, as `SFTTrainer` and `DPOTrainer` have
    them: an answer begins where the tokens of the prompt alone differ from those of any row.
    """
    eos = tokenizer.eos_token
    alone = tokenizer(prompt)["input_ids"]
    rows = [tokenizer(prompt + answer + eos * (not answer.endswith(eos)))["input_ids"] for answer in answers]
    same = [takewhile(lambda pair: pair[0] == pair[1], zip(alone, row, strict=False)) for row in rows]
    begin = min(len(list(pairs)) for pairs in same)
    return [(row, row[max(begin, 1) :]) for row in rows]  # nothing predicts the first token


def trained(row: Encoded) -> tuple[list[int], list[int]]:
    return row.ids.tolist(), row.ids[row.targets].tolist()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=_texts, completion=_texts)
@example(prompt="is it", completion="is it</s>")
@example(prompt="There the", completion="r")  # the end of the prompt has other tokens alone
def test_an_answer_has_the_tokens_of_trl(tokenizer_dir: TokenizerDir, prompt: str, completion: str) -> None:
    encoder = encoder_of(tokenizer_dir)
    row = {"prompt": prompt, "completion": completion}
    assert list(map(trained, encoded(encoder, "prompt-completion", row))) == of_trl(
        encoder.tokenizer, prompt, completion
    )


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=_texts, chosen=_texts, rejected=_texts)
@example(prompt="There the", chosen="r", rejected=" fine")
def test_a_pair_has_the_tokens_of_trl(
    tokenizer_dir: TokenizerDir, prompt: str, chosen: str, rejected: str
) -> None:
    encoder = encoder_of(tokenizer_dir, loss_on="last-answer")
    row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
    wanted = of_trl(encoder.tokenizer, prompt, chosen, rejected)
    assert list(map(trained, encoded(encoder, "preference", row))) == wanted


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("Sky? Blue.", "Sky? Green.", "Sky?"),
        ("Sky? Green.", "Sky? Grey.", "Sky? Gre"),
        ("Blue.", "Green.", ""),
        ("Sky? Blue. Yes.", "Sky? Blue.", "Sky? Blue"),
        ("a b", "a b", "a "),
    ],
)
def test_texts_without_a_prompt_share_their_beginning(chosen: str, rejected: str, prompt: str) -> None:
    assert shared_prompt(chosen, rejected) == prompt  # what trl.extract_prompt gives


def test_whole_texts_have_the_tokens_of_trl(tokenizer_dir: TokenizerDir) -> None:
    encoder = encoder_of(tokenizer_dir, loss_on="last-answer")
    chosen, rejected = "\n\nHuman: why?\n\nAssistant: there", "\n\nHuman: why?\n\nAssistant: fine"
    sides = encoded(encoder, "preference", {"chosen": chosen, "rejected": rejected})
    shared = shared_prompt(chosen, rejected)
    assert list(map(trained, sides)) == of_trl(
        encoder.tokenizer, shared, chosen[len(shared) :], rejected[len(shared) :]
    )


def test_an_empty_prompt_is_one(tokenizer_dir: TokenizerDir) -> None:
    encoder = encoder_of(tokenizer_dir, loss_on="last-answer")
    row = {"prompt": "", "chosen": "there you are", "rejected": "there I am"}
    wanted = of_trl(encoder.tokenizer, "", "there you are", "there I am")
    assert list(map(trained, encoded(encoder, "preference", row))) == wanted


def test_a_reward_model_reads_whole_texts_to_their_end_of_sequence(tokenizer_dir: TokenizerDir) -> None:
    encoder = encoder_of(tokenizer_dir, loss_on="last-answer", end_at_stop=False)
    texts = ["how are you? fine", "how are you? I am there"]
    sides = encoded(encoder, "preference", dict(zip(("chosen", "rejected"), texts, strict=True)))
    eos = encoder.tokenizer.eos_token
    assert [side.ids.tolist() for side in sides] == [encoder.tokenizer(t + eos)["input_ids"] for t in texts]


def test_a_rated_answer_is_plain_with_the_answer_of_another_row(tokenizer_dir: TokenizerDir) -> None:
    encoder = encoder_of(tokenizer_dir, loss_on="last-answer")
    rows = [{"prompt": f"how {i}", "completion": f"fine {i}", "label": True} for i in range(2)]
    units = encoder.encode_ratings([encoder.read_row("preference", row, SOURCE) for row in rows])
    for number, unit in enumerate(units):
        assert isinstance(unit, EncodedUnit)
        answers = [f"fine {number}", f"fine {1 - number}"]
        assert list(map(trained, unit.sides)) == of_trl(encoder.tokenizer, f"how {number}", *answers)


def test_a_prompt_without_an_answer_is_plain(tokenizer_dir: TokenizerDir) -> None:
    encoder = encoder_of(tokenizer_dir)
    (row,) = encoded(encoder, "prompt", {"prompt": "how are you?"})
    assert row.ids.tolist() == encoder.tokenizer("how are you?")["input_ids"]


def test_messages_are_rendered(tokenizer_dir: TokenizerDir) -> None:
    encoder = encoder_of(tokenizer_dir)
    row = {"prompt": TURNS[:1], "completion": TURNS[1:]}
    assert encoder.read_row("prompt-completion", row, SOURCE) == Conversation(TURNS)
    (side,) = encoded(encoder, "prompt-completion", row)
    assert "<|im_start|>assistant\nbecause" in encoder.tokenizer.decode(side.ids)


@pytest.mark.parametrize("more", [{"system": "be short"}, {"tools": '[{"name": "f"}]'}])
@pytest.mark.parametrize("name", ["prompt-completion", "prompt"])
def test_what_only_a_template_renders_is_refused(
    tokenizer_dir: TokenizerDir, name: FormatName, more: Row
) -> None:
    encoder = encoder_of(tokenizer_dir)
    with pytest.raises(RowError, match="need the chat template"):
        encoder.read_row(name, {"prompt": "how?", "completion": "fine", **more}, SOURCE)


def test_control_tokens_may_be_text(tokenizer_dir: TokenizerDir) -> None:
    encoder = encoder_of(tokenizer_dir, control_tokens="escape")
    row = {"prompt": "a <|im_end|> b", "completion": "c <|im_end|>"}
    (side,) = encoded(encoder, "prompt-completion", row)
    end = encoder.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert side.ids.tolist().count(end) == 1, "the end of sequence"
    assert encoder.tokenizer.decode(side.ids) == "a <|im_end|> bc <|im_end|><|im_end|>"
    assert encoder.tokenizer.decode(side.ids[side.targets]) == "c <|im_end|><|im_end|>"


def test_a_template_that_no_row_needs_is_not_checked(tokenizer_dir: TokenizerDir, tmp_path: Path) -> None:
    template = tmp_path / "endless.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    encoder = encoder_of(tokenizer_dir, template_file=str(template))
    (row,) = encoder.encode([Completion("how?", "fine", plain=True)])
    assert isinstance(row, Encoded)
    with pytest.raises(DataError, match="leaves the stop token"):
        encoder.encode([Conversation(TURNS)])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"objective": "pretrain"}, "objective pretrain does not use it"),
        ({"data": {"template": "lf:qwen3"}}, "lf:qwen3 renders texts, too"),
        ({"objective": "grpo", "rewards": ["exact"], "rollout": {"environment": "e.py:E"}}, "has messages"),
    ],
)
def test_the_key_is_refused_where_it_has_no_effect(keys: Row, words: str) -> None:
    data = {"train": "x", "plain_texts": True, **keys.get("data", {})}
    with pytest.raises(ValueError, match=f"data.plain_texts: .*{words}"):
        RunConfig.model_validate({"model": "m", "output_dir": "o", **keys, "data": data})
