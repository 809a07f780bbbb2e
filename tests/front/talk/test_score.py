"""Scores of texts keep the properties their names promise. Run: pytest tests/front/talk/test_score.py"""

import string
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.trainer.objectives.text_scores import bleu, exact_match, rouge_l, similarity
from unisono.trainer.task.evaluate import llamafactory_rouge
from unisono.trainer.training.evaluation import differs, text_of

TEXTS = st.text(max_size=40)
PAIRS = st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=6)
ASCII = st.text(alphabet=string.printable, max_size=40)
SCORES = [(exact_match, 1.0), (rouge_l, 1.0), (bleu, 100.0)]


@given(PAIRS)
@settings(deadline=None, max_examples=60)
def test_scores_lie_between_nothing_and_all(pairs: list[tuple[str, str]]) -> None:
    for score, most in SCORES:
        assert 0.0 <= score(pairs) <= most


@given(st.lists(TEXTS, min_size=1, max_size=6))
@settings(deadline=None, max_examples=60)
def test_answers_that_are_their_references_match_fully(texts: list[str]) -> None:
    pairs = [(text, text) for text in texts]
    assert exact_match(pairs) == 1.0
    assert rouge_l(pairs) == pytest.approx(1.0)


@given(PAIRS)
@settings(deadline=None, max_examples=60)
def test_the_order_of_pairs_changes_no_score(pairs: list[tuple[str, str]]) -> None:
    for score, _ in SCORES:
        assert score(pairs) == pytest.approx(score(pairs[::-1]), abs=1e-9)


@given(PAIRS, PAIRS)
@settings(deadline=None, max_examples=60)
def test_means_over_pairs_are_means(some: list[tuple[str, str]], others: list[tuple[str, str]]) -> None:
    for score in (exact_match, rouge_l):
        whole = (score(some) * len(some) + score(others) * len(others)) / (len(some) + len(others))
        assert score(some + others) == pytest.approx(whole)


@given(ASCII, ASCII)
@settings(deadline=None, max_examples=100)
def test_on_ascii_rouge_l_is_what_rouge_score_gives(answer: str, reference: str) -> None:
    from rouge_score.rouge_scorer import RougeScorer

    if answer.strip() != reference.strip():
        theirs = RougeScorer(["rougeL"]).score(reference, answer)["rougeL"].fmeasure
        assert rouge_l([(answer, reference)]) == pytest.approx(theirs)


def test_words_of_other_scripts_count() -> None:
    assert rouge_l([("привет мир", "привет всем")]) == pytest.approx(0.5)
    assert rouge_l([("今日は", "今日も")]) == pytest.approx(2 / 3)


def test_bleu_of_equal_sentences_is_100_and_of_others_less() -> None:
    text = "the quick brown fox jumps over the lazy dog"
    assert bleu([(text, text)]) == pytest.approx(100.0)
    assert 0 < bleu([("the quick brown fox sits on the lazy dog", text)]) < 100


def test_white_space_at_the_ends_does_not_count() -> None:
    assert exact_match([(" a\n", "a"), ("a", "b")]) == 0.5


# LLaMA-Factory 0.9.5's own figures for these texts (nltk's sentence_bleu of characters, smoothing
# method 3).
CHARACTER_BLEU = [
    ("Hello! I am a model.", "Hello! I am {{name}}, an AI assistant.", 25.6287),
    ("the cat sat on the mat", "the cat sat on a mat.", 77.3932),
    ("", "x", 0.0),
    ("ab", "abc def", 4.8808),
    ("你好，我是助手。", "你好！我是一个助手。", 23.5305),
    ("same text", "same text", 100.0),
    ("don't stop 3.14 times", "do not stop 3.14 times", 80.0617),
]


@pytest.mark.parametrize(("answer", "reference", "score"), CHARACTER_BLEU)
def test_bleu_4_of_a_prediction_is_that_of_llamafactory(answer: str, reference: str, score: float) -> None:
    assert similarity([(answer, reference)])["bleu-4"] == pytest.approx(score, abs=1e-4)


@given(PAIRS)
@settings(deadline=None, max_examples=60)
def test_scores_of_a_prediction_are_means_between_0_and_100(pairs: list[tuple[str, str]]) -> None:
    found = similarity(pairs)
    assert list(found) == ["bleu-4", "rouge-1", "rouge-2", "rouge-l"]
    for name, score in found.items():
        assert 0.0 <= score <= 100.0 + 1e-9
        assert score == pytest.approx(sum(similarity([pair])[name] for pair in pairs) / len(pairs))


def test_rouge_of_a_prediction_is_that_of_llamafactory_with_its_packages() -> None:
    """It cuts texts into words by jieba, and rounds each score to four digits before the mean."""
    pytest.importorskip("jieba", reason="needs jieba")
    rouge = pytest.importorskip("rouge_chinese", reason="needs rouge-chinese").Rouge()
    cut = rouge.get_scores("你好 ， 我 是 助手 。", "你好 ！ 我 是 一个 助手 。")[0]
    pairs = [("你好，我是助手。", "你好！我是一个助手。"), ("", "text")]
    found = llamafactory_rouge(pairs)
    assert found == {name: round(100 * score["f"], 4) / 2 for name, score in cut.items()}
    assert found["rouge-1"] != pytest.approx(similarity(pairs)["rouge-1"])  # by characters


def test_rouge_of_a_prediction_counts_words_and_their_order() -> None:
    found = similarity([("the cat sat on the mat", "on the mat sat the cat")])
    assert found["rouge-1"] == pytest.approx(100.0)
    assert found["rouge-2"] == pytest.approx(60.0)  # the cat, on the, the mat: 3 of 5
    assert found["rouge-l"] == pytest.approx(50.0)


@pytest.mark.parametrize("reference", ['{"day": "tue"}', "  naïve – 今日は\x1b[1m fox\x1b[0m, five ok  "])
def test_an_answer_ends_early_only_if_it_cannot_match(
    make_tokenizer: Callable[[], Any], reference: str
) -> None:
    tokenizer = make_tokenizer()
    wanted = tokenizer.encode(reference)
    pieces = tokenizer.convert_ids_to_tokens(wanted)
    byte_by_byte = tokenizer.convert_tokens_to_ids([letter for piece in pieces for letter in piece])
    assert text_of(tokenizer, byte_by_byte) == text_of(tokenizer, wanted)
    for tokens in (wanted, byte_by_byte):
        assert not any(differs(tokenizer, tokens[:end], wanted) for end in range(len(tokens) + 1))
    other = tokenizer.encode("dog " + reference)
    assert next(end for end in range(len(other)) if differs(tokenizer, other[:end], wanted)) <= 12
