"""Scores of answers against references. Pure."""

import math
import re
from collections import Counter
from collections.abc import Sequence

Pair = tuple[str, str]
"""An answer and its reference."""

# Runs of letters and digits; in scripts without spaces between words every character is a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\u0e00-\u0e7f"
_WORD = re.compile(f"[{_UNSPACED}]|[^\\W_{_UNSPACED}]+")


def exact_match(pairs: Sequence[Pair]) -> float:
    """The share of answers, 0 to 1, that equal their reference up to white space at the ends."""
    assert pairs
    return sum(answer.strip() == reference.strip() for answer, reference in pairs) / len(pairs)


def rouge_l(pairs: Sequence[Pair]) -> float:
    """The mean over pairs, 0 to 1, of the F1 of the longest common subsequence of words (ROUGE-L,
    no stemming).

    On ASCII text it equals rouge-score; letters of other scripts, which rouge-score drops, count as
    words, too.
    """
    from rouge_score.rouge_scorer import RougeScorer

    assert pairs
    scorer = RougeScorer(["rougeL"], tokenizer=_Words())
    return sum(_rouge_l(scorer, answer, reference) for answer, reference in pairs) / len(pairs)


def bleu(pairs: Sequence[Pair]) -> float:
    """BLEU of the corpus, 0 to 100, by sacrebleu (13a tokens, exponential smoothing).

    A corpus without any answer of four words scores 0, as BLEU counts n-grams of up to four words.
    """
    from sacrebleu import corpus_bleu

    assert pairs
    score: float = corpus_bleu([answer for answer, _ in pairs], [[reference for _, reference in pairs]]).score
    return min(score, 100.0)  # rounding can exceed it slightly


def sentence_bleu(answer: str, reference: str) -> float:
    """BLEU of one answer, 0 to 100, by sacrebleu (13a tokens, exponential smoothing, orders up to
    the answer's length).
    """
    from sacrebleu import sentence_bleu as score

    return min(float(score(answer, [reference]).score), 100.0)


def similarity(pairs: Sequence[Pair]) -> dict[str, float]:
    """The mean over pairs, 0 to 100, of sentence BLEU-4 of characters and of the F1 of ROUGE-1,
    ROUGE-2 and ROUGE-L of words.

    These are the scores that LLaMA-Factory's prediction writes. BLEU is that of NIST's smoothing
    (Chen and Cherry 2014, method 3), with blanks as characters. A Chinese character is a word here;
    LLaMA-Factory cuts Chinese text into words by jieba.
    """
    from rouge_score.rouge_scorer import RougeScorer

    assert pairs
    names = {"rouge-1": "rouge1", "rouge-2": "rouge2", "rouge-l": "rougeL"}
    scorer = RougeScorer(list(names.values()), tokenizer=_Words())
    scores = [scorer.score(reference, answer) for answer, reference in pairs]
    rouge = {ours: sum(100 * one[name].fmeasure for one in scores) for ours, name in names.items()}
    bleu4 = sum(_character_bleu(answer, reference) for answer, reference in pairs)
    return {name: value / len(pairs) for name, value in {"bleu-4": bleu4, **rouge}.items()}


def _character_bleu(answer: str, reference: str) -> float:
    """BLEU-4 of one answer, 0 to 100.

    An n-gram order without a match counts as half of a match, the next one as a quarter, and so on.
    """
    shared = [_shared_ngrams(answer, reference, n) for n in range(1, 5)]
    if not shared[0]:
        return 0.0
    logarithm, misses = 0.0, 0
    for n, count in enumerate(shared, 1):
        misses += not count
        logarithm += math.log((count or 0.5**misses) / max(1, len(answer) - n + 1)) / 4
    brevity = min(0.0, 1 - len(reference) / len(answer))
    return 100 * math.exp(logarithm + brevity)


def _shared_ngrams(answer: str, reference: str, n: int) -> int:
    """The number of n-grams of characters in both texts."""
    counts = [Counter(text[i : i + n] for i in range(len(text) - n + 1)) for text in (answer, reference)]
    return (counts[0] & counts[1]).total()


class _Words:
    """The tokenizer for rouge-score."""

    def tokenize(self, text: str) -> list[str]:
        """Words in lower case."""
        return _WORD.findall(text.lower())


def _rouge_l(scorer: "object", answer: str, reference: str) -> float:
    if answer.strip() == reference.strip():
        return 1.0  # also for texts without words, e.g. `{}`
    value: float = scorer.score(reference, answer)["rougeL"].fmeasure  # type: ignore[attr-defined]
    return value
